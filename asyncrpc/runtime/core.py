"""What both sides of a link share: the connection, and values in messages.

Here references and propagators (`extensions`) take part in every message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from asyncrpc.ids import WorkerId
from asyncrpc.runtime import streams
from asyncrpc.runtime.futures import CallFuture
from asyncrpc.runtime.inbound import InboundCall
from asyncrpc.runtime.machine.calls import PendingCalls, ServedCalls
from asyncrpc.serde import Encoded
from asyncrpc.wire.messages import Meta, unpack_head

if TYPE_CHECKING:
    from asyncrpc.runtime.connection import Connection
    from asyncrpc.runtime.extensions import OnGradient, Pins
    from asyncrpc.runtime.link import Link
    from asyncrpc.runtime.worker import Worker

NO_META: Final[dict[str, Any]] = {}


class LinkCore:
    """The connection to one incarnation of a peer, and the calls on it."""

    def __init__(self, worker: Worker, peer: WorkerId, connection: Connection) -> None:
        self.worker = worker
        self.peer = peer
        self.connection = connection
        self.loop = worker.loop
        self.link = cast("Link", self)  # the whole, of which this is the base
        self.pending: PendingCalls[CallFuture[Any] | streams.Inflow] = PendingCalls()
        self.served: ServedCalls[InboundCall] = ServedCalls()
        self.lost_because = ""
        self.peer_drains = False
        self.codec = worker.codec

    @property
    def is_lost(self) -> bool:
        """Whether the connection has ended."""
        return bool(self.lost_because)

    def _encode(
        self,
        value: Any,
        meta: dict[str, Any] | None = None,
        labels: Sequence[str] = (),
    ) -> tuple[Encoded, Pins | None, dict[str, Any] | None]:
        """Encode a value for the peer; let references and propagators take part."""
        references = self.worker.references
        if references is None:
            encoded, pins = self.codec.encode(value, labels=labels), None
        else:
            references.begin_encode(self.link)
            sent = False
            try:
                encoded = self.codec.encode(value, labels=labels)
                sent = True
            finally:
                pins = references.end_encode(sent=sent)
        for propagator in self.worker.propagators:
            part = propagator.outgoing(self.link, encoded.gradient_tensors)
            if part is not None:
                meta = meta or {}
                meta[propagator.key] = part
        return encoded, pins, meta

    def _decode(
        self, control: bytes, buffers: list[memoryview], meta: Meta
    ) -> tuple[Any, Any]:
        """Return a value and what it lent."""
        on_gradient: OnGradient | None = None
        for propagator in self.worker.propagators:
            if propagator.key in meta:
                found = propagator.incoming(self.link, meta[propagator.key])
                on_gradient = found or on_gradient
        references = self.worker.references
        if references is None:
            return self.codec.decode(control, buffers, on_gradient=on_gradient), None
        references.begin_decode(self.link)
        try:
            value = self.codec.decode(control, buffers, on_gradient=on_gradient)
        finally:
            loans = references.end_decode()
        return value, loans

    def _answer_meta(self, head: bytes) -> Meta:
        record = unpack_head(head) if head else []
        meta = record[0] if record else None
        return meta if type(meta) is dict else NO_META

    def _take_over(self, loans: Any) -> None:
        """Give back what a result lent, or register it; both go as notices."""
        references = self.worker.references
        if loans is not None and references is not None:
            references.settle_loans(self.link, loans, answered=False)

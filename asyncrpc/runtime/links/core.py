"""What both sides of a link share: the connection, and values in messages.

Here references and propagators (`extensions`) take part in every message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, cast

from asyncrpc.errors import (
    AsyncRpcError,
    CallError,
    DecodeError,
    EncodeError,
    Outcome,
    RemoteProtocolError,
)
from asyncrpc.ids import WorkerId
from asyncrpc.runtime.calls import streams
from asyncrpc.runtime.calls.credit import LinkCredit
from asyncrpc.runtime.calls.futures import CallFuture
from asyncrpc.runtime.calls.holding import hold
from asyncrpc.runtime.calls.inbound import InboundCall
from asyncrpc.runtime.calls.preparing import Preparing
from asyncrpc.runtime.devices.maps import DEVICES, IDENTITY, DeviceMap
from asyncrpc.runtime.machine.calls import PendingCalls, ServedCalls
from asyncrpc.serde import UNREAD, Compression, Encoded, references_in, stage, words_of
from asyncrpc.wire.frames import FrameKind
from asyncrpc.wire.messages import Meta, unpack_head

if TYPE_CHECKING:
    from asyncrpc.runtime.extensions import OnGradient, Pins, References
    from asyncrpc.runtime.links.connection import Connection
    from asyncrpc.runtime.links.link import Link
    from asyncrpc.runtime.worker import Worker

NO_META: Final[dict[str, Any]] = {}
CODEC: Final = "c"  # in the meta of a request: the codec that the caller uses and wants


def unreadable(error: BaseException) -> AsyncRpcError:
    """Return the error about a message whose content could not be read.

    The message is at fault, and no other: it is answered, and the connection stays.
    """
    if isinstance(error, AsyncRpcError) and not isinstance(error, RemoteProtocolError):
        return error
    problem = f"what arrived cannot be read: {words_of(error)}"
    found = DecodeError(problem, outcome=Outcome.NOT_EXECUTED)
    found.__cause__ = error
    return found


def unsendable(error: BaseException) -> AsyncRpcError:
    """Return the error about what a function gave, and could not be encoded."""
    if not isinstance(error, AsyncRpcError):
        problem = f"cannot be sent: {words_of(error)}"
        unsendable = EncodeError(problem, outcome=Outcome.EXECUTED)
        unsendable.__cause__ = error
        return unsendable
    if isinstance(error, CallError):
        error.outcome = Outcome.EXECUTED
    return error


class CommonArguments:
    """Arguments of one call to several peers, encoded once if nothing forbids it.

    Attributes:
        value: arguments and keyword arguments.
        encodings: what all peers are sent, by codec ("" is none); empty if it is
            different for each, or not known yet.
    """

    __slots__ = ("_packings", "encodings", "value")

    def __init__(self, value: tuple[list[Any], dict[str, Any]]) -> None:
        self.value = value
        self.encodings: dict[str, Encoded] = {}
        self._packings: dict[str, asyncio.Future[Encoded]] = {}

    def packed(
        self, worker: Worker, codec: str, encoded: Encoded
    ) -> Awaitable[Encoded]:
        """Pack in a thread what was encoded; what is common to all is packed once."""
        packing = self._packings.get(codec)
        if packing is not None:
            return _again(packing)
        packing = worker.run_on_host(encoded.pack)
        if codec not in self.encodings:
            return packing
        self._packings[codec] = packing
        return asyncio.shield(packing)


async def _again(packing: asyncio.Future[Encoded]) -> Encoded:
    """Wait for what is packed for another peer, and is counted there."""
    try:
        return replace(await asyncio.shield(packing), bytes_copied=0)
    except EncodeError as error:  # each call has its own, which names it
        raise EncodeError(error.problem, outcome=error.outcome) from error


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
        self.may_be_overtaken = False  # the message at hand: see `_head`
        self.codec = worker.codec
        self.unreturned = worker.memory.leases.dead  # places of peers, to be given back
        self.compression = worker.options.compression_to(peer.name)
        self.device_map = worker.options.device_map_to(peer.name)
        self.is_plain = self.compression is None and self.device_map is None
        self.preparing = Preparing(self.link)
        self.credit = LinkCredit(self.link, worker.inbound_credit)

    @property
    def is_lost(self) -> bool:
        """Whether the connection has ended."""
        return bool(self.lost_because)

    def _encode(
        self,
        value: Any,
        meta: dict[str, Any] | None = None,
        labels: Sequence[str] = (),
        compression: Compression | None = None,
        device_map: DeviceMap | None = None,
    ) -> tuple[Encoded, Pins | None, dict[str, Any] | None]:
        """Encode a value for the peer; let references and propagators take part.

        With a codec, what is returned has still to be packed.  A device map matters
        only if tensors of the host's memory go to devices by it.
        """
        if self.unreturned:  # before the message, whose sender may need the room
            self.worker.memory.leases.give_back()
        references = self.worker.references
        quick = self.codec.encode_quickly(value) if compression is None else None
        if quick is not None:
            encoded, pins = quick, None
        elif references is None:
            encoded, pins = self._encode_values(value, labels, compression), None
        else:
            references.begin_encode(self.link)
            sent = False
            try:
                encoded = self._encode_values(value, labels, compression)
                sent = True
            finally:
                pins = references.end_encode(sent=sent)
        if encoded.shared:
            self._refer(encoded, pins)
        if device_map is not None and device_map.takes_host:
            stage(encoded)
            self.may_be_overtaken = True
        if encoded.copies and compression is None:
            self._fetch(encoded)
        if encoded.bytes_copied:
            self.connection.bytes_gathered += encoded.bytes_copied
        return encoded, pins, self._propagate(encoded, meta)

    def _refer(self, encoded: Encoded, pins: Pins | None) -> None:
        """Have the peer map the memory that a message refers to before it reads it."""
        try:
            self.worker.memory.regions.refer(self.link, encoded)
        except AsyncRpcError:
            if pins is not None:
                pins.undo()
            raise
        self.may_be_overtaken = True

    def _fetch(self, encoded: Encoded) -> None:
        """Send a message only when its bytes have come from the devices."""
        self.worker.devices.fetch(self.link, encoded, hold(encoded))
        self.may_be_overtaken = True

    def _encode_values(
        self, value: Any, labels: Sequence[str], compression: Compression | None
    ) -> Encoded:
        if compression is None:
            return self.codec.encode(value, labels=labels)
        return self.codec.encode_for(compression, value, labels=labels)

    def _encode_common(
        self,
        common: CommonArguments,
        labels: Sequence[str],
        meta: dict[str, Any] | None = None,
        compression: Compression | None = None,
        device_map: DeviceMap | None = None,
    ) -> tuple[Encoded, Pins | None, dict[str, Any] | None]:
        """Encode for one of several peers, or take what was encoded for another.

        References are counted per receiver: with one in it, nothing is in common.
        """
        if device_map is not None and device_map.takes_host:
            value = list(common.value)
            return self._encode(value, meta, labels, compression, device_map)
        codec = "" if compression is None else compression.name
        encoded = common.encodings.get(codec)
        if encoded is not None:  # what was gathered is counted where it was done
            meta = self._propagate(encoded, meta)
            return replace(encoded, bytes_copied=0), None, meta
        value = list(common.value)
        encoded, pins, meta = self._encode(value, meta, labels, compression)
        if pins is None and not encoded.shared and not encoded.copies:
            common.encodings[codec] = encoded
        return encoded, pins, meta

    def device_map_of(self, kind: int, call_id: int, head: bytes) -> DeviceMap:
        """Return where the tensors of a message from the peer are to be.

        Raises:
            MalformedError: it says so, and what it says is no map.
        """
        if kind in (FrameKind.REQUEST, FrameKind.SERVICE):
            record = unpack_head(head)
            meta = record[-1] if len(record) > 1 else None
            if type(meta) is dict and DEVICES in meta:
                return DeviceMap.from_wire(meta[DEVICES])
            return IDENTITY
        call = self.pending.get(call_id)
        device_map = None if call is None else call.device_map
        return IDENTITY if device_map is None else device_map.inverse()

    def _propagate(
        self, encoded: Encoded, meta: dict[str, Any] | None
    ) -> dict[str, Any] | None:
        """Let propagators take part in a message; return its meta."""
        for propagator in self.worker.propagators:
            part = propagator.outgoing(self.link, encoded.gradient_tensors)
            if part is not None:
                meta = meta or {}
                meta[propagator.key] = part
        return meta

    def _decode(
        self, control: bytes, buffers: list[memoryview], meta: Meta
    ) -> tuple[Any, Any]:
        """Return a value and what it lent."""
        on_gradient: OnGradient | None = None
        if meta:
            for propagator in self.worker.propagators:
                if propagator.key in meta:
                    found = propagator.incoming(self.link, meta[propagator.key])
                    on_gradient = found or on_gradient
        value, loans = self.codec.decode_quickly(control, buffers, on_gradient), None
        if value is UNREAD:
            value, loans = self._decode_slowly(control, buffers, on_gradient)
        if on_gradient is not None:
            for propagator in self.worker.propagators:
                propagator.decoded(on_gradient)
        return value, loans

    def _decode_slowly(
        self, control: bytes, buffers: list[memoryview], on_gradient: OnGradient | None
    ) -> tuple[Any, Any]:
        references = self.worker.references
        if references is None:
            return self.codec.decode(control, buffers, on_gradient=on_gradient), None
        references.begin_decode(self.link)
        try:
            value = self.codec.decode(control, buffers, on_gradient=on_gradient)
        except BaseException:
            self._settle_unread(references, control, references.lifted)
            raise
        return value, references.end_decode()

    def give_back(self, control: bytes) -> None:
        """Take the references of a message that is not read, and give them back.

        Whoever sent it counts them as arrived: see `References`.
        """
        references = self.worker.references
        if references is not None:
            references.begin_decode(self.link)
            self._settle_unread(references, control, 0)

    def _settle_unread(self, references: References, control: bytes, read: int) -> None:
        """Take those that have not been read, then give back all of the message."""
        for tree in references_in(control)[read:]:
            with suppress(AsyncRpcError):
                references.lift(tree)
        loans = references.end_decode()
        if loans is not None:  # when what was read of the message is dead
            self.loop.call_soon(self._take_over, loans)

    def _answer_meta(self, head: bytes) -> Meta:
        record = unpack_head(head) if head else []
        meta = record[0] if record else None
        return meta if type(meta) is dict else NO_META

    def _take_over(self, loans: Any) -> None:
        """Give back what a result lent, or register it; both go as notices."""
        references = self.worker.references
        if loans is not None and references is not None:
            references.settle_loans(self.link, loans, answered=False)

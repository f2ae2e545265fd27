"""What the calls to one peer need of their worker, its link and its connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from asyncrpc.runtime.calls.deferred import DropsMessages
from asyncrpc.runtime.calls.futures import CallFuture
from asyncrpc.runtime.calls.machine.credit import WaitingRequests
from asyncrpc.runtime.calls.packing import PackingHost
from asyncrpc.runtime.calls.streams import StreamReceiver
from asyncrpc.runtime.extensions import CallTracer
from asyncrpc.runtime.options import Options
from asyncrpc.serde import Codec
from asyncrpc.trace import FlightRecorder
from asyncrpc.wire.outgoing import OutgoingMessage, OutgoingMessages

OutboundCall: TypeAlias = CallFuture[Any] | StreamReceiver


class OutboundHost(PackingHost, Protocol):
    """What calls need of their worker.

    Attributes:
        codec: encodes arguments.
        recorder: keeps how calls end.
        tracer: shows calls in traces; None: nothing does.
    """

    codec: Codec
    recorder: FlightRecorder
    tracer: CallTracer | None

    @property
    def options(self) -> Options:
        """The worker's options."""


class OutboundConnection(DropsMessages, Protocol):
    """A connection, as far as calls go."""

    @property
    def first_unsent(self) -> int:
        """While it is broken, the first call that cannot have left."""

    def join(self, part: bytes) -> None:
        """Write a message that can wait for the next one."""

    def hold(self, part: bytes, for_s: float) -> None:
        """Write a message with the next one, or after so many seconds."""

    def push(self, part: bytes) -> None:
        """Write a message now, with all that waits."""

    @property
    def outgoing(self) -> OutgoingMessages:
        """Messages that are not written yet."""

    def submit(self, message: OutgoingMessage) -> None:
        """Send a message that may have to wait, or has waited."""

    def claim(self, call_id: int, memory: memoryview) -> None:
        """Let the response of a call land in memory of the caller."""

    def release_claim(self, call_id: int) -> None:
        """End a claim: from now on nothing is written to its memory."""


class CallCredit(Protocol):
    """The peer's credit for large requests.

    Attributes:
        waiting: requests that wait for it.
    """

    waiting: WaitingRequests[Callable[[], None]]

    def wait(self, call_id: int, nbytes: int, send: Callable[[], None]) -> None:
        """Keep a request until the peer has room for it; then `send` it."""

    def withdraw(self, call_id: int) -> bool:
        """Do not send a request that waits; return whether there was one."""

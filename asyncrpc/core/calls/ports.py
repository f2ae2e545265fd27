"""What the parts of a link see of their worker, their connection, and the link itself.

All are made above this package, so it names them here; of what is in this package, or
below it, the parts take the classes themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from asyncrpc.core.services.ports import PeerLink, Scheduler

if TYPE_CHECKING:
    import asyncio
    import contextvars
    from collections.abc import Callable, Coroutine, Sequence

    from asyncrpc.core.calls.code import CodeExchange
    from asyncrpc.core.calls.context import Deadlines
    from asyncrpc.core.calls.credit import InboundCredit
    from asyncrpc.core.calls.error_encoder import ErrorEncoder
    from asyncrpc.core.calls.futures import CallFuture
    from asyncrpc.core.calls.inbound import InboundCall
    from asyncrpc.core.calls.modes import Mode, Target
    from asyncrpc.core.calls.peer_memory import OutboundBudget
    from asyncrpc.core.calls.reading_turns import ReadingTurns
    from asyncrpc.core.calls.requests import CallAdmission
    from asyncrpc.core.calls.streams import StreamReceiver
    from asyncrpc.core.calls.unsent import UnsentCalls
    from asyncrpc.core.devices.staging import Devices
    from asyncrpc.core.loop.threads import ThreadPool
    from asyncrpc.core.options import LimitOptions, Options
    from asyncrpc.core.serde import Codec, FunctionTable
    from asyncrpc.core.services.extensions import (
        CallTracer,
        Propagator,
        References,
        ThreadState,
    )
    from asyncrpc.core.services.router import Router
    from asyncrpc.core.trace.recorder import FlightRecorder
    from asyncrpc.core.transport.byte_stream import ByteStream
    from asyncrpc.core.wire.outgoing import (
        OutgoingMessage,
        OutgoingMessages,
        OutgoingState,
    )
    from asyncrpc.errors import AsyncRpcError

T = TypeVar("T")


class CallHost(Scheduler, Protocol):
    """A worker, as the parts of its links see it: `runtime.parts`, and a test's.

    Attributes:
        name: of the worker.
        codec: of all its values.
        code: sends functions without a name to peers, and takes theirs.
        functions: that peers may call, and classes of exceptions that may be rebuilt.
        references: of values that stay with their owner; None if there are none.
        propagators: state that travels with every call.
        thread_states: the modes under which functions of calls run.
        tracer: shows calls in traces; None: nothing does.
        recorder: keeps how calls end, and has the clock.
        error_encoder: describes exceptions of functions.
        on_raised: called with exceptions of functions, if not None.
        note_of: returns what is told beside an answer; None: nothing is.
        pool: threads for plain functions, which may touch devices.
        context: that functions begin in.
        deadlines: ends functions that run longer than their callers wait.
        inbound_credit: limits the large requests that it takes in, over all peers.
        outbound_budget: limits what its peers have not taken, over all of them.
    """

    name: str
    codec: Codec
    code: CodeExchange
    functions: FunctionTable
    references: References | None
    propagators: list[Propagator]
    thread_states: list[ThreadState]
    tracer: CallTracer | None
    recorder: FlightRecorder
    error_encoder: ErrorEncoder
    on_raised: Callable[[BaseException], None] | None
    note_of: Callable[[Any], Any] | None
    pool: ThreadPool
    context: contextvars.Context
    deadlines: Deadlines[InboundCall]
    inbound_credit: InboundCredit
    outbound_budget: OutboundBudget

    @property
    def options(self) -> Options:
        """The worker's options."""

    @property
    def limits(self) -> LimitOptions:
        """What the worker takes on."""

    @property
    def is_draining(self) -> bool:
        """Return whether shutdown has begun."""

    def check_running(self) -> None:
        """Raise NotStartedError if the worker does not run."""

    def check_on_loop(self, used: str, /) -> None:
        """Raise an error that names `used`, unless the worker's loop runs here."""

    @property
    def admission(self) -> CallAdmission:
        """Limits and counts the calls that are served."""

    @property
    def router(self) -> Router:
        """Return the router of messages to this worker's services."""

    @property
    def unsent(self) -> UnsentCalls:
        """Counts the calls that wait before they are sent."""

    @property
    def devices(self) -> Devices:
        """The worker's devices."""

    @property
    def host_pool(self) -> ThreadPool:
        """Threads for work on host memory."""

    def run_in_thread(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Run `job` in a thread of the pool."""

    def run_on_host(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Run `job`, which touches no device, in a thread."""

    def start_eagerly(
        self,
        coroutine: Coroutine[Any, Any, None],
        context: contextvars.Context,
    ) -> asyncio.Task[None] | None:
        """Run a call's coroutine as far as it goes now; return a task if it waits."""

    def target(self, name: str) -> Target:
        """Return what a peer may call by this name."""

    def mode_of_method(self, method: Callable[..., Any]) -> Mode:
        """Decide where a method of a referenced object runs."""


class CallConnection(Protocol):
    """A connection, as the parts of its link see it: `links.connection`, and a test's.

    Attributes:
        bytes_gathered: bytes that were copied together for it.
    """

    bytes_gathered: int

    @property
    def message_bytes_copied(self) -> int:
        """Return how many bytes of the current message were copied on arrival."""

    @property
    def turns(self) -> ReadingTurns:
        """Its turns of parsing messages."""

    @property
    def outgoing(self) -> OutgoingMessages:
        """Messages that are not written yet."""

    @property
    def first_unsent(self) -> int:
        """While it is broken, the first call that cannot have left."""

    def send(
        self,
        kind: int,
        call_id: int,
        *,
        flags: int = 0,
        aux: int = 0,
        head: bytes = b"",
        control: bytes = b"",
        buffers: Sequence[memoryview] = (),
        on_sent: Callable[[], None] | None = None,
    ) -> None:
        """Write a message; never waits.  On a closed connection it is dropped."""

    def submit(self, message: OutgoingMessage) -> None:
        """Send a message that may have to wait, or has waited."""

    def join(self, part: bytes) -> None:
        """Write a message that can wait for the next one."""

    def hold(self, part: bytes, for_s: float) -> None:
        """Write a message with the next one, or after so many seconds."""

    def push(self, part: bytes) -> None:
        """Write a message now, with all that waits."""

    def drop(
        self, kind: int, call_id: int, *, bare_only: bool = False
    ) -> OutgoingState | None:
        """Give up a message that waits, or if `bare_only` nothing but a value."""

    def forget_transfer(self, kind: int, call_id: int) -> bytes | None:
        """Do not deliver a message whose payload is arriving; return its control."""

    def claim(self, call_id: int, memory: memoryview) -> None:
        """Let the response of a call land in memory of the caller."""

    def release_claim(self, call_id: int) -> None:
        """End a claim: from now on nothing is written to its memory."""

    def fail(self, error: AsyncRpcError) -> None:
        """Abort the connection because of `error`."""


class CallLink(PeerLink, Protocol):
    """A link, as the parts of it see it: `links.link`, and a test's."""

    @property
    def stream(self) -> ByteStream:
        """What its connection writes."""

    def cancel(self, call: CallFuture[Any] | StreamReceiver) -> None:
        """Tell the callee that the caller does not wait any more."""

    def send_credit(self, call_id: int, items: int) -> None:
        """Tell a stream's producer that items have been taken."""

    def count_written(self) -> int:
        """Return how many bytes are kept of what was written."""

    def count_kept(self) -> int:
        """Return that, and how many bytes of answers wait to be written."""

    async def writable(self) -> None:
        """Wait until the transport has room."""

    def give_up(self, error: AsyncRpcError) -> None:
        """End the connection because of what the peer did."""

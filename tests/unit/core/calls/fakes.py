"""What the parts of a link are given in their tests: nothing runs, all is recorded."""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence, Sized
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

from asyncrpc.core.calls.code import CodeExchange
from asyncrpc.core.calls.context import Deadlines
from asyncrpc.core.calls.credit import InboundCredit, LinkCredit
from asyncrpc.core.calls.deferred import DeferredMessages
from asyncrpc.core.calls.error_encoder import ErrorEncoder
from asyncrpc.core.calls.heads import ReceivedHeads
from asyncrpc.core.calls.inbound import InboundCall, Responder
from asyncrpc.core.calls.machine.calls import LinkStatus, PendingCalls, ServedCalls
from asyncrpc.core.calls.message_codec import MessageCodec
from asyncrpc.core.calls.modes import Mode, Target, mode_of
from asyncrpc.core.calls.outbound import AnswerReceiver, CallEnds, OutboundCalls
from asyncrpc.core.calls.peer_memory import Backlog, OutboundBudget, PeerMemory
from asyncrpc.core.calls.preparation import MessagePreparation
from asyncrpc.core.calls.requests import RequestDispatcher
from asyncrpc.core.calls.streams import OutboundCall
from asyncrpc.core.calls.unsent import UnsentCalls
from asyncrpc.core.counters import Counters
from asyncrpc.core.ids import Incarnation, WorkerId
from asyncrpc.core.loop.clock import Deadline
from asyncrpc.core.options import LimitOptions, Options
from asyncrpc.core.serde import Codec, Copy, Encoded, FunctionTable, Policy
from asyncrpc.core.services.router import Router, answers, takes
from asyncrpc.core.services.schema import Notice, Request, Signed, message
from asyncrpc.core.wire.outgoing import OutgoingEvent, OutgoingMessage, OutgoingMessages
from asyncrpc.errors import AsyncRpcError, MalformedError, RejectedError
from asyncrpc.trace import FlightRecorder

NEVER = 1 << 64
PEER = WorkerId("b", Incarnation(7))


class Timer:
    """A timer that only its test lets expire."""

    def __init__(self, at_s: float, act: Callable[[], None]) -> None:
        self.at_s = at_s
        self.act = act
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class FakeLoop(asyncio.AbstractEventLoop):
    """A loop that runs nothing until it is told to."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.timers: list[Timer] = []
        self.soon: deque[Callable[[], None]] = deque()

    def time(self) -> float:
        return self.now_s

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """A call that fails, and that a test does not look at, is no error here."""

    def call_at(  # type: ignore[override]  # nothing here is given a context
        self, when: float, callback: Any, *args: Any, **_more: Any
    ) -> Any:
        def act() -> None:
            self.now_s = max(self.now_s, when)
            callback(*args)

        timer = Timer(when, act)
        self.timers.append(timer)
        return timer

    def call_soon(  # type: ignore[override]  # likewise
        self, callback: Any, *args: Any, **_more: Any
    ) -> Any:
        self.soon.append(lambda: callback(*args))
        return None

    def run_soon(self) -> None:
        """Run what is to run in the next turns."""
        while self.soon:
            self.soon.popleft()()


class Sent(NamedTuple):
    """A message that was sent."""

    kind: int
    call_id: int
    flags: int = 0
    aux: int = 0
    head: bytes = b""
    control: bytes = b""
    buffers: Sequence[memoryview] = ()
    on_sent: Callable[[], None] | None = None


class Turns:
    """Counts how often the messages of a connection are held."""

    def __init__(self) -> None:
        self.holds = 0

    def hold(self) -> None:
        self.holds += 1

    def resume(self) -> None:
        self.holds -= 1


class FakeConnection:
    """A connection that writes down what is sent."""

    def __init__(self) -> None:
        self.sent: list[Sent] = []
        self.pushed: list[bytes] = []
        self.joined: list[bytes] = []
        self.held: list[tuple[bytes, float]] = []
        self.outgoing = OutgoingMessages()
        self.drop = self.outgoing.drop
        self.arriving: dict[tuple[int, int], bytes] = {}
        self.failed: AsyncRpcError | None = None
        self.turns: Any = Turns()
        self.refuses: BaseException | None = None
        self.first_unsent = NEVER
        self.bytes_gathered = 0
        self.message_bytes_copied = 0
        self.lanes = None

    def send(self, kind: int, call_id: int, **more: Any) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.sent.append(Sent(kind, call_id, **more))

    def submit(self, message: OutgoingMessage) -> None:
        fields = {name: getattr(message, name) for name in Sent._fields}
        self.send(fields.pop("kind"), fields.pop("call_id"), **fields)
        self.outgoing.sent(message)

    def let_wait(self, kind: int, call_id: int) -> OutgoingMessage:
        """Let a message be on its way."""
        message = OutgoingMessage(kind, call_id)
        self.outgoing.wait(message, OutgoingEvent.QUEUE, lambda: None)
        return message

    def push(self, part: bytes) -> None:
        self.pushed.append(part)

    def join(self, part: bytes) -> None:
        self.joined.append(part)

    def hold(self, part: bytes, for_s: float) -> None:
        self.held.append((part, for_s))

    def forget_transfer(self, kind: int, call_id: int) -> bytes | None:
        return self.arriving.pop((kind, call_id), None)

    def claim(self, call_id: int, memory: memoryview) -> None: ...

    def release_claim(self, call_id: int) -> None: ...

    def fail(self, error: AsyncRpcError) -> None:
        self.failed = error

    def count_kept(self) -> int:
        return 0

    async def writable(self) -> None: ...

    @property
    def last(self) -> Sent:
        return self.sent[-1]


class FakeThreads:
    """Threads that run a job when they are told to."""

    is_exclusive = False

    def __init__(self) -> None:
        self.jobs: deque[tuple[Callable[[], Any], Callable[..., None]]] = deque()
        self.are_closed = False

    def submit(self, job: Callable[[], Any], done: Callable[..., None]) -> None:
        if self.are_closed:
            raise RejectedError("no threads")
        self.jobs.append((job, done))

    def run(self) -> None:
        while self.jobs:
            job, done = self.jobs.popleft()
            try:
                result = job()
            except BaseException as error:  # noqa: BLE001  (as the pool does)
                done(None, error)
            else:
                done(result, None)


class FakeDevices:
    """Devices whose copies end when they are told to."""

    async def fetched(self, copies: Sequence[Copy]) -> None: ...

    def fill(self, copies: Iterable[Copy], done: Callable[[Any], None]) -> None:
        done(None)

    def place(self, wanted: Any, done: Callable[..., None]) -> None:
        done({index: tensor for index, (tensor, _) in wanted.items()}, None)


@message("kept", "look")
class Look(Request[int]):
    """A request of the test."""

    number: int


@message("kept", "hear")
class Hear(Notice):
    """A notice of the test."""

    number: Signed


@message("kept", "gone", may_wait_s=0.5)
class Gone(Notice):
    """A notice of the test that may wait."""

    number: Signed


class FakeService:
    """A service that keeps what it is told."""

    name = "kept"

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.routes = [answers(Look, self._on_look), takes(Hear, self._on_hear)]

    async def _on_look(self, link: Any, look: Look) -> int:
        return look.number

    def _on_hear(self, link: Any, hear: Hear) -> None:
        if hear.number < 0:
            raise MalformedError("it is wrong")
        self.numbers.append(hear.number)

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None: ...

    async def close(self) -> None: ...


class FakeAdmission:
    """Admits all calls, or refuses them."""

    def __init__(self) -> None:
        self.active = self.held_bytes = self.ended = 0
        self.wakes_at = -1
        self.refusal: AsyncRpcError | None = None

    def wake(self) -> None:
        """Wake nothing: no test waits for calls to end."""

    def open(self, _peer: Incarnation, calls: Sized) -> PeerMemory:
        counts: Any = self
        return PeerMemory(counts, calls, lambda: 0, LimitOptions().peer_bytes_max)

    def admit(self, of_peer: Sized) -> None:
        if self.refusal is not None:
            raise self.refusal


@dataclass
class FakeHost:
    """A worker, as far as the parts of its links see it."""

    name: str = "a"
    options: Options = field(default_factory=Options)
    loop: Any = field(default_factory=FakeLoop)
    references: Any = None
    is_draining: bool = False
    unsent: UnsentCalls = field(default_factory=UnsentCalls)
    inbound_bytes_max: int = 64 << 20

    def __post_init__(self) -> None:
        self.functions = FunctionTable(Policy.TRUSTED)
        self.recorder = FlightRecorder()
        self.recorder.now_s = self.loop.time
        self.limits = self.options.limits
        self.codec = Codec(self.functions)
        self.code = CodeExchange(self, Counters())
        self.propagators: list[Any] = []
        self.deadlines = Deadlines(self.loop, InboundCall.expire)
        self.thread_states: list[Any] = []
        self.tracer: Any = None
        self.note_of: Callable[[Any], Any] | None = None
        self.on_raised: Callable[[BaseException], None] | None = None
        self.error_encoder = ErrorEncoder(self.codec, worker=self.name, pid=1)
        self.pool: Any = FakeThreads()
        self.host_pool: Any = self.pool
        self.devices: Any = FakeDevices()
        self.context = contextvars.Context()
        self.kept = FakeService()
        self.router = Router()
        self.router.add("kept", self.kept.routes)
        self.admission: Any = FakeAdmission()
        self.tasks: list[Coroutine[Any, Any, Any]] = []
        self.outbound_budget = OutboundBudget(1 << 30)
        self.inbound_credit = InboundCredit(
            self.name, self.loop, self.inbound_bytes_max, self.allow
        )
        self.dead: deque[Any] = deque()

    def allow(self, nbytes: int) -> None: ...

    def give_back(self) -> None:
        self.dead.clear()

    def check_running(self) -> None: ...

    def check_on_loop(self, used: str, /) -> None: ...

    def target(self, name: str) -> Target:
        function = self.functions.resolve(name)
        mode = mode_of(function)
        # What would run in a thread runs at once: no test here is about that.
        return Target(name, function, Mode.ON_LOOP if mode is Mode.THREAD else mode)

    def mode_of_method(self, method: Callable[..., Any]) -> Mode:
        return Mode.ON_LOOP

    def start_task(self, coroutine: Any, *, context: Any = None) -> Any:
        self.tasks.append(coroutine)
        return FakeTask()

    def start_eagerly(self, coroutine: Any, context: Any) -> Any:
        """Run a coroutine to where it first waits."""
        try:
            context.run(coroutine.send, None)
        except StopIteration:
            return None
        self.tasks.append(coroutine)
        return FakeTask()

    def run_in_thread(self, job: Callable[[], Any], pool: Any = None) -> Any:
        future: asyncio.Future[Any] = asyncio.Future(loop=self.loop)
        self.pool.submit(job, lambda result, _error: future.set_result(result))
        return future

    def run_on_host(self, job: Callable[[], Any]) -> Any:
        return self.run_in_thread(job)


class FakeTask:
    """A task that a test lets go on, or not."""

    def __init__(self) -> None:
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def add_done_callback(self, callback: Any) -> None: ...

    def done(self) -> bool:
        return False


class Room:
    """A transport has it."""

    def is_set(self) -> bool:
        return True


class Parts:
    """The parts of a link, made one by one over a connection that is none."""

    def __init__(self, host: FakeHost | None = None) -> None:
        self.host = host or FakeHost()
        self.connection = FakeConnection()
        self.stream: Any = SimpleNamespace(on_taken=None, on_kept=None, room=Room())
        self.writable = self.connection.writable
        self.count_written = self.count_kept = self.connection.count_kept
        self.peer = PEER
        self.status = LinkStatus()
        self.pending: PendingCalls[OutboundCall] = PendingCalls()
        self.served: ServedCalls[InboundCall] = ServedCalls()
        self.heads = ReceivedHeads(self.host.target)
        self.memory = PeerMemory(
            self.host.admission,
            self.served.running,
            lambda: 0,
            self.host.options.limits.peer_bytes_max,
        )
        self.check_room = self.memory.check
        self.credit = LinkCredit(
            PEER.name,
            self.host.inbound_credit,
            self.memory,
            loop=self.host.loop,
            connection=self.connection,
            status=self.status,
        )
        self.ends = CallEnds(PEER, self.host.recorder)
        self.deferred = DeferredMessages(
            to=PEER.name,
            connection=self.connection,
            pending=self.pending,
            served=self.served,
            errors=self.host.error_encoder,
            ends=self.ends,
        )
        self.referred: list[Encoded] = []
        self.messages = MessageCodec(
            self,
            self.host,
            connection=self.connection,
            dead_places=self.host.dead,
            give_back_places=self.host.give_back,
            refer=self.referred.append,
            devices=self.host.devices,
            deferred=self.deferred,
        )
        self.preparation = MessagePreparation(
            self.host,
            limit=2,
            connection=self.connection,
            pending=self.pending,
            status=self.status,
            unread=self.messages,
            read_head=self.heads.read,
            expand=self.credit.expand,
        )
        self.calls = OutboundCalls(
            self,
            PEER,
            self.host,
            connection=self.connection,
            pending=self.pending,
            status=self.status,
            credit=self.credit,
            messages=self.messages,
            ends=self.ends,
        )
        self.answers = AnswerReceiver(
            PEER,
            self.host,
            connection=self.connection,
            pending=self.pending,
            messages=self.messages,
            calls=self.calls,
            ends=self.ends,
        )
        self.responder = Responder(
            self,
            self.host,
            connection=self.connection,
            backlog=Backlog(self, self.host.outbound_budget, self.memory),
            served=self.served,
            messages=self.messages,
        )
        self.requests = RequestDispatcher(
            self,
            self.host,
            connection=self.connection,
            served=self.served,
            credit=self.credit,
            messages=self.messages,
            heads=self.heads,
            preparation=self.preparation,
            responder=self.responder,
        )

    is_guest = is_draining = False

    def give_up(self, error: AsyncRpcError) -> None:
        self.connection.failed = error

    @property
    def is_lost(self) -> bool:
        return self.status.is_lost

    def cancel(self, call: OutboundCall) -> None:
        self.calls.cancel(call)

    def send_credit(self, call_id: int, items: int) -> None:
        self.calls.send_credit(call_id, items)

    def tell(self, notice: Notice, *, at_once: bool = False) -> None:
        self.calls.tell(notice, at_once=at_once)

    def ask(
        self,
        request: Request[Any],
        *,
        deadline: Deadline | None = None,
        device_map: Any = None,
    ) -> asyncio.Future[Any]:
        return self.calls.ask(request, deadline=deadline, device_map=device_map)

    def value_of(self, message: Sent) -> Any:
        """Return the value that a message was sent with."""
        return self.host.codec.decode(message.control, list(message.buffers))

    def control(self, value: Any) -> bytes:
        """Return the control part of a message with a value."""
        return self.host.codec.encode(value).control


class Pins:
    """What a message relies on; counts what becomes of it."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_sent(self) -> None:
        self.events.append("sent")

    def undo(self) -> None:
        self.events.append("undone")

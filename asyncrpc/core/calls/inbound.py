"""One call from a peer: from its decoded request to its answer.

An `InboundCall` runs the function; how, is decided in `modes`.  What the function
returned or raised goes to the `Responder` of its link, which sends it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import functools
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch

from asyncrpc.core.calls.context import Watch, current_call_var, deadline_var
from asyncrpc.core.calls.credit import Claim, item_bytes
from asyncrpc.core.calls.error_encoder import holds_device_tensor
from asyncrpc.core.calls.foreign_futures import as_awaitable
from asyncrpc.core.calls.inline import is_short
from asyncrpc.core.calls.machine.calls import ServedCalls
from asyncrpc.core.calls.message_codec import (
    CODEC,
    MessageCodec,
    unsendable,
)
from asyncrpc.core.calls.modes import Mode, Target
from asyncrpc.core.calls.peer_memory import LARGE_BYTES, Backlog
from asyncrpc.core.calls.ports import CallConnection, CallHost
from asyncrpc.core.calls.preparation import PACK_HERE_BYTES_MAX
from asyncrpc.core.devices.maps import DEVICES, DeviceMap
from asyncrpc.core.ids import WorkerId
from asyncrpc.core.loop.clock import Deadline
from asyncrpc.core.loop.waits import works_for
from asyncrpc.core.serde import Encoded, compression_for_answer
from asyncrpc.core.services.extensions import (
    NOTE,
    TRACE,
    CallSpan,
    Pins,
)
from asyncrpc.core.services.ports import PeerLink
from asyncrpc.core.torch_modes import (
    FunctionModes,
    alone,
    drop_modes,
    has_defaults,
    has_torchs_kernels,
    steps,
)
from asyncrpc.core.trace.events import CANCELLED, OK, call_label, outcome_of
from asyncrpc.core.trace.recorder import FlightRecorder
from asyncrpc.core.trace.ring import plain
from asyncrpc.core.wire.frames import FrameKind, pack_head
from asyncrpc.errors import (
    CallError,
    DeadlineExceededError,
    Outcome,
    RejectedError,
    RRefDeletedError,
    WorkerLostError,
)

if TYPE_CHECKING:
    from torch.autograd import profiler


T = TypeVar("T")

# What most functions return: to ask whether it can be awaited takes 0.4 us.
_PLAIN: Final = frozenset({type(None), bool, int, float, str, bytes, torch.Tensor})
# A member of an enum takes 0.1 us to find.
_COROUTINE: Final = Mode.COROUTINE
_ONE_STEP: Final = Mode.ONE_STEP
_ON_LOOP: Final = Mode.ON_LOOP
_ASYNC_EXECUTION: Final = Mode.ASYNC_EXECUTION

_TRACE_ALONE: Final = {TRACE}

CANCELLED_AT_ONCE: Final = 256  # calls of a lost peer, of 20 us each
_RESPONSE: Final = int(FrameKind.RESPONSE)  # an enum's member takes 0.1 us to find


class InboundCall:
    """One call that is being served.

    Attributes:
        host: runs the function.
        responder: sends the answer.
        came_s: when it came, by the clock of the worker.
        began_s: when its function began; at first, when it came.
        is_cancelled: whether the caller no longer wants the result.
        rref_id: of the value that it makes, if that stays here.
        wanted: the value whose method it calls, if that was not made when it came.
        shown: what a profiler shows of it, until it ends.
        span: what a trace shows of it.
        note: what its function says of itself, for `note_of` of the worker.
        claim: what a large request holds of the worker's inbound bytes.
    """

    __slots__ = (
        "began_s",
        "call_id",
        "came_s",
        "claim",
        "context",
        "credit",
        "deadline",
        "host",
        "is_cancelled",
        "loans",
        "meta",
        "note",
        "pool",
        "responder",
        "rref_id",
        "shown",
        "span",
        "target",
        "task",
        "wanted",
        "watch",
    )

    def __init__(  # noqa: PLR0917  (one for each call)
        self,
        host: CallHost,
        responder: Responder,
        call_id: int,
        now_s: float,
        deadline: Deadline | None,
        meta: dict[str, Any],
    ) -> None:
        self.host = host
        self.came_s = self.began_s = now_s
        self.responder = responder
        self.call_id = call_id
        self.deadline = deadline
        self.meta = meta
        self.rref_id: tuple[int, int] | None = None
        self.wanted: tuple[int, int] | None = None
        self.loans: Any = None
        self.credit: Any = None
        self.claim: Claim | None = None
        self.is_cancelled = False
        self.pool = host.pool
        self.target: Target | None = None
        self.task: asyncio.Task[None] | None = None
        self.shown: profiler.record_function | None = None
        self.span: CallSpan | None = None
        self.note: Any = None
        self.watch: Watch | None = None  # of its deadline
        # What the function runs in.  It refers to this call, so the end lets go of it.
        self.context: contextvars.Context | None = host.context.copy()
        self.context.run(self._enter)

    def _enter(self) -> None:
        """Set the variables that the function sees; runs in its context."""
        current_call_var.set(self)
        if self.deadline is not None:
            deadline_var.set(self.deadline)
        if self.meta:
            for propagator in self.host.propagators:
                if propagator.key in self.meta:
                    propagator.enter(self.meta[propagator.key])

    def in_context(self, function: Callable[[Any], T], value: Any) -> T:
        """Call `function` with this call's variables.

        A copy of the context has them: a thread that outlives the deadline may still be
        in the context itself.  It costs 6 ns.
        """
        if self.context is None or current_call_var.get() is self:
            return function(value)
        return self.context.copy().run(function, value)

    @property
    def device_map_back(self) -> DeviceMap | None:
        """The device map of the results, from that of the call; None without one."""
        if DEVICES not in self.meta:
            return None
        return DeviceMap.from_wire(self.meta[DEVICES]).inverse()

    @property
    def function_name(self) -> str:
        """Return the function's name, for people; empty if it could not be read."""
        return self.target.name if self.target is not None else ""

    @property
    def is_running(self) -> bool:
        """Return whether its function has not ended."""
        return self.target is not None

    @property
    def label(self) -> str:
        """What tells it from other calls; a `CallServed` has all that makes it."""
        return call_label(self.call_id, self.responder.caller)

    def run(self, target: Target, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Start the function; the answer follows when it ends."""
        self.target = target
        context = self.context
        if self.is_cancelled or context is None:
            return
        mode = target.mode
        if mode is _COROUTINE or mode is _ONE_STEP:
            run = self._await if self.claim is None else self._await_holding
            coroutine = run(target.function, args, kwargs, mode is _ONE_STEP)
            task = self.host.start_eagerly(coroutine, context)
            if task is not None:
                self.task = task
                if self.is_cancelled:  # by something that its first step has set off
                    task.cancel()
        elif mode is _ON_LOOP or (target.is_listed and self._is_cheap(args, kwargs)):
            self._run_here(context, target.function, args, kwargs)
        else:
            self._submit(_Job(self, context, target, args, kwargs))
            if self.claim is not None:
                self.claim.hold()
        if self.deadline is not None and self.target is not None:  # it goes on
            self.watch = self.host.deadlines.watch(self, self.deadline)

    def _submit(self, job: _Job) -> None:
        is_marked = job.target.mode is _ASYNC_EXECUTION
        # Bound methods: by them it is seen for which call a thread is waited for.
        self.pool.submit(job, self._on_future if is_marked else self._on_thread_done)

    def _is_cheap(self, args: list[Any], kwargs: dict[str, Any]) -> bool:
        if kwargs or (self.meta and self.meta.keys() != _TRACE_ALONE):
            return False
        # A mode would see how the tensors are looked at.
        return (
            has_defaults()
            and has_torchs_kernels()
            and is_short(args, self.host.limits.on_loop_bytes_max)
        )

    def cancel(self) -> None:
        """Cancel the call: the caller no longer wants the result.

        A task is cancelled; a thread cannot be, but can ask (`asyncrpc.cancelled`).
        """
        self.is_cancelled = True
        if self.task is not None:
            self.task.cancel()
        else:
            self.responder.forget(self)

    def end(self) -> None:
        """End the call: it has been answered, or its caller has gone."""
        self.context = None  # else both would wait for the collector of cycles
        self.target = None
        if self.watch is not None:
            self.watch.stop(self)
            self.watch = None
        if self.claim is not None:
            self.claim.let_go()
        if self.shown is not None:
            self.shown.__exit__(None, None, None)
            self.shown = None

    def start_stream(self, coroutine: Any) -> None:
        """Run the coroutine that sends a stream's items, in this call's context."""
        self._start_task(coroutine)

    def _start_task(self, coroutine: Any) -> asyncio.Task[None]:
        if self.claim is not None:
            self.claim.hold()
        task = self.task = self.host.start_task(coroutine, context=self.context)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():  # before it began, and so could say it
            self.responder.forget(self)
        if self.claim is not None:
            self.claim.let_go()
        self.task = None  # its context refers to this call

    async def _await(
        self,
        function: Callable[..., Any],
        args: list[Any],
        kwargs: dict[str, Any],
        has_one_step: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        # The arguments are let go before the answer is sent, so that it can say which
        # of the references among them the function has kept.
        try:
            running = function(*args, **kwargs)
            args.clear()
            kwargs.clear()
            if has_one_step and has_defaults():
                try:
                    result = await running
                finally:
                    drop_modes()
            elif type(running) is CoroutineType and has_defaults():
                # As `steps` does it: most coroutines end here, and save 5 us.
                try:
                    awaited = running.send(None)
                except BaseException as end:
                    drop_modes()
                    if type(end) is not StopIteration:
                        raise
                    result = end.value
                else:
                    result = await steps(running, FunctionModes(), awaited)
            else:
                result = await alone(running)
            del running
        except asyncio.CancelledError as error:
            self.on_cancelled(error)
        except BaseException as error:  # noqa: BLE001  (the caller gets it)
            self.responder.answer_error(self, error)
        else:
            self.responder.answer(self, result)
        self.task = None  # its context refers to this call

    async def _await_holding(self, *function: Any) -> None:
        """Run a function, and hold what the call holds until it ends."""
        claim = self.claim
        assert claim is not None  # or it is not needed
        claim.hold()
        try:
            await self._await(*function)
        finally:
            claim.let_go()

    def on_cancelled(self, error: asyncio.CancelledError, *, items: int = 0) -> None:
        """Answer for a task cancelled by its caller, its deadline or itself."""
        if self.is_cancelled:
            self.responder.forget(self, items=items)
        elif self.host.is_draining:
            gone = WorkerLostError("the worker shut down before the function ended")
            self.responder.answer_error(
                self, gone, items=items, outcome=Outcome.UNKNOWN
            )
        else:
            self.responder.answer_error(self, error, items=items)

    def _run_here(
        self,
        context: contextvars.Context,
        function: Callable[..., Any],
        args: list[Any],
        kwargs: dict[str, Any],
    ) -> None:
        try:
            if has_defaults():
                result = self._in_thread(context, function, args, kwargs)
                drop_modes()
            else:
                with FunctionModes():
                    result = self._in_thread(context, function, args, kwargs)
        except BaseException as error:  # noqa: BLE001  (the caller gets it)
            self.responder.answer_error(self, error)
        else:
            self._on_returned(result)

    @works_for(lambda at: at["self"])
    def _in_thread(
        self,
        context: contextvars.Context,
        function: Callable[..., Any],
        args: list[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call the function in this call's context, then let go of its arguments."""
        try:
            if self.is_cancelled:  # while it waited for a thread: it need not begin
                return None
            self.began_s = self.host.recorder.now_s()
            return context.run(function, *args, **kwargs)
        finally:
            args.clear()
            kwargs.clear()

    def _on_future(self, result: Any, error: BaseException | None) -> None:
        """Take the future of a marked function; cancel it if the call was given up."""
        if type(result) is _Job:
            self._hold(result)
            return
        if self.is_cancelled:
            with contextlib.suppress(Exception):  # its own code may run
                _cancel(result, self.host.loop)
        self._on_thread_done(result, error)

    def _hold(self, job: _Job) -> None:
        self.responder.backlog.hold(lambda: self._submit(job))

    def _on_thread_done(self, result: Any, error: BaseException | None) -> None:
        if type(result) is _Job:
            self._hold(result)
            return
        if not self.is_cancelled:
            if error is not None:
                self.responder.answer_error(self, error)
            else:
                try:
                    self._on_returned(result)
                except BaseException as problem:  # noqa: BLE001  (the result's code)
                    self.responder.answer_error(self, problem)
        if self.claim is not None:
            self.claim.let_go()

    def _on_returned(self, result: Any) -> None:
        """Take the result of a plain function: a value, or an awaitable."""
        is_marked = self.target is not None and self.target.mode is Mode.ASYNC_EXECUTION
        future = as_awaitable(result) if is_marked else None
        # By its type: a result may pretend to be of another; a generator is not
        # awaitable.
        kind = type(result)
        if future is None and kind not in _PLAIN and issubclass(kind, Coroutine):
            future = result
        if future is not None:
            task = self._start_task(self._await(_identity, [future], {}))
            task.add_done_callback(partial(_cancel_unawaited, future, self.host.loop))
        elif is_marked:
            self.responder.answer_error(self, _no_future(result))
        else:
            self.responder.answer(self, result)

    def expire(self) -> None:
        """Stop the function at the deadline; the caller knows already."""
        self.watch = None
        error = DeadlineExceededError(
            function=self.function_name,
            to=self.host.name,
            outcome=Outcome.UNKNOWN,
            timeout_s=self.deadline.allowed_s if self.deadline is not None else 0.0,
        )
        self.responder.answer_error(self, error, outcome=Outcome.UNKNOWN)
        self.cancel()


@dataclass(slots=True)
class _Job:
    """A call of a function in a thread."""

    call: InboundCall
    context: contextvars.Context
    target: Target
    args: list[Any]
    kwargs: dict[str, Any]

    def __call__(self) -> Any:
        """Call it; return this job if its caller must take earlier answers first."""
        backlog = self.call.responder.backlog
        if backlog.is_pressed and backlog.must_wait(self.target.name):
            return self
        function = self.target.function
        return self.call._in_thread(self.context, function, self.args, self.kwargs)  # noqa: SLF001


async def _identity(future: Any) -> Any:
    return await future


def _cancel(value: Any, loop: asyncio.AbstractEventLoop) -> None:
    """Cancel a future, or close a coroutine, that will not be awaited."""
    kind = type(value)  # what it says of itself may be wrong
    if issubclass(kind, Coroutine):
        value.close()
    elif issubclass(kind, concurrent.futures.Future) or (
        issubclass(kind, asyncio.Future) and value.get_loop() is loop
    ):
        value.cancel()


def _cancel_unawaited(
    future: Any, loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]
) -> None:
    """Cancel a future whose task was cancelled before it began to await it."""
    if task.cancelled():
        with contextlib.suppress(Exception):  # its own code may run
            _cancel(future, loop)


def _no_future(result: Any) -> RuntimeError:
    kind = type(result).__name__
    return RuntimeError(
        "Functions decorated with @rpc.async_function must return a "
        f"torch.futures.Future object, or an awaitable, but this one returned a {kind};"
        " "
        "return the future itself, or drop the decorator"
    )


class ServedEnds:
    """Notes how the calls that one peer has made of this worker end."""

    __slots__ = ("_caller", "_now_s", "_served", "_streams")

    def __init__(self, caller: WorkerId, recorder: FlightRecorder) -> None:
        self._caller = plain(caller)
        self._now_s = recorder.now_s
        self._served = recorder.served
        self._streams = recorder.sent

    def note(self, inbound: InboundCall, outcome: str, items: int) -> None:
        """Record a call that was answered or given up; a stream, with its items."""
        target = inbound.target
        name = "" if target is None else target.name
        if inbound.credit is None:
            self._served.record(
                (
                    self._now_s(),
                    inbound.came_s,
                    inbound.began_s,
                    self._caller,
                    name,
                    inbound.call_id,
                    outcome,
                )
            )
        else:
            self._streams.record(
                (
                    self._now_s(),
                    inbound.came_s,
                    self._caller,
                    name,
                    inbound.call_id,
                    outcome,
                    items,
                )
            )


class Responder:
    """Sends the answers to the calls of one peer.

    Attributes:
        caller: name of the peer.
        backlog: what it has not taken.
    """

    def __init__(
        self,
        link: PeerLink,
        host: CallHost,
        *,
        connection: CallConnection,
        backlog: Backlog,
        served: ServedCalls[InboundCall],
        messages: MessageCodec,
    ) -> None:
        """Answer calls.

        Args:
            link: to the peer; references get it.
        """
        self._link = link
        self._host = host
        self._served = served
        self._messages = messages
        self._references = host.references
        self._errors = host.error_encoder
        self._ends = ServedEnds(link.peer, host.recorder)
        self.caller = link.peer.name
        self.backlog = backlog
        # Used for every answer.
        self._encode = messages.encode
        self._send = connection.send
        self._admission = host.admission

    def on_lost(self) -> None:
        """The connection has ended: cancel what runs for the peer, in turns."""
        self.backlog.close()
        self._cancel_next(deque(self._served))

    def _cancel_next(self, calls: deque[InboundCall]) -> None:
        """Cancel some calls; each task that is cancelled runs in this turn, or next."""
        for _ in range(min(len(calls), CANCELLED_AT_ONCE)):
            inbound = calls.popleft()
            if self._served.get(inbound.call_id) is inbound:  # it goes on
                inbound.cancel()
        if calls:
            self._messages.call_soon(self._cancel_next, calls)

    def run_later(
        self,
        inbound: InboundCall,
        target: Target,
        args: list[Any],
        kwargs: dict[str, Any],
    ) -> None:
        """Run a call once its caller has taken earlier answers."""

        def begin() -> None:
            try:
                inbound.run(target, args, kwargs)
            except BaseException as error:  # noqa: BLE001  (the caller gets it)
                self.answer_error(inbound, error)

        self.backlog.hold(begin)

    def answer(self, inbound: InboundCall, value: Any) -> None:
        """Send a function's result, or keep it if it stays here."""
        if self._served.get(inbound.call_id) is not inbound:
            return  # cancelled, expired or lost meanwhile
        references = self._references
        if inbound.rref_id is not None and references is not None:
            references.fulfil(inbound.rref_id, value)
            value = None
        compression = None
        try:
            encode = self._encode_back(inbound)
            if CODEC in inbound.meta:
                compression = compression_for_answer(inbound.meta[CODEC])
                encode = functools.partial(encode, compression=compression)
            encoded, pins, meta = inbound.in_context(encode, value)
        except BaseException as error:  # noqa: BLE001  (the result's own code runs)
            self.answer_error(inbound, unsendable(error))
            return
        if compression is None:
            self._send_answer(inbound, _RESPONSE, encoded, meta, pins)
        else:
            self._pack_answer(inbound, encoded, meta, pins)

    def _encode_back(self, inbound: InboundCall) -> Callable[..., Any]:
        """Return what encodes a result, or an item, for the devices of its caller."""
        device_map = inbound.device_map_back if inbound.meta else None
        if device_map is None:
            return self._encode
        return functools.partial(self._encode, device_map=device_map)

    def _pack_answer(
        self,
        inbound: InboundCall,
        encoded: Encoded,
        meta: dict[str, Any] | None,
        pins: Pins | None,
    ) -> None:
        """Apply the caller's codec to a result, in a thread, and send it."""
        inbound.task = None  # it ends now; a cancel need not wait for it

        def finish(packed: Encoded | None, error: BaseException | None) -> None:
            if packed is not None and self._served.get(inbound.call_id) is inbound:
                if packed.code:
                    self._messages.await_code(packed, packed.code)
                self._send_answer(inbound, _RESPONSE, packed, meta, pins)
                return
            if pins is not None:
                pins.undo()
            if error is not None:
                self.answer_error(inbound, error)

        def pack(error: BaseException | None = None) -> None:
            if error is not None:
                finish(None, error)
                return
            if encoded.payload_bytes > PACK_HERE_BYTES_MAX:
                with contextlib.suppress(RejectedError):  # closing: no threads
                    self._host.host_pool.submit(encoded.pack, finish)
                    return
            finish(encoded.pack(), None)

        if encoded.copies:
            self._host.devices.fill(encoded.copies, pack)
        else:
            pack()

    def answer_error(
        self,
        inbound: InboundCall,
        error: BaseException,
        *,
        items: int = 0,
        outcome: Outcome = Outcome.EXECUTED,
    ) -> None:
        """Send a function's exception, or keep it for workers that fetch the value.

        Args:
            outcome: whether the function ran; it did not if this worker refuses the
                call.
        """
        if self._served.get(inbound.call_id) is not inbound:
            return
        if inbound.span is not None:
            inbound.span.failed(error)
        if outcome is Outcome.NOT_EXECUTED and issubclass(type(error), CallError):
            error.outcome = outcome  # type: ignore[attr-defined]  # its text says so
        if outcome is Outcome.EXECUTED and self._host.on_raised is not None:
            self._host.on_raised(error)
        if issubclass(type(error), CallError) and not error.function:  # type: ignore[attr-defined]
            error.function, error.to = inbound.function_name, self._host.name  # type: ignore[attr-defined]
        if self._fails_value_alone(inbound, error, outcome):
            self.answer(inbound, None)
            return
        describe = functools.partial(self._errors.describe, error)
        failed = outcome_of(error)
        if not self._host.pool.is_exclusive or not holds_device_tensor(error):
            self._send_error(inbound, describe, items, outcome, failed)
            return

        def on_described(tree: Any, problem: BaseException | None) -> None:
            if self._served.get(inbound.call_id) is inbound:
                described = describe if problem is not None else (lambda: tree)
                self._send_error(inbound, described, items, outcome, failed)

        inbound.task = None  # it ends now; a cancel need not wait for it
        self._host.pool.submit(describe, on_described)  # its text shows the tensor

    def _fails_value_alone(
        self, inbound: InboundCall, error: BaseException, outcome: Outcome
    ) -> bool:
        """Fail the value of a remote(); return whether its call did not fail.

        Its users see the error.  Once the deadline has passed the call has failed as
        well: an answer must not reach the caller as a success just before its deadline.
        """
        references = self._references
        if inbound.rref_id is None or references is None:
            return False
        references.fail(inbound.rref_id, error, outcome)
        inbound.rref_id = None
        has_expired = outcome is Outcome.UNKNOWN and inbound.deadline is not None
        return not (has_expired and issubclass(type(error), DeadlineExceededError))

    def _send_error(
        self,
        inbound: InboundCall,
        describe: Callable[[], Any],
        items: int,
        outcome: Outcome,
        failed: str,
    ) -> None:
        messages = self._messages
        encoded = self._errors.encode(
            describe, messages.prepare, takes_code=messages.takes_code
        )
        meta = None if outcome is Outcome.EXECUTED else {"o": outcome.name}
        self._send_answer(inbound, FrameKind.ERROR, encoded, meta, None, items, failed)

    def forget(self, inbound: InboundCall, *, items: int = 0) -> None:
        """Send no answer: the caller has gone; a stream has sent `items` items."""
        if self._served.get(inbound.call_id) is inbound:
            self._give_up_value(inbound)
            self._end_served(inbound, CANCELLED, items)
            self._settle_loans(inbound, answered=False)

    def _give_up_value(self, inbound: InboundCall) -> None:
        """Fail the tasks that wait for the value of a remote(): it will never come.

        Its creator is gone; others may have been lent the reference.
        """
        references = self._references
        if inbound.rref_id is not None and references is not None:
            name = self._link.peer.name
            gone = f"the value was never made: its creator {name!r} was lost meanwhile"
            references.fail(inbound.rref_id, RRefDeletedError(gone))
            inbound.rref_id = None

    def send_item(self, inbound: InboundCall, serial: int, value: Any) -> int:
        """Send one item of a stream; return the bytes that it counts for."""
        encode = self._encode_back(inbound)
        try:
            encoded, pins, meta = inbound.in_context(encode, value)
        except BaseException as error:
            raise unsendable(error) from error
        if not serial and self._host.note_of is not None:
            meta = {**(meta or {}), NOTE: self._host.note_of(inbound.note)}
        self._send(
            FrameKind.STREAM_ITEM,
            inbound.call_id,
            head=pack_head([serial, meta]),
            control=encoded.control,
            buffers=encoded.buffers,
            on_sent=None if pins is None else pins.on_sent,
        )
        nbytes = item_bytes(encoded.control, encoded.buffers)
        if nbytes > LARGE_BYTES:
            self.backlog.look()
        return nbytes

    def end_stream(self, inbound: InboundCall, items: int) -> None:
        """Tell the consumer that the generator has returned."""
        if self._served.get(inbound.call_id) is inbound:
            self._end_served(inbound, OK, items)
            returned = self._settle_loans(inbound, answered=True)
            meta: dict[str, Any] = {"l": returned} if returned else {}
            if self._host.note_of is not None:
                meta[NOTE] = self._host.note_of(inbound.note)
            self._send(
                FrameKind.STREAM_END,
                inbound.call_id,
                aux=items,
                head=pack_head([meta]) if meta else b"",
            )

    def _send_answer(  # noqa: PLR0917
        self,
        inbound: InboundCall,
        kind: int,
        encoded: Encoded,
        meta: dict[str, Any] | None,
        pins: Pins | None,
        aux: int = 0,
        outcome: str = OK,
    ) -> None:
        buffers = encoded.buffers
        large = ""  # what has answered with much
        if len(encoded.control) > LARGE_BYTES or (
            buffers and sum(buffer.nbytes for buffer in buffers) > LARGE_BYTES
        ):
            large = inbound.function_name or "a function"
        on_sent = None if pins is None else pins.on_sent
        if inbound.claim is not None and encoded.buffers:
            on_sent = inbound.claim.until_sent(on_sent)
        self._end_served(inbound, outcome, aux)
        if inbound.loans is not None:
            returned = self._settle_loans(inbound, answered=True)
            if returned:
                meta = meta or {}
                meta["l"] = returned
        if self._host.note_of is not None:
            meta = {**(meta or {}), NOTE: self._host.note_of(inbound.note)}
        self._send(
            kind,
            inbound.call_id,
            aux=aux,
            # With a head it arrives even if the call is cancelled meanwhile, and so do
            # the references in it, which the caller then gives back.
            head=pack_head([meta]) if meta or pins is not None else b"",
            control=encoded.control,
            buffers=buffers,
            on_sent=on_sent,
        )
        if large:
            self.backlog.on_large(large)

    def _end_served(self, inbound: InboundCall, outcome: str, items: int) -> None:
        self._ends.note(inbound, outcome, items)
        if inbound.span is not None:
            is_stream = inbound.credit is not None
            inbound.span.end(outcome, items=items if is_stream else None)
        inbound.end()
        self._served.end(inbound.call_id)
        admission = self._admission
        admission.active -= 1
        admission.ended += 1
        if admission.active <= admission.wakes_at:
            admission.wake()

    def _settle_loans(self, inbound: InboundCall, *, answered: bool) -> list[int]:
        loans, inbound.loans = inbound.loans, None
        references = self._references
        if loans is None or references is None:
            return []
        return references.settle_loans(self._link, loans, answered=answered)

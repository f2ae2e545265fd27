"""A peer: another worker, as seen from this one; and how calls to it start.

`CallStarter` makes a request on a link of a function and its arguments.  From any
thread: calls made in the threads that run functions are handed to the loop.
"""

from __future__ import annotations

import asyncio
import threading
import types
import warnings
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar, overload

import torch
from torch.autograd import profiler

from asyncrpc.core.arguments import UNSET
from asyncrpc.core.calls import streams
from asyncrpc.core.calls.context import deadline_var, effective_deadline
from asyncrpc.core.calls.destination import Destination
from asyncrpc.core.calls.futures import (
    AwaitedCall,
    CallFuture,
    call_site,
    task_here,
)
from asyncrpc.core.calls.outbound import CallEnds
from asyncrpc.core.calls.profiling import show_call
from asyncrpc.core.calls.repeating import is_idempotent, repeat
from asyncrpc.core.calls.tracing import (
    end_unsent,
    stream_trace,
    trace_call,
    with_span,
)
from asyncrpc.core.calls.unsent import UnsentCalls
from asyncrpc.core.devices.streams import StreamMarks, marks_here, take_marks
from asyncrpc.core.html import State, panel
from asyncrpc.core.ids import WorkerId
from asyncrpc.core.lifecycle import refuse_to_pickle
from asyncrpc.core.links.link import Link
from asyncrpc.core.loop.clock import Deadline
from asyncrpc.core.loop.loops import LoopGuard
from asyncrpc.core.members import UNKNOWN_INCARNATION
from asyncrpc.core.options import PLAIN, CallOptions, Options, with_options
from asyncrpc.core.serde import FunctionTable, describe_callable
from asyncrpc.core.services.extensions import CallTracer, References, ThreadState
from asyncrpc.errors import UsageError

if TYPE_CHECKING:
    from asyncrpc.core.links.directory import Directory
    from asyncrpc.core.loop.tasks import Tasks
    from asyncrpc.core.trace.recorder import FlightRecorder


P = ParamSpec("P")
T = TypeVar("T")

# Asked in every call, so without a look-up in torch: 90 ns together.  Inference mode
# turns gradients off, too.
_grad_is_on = torch.is_grad_enabled
_any_autocast_is_on = torch._C._is_any_autocast_enabled  # noqa: SLF001
AT_ONCE: Final = nullcontext()
# What is called, over and over, and always by the same name.
_NAMED: Final = frozenset({types.FunctionType, types.BuiltinFunctionType, type})
KNOWN_MAX: Final = 4096  # programs call tens of functions


class Peer:
    """Another worker, by name; from `Worker.peer`.  It holds no connection itself."""

    __slots__ = ("_calls", "_on_stream", "_options", "name")

    def __init__(
        self,
        calls: CallStarter,
        name: str,
        options: CallOptions = PLAIN,
        on_stream: Callable[[streams.StreamReceiver], None] | None = None,
    ) -> None:
        self._calls = calls
        self._options = options
        self._on_stream = on_stream  # given the receiver of a stream
        self.name = name

    def using(self, **options: Any) -> Peer:
        """Return this peer with other options for the calls made through it.

        Args:
            **options: `timeout_s`, `out`, `codec`, `device_map` and `idempotent`; an
                option that is left out stays as it is.  `timeout_s`: seconds.  `out`: a
                tensor of the result's shape and dtype, in host memory, which
                    the result is received into and which the call returns.  If it is
                    contiguous, the bytes arrive there straight from the socket;
                    otherwise, or if the result's order differs or it comes through
                    shared memory, they are copied once more.  It must not require a
                    gradient, nor be used before the call has ended.  If the call fails
                    or is cancelled, its content is undefined; but it is no longer
                    written to.
                `codec`: makes payloads smaller, in both directions: `"lz4"`, `"zstd"`
                    (lossless), `"fp16"`, `"bf16"`, `"int8"` (for float tensors), one of
                    each, such as `"bf16+zstd"`; `"bf16"` refuses tensors that it would
                    harm, `"bf16+keep"` sends them as they are; `""`: no codec.
                `device_map`: from devices of this worker to devices of the peer, where
                    the arguments' tensors go; results come back by the inverse map.
                `idempotent`: whether the function may run twice: then a `call` whose
                    worker is lost is made again; see `asyncrpc.idempotent`.

        Raises:
            UsageError: there is no such option; there is no such codec, or its package
                is not installed; or a value has the wrong type.

        Example:
            >>> await worker.peer("ps").using(timeout_s=2.0).call(step, batch)
            >>> rows = torch.empty(1000, 64)
            >>> await worker.peer("ps").using(out=rows).call(read_rows, 1000)
        """
        return Peer(self._calls, self.name, with_options(self._options, options))

    @overload
    async def call(
        self, function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T: ...
    @overload
    async def call(
        self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T: ...
    async def call(
        self, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run `function` on this peer and return its result.

        A coroutine function runs on the peer's event loop, any other in its threads.
        Tensors are sent without a copy: do not write to one until the call returns.

        Args:
            function: importable on the peer; its qualified name is what is sent.
            *args: its arguments.  Tensors of any shape, dtype and strides; numbers,
                text, containers, numpy arrays; references.  Anything else is pickled,
                which the policy `STRICT` refuses.
            **kwargs: its keyword arguments; as `*args`.

        Returns:
            What `function` returned.  Tensors keep shape and dtype.

        Raises:
            RemoteError: `function` raised; also an instance of the class that it
                raised, where this worker has that class.
            DeadlineExceededError: the enclosing `asyncrpc.deadline` (seconds) passed.
                The peer knows the deadline too, and stops at it.
            WorkerLostError: the peer is gone; `outcome` says whether a retry is safe.
            EncodeError: an argument cannot be sent.  Nothing was sent.
            UsageError: `out` cannot receive a result, see `using`.  Nothing was sent.
            OutMismatchError: the result does not fit into `out`.
            RejectedError: the peer refused the call; it was not run.

        Cancellation:
            The peer is told and a coroutine there is cancelled; a thread cannot be.
            This returns at once, without waiting for either.

        Example:
            >>> async with asyncrpc.deadline(2.0):
            ...     loss = await worker.peer("ps").call(step, batch, lr=0.1)

        Source: torch.distributed.rpc.rpc_async; unlike there, "no limit" is None, not
        0, and a call can be cancelled.
        """
        __tracebackhide__ = True  # notebooks and pytest leave this frame out
        return await self._calls.start_call(
            self.name, function, args, kwargs, options=self._options, awaits=True
        )

    def remote(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run `function` on this peer, keep its result there, return an RRef at once.

        An error of the function is raised when the value of the reference is fetched.

        Args:
            function: as for `call`; a class makes an object of it there.
            *args: as for `call`.
            **kwargs: as for `call`.

        Returns:
            An `RRef` to the result, before the function has run.

        Raises:
            EncodeError: an argument cannot be sent, and the peer is connected; if the
                peer is not connected yet, using the reference raises it.
            UsageError: this peer has an `out`, but no result is sent back.

        Source: torch.distributed.rpc.remote.
        """
        self._refuse_out("remote", "`await rref.to_here(out=...)`")
        return self._calls.start_remote(
            self.name, function, args, kwargs, options=self._options
        )

    @overload
    def stream(
        self,
        function: Callable[P, AsyncIterator[T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> AsyncGenerator[T, None]: ...
    @overload
    def stream(
        self,
        function: Callable[P, Iterator[T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> AsyncGenerator[T, None]: ...
    async def stream(
        self, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        """Run a generator on this peer and yield its items as they come.

        The generator runs ahead by a bounded number of items and bytes
        (`LimitOptions.stream_items_max`, `stream_bytes_max`), then waits to be
        consumed.  Closing this iterator early closes the generator: its `finally`
        blocks run.  In a loop that may `break`, use `contextlib.aclosing`.

        Args:
            function: an asynchronous generator function, or a plain one, which is then
                stepped in threads.
            *args: as for `call`.
            **kwargs: as for `call`.

        Yields:
            The items, in order.

        Raises:
            RemoteError: the generator raised, after the items yielded so far.
            WorkerLostError: the peer is gone.
            DeadlineExceededError: the enclosing deadline passed, or `timeout_s` of
                `using`, which limits the whole stream.
            RejectedError: `function` is not a generator function.
            UsageError: this peer has an `out`, which cannot receive many items.

        Cancellation:
            The generator is closed; this does not wait for it.

        Example:
            >>> async for row in worker.peer("ps").stream(read_rows, "table"):
            ...     print(row)
        """
        self._refuse_out("stream", "`call`")
        calls = self._calls
        calls.loop_guard.check_on_loop("Peer.stream")
        target, values = calls.describe(function, args, kwargs, self.name)
        meta: dict[str, Any] | None = calls.meta_here()
        timeout_s = self._options.timeout_s
        if timeout_s is UNSET:
            timeout_s = calls.options.rpc_timeout_s
        deadline = effective_deadline(timeout_s, calls.loop.time())
        called = (target or "a callable").rpartition(":")[2]
        with stream_trace(calls.tracer, called, self.name) as trace:
            link = await streams.link_by(
                deadline, calls.link_for_call, self.name, called
            )
            stream = streams.StreamReceiver(
                link,
                called,
                self.name,
                limits=calls.options.limits,
                began_s=calls.now_s(),
                task=task_here(calls.loop),
            )
            if self._on_stream is not None:
                self._on_stream(stream)
            if trace is not None:
                trace.count = lambda: stream.received
                meta = with_span(meta, trace.span)
            items = streams.consume(
                stream,
                lambda limit: link.start_stream(
                    stream, target, values, limit, meta, options=self._options
                ),
                deadline,
                calls.on_loop_thread,
            )
            try:
                async for item in items:
                    yield item
                    if not calls.loop_guard.is_on_loop:  # another loop resumes this
                        calls.loop_guard.check_on_loop("Peer.stream")
            finally:
                await items.aclose()

    def _refuse_out(self, used: str, instead: str) -> None:
        if self._options.out is not None:
            raise UsageError(
                f"`{used}` cannot receive a result into out=; use {instead}"
            )

    def __repr__(self) -> str:
        return f"<Peer {self.name!r} of {self._calls.name!r}>"

    def _repr_html_(self) -> str:
        rows = [("state", self._calls.state_of(self.name))]
        changed = (
            (field.name, repr(getattr(self._options, field.name)))
            for field in fields(self._options)
            if getattr(self._options, field.name) is not getattr(PLAIN, field.name)
        )
        about = f"of {self._calls.name!r}"
        return panel(f"Peer {self.name!r}", about, rows=[*rows, *changed])


class CallStarter:
    """Starts the calls of one worker.

    Attributes:
        unsent: calls that have been started and not sent.
        expected: workers that somebody starts, by name; calls to them wait.
        shows_calls: whether it shows calls to a profiler; a facade shows its own, in
            its callers' threads.
        references: makes what `remote` returns; None: there are no references.
        thread_states: what travels with a call because of the thread that makes it.
        tracer: shows calls in traces; None: calls are not traced.
    """

    loop: asyncio.AbstractEventLoop  # this and those below from `open` on
    directory: Directory
    recorder: FlightRecorder
    now_s: Callable[[], float]

    def __init__(
        self, loop_guard: LoopGuard, functions: FunctionTable, options: Options
    ) -> None:
        self.loop_guard = loop_guard
        self.lifecycle = loop_guard.lifecycle
        self.name = self.lifecycle.name
        self.functions = functions
        self.options = options
        self.references: References | None = None
        self.thread_states: list[ThreadState] = []
        self.tracer: CallTracer | None = None
        self.unsent = UnsentCalls()
        self.expected: dict[str, asyncio.Future[None]] = {}
        self.shows_calls = True
        # Functions' names, as they are sent.
        self._known: dict[Callable[..., Any], tuple[str | None, str]] = {}

    def __reduce__(self) -> Any:
        """Refuse to be pickled, as part of a `Peer`."""
        refuse_to_pickle()

    def open(
        self, tasks: Tasks, directory: Directory, recorder: FlightRecorder
    ) -> None:
        """Begin: the worker has an event loop."""
        self.recorder = recorder
        self.now_s = recorder.now_s
        self.loop = tasks.loop
        self.is_loop_running = tasks.loop.is_running
        self.directory = directory
        self._met = directory.met
        self.thread_id = tasks.thread_id
        self.start_task = tasks.start_task
        self.on_loop_thread = tasks.on_loop_thread

    async def link_to(self, to: str) -> Link:
        """Return the open link to a worker, connecting if necessary."""
        entry = self.directory.find(to)
        return entry.link or await self.directory.connect(entry)

    def state_of(self, name: str) -> State:
        """Return how a peer can be reached, for a notebook."""
        if not self.lifecycle.is_usable:
            return State("unknown", "off", f"worker {self.name!r} does not run")
        if name in self.expected:
            return State("starting", "busy", "calls wait for it")
        entry = self._met(name)
        if entry is None or entry.link is None:
            return State("not connected", "off")
        pending = entry.link.pending
        calls = f"calls sent: {pending.started:,}, not answered: {len(pending):,}"
        return State("connected", "good", calls)

    async def link_for_call(self, to: str) -> Link:
        """Do the same for a call, which waits for a worker that somebody starts."""
        while (starting := self.expected.get(to)) is not None:
            entry = self._met(to)
            if entry is not None and entry.link is not None:
                break
            await asyncio.shield(starting)
        return await self.link_to(to)

    def expect(self, name: str) -> asyncio.Future[None]:
        """Let calls to a worker wait until the future ends, and raise what it raises.

        Calls that the worker can answer now do not wait.
        """
        started: asyncio.Future[None] = self.loop.create_future()
        self.expected[name] = started
        started.add_done_callback(lambda done: self._on_started(name, done))
        return started

    def _on_started(self, name: str, started: asyncio.Future[None]) -> None:
        if self.expected.get(name) is started:
            del self.expected[name]
        if not started.cancelled():
            started.exception()  # nobody may wait for it

    def describe(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        to: str = "",
    ) -> tuple[str | None, tuple[list[Any], dict[str, Any]]]:
        """Return the name of a function, and the values that travel with it.

        A callable without a name (a bound method, a partial) travels as a value.

        Args:
            to: the worker that is to run it; empty: several, or another one.
        """
        is_here = to == self.name
        form, value = describe_callable(self.functions, function, is_here=is_here)
        if form == "name":
            return value, (list(args), dict(kwargs))
        return None, ([value, *args], dict(kwargs))

    def start_call(
        self,
        to: str,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        options: CallOptions = PLAIN,
        with_site: bool = False,
        awaits: bool = False,
    ) -> CallFuture[Any]:
        """Start a call and return its future; see `Peer.call`.

        May be called from any thread.  On the loop's own thread, with the peer
        connected, the request is written before this returns, and an argument that
        cannot be sent raises here.
        """
        kwargs = kwargs or {}
        if options is not PLAIN and options.idempotent:
            return self._start_repeating(
                to, function, args, kwargs, options=options, awaits=awaits
            )
        known = self._known.get(function) if type(function) in _NAMED else None
        if known is None:
            if is_idempotent(function):  # so it is never among the known
                return self._start_repeating(
                    to, function, args, kwargs, options=options, awaits=awaits
                )
            known, values = self._describe_anew(to, function, args, kwargs)
        else:
            values = list(args), dict(kwargs)
        target, name = known
        call = self.new_call(name, to, with_site=with_site, awaits=awaits)
        if options is not PLAIN:
            call.options = options
            if options.out is not None:
                call.destination = Destination(options.out)
        self.begin(call, target, values, timeout_s=options.timeout_s)
        return call

    def forget_names(self) -> None:
        """Name each function anew at its next call."""
        self._known = {}

    def is_known(self, function: Callable[..., Any]) -> bool:
        """Return whether a function has been called before, and has a name."""
        return type(function) in _NAMED and function in self._known

    def _start_repeating(
        self,
        to: str,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        options: CallOptions,
        awaits: bool,
    ) -> CallFuture[Any]:
        """Start a call that is made again if its worker is lost."""
        target, values = self.describe(function, args, kwargs, to)
        name = target or str(getattr(function, "__qualname__", function))
        name = name.rpartition(":")[2]
        call = self.new_call(name, to, kind="repeated", awaits=awaits)
        timeout_s = options.timeout_s
        if timeout_s is UNSET:
            timeout_s = self.options.rpc_timeout_s
        deadline = effective_deadline(timeout_s, self.loop.time())
        meta, marks = self.meta_here(), marks_here()

        def attempt() -> CallFuture[Any]:
            left_s = None
            if deadline is not None:
                left_s = max(deadline.at_s - self.loop.time(), 0.0)
            attempt_call = self.new_call(name, to, kind="", attempt_of=call)
            attempt_call.options = options
            if options.out is not None:
                attempt_call.destination = Destination(options.out)
            fresh = list(values[0]), dict(values[1])
            self.begin(attempt_call, target, fresh, timeout_s=left_s, meta=dict(meta))
            return attempt_call

        def start() -> None:
            take_marks(marks)
            if not call.done():
                call.begun = self.start_task(repeat(call, attempt))

        self.on_loop_thread(start)
        return call

    def _describe_anew(
        self,
        to: str,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> tuple[tuple[str | None, str], tuple[list[Any], dict[str, Any]]]:
        """Describe a function that is called for the first time, and remember it."""
        code = self.functions.known_code(function) if to != self.name else None
        if code is not None:
            return (code, code.simple), (list(args), dict(kwargs))
        target, values = self.describe(function, args, kwargs, to)
        name = target or str(getattr(function, "__qualname__", function))
        known = target, name.rpartition(":")[2]
        if target and to == self.name and self.functions.leads_here_alone(target):
            return known, values
        if type(function) in _NAMED and type(target) is str:  # its name stays
            if known in self._known.values():
                if to == self.name:
                    return known, values  # remembered when another worker is called
                check = self.functions.check_name
                if check is None or not check(target):
                    _warn_of_old_code(target)
            if len(self._known) < KNOWN_MAX:
                self._known[function] = known
        return known, values

    def new_call(
        self,
        function: str,
        to: str,
        *,
        with_site: bool = False,
        kind: str = "async",
        awaits: bool = False,
        attempt_of: CallFuture[Any] | None = None,
    ) -> CallFuture[Any]:
        """Make the future of a call that `begin` will start.

        Args:
            kind: what a profiler shows it as; "" shows nothing.  "repeated" is an
                "async" one whose attempts have futures of their own.
        """
        # `begin` looks at the other threads of calls that it is the first to start.
        if not self.is_loop_running() or kind != "async":
            self.loop_guard.check_caller("a call", awaits=awaits)
        if not self.lifecycle.is_usable:
            self.lifecycle.check_running()
        call: CallFuture[Any] = (AwaitedCall if awaits else CallFuture)(
            loop=self.loop,
            function=function,
            to=to,
            began_s=self.now_s(),
            loop_guard=self.loop_guard,
            is_on_loop=threading.get_ident() == self.thread_id,
        )
        if with_site:
            call.site = call_site(3)
        if profiler._is_profiler_enabled and kind and self.shows_calls:  # noqa: SLF001
            show_call(call, "async" if kind == "repeated" else kind, self.name)
        if self.tracer is not None:
            is_repeated = kind == "repeated"
            trace_call(
                self.tracer, call, attempt_of=attempt_of, is_repeated=is_repeated
            )
        return call

    def begin(
        self,
        call: CallFuture[Any],
        target: str | list[Any] | None,
        values: tuple[list[Any], dict[str, Any]],
        *,
        timeout_s: Any = UNSET,
        meta: dict[str, Any] | None = None,
        on_link: Callable[[Link], None] | None = None,
    ) -> None:
        """Send a call, from any thread; its future completes when the answer comes.

        Args:
            meta: the metadata, including `meta_here()`; None: `meta_here()` alone.
            on_link: called with the link before the call is sent; what it raises is
                raised, or fails the call if the link had to be waited for.
        """
        try:
            if meta is None and (not _grad_is_on() or _any_autocast_is_on()):
                meta = self.meta_here()
            if threading.get_ident() != self.thread_id:
                awaits = type(call) is AwaitedCall
                self.loop_guard.check_caller("a call", awaits=awaits)
                meta = meta or {}
                self.loop.call_soon_threadsafe(
                    self._begin_later,
                    marks_here(),
                    call,
                    target,
                    values,
                    timeout_s,
                    meta,
                    on_link,
                )
                return
            if timeout_s is UNSET:
                timeout_s = self.options.rpc_timeout_s
            deadline = (
                deadline_var.get()
                if timeout_s is None
                else effective_deadline(timeout_s, self.loop.time())
            )
            if deadline is not None and deadline.is_lifted:
                deadline = None
            entry = self._met(call.to)
            link = entry.link if entry else self._link_of_stranger(call.to)
            if link is not None:
                if on_link is not None:
                    on_link(link)
                link.start(call, target, values, deadline=deadline, meta=meta)
            else:
                self._begin_apart(call, target, values, deadline, meta, on_link)
        except BaseException as error:
            end_unsent(call, error)
            raise

    def _link_of_stranger(self, to: str) -> Link | None:
        return None if to in self.expected else self.directory.link_to(to)

    def _begin_apart(  # noqa: PLR0917
        self,
        call: CallFuture[Any],
        target: str | list[Any] | None,
        values: tuple[list[Any], dict[str, Any]],
        deadline: Deadline | None,
        meta: dict[str, Any] | None,
        on_link: Callable[[Link], None] | None,
    ) -> None:
        """Begin a call to a peer that is not connected yet."""
        marks = marks_here()

        def start(link: Link) -> None:
            take_marks(marks)
            if on_link is not None:
                on_link(link)
            link.start(call, target, values, deadline=deadline, meta=meta)

        connecting = self.connect_and_start(call, start, deadline=deadline)
        call.begun = self.start_task(connecting)

    def _begin_later(  # noqa: PLR0917
        self,
        marks: StreamMarks | None,
        call: CallFuture[Any],
        target: str | list[Any] | None,
        values: tuple[list[Any], dict[str, Any]],
        timeout_s: Any,
        meta: dict[str, Any] | None,
        on_link: Callable[[Link], None] | None,
    ) -> None:
        """Begin a call for another thread, in that thread's context."""
        if call.done():
            return
        take_marks(marks)
        try:
            self.begin(
                call, target, values, timeout_s=timeout_s, meta=meta, on_link=on_link
            )
        except Exception as error:  # noqa: BLE001  (the thread that waits raises it)
            call.fail(error)

    async def connect_and_start(
        self,
        call: CallFuture[Any],
        start: Callable[[Link], None],
        *,
        deadline: Deadline | None,
        turn: AbstractAsyncContextManager[Any] = AT_ONCE,
    ) -> None:
        """Connect to a call's peer, then `start` it; any error fails the call."""
        try:
            with self.unsent.waiting(call, deadline, "it had a connection"):
                async with (
                    asyncio.timeout_at(None if deadline is None else deadline.at_s),
                    turn,
                ):
                    link = await self.link_for_call(call.to)
                call.begun = None
                if not call.done():
                    start(link)
        finally:
            if call.done() and call.link is None:
                CallEnds(
                    WorkerId(call.to, UNKNOWN_INCARNATION), self.recorder
                ).note_unsent(call)

    def meta_here(self) -> dict[str, Any]:
        """Return the metadata of a call that belongs to the thread that makes it."""
        return {
            state.key: value
            for state in self.thread_states
            if (value := state.here()) is not None
        }

    def start_remote(
        self,
        to: str,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        options: CallOptions = PLAIN,
    ) -> Any:
        """Start a call whose result stays on the callee; return the reference to it."""
        if self.references is None:
            raise UsageError("this worker was made without remote references")
        self.lifecycle.check_running()
        named = kwargs or {}
        if self.is_known(function):
            (target, _), values = self._known[function], (list(args), dict(named))
        elif is_idempotent(function):  # so it is never among the known
            target, values = self.describe(function, args, named, to)
        else:
            (target, _), values = self._describe_anew(to, function, args, named)
        return self.references.start_remote(to, target, values, options=options)


def _warn_of_old_code(target: str) -> None:
    warnings.warn(
        f"{target} was defined anew after it had been called (importlib.reload does "
        "so): workers in other processes run what they have imported; reload the "
        "module there as well, or start them again",
        RuntimeWarning,
        stacklevel=5,
    )

"""Starting calls: from a function and its arguments to a request on a link.

From any thread: calls made in the threads that run functions are handed to the loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import types
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, Final, TypeVar

import torch
from torch.autograd import profiler

from asyncrpc.clock import Deadline
from asyncrpc.errors import (
    AsyncRpcError,
    DeadlineExceededError,
    NotStartedError,
    Outcome,
    UsageError,
    WorkerLostError,
)
from asyncrpc.runtime.calls.cheap import is_listed
from asyncrpc.runtime.calls.context import deadline_var, effective_deadline
from asyncrpc.runtime.calls.destination import Destination
from asyncrpc.runtime.calls.futures import CallFuture, call_site
from asyncrpc.runtime.calls.inbound import InboundCall, Mode, Target, mode_of
from asyncrpc.runtime.calls.profiling import show_call
from asyncrpc.runtime.calls.repeating import is_idempotent, repeat
from asyncrpc.runtime.eager import eager_task
from asyncrpc.runtime.extensions import References, ThreadState
from asyncrpc.runtime.forking import FORKED
from asyncrpc.runtime.links.directory import Directory
from asyncrpc.runtime.links.link import Link
from asyncrpc.runtime.loops import check_loop, running_loop
from asyncrpc.runtime.options import PLAIN, UNSET, CallOptions, Options
from asyncrpc.serde import FunctionTable, describe_callable

T = TypeVar("T")

# Asked in every call, so without a look-up in torch: 90 ns together.  Inference mode
# turns gradients off, too.
_grad_is_on = torch.is_grad_enabled
_any_autocast_is_on = torch._C._is_any_autocast_enabled  # noqa: SLF001

AT_ONCE: Final = nullcontext()

# What is called, over and over, and always by the same name.
_NAMED: Final = frozenset({types.FunctionType, types.BuiltinFunctionType, type})
KNOWN_MAX: Final = 4096  # programs call tens of functions


class CallStarter:
    """The part of a `Worker` that starts calls."""

    functions: FunctionTable
    options: Options
    loop: asyncio.AbstractEventLoop
    directory: Directory
    references: References | None
    thread_states: list[ThreadState]
    name: str
    _state: str
    beginning = 0  # calls that have been started and have no link yet
    shows_calls = True  # to a profiler; a facade does it in its callers' threads
    # A set, but ordered: in a simulation runs must not depend on addresses.
    _tasks: dict[asyncio.Task[Any], None]
    _thread_id: int
    _targets: dict[str, Target]
    _modes: dict[Callable[..., Any], Mode]
    # Functions' names, as they are sent and as they are read.
    _known: dict[Callable[..., Any], tuple[str | None, str]]

    @property
    def is_closed(self) -> bool:
        """Whether it has been shut down, or was never started.

        While it drains it is not: functions in flight may make calls of their own.
        """
        return self._state not in ("running", "starting", "closing")

    async def link_to(self, to: str) -> Link:
        """Return the open link to a worker, connecting if need be.

        Raises:
            WorkerLostError: it cannot be reached.
            UnknownWorkerError: there is none of the name.
        """
        entry = self.directory.find(to)
        return entry.link or await self.directory.connect(entry)

    def describe(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> tuple[str | None, tuple[list[Any], dict[str, Any]]]:
        """Return the name of a function, and the values that travel with it.

        A callable without a name (a bound method, a partial) travels as a value.

        Raises:
            EncodeError: neither can be sent.
        """
        form, value = describe_callable(self.functions, function)
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
    ) -> CallFuture[Any]:
        """Start a call and return its future; see `Peer.call`.

        May be called from any thread.  On the loop's own, and connected, the request
        is written before this returns, and an argument that cannot travel raises here.

        Raises:
            EncodeError: as said.
            UnknownWorkerError: there is no worker `to`.
            NotStartedError: this worker does not run.
            UsageError: nothing can be received into `options.out`.
        """
        kwargs = kwargs or {}
        if options is not PLAIN and options.idempotent:
            return self._start_repeating(to, function, args, kwargs, options)
        known = self._known.get(function) if type(function) in _NAMED else None
        if known is None:
            if is_idempotent(function):  # so it is never among the known
                return self._start_repeating(to, function, args, kwargs, options)
            known, values = self._describe_anew(function, args, kwargs)
        else:
            values = list(args), dict(kwargs)
        target, name = known
        call = self.new_call(name, to, with_site=with_site)
        if options is not PLAIN:
            call.options = options
            if options.out is not None:
                call.destination = Destination(options.out)
        self.begin(call, target, values, timeout_s=options.timeout_s)
        return call

    def is_known(self, function: Callable[..., Any]) -> bool:
        """Say whether a function has been called before, and has a name."""
        return type(function) in _NAMED and function in self._known

    def _start_repeating(
        self,
        to: str,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        options: CallOptions,
    ) -> CallFuture[Any]:
        """Start a call that is made again if its worker is lost."""
        target, values = self.describe(function, args, kwargs)
        name = target or str(getattr(function, "__qualname__", function))
        name = name.rpartition(":")[2]
        call = self.new_call(name, to)
        timeout_s = options.timeout_s
        if timeout_s is UNSET:
            timeout_s = self.options.rpc_timeout_s
        deadline = effective_deadline(timeout_s, self.loop.time())
        meta = self.meta_here()

        def attempt() -> CallFuture[Any]:
            left_s = None
            if deadline is not None:
                left_s = max(deadline.at_s - self.loop.time(), 0.0)
            one = self.new_call(name, to, kind="")
            one.options = options
            if options.out is not None:
                one.destination = Destination(options.out)
            fresh = list(values[0]), dict(values[1])
            self.begin(one, target, fresh, timeout_s=left_s, meta=dict(meta))
            return one

        def start() -> None:
            if not call.done():
                call.begun = self.start_task(repeat(call, attempt))

        self.on_loop_thread(start)
        return call

    def _describe_anew(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> tuple[tuple[str | None, str], tuple[list[Any], dict[str, Any]]]:
        """Describe a function that is called for the first time, and remember it."""
        target, values = self.describe(function, args, kwargs)
        name = target or str(getattr(function, "__qualname__", function))
        known = target, name.rpartition(":")[2]
        if type(function) in _NAMED and target and len(self._known) < KNOWN_MAX:
            self._known[function] = known
        return known, values

    def new_call(
        self, function: str, to: str, *, with_site: bool = False, kind: str = "async"
    ) -> CallFuture[Any]:
        """Make the future of a call that is to be started by `begin`.

        Args:
            function: what it runs, for people to read.
            to: name of the callee.
            with_site: whether it remembers where it was made.
            kind: what a profiler shows it as; "" shows nothing.
        """
        self.check_running()
        call: CallFuture[Any] = CallFuture(loop=self.loop, function=function, to=to)
        if with_site:
            call.site = call_site(3)
        if profiler._is_profiler_enabled and kind and self.shows_calls:  # noqa: SLF001
            show_call(call, kind, self.name)
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
            call: its future.
            target: as for `Link.start`, likewise the others.
            values: arguments and keyword arguments.
            timeout_s: seconds.
            meta: what travels beside them, `meta_here()` included; None: that alone.
            on_link: called with the link before the call is sent; what it raises is
                raised, or fails the call if the link had to be waited for.
        """
        if meta is None and (not _grad_is_on() or _any_autocast_is_on()):
            meta = self.meta_here()
        if threading.get_ident() != self._thread_id:
            if running_loop() is not None:
                self.check_on_loop("a call")
            meta = meta or {}
            self.loop.call_soon_threadsafe(
                self._begin_later, call, target, values, timeout_s, meta, on_link
            )
            return
        if timeout_s is UNSET:
            timeout_s = self.options.rpc_timeout_s
        if timeout_s is None:
            deadline = deadline_var.get()
        else:
            deadline = effective_deadline(timeout_s, self.loop.time())
        link = self.directory.link_to(call.to)
        if link is not None:
            if on_link is not None:
                on_link(link)
            link.start(call, target, values, deadline=deadline, meta=meta)
        else:
            self._begin_apart(call, target, values, deadline, meta, on_link)

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

        def start(link: Link) -> None:
            if on_link is not None:
                on_link(link)
            link.start(call, target, values, deadline=deadline, meta=meta)

        connecting = self.connect_and_start(call, start, deadline=deadline)
        call.begun = self.start_task(connecting)

    def _begin_later(  # noqa: PLR0917
        self,
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
        """Connect to a call's peer, then `start` it; whatever goes wrong, it fails.

        Args:
            call: its future.
            start: writes the request.
            deadline: for the connection, too.
            turn: held while connecting.
        """
        self.beginning += 1
        try:
            async with (
                asyncio.timeout_at(None if deadline is None else deadline.at_s),
                turn,
            ):
                link = await self.link_to(call.to)
            call.begun = None
            if not call.done():
                start(link)
        except AsyncRpcError as error:
            # Without its traceback: this frame keeps the call, and what it is for.
            call.fail(_named(error, call).with_traceback(None))
        except TimeoutError:
            allowed_s = 0.0 if deadline is None else deadline.allowed_s
            call.fail(_never_sent(call, allowed_s))
        except asyncio.CancelledError:
            call.fail(_cut_off(call))  # unless it was the caller who gave up
            raise
        except Exception as error:  # noqa: BLE001  (a value's own code; the caller's)
            call.fail(error)
        finally:
            self.beginning -= 1

    def meta_here(self) -> dict[str, Any]:
        """Return what travels with a call because this thread makes it."""
        return {
            state.key: found
            for state in self.thread_states
            if (found := state.here()) is not None
        }

    def on_loop_thread(self, action: Callable[[], None]) -> None:
        """Run `action` on the loop: now if this is its thread, else soon."""
        if threading.get_ident() == self._thread_id:
            action()
        else:
            self.loop.call_soon_threadsafe(action)

    def start_remote(
        self,
        to: str,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        options: CallOptions = PLAIN,
    ) -> Any:
        """Start a call whose result stays on the callee; return the reference to it.

        Raises:
            EncodeError: as for `start_call`.
        """
        if self.references is None:
            raise UsageError("this worker was made without remote references")
        self.check_running()
        named = kwargs or {}
        if self.is_known(function):
            (target, _), values = self._known[function], (list(args), dict(named))
        elif is_idempotent(function):  # so it is never among the known
            target, values = self.describe(function, args, named)
        else:
            (target, _), values = self._describe_anew(function, args, named)
        return self.references.start_remote(to, target, values, options=options)

    def target(self, name: str) -> Target:
        """Return what a peer may call by this name.

        Raises:
            DecodeError: there is no such function here.
            RejectedError: the policy does not allow it.
        """
        found = self._targets.get(name)
        if found is None:
            function = self.functions.resolve(name)
            found = Target(
                name.rpartition(":")[2],
                function,
                mode_of(function),
                is_listed(function) and self.options.on_loop_bytes_max > 0,
            )
            self._targets[name] = found
        return found

    def mode_of_method(self, method: Callable[..., Any]) -> Mode:
        """Decide where a method of a referenced object runs.

        Remembered by the function of its class: to find out takes 4 us.
        """
        function = getattr(method, "__func__", None)
        if type(function) is not types.FunctionType:
            return mode_of(method)
        mode = self._modes.get(function)
        if mode is None:
            mode = mode_of(method)
            if len(self._modes) < KNOWN_MAX:
                self._modes[function] = mode
        return mode

    def start_task(
        self,
        coroutine: Coroutine[Any, Any, T],
        *,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[T]:
        """Run a coroutine as a task that this worker owns: it ends with the worker."""
        task = self.loop.create_task(coroutine, context=context)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    def start_eagerly(
        self,
        coroutine: Coroutine[Any, Any, None],
        context: contextvars.Context,
        inbound: InboundCall,
    ) -> None:
        """Run a call's coroutine as far as it goes without waiting, now.

        Most calls end there, and need neither a turn of the loop nor a place among the
        tasks.  One that waits goes on as any other task.
        """
        task = eager_task(self.loop, coroutine, context)
        if not task.done():
            inbound.task = task
            self._tasks[task] = None
            task.add_done_callback(self._tasks.pop)
            if inbound.is_cancelled:  # by something that its first step has set off
                task.cancel()

    def check_on_loop(self, used: str) -> None:
        """Raise unless this worker runs, and this is its event loop.

        Args:
            used: what was called, for the error.

        Raises:
            NotStartedError: as for `check_running`.
            UsageError: another event loop runs here, or none.
        """
        self.check_running()
        self.check_loop(used)

    def check_loop(self, used: str) -> None:
        """Raise unless this is this worker's event loop; it may have ended.

        Args:
            used: what was called, for the error.

        Raises:
            NotStartedError: it belongs to the process that this one was forked from.
            UsageError: another event loop runs here, or none.
        """
        if self._state == FORKED:
            self.check_running()
        check_loop(used, self.loop, f"worker {self.name!r}")

    def check_running(self) -> None:
        """Raise if this worker does not run.

        Raises:
            NotStartedError: it has not been started, or has been shut down.
        """
        if self.is_closed:
            if self._state == FORKED:
                raise NotStartedError(
                    f"worker {self.name!r} belongs to the process that this one was"
                    " forked from: a forked child has none; start processes with"
                    " asyncrpc.multiprocessing or the method 'spawn', and a worker in"
                    " each"
                )
            raise NotStartedError(
                f"worker {self.name!r} does not run: it has been shut down"
                if self._state in ("closing", "closed")
                else f"worker {self.name!r} has not been started; use `async with`"
            )


def _named(error: AsyncRpcError, call: CallFuture[Any]) -> AsyncRpcError:
    """Say in an error which call it befell."""
    if hasattr(error, "function") and hasattr(error, "to"):
        error.function, error.to = call.function, call.to
    return error


def _cut_off(call: CallFuture[Any]) -> AsyncRpcError:
    return WorkerLostError(
        "this worker was shut down before it had a connection",
        function=call.function,
        to=call.to,
        outcome=Outcome.NOT_EXECUTED,
    )


def _never_sent(call: CallFuture[Any], allowed_s: float) -> AsyncRpcError:
    return DeadlineExceededError(
        function=call.function,
        to=call.to,
        outcome=Outcome.NOT_EXECUTED,
        timeout_s=allowed_s,
    )

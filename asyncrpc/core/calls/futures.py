"""The future of a call: awaited on the loop, or waited for in a thread."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Generator
from contextvars import Context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from asyncrpc.core.arguments import check_timeout
from asyncrpc.core.calls.context import Watch, current_call_var
from asyncrpc.core.devices.maps import DeviceMap
from asyncrpc.core.loop.forking import is_parents
from asyncrpc.core.loop.loops import LoopGuard, running_loop
from asyncrpc.core.loop.threads import thread_blocked
from asyncrpc.core.loop.waits import WaitDescription, WaitKind, waits
from asyncrpc.core.options import PLAIN, CallOptions
from asyncrpc.errors import ClosedError, Outcome, UsageError

if TYPE_CHECKING:
    from asyncrpc.core.calls.destination import Destination
    from asyncrpc.core.calls.ports import CallLink
    from asyncrpc.core.services.extensions import CallSpan


T = TypeVar("T")

# Without an error where none runs: that takes 0.4 us.
_loop_of_thread: Final = asyncio._get_running_loop  # noqa: SLF001

LOOK_S: Final = 1.0  # how often a waiting thread checks that its loop is open


@dataclass(slots=True)
class CallStats:
    """The bytes that one call moved through this worker's memory.

    Attributes:
        bytes_sent: of buffers (tensors, arrays, long byte strings) of the request.
        bytes_received: of buffers of the response, once it has arrived.
        bytes_copied: of both, copied by this worker in user space, each as often as it
            was: gathered from a tensor with holes, put into shared memory, cut out of a
            read that brought more than the payload (all payloads up to 64 KiB), or
            copied to `out`.  It does not count copies that an argument's own code
            makes, nor the kernel's.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_copied: int = 0


class CallFuture(asyncio.Future[T], Generic[T]):
    """The result of a call that has been started.

    Await it on the worker's event loop, or `wait()` for it in a thread.  Cancelling it
    cancels the function on the callee.  A call that fails and is never awaited is
    logged when it is collected, with the place of the call.

    Attributes:
        function: name of the function that was called.
        to: name of the worker that was called.
        began_s: when it was made, by the clock of its worker; 0 if that is not known.
        stats: bytes moved and copied.
    """

    __slots__ = (
        "allowed_s",
        "began_s",
        "begun",
        "call_id",
        "destination",
        "device_map",
        "function",
        "link",
        "loop_guard",
        "moved",
        "note",
        "options",
        "pins",
        "request_bytes",
        "site",
        "span",
        "task",
        "to",
        "watch",
    )

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        function: str = "",
        to: str = "",
        began_s: float = 0.0,
        loop_guard: LoopGuard | None = None,
        is_on_loop: bool = False,
    ) -> None:
        super().__init__(loop=loop)
        self.function = function
        self.to = to
        self.began_s = began_s
        # What the runtime keeps of a call in flight; not for others.
        self.loop_guard = loop_guard  # of its worker
        self.link: CallLink | None = None  # once it has been sent
        self.call_id = 0
        self.request_bytes = 0  # of its buffers, if they are many: see `credit`
        self.watch: Watch | None = None  # of its deadline
        self.pins: Any = None  # what must live until the callee has answered
        self.allowed_s = 0.0
        self.site: tuple[str, int] | None = None
        self.begun: asyncio.Task[None] | None = None  # what connects, while it does
        self.options: CallOptions = PLAIN
        self.destination: Destination | None = None  # what the result comes into
        self.device_map: DeviceMap | None = None  # of the arguments
        self.moved: CallStats | None = None  # None: no bytes of buffers
        self.span: CallSpan | None = None  # what a trace shows of it, if one does
        # Name of the task or thread that made it; see `trace.CallEnded`.
        # To ask which loop runs is a system call: see `LoopGuard`.
        is_here = is_on_loop or _loop_of_thread() is loop
        self.task = task_here(loop) if is_here else _thread_here()
        self.note: Any = None  # what came beside the answer, if anything did

    def __await__(self) -> Generator[Any, None, T]:
        """Wait for the result.

        Raises:
            UsageError: the call has not ended, and this is not its worker's event loop.
            Exception: what the call raised.
        """
        guard = self.loop_guard
        if guard is not None and not guard.is_on_loop and not self.done():
            guard.check_loop(f"the call of {self.function} on {self.to!r}")
        return super().__await__()

    def add_done_callback(
        self, fn: Callable[[Any], object], /, *, context: Context | None = None
    ) -> None:
        """Call a function with the call once it has ended, on its worker's event loop.

        Raises:
            UsageError: the call has not ended, and another event loop runs here, as
                for `asyncio.gather`, `shield` and `wait` there.
        """
        guard = self.loop_guard
        if (
            guard is not None
            and not guard.is_on_loop
            and not self.done()
            and running_loop() is not None
        ):
            guard.check_loop(f"the call of {self.function} on {self.to!r}")
        super().add_done_callback(fn, context=context)

    @property
    def stats(self) -> CallStats:
        """Bytes moved and copied."""
        if self.moved is None:  # most calls move none
            self.moved = CallStats()
        return self.moved

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the call; the callee is told, and not waited for.

        Returns:
            False if the call has ended already, or its event loop has been closed.

        Raises:
            UsageError: the call belongs to the process that this one was forked from.

        Thread safety: from any thread; outside the event loop's thread, the call is
        cancelled soon after.
        """
        if self.done():
            return False
        loop = self.get_loop()
        if running_loop() is not loop:
            if is_parents(loop):
                raise UsageError(
                    f"the call of {self.function} on {self.to!r} belongs to the process"
                    " that this one was forked from: it can be cancelled only there"
                )
            try:
                loop.call_soon_threadsafe(self.cancel, msg)
            except RuntimeError:  # the loop is closed: the call ends no more
                return False
            return True
        if self.begun is not None:
            self.begun.cancel()
        if self.link is not None:
            self.link.cancel(self)
        return super().cancel(msg)

    def wait(self, timeout_s: float | None = None) -> T:
        """Block this thread until the result is there, and return it.

        Args:
            timeout_s: seconds to wait here; the call itself goes on.  None: no limit.

        Raises:
            UsageError: called on the event loop's own thread, which it would stop.
            TimeoutError: `timeout_s` passed.
            ClosedError: the event loop was closed before the call ended.
            Exception: what the call raised, as for `await`.

        Thread safety: from any thread but the event loop's.
        """
        check_timeout("timeout_s", timeout_s)
        refuse_on_loop("CallFuture.wait()", "`await` the future", self.get_loop())
        if not is_done_within(self, timeout_s):
            raise TimeoutError(f"no result of {self.function} in {timeout_s:g} s")
        return self.result()

    @property
    def failure(self) -> BaseException | None:
        """Internal: return what it failed with, if it is done.

        Unlike `exception()`, this does not count as retrieval: an error that is never
        retrieved is still logged.
        """
        error: BaseException | None = self._exception
        return None if self.cancelled() else error

    @property
    def outcome_if_lost(self) -> Outcome:
        """Internal: return the outcome of the call if no answer ever comes."""
        return Outcome.NOT_EXECUTED if self.link is None else Outcome.UNKNOWN

    def settle(self) -> None:
        """Internal: let go of what was kept for the call in flight."""
        if self.watch is not None:
            self.watch.stop(self)
            self.watch = None
        self.begun = None
        if self.destination is not None:
            self.destination.release()

    def succeed(self, value: T) -> None:
        """Internal: set the result unless the future is done."""
        if not self.done():
            self.set_result(value)

    def fail(self, error: BaseException) -> None:
        """Internal: set the error unless the future is done."""
        if not self.done():
            self.set_exception(error)

    def __repr__(self) -> str:
        where = f" made at {self.site[0]}:{self.site[1]}" if self.site else ""
        state = "done" if self.done() else "pending"
        return f"<CallFuture {self.function} on {self.to!r} {state}{where}>"


# Adds a callback to a call whose maker has seen which loop runs here: 0.5 us less.
on_done: Final = asyncio.Future.add_done_callback


class AwaitedCall(CallFuture[T]):
    """A call that the coroutine which made it awaits, and hands to nobody.

    Its maker is on the loop, so awaiting it runs no Python: 0.2 us of a small call.
    """

    __slots__ = ()
    __await__ = asyncio.Future.__await__
    add_done_callback = on_done


@waits(lambda at: _answer_awaited(at["future"]))
def is_done_within(future: asyncio.Future[Any], timeout_s: float | None) -> bool:
    """Block a thread, not the loop's, until a future of the loop is done."""
    ended, loop = threading.Event(), future.get_loop()
    watch = future.add_done_callback
    try:
        loop.call_soon_threadsafe(watch, lambda _: ended.set())
    except RuntimeError:  # nothing runs on it any more
        if future.done():
            return True
        raise loop_closed() from None
    with thread_blocked():
        return wait_on_loop(loop, ended.wait, timeout_s)


def _answer_awaited(future: asyncio.Future[Any]) -> WaitDescription | None:
    is_call = isinstance(future, CallFuture)
    return WaitDescription(WaitKind.CALL, call=future) if is_call else None


def wait_on_loop(
    loop: asyncio.AbstractEventLoop,
    wait: Callable[[float], bool],
    timeout_s: float | None = None,
) -> bool:
    """Block this thread until the loop has done something.

    A closed loop does nothing more, and signals nothing: so it is checked.

    Args:
        wait: waits for at most so many seconds; returns whether it has happened.
        timeout_s: seconds in all; None is no limit.
    """
    left_s = float("inf") if timeout_s is None else timeout_s
    while not wait(min(LOOK_S, left_s)):
        left_s -= LOOK_S
        if left_s <= 0:
            return False
        if loop.is_closed() and not wait(0.0):  # it may have been its last act
            raise loop_closed()
    return True


def loop_closed() -> ClosedError:
    """Return the error of a thread that waits for a closed loop."""
    return ClosedError(
        "the event loop was closed before this ended; end workers and the threads that"
        " wait for their calls first"
    )


def refuse_on_loop(
    action: str, instead: str, loop: asyncio.AbstractEventLoop | None = None
) -> None:
    """Raise if this thread runs an event loop, which `action` would stop."""
    running = running_loop()
    if running is not None and (loop is None or running is loop):
        raise UsageError(f"{action} would stop the event loop; {instead} here instead")


def call_site(depth: int) -> tuple[str, int]:
    """Return the file and line of the caller's caller, `depth` frames up."""
    frame = sys._getframe(depth + 1)  # noqa: SLF001  (the only cheap way to a line)
    return frame.f_code.co_filename, frame.f_lineno


if sys.version_info >= (3, 12):
    _current_task = asyncio.current_task
else:
    # Before 3.12 it is written in Python; a look into its table takes a third of the
    # time.
    _current_task: Callable[[Any], asyncio.Task[Any] | None] = (
        asyncio.tasks._current_tasks.get  # type: ignore[attr-defined]  # noqa: SLF001
    )


def task_here(loop: asyncio.AbstractEventLoop) -> str:
    """Return the call that is served here, or the name of the running task.

    All tasks of a function that a caller runs here count as the call: a function that
    gathers others is seen with them.

    Args:
        loop: of the worker; this is its thread.
    """
    call = current_call_var.get()
    if call is not None and call.is_running:
        return call.label
    task = _current_task(loop)
    return "" if task is None else task.get_name()


def _thread_here() -> str:
    """Return the call that this thread serves, or its name; it runs no loop."""
    call = current_call_var.get()
    if call is not None and call.is_running:
        return call.label
    return threading.current_thread().name

"""Which event loop runs a program, and the errors of one that uses another's worker.

A program runs on uvloop where it is installed, else on asyncio's own loop.  A worker
belongs to the loop that it was started on.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import closing
from typing import Any, TypeVar

from asyncrpc.core.arguments import check_flag, check_kind
from asyncrpc.core.lifecycle import Lifecycle, WorkerState
from asyncrpc.errors import UsageError

T = TypeVar("T")

try:
    import uvloop
except ImportError:  # uvloop has no build for this platform
    _FACTORY: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
else:
    _FACTORY = uvloop.new_event_loop


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Return the factory of the fastest event loop of this platform."""
    return _FACTORY


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs in this thread; None if no loop runs."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def loop_for(used: str) -> asyncio.AbstractEventLoop:
    """Return the running event loop."""
    loop = running_loop()
    if loop is None:
        raise UsageError(
            f"{used} needs a running event loop: use it in a coroutine that"
            " `asyncrpc.run` or `asyncio.run` runs in this thread and process"
        )
    return loop


def check_loop(used: str, loop: asyncio.AbstractEventLoop, whose: str) -> None:
    """Raise UsageError unless a loop is the one that runs in this thread."""
    running = running_loop()
    if running is loop:
        return
    if loop.is_closed():
        raise UsageError(
            f"{used} cannot be used any more: the event loop that {whose} was started"
            " on is closed; end a worker, by `async with` or `shutdown`, before its"
            " loop ends, and start one on each loop that needs one"
        )
    where = "in a thread without one" if running is None else "on another one"
    raise UsageError(
        f"{used} must be used on the event loop that {whose} was started on, not"
        f" {where}; from another thread use"
        " `asyncio.run_coroutine_threadsafe(..., worker.loop)`, or, without a loop,"
        " the blocking names such as `asyncrpc.rpc_sync`; in one thread run all on"
        " one loop (pytest-asyncio: the same loop_scope for fixture and test)"
    )


def run(main: Coroutine[Any, Any, T], *, debug: bool | None = None) -> T:
    """Run a program's main coroutine and return its result.

    Like `asyncio.run`, on uvloop where the platform has it.  Ctrl-C cancels `main`,
    whose workers then close in order.

    Args:
        main: the coroutine.
        debug: asyncio's debug mode; None takes it from the interpreter's options.

    Raises:
        UsageError: an argument is of another kind, or a loop runs in this thread.

    Example:
        >>> asyncrpc.run(main())
    """
    check_kind("main", main, Coroutine, "a coroutine, such as main()")
    with closing(main):  # no warning if it is not run
        if debug is not None:
            check_flag("debug", debug)
        _refuse_on_loop()
        with asyncio.Runner(debug=debug, loop_factory=loop_factory()) as runner:
            return runner.run(main)


def _refuse_on_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise UsageError("run() makes an event loop, but one runs in this thread: await it")


class LoopGuard:
    """Refuses a worker outside its own event loop.

    Attributes:
        loop: the event loop that the worker was started on; None before.
    """

    __slots__ = ("_is_loop_running", "_thread_id", "lifecycle", "loop")

    def __init__(self, lifecycle: Lifecycle) -> None:
        self.lifecycle = lifecycle
        self.loop: asyncio.AbstractEventLoop | None = None
        self._thread_id = 0

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Note the worker's event loop, which runs in this thread."""
        self.loop, self._is_loop_running = loop, loop.is_running
        self._thread_id = threading.get_ident()

    @property
    def is_on_loop(self) -> bool:
        """Whether the worker's event loop runs here.

        In one thread, one loop runs at a time.  To ask which costs a system call on
        Python 3.11; to ask ours, 30 ns.
        """
        return threading.get_ident() == self._thread_id and self._is_loop_running()

    def check_caller(self, used: str, *, awaits: bool = False) -> None:
        """Raise unless a call may begin here: on the loop, or off any loop."""
        if not self.is_on_loop:
            is_closed = self.loop is not None and self.loop.is_closed()
            if awaits or is_closed or running_loop() is not None:
                self.check_on_loop(used)

    def check_on_loop(self, used: str) -> None:
        """Raise unless the worker runs, and its event loop runs here."""
        if self.is_on_loop and self.lifecycle.is_usable:
            return
        self.lifecycle.check_running()
        self.check_loop(used)

    def check_loop(self, used: str) -> None:
        """Raise unless the worker's event loop runs here; the worker may have ended."""
        lifecycle = self.lifecycle
        if lifecycle.state is WorkerState.FORKED or self.loop is None:
            lifecycle.check_running()
        assert self.loop is not None  # it has been started
        check_loop(used, self.loop, f"worker {lifecycle.name!r}")

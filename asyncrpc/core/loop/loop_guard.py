"""A worker belongs to one event loop: the errors of a program that uses another."""

from __future__ import annotations

import asyncio
import threading

from asyncrpc.core.lifecycle import Lifecycle, WorkerState
from asyncrpc.core.loop.loops import check_loop, running_loop


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

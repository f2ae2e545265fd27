"""A worker belongs to one event loop: the errors of a program that uses another."""

from __future__ import annotations

import asyncio

from asyncrpc.runtime.lifecycle import Lifecycle, WorkerState
from asyncrpc.runtime.loops import check_loop, running_loop


class LoopGuard:
    """Refuses a worker outside its own event loop.

    Attributes:
        lifecycle: of the worker.
        loop: the event loop that the worker was started on; None before.
    """

    __slots__ = ("lifecycle", "loop")

    def __init__(self, lifecycle: Lifecycle) -> None:
        self.lifecycle = lifecycle
        self.loop: asyncio.AbstractEventLoop | None = None

    def check_on_loop(self, used: str) -> None:
        """Raise unless the worker runs, and its event loop is the one that runs here.

        Args:
            used: what was called, for the error.

        Raises:
            NotStartedError: as for `Lifecycle.check_running`.
            UsageError: another event loop runs here, or none.
        """
        if self.lifecycle.is_usable and running_loop() is self.loop:
            return
        self.lifecycle.check_running()
        self.check_loop(used)

    def check_loop(self, used: str) -> None:
        """Raise unless the worker's event loop runs here; the worker may have ended.

        Args:
            used: what was called, for the error.

        Raises:
            NotStartedError: the worker belongs to the process that this one was forked
                from.
            UsageError: another event loop runs here, or none.
        """
        lifecycle = self.lifecycle
        if lifecycle.state is WorkerState.FORKED or self.loop is None:
            lifecycle.check_running()
        assert self.loop is not None  # it has been started
        check_loop(used, self.loop, f"worker {lifecycle.name!r}")

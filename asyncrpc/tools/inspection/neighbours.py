"""Which tasks and threads of a process belong to which of its workers.

Several workers may share a loop, and so its tasks and threads.  Each snapshot has them
all, since one may wait for another; but each belongs to one worker, which tells of it.
The other workers tell it as internal.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from contextvars import Context
from typing import Any

from asyncrpc.core.calls.context import current_worker_var
from asyncrpc.core.loop.forking import known_workers


class Neighbours:
    """The other workers of one worker's loop that it knows, and that tell of theirs."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        incarnation: int,
        incarnation_of: Callable[[str], int | None],
    ) -> None:
        parts = [getattr(worker, "parts", None) for worker in known_workers()]
        running = [
            other
            for other in parts
            if other is not None and not other.is_closed and other.loop is loop
        ]
        self._own = incarnation
        self._others = [
            other
            for other in running
            if other.identity.incarnation != incarnation
            and other.identity.incarnation == incarnation_of(other.identity.name)
        ]
        # What belongs to no worker, the first one tells.
        self._is_first = all(
            incarnation < other.identity.incarnation for other in self._others
        )

    def caller_of(self, call: Any) -> int | None:
        """Return the incarnation of the neighbour that has made a call."""
        for other in self._others:
            for link in other.directory.links:
                if link.pending.get(call.call_id) is call:
                    incarnation: int = other.identity.incarnation
                    return incarnation
        return None

    def have(self, task: asyncio.Task[Any]) -> bool:
        """Return whether a task is another worker's to tell."""
        if not self._others:
            return False
        context = _context_of(task)
        worker = None if context is None else context.get(current_worker_var)
        if worker is None:
            return not self._is_first
        incarnation: int = worker.incarnation
        if incarnation == self._own:
            return False
        is_here = any(
            incarnation == other.identity.incarnation for other in self._others
        )
        return is_here or not self._is_first

    def have_thread(self, name: str) -> bool:
        """Return whether a thread is another worker's to tell."""
        if any(name.startswith(f"asyncrpc-{other.name}-") for other in self._others):
            return True
        return not self._is_first and not name.startswith("asyncrpc-")


def _context_of(task: asyncio.Task[Any]) -> Context | None:
    if hasattr(task, "get_context"):  # from Python 3.12 on
        context: Context = task.get_context()
        return context
    referents = gc.get_referents(task)
    return next(
        (referent for referent in referents if isinstance(referent, Context)), None
    )

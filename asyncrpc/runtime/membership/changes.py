"""Changes of the membership, as a program sees them: an asynchronous iterator."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

from asyncrpc.errors import UsageError
from asyncrpc.ids import WorkerInfo
from asyncrpc.runtime.loops import check_loop
from asyncrpc.runtime.membership.machine.membership import ChangeKind

# Changes that a program has not taken.  More would not help one that is so far behind:
# it has to look at the whole list again.
CHANGES_MAX: Final = 1024
NOBODY: Final = WorkerInfo("", -1)


@dataclass(frozen=True, slots=True)
class MemberChange:
    """What has become of a member of the group.

    Attributes:
        kind: `"joined"`, `"left"` (it said so), `"lost"` (it died, or cannot be
            reached), `"restarted"` (another process has its name now), `"back"` (it
            was not dead after all); or `"resync"`: changes were missed, look at
            `Worker.known_members`.
        member: its name and rank; of `"resync"`, an empty name.
        incarnation: which life of the name it is; 0 if that is not known.
    """

    kind: ChangeKind
    member: WorkerInfo
    incarnation: int


class MemberChanges(AsyncIterator[MemberChange]):
    """The changes from now on, one after the other; from `Worker.members`.

    It ends when the worker does.  At most 1,024 changes are kept for a program that
    does not take them; then they are dropped, and one `"resync"` stands for them all.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[MemberChange] = deque()
        self._news = asyncio.Event()
        self._is_closed = False
        self._is_awaited = False

    def __aiter__(self) -> MemberChanges:
        return self

    async def __anext__(self) -> MemberChange:
        """Wait for the next change; cancelled, it has taken none.

        Raises:
            UsageError: another task waits for it, or this is not the worker's event
                loop.
        """
        check_loop("Worker.members", self._loop, "the worker")
        if self._is_awaited:
            raise UsageError("two tasks wait for one iterator of members; make two")
        self._is_awaited = True
        try:
            while not self._waiting:
                if self._is_closed:
                    raise StopAsyncIteration
                self._news.clear()
                await self._news.wait()  # the end of the worker sets it
        finally:
            self._is_awaited = False
        return self._waiting.popleft()

    def put(self, change: MemberChange) -> None:
        """Internal: add a change."""
        if len(self._waiting) >= CHANGES_MAX:
            self._waiting.clear()
            change = MemberChange(ChangeKind.RESYNC, NOBODY, 0)
        self._waiting.append(change)
        self._news.set()

    def end(self) -> None:
        """Internal: let the iteration end, after the changes that are kept."""
        self._is_closed = True
        self._news.set()

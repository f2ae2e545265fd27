"""Changes of the membership, as a program sees them: an asynchronous iterator.

A slow program gets fewer changes, not more: beyond `CHANGES_MAX`, the changes of each
worker are combined into one, or dropped if they undo each other.  If that does not
halve their number, all are dropped, and the program is told to look at the whole list.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, replace
from typing import Final

from asyncrpc.core.ids import WorkerInfo
from asyncrpc.core.loop.loops import check_loop
from asyncrpc.core.membership.machine.records import (
    ChangeKind,
)
from asyncrpc.errors import UsageError

CHANGES_MAX: Final = 1024  # that a program has not taken
COMBINED_MAX: Final = CHANGES_MAX // 2  # else each new change would combine them again
NO_WORKER: Final = WorkerInfo("", -1)


@dataclass(frozen=True, slots=True)
class MemberChange:
    """One change of a member of the group.

    Attributes:
        kind: `"joined"`, `"left"` (it said so), `"lost"` (it died, or cannot be
            reached), `"restarted"` (another process has its name now), `"back"` (it
            was not dead after all); or `"resync"`: changes were missed, look at
            `Worker.known_members`.
        member: name and rank of the member; for `"resync"`, an empty name.
        incarnation: which life of the name it is; 0 if that is not known.
        previous: for `"restarted"`, the incarnation before; else 0.
    """

    kind: ChangeKind
    member: WorkerInfo
    incarnation: int
    previous: int = 0


RESYNC: Final = MemberChange(ChangeKind.RESYNC, NO_WORKER, 0)
_ENDS: Final = (ChangeKind.LEFT, ChangeKind.LOST)


def combined(changes: Iterable[MemberChange]) -> list[MemberChange]:
    """Return at most one change for each worker, and the last `"resync"`, if any.

    A worker that was absent before and is absent now is left out, as is one whose life
    is the same as before.
    """
    combined_changes: dict[str, MemberChange | None] = {}
    before: dict[str, tuple[bool, int]] = {}  # was it there, and as which life
    for change in changes:
        name = change.member.name
        if change.kind is ChangeKind.RESYNC:
            # What the program will look at includes all of these changes.
            combined_changes, before = {name: change}, {}
            continue
        before.setdefault(name, _before(change))
        combined_changes[name] = _as_one(before[name], change)
    return [change for change in combined_changes.values() if change is not None]


def _before(change: MemberChange) -> tuple[bool, int]:
    """Return whether a worker was there before a change, and as which life."""
    match change.kind:
        case ChangeKind.LEFT | ChangeKind.LOST:
            return True, change.incarnation
        case ChangeKind.RESTARTED:
            return True, change.previous
        case ChangeKind.BACK:
            return False, change.incarnation
        case _:
            return False, 0


def _as_one(before: tuple[bool, int], last: MemberChange) -> MemberChange | None:
    """Return one change from the state before to the state after the last change."""
    was_there, life = before
    if last.kind in _ENDS:
        return (
            replace(last, incarnation=life or last.incarnation) if was_there else None
        )
    if last.incarnation == life:
        return None if was_there else replace(last, kind=ChangeKind.BACK, previous=0)
    kind = ChangeKind.RESTARTED if was_there else ChangeKind.JOINED
    return replace(last, kind=kind, previous=life if was_there else 0)


class MemberChanges(AsyncIterator[MemberChange]):
    """The changes from now on, one after the other; see `Worker.members_changed`.

    The iteration ends when the worker ends.  At most 1,024 changes are kept for a
    program that does not take them; beyond that, the changes of each worker are
    combined into one.  If more than 512 are left, one `"resync"` stands for all of
    them.
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
        """Wait for the next change; a cancelled wait takes none.

        Raises:
            UsageError: another task waits for this iterator, or this is not the
                worker's event loop.
        """
        check_loop("Worker.members_changed", self._loop, "the worker")
        if self._is_awaited:
            raise UsageError(
                "another task waits for this iterator of members; make one for each"
            )
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
        self._waiting.append(change)
        if len(self._waiting) > CHANGES_MAX:
            self._waiting = deque(combined(self._waiting))
            if len(self._waiting) > COMBINED_MAX:
                self._waiting = deque([RESYNC])
        self._news.set()

    def end(self) -> None:
        """Internal: let the iteration end, after the changes that are kept."""
        self._is_closed = True
        self._news.set()

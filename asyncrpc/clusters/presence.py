"""Which incarnations of started workers the program's worker takes to be alive.

A worker that joins under the name of one that may still answer is refused, and the end
of a process is told (by Ray even before it) apart from that of its connections.  So a
worker is started again only after the program's worker has seen the former one go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from asyncrpc import ChangeKind, MemberChange, MemberChanges

_ARRIVALS = frozenset({ChangeKind.JOINED, ChangeKind.RESTARTED, ChangeKind.BACK})


class Presence:
    """Follows the membership of the program's worker."""

    def __init__(
        self, changes: MemberChanges, on_gone: Callable[[str, int, str], None]
    ) -> None:
        self._changes = changes
        self._on_gone = on_gone
        self._present: dict[str, int] = {}
        self._changed = asyncio.Condition()

    async def follow(self) -> None:
        """Follow the changes until the program's worker ends."""
        async for change in self._changes:
            async with self._changed:
                self._note(change)
                self._changed.notify_all()

    def _note(self, change: MemberChange) -> None:
        name = change.member.name
        if change.kind in _ARRIVALS:
            self._present[name] = change.incarnation
        elif self._present.get(name) == change.incarnation:
            del self._present[name]
            is_lost = change.kind is ChangeKind.LOST
            why = "the driver's worker lost it" if is_lost else "it shut down"
            self._on_gone(name, change.incarnation, why)

    async def until_gone(self, name: str) -> None:
        """Wait until no incarnation of a worker is alive."""
        async with self._changed:
            await self._changed.wait_for(lambda: name not in self._present)

"""A group that a part of the package uses alone, and recreates after a failure.

Ranks match collectives by their order.  A rank that fails in the middle of several
begins none of the rest, while another rank may wait in one of them.  So the rank leaves
the group, which tells the others, and the next group gets another name.  Each rank that
fails makes that group, and so the ranks meet again.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Sequence
from typing import Final

from asyncrpc.core.serde import words_of
from asyncrpc.errors import CollectiveError, UsageError
from asyncrpc.parallel.collectives.group import Group

_OPEN: Final = 2  # groups: the home, and the one in use


class RecreatableGroup:
    """Ranks with a group of their own, recreated after each failure."""

    def __init__(self, base: Group, ranks: Sequence[int] | None = None) -> None:
        """Prepare the group; nothing is sent.

        Args:
            ranks: the ranks that take part, including this one; None: all.
        """
        # Nothing is ever sent in this group: the names of the used groups begin with
        # its name.
        self._home = base.duplicate()
        self._ranks = range(base.size) if ranks is None else ranks
        self._open = [self._home]
        self._serial = 0
        self._has_left = False  # has left a group, and not entered the next one
        self._finalizer = weakref.finalize(
            self, _close_later, base.worker.loop, self._open
        )
        self._finalizer.atexit = False
        self._open_next()

    def enter(self) -> Group:
        """Return the group."""
        if not self._finalizer.alive:
            raise UsageError("this object was closed and has no group: make a new one")
        self._has_left = False
        return self._open_next()

    def renew(self) -> Group:
        """Return a new group; every rank calls it, wherever it has failed before.

        So a rank that has not noticed a failure of the others also meets them.
        """
        self.leave("")
        return self.enter()

    def leave(self, reason: str) -> None:
        """Give up the group: collectives of others in it fail, and the next one is new.

        Until `enter`, further calls do nothing: nested failures are one failure, as
        they are for the others, which must enter the same next group.

        Args:
            reason: what happened, as in "rank 1 ('b') `reason`"; empty: the group has
                failed already, and the others know why.
        """
        if self._has_left or len(self._open) < _OPEN:
            return
        group = self._open.pop()
        self._has_left = True
        if reason:
            with contextlib.suppress(CollectiveError):  # it has failed before
                group.refuse(reason)
        group.close()
        # It is open from now on, so that calls that enter it see `close`.
        with contextlib.suppress(UsageError):  # the worker has ended
            self._open_next()

    def close(self) -> None:
        """Leave for good; called on the loop.  Idempotent."""
        self._finalizer.detach()
        _close(self._open)

    def _open_next(self) -> Group:
        if len(self._open) < _OPEN:
            name = f"#{self._serial + 1}"
            self._open.append(self._home.subgroup(self._ranks, name=name))
            self._serial += 1
        return self._open[-1]


def reason_for(job: str, error: BaseException) -> str:
    """Return why a rank leaves; empty if the group has failed already."""
    if issubclass(type(error), CollectiveError):
        return ""
    if issubclass(type(error), asyncio.CancelledError):
        return f"cancelled {job}"
    return f"failed in {job}: {words_of(error)}"


def _close(groups: list[Group]) -> None:
    while groups:
        groups.pop().close()


def _close_later(loop: asyncio.AbstractEventLoop, groups: list[Group]) -> None:
    # The loop may be gone, with the worker and all of its groups.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(_close, groups)

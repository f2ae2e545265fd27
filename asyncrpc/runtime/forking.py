"""The effect of `os.fork` on a worker: the child has no worker.

The child holds the parent's sockets and a loop that polls with the parent's kernel
objects, but none of its threads: a call made there could be written into the middle of
the parent's, and never be answered.  So a fork ends the child's copy of every worker,
and using one raises.  The parent's are untouched.

`os.fork` belongs to the process, so the workers must be known process-wide: weakly.
Their loops are the parent's, too.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from typing import Final, Protocol


class Forkable(Protocol):
    """Ends in a forked child."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that it runs on."""

    def end_in_child(self) -> None:
        """Become unusable, and let go of nothing that the parent uses."""


_parents_loops: Final[list[object]] = []  # in a child: for good, as one may close
_known: Final[weakref.WeakSet[Forkable]] = weakref.WeakSet()


def end_in_forked_children(one: Forkable) -> None:
    """Make `one` end in every process that is forked from this one."""
    _known.add(one)


def known_workers() -> list[Forkable]:
    """Return every worker of this process that still exists, running or not."""
    return list(_known)


def is_parents(loop: object) -> bool:
    """Return whether a loop is that of a worker in the parent of this fork."""
    return any(loop is one for one in _parents_loops)


def _end_all() -> None:
    for one in known_workers():
        _parents_loops.append(one.loop)
        one.end_in_child()


os.register_at_fork(after_in_child=_end_all)

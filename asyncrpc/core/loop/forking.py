"""The effect of `os.fork` on a worker: the child has no worker.

The child holds the parent's sockets and a loop that polls with the parent's kernel
objects, but none of its threads: a call made there could be written into the middle of
the parent's, and never be answered.  So a fork ends the child's copy of every worker,
and using one raises.  The parent's are untouched.

`os.fork` belongs to the process, so the workers must be known process-wide: weakly.
Their loops are the parent's, too.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, Final, TypeVar

F = TypeVar("F")

_parents_loops: Final[list[object]] = []  # in a child: for good, as one may close
_known: Final[weakref.WeakKeyDictionary[Any, Callable[[Any], object]]] = (
    weakref.WeakKeyDictionary()
)


def end_in_forked_children(resource: F, end: Callable[[F], object]) -> None:
    """Make `resource` end in every process that is forked from this one.

    Args:
        resource: what is used here; it is known weakly.
        end: returns the event loop that it runs on.
    """
    _known[resource] = end


def known_workers() -> list[object]:
    """Return every worker of this process that still exists, running or not."""
    return list(_known)


def is_parents(loop: object) -> bool:
    """Return whether a loop is that of a worker in the parent of this fork."""
    return any(loop is parents_loop for parents_loop in _parents_loops)


def _end_all() -> None:
    for resource, end in list(_known.items()):
        _parents_loops.append(end(resource))


os.register_at_fork(after_in_child=_end_all)

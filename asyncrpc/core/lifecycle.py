"""The life of a worker: which states it has, and what may be done in each.

States and transitions are data, so that a test can go through all of them; the drawing
in docs/explanation/architecture.md is made from them.
"""

from __future__ import annotations

import enum
from typing import Final, NoReturn

from asyncrpc.core.state_table import StateTable
from asyncrpc.errors import (
    AlreadyStartedError,
    NotStartedError,
    UsageError,
)


class WorkerState(enum.Enum):
    """Where a worker is in its life."""

    NEW = "new"
    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"  # new calls are refused, those in flight may end
    CLOSED = "closed"
    FORKED = "forked"  # a copy in a forked child, which cannot be used


class Event(enum.Enum):
    """What happens to a worker."""

    START = "start"
    STARTED = "started"
    SHUT_DOWN = "shut down"  # or its start has failed
    DRAINED = "drained"
    FORK = "fork"


NEW, STARTING, RUNNING, DRAINING, CLOSED, FORKED = WorkerState

TRANSITIONS: Final = StateTable(
    "a worker",
    {
        NEW: {Event.START: STARTING},
        STARTING: {
            Event.STARTED: RUNNING,
            Event.SHUT_DOWN: DRAINING,
            Event.FORK: FORKED,
        },
        RUNNING: {Event.SHUT_DOWN: DRAINING, Event.FORK: FORKED},
        DRAINING: {Event.DRAINED: CLOSED, Event.FORK: FORKED},
        CLOSED: {Event.FORK: FORKED},
        FORKED: {Event.FORK: FORKED},
    },
)

_USABLE: Final = frozenset({STARTING, RUNNING, DRAINING})
_DRAINING: Final = frozenset({DRAINING, CLOSED})


class Lifecycle:
    """The state of one worker, and the errors about it.

    Attributes:
        is_usable: whether it may make calls; functions in flight may, while it drains.
        is_draining: whether shutdown has begun.
    """

    __slots__ = ("is_draining", "is_usable", "name", "state")

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = NEW
        self.is_usable = False
        self.is_draining = False

    def advance(self, event: Event) -> None:
        """Go to the state that follows."""
        if event is Event.START and self.state is not NEW:
            raise AlreadyStartedError(
                f"worker {self.name!r} has been started before; make a new Worker"
            )
        following = TRANSITIONS.after(self.state, event, f"worker {self.name!r}")
        self.state = following
        # Asked in every call, at either end: no look-up then.
        self.is_usable = following in _USABLE
        self.is_draining = following in _DRAINING

    @property
    def is_running(self) -> bool:
        """Return whether it has been started, and shutdown has not begun."""
        return self.state is RUNNING

    def check_running(self) -> None:
        """Raise if the worker does not run."""
        if self.is_usable:
            return
        if self.state is FORKED:
            raise NotStartedError(
                f"worker {self.name!r} belongs to the process that this one was"
                " forked from: a forked child has no worker; start processes with"
                " asyncrpc.multiprocessing or the method 'spawn', and a worker in"
                " each"
            )
        raise NotStartedError(
            f"worker {self.name!r} does not run: it has been shut down"
            if self.state is CLOSED
            else f"worker {self.name!r} has not been started; use `async with`"
        )


def refuse_to_pickle() -> NoReturn:
    """Refuse to pickle what belongs to a worker, such as a `Peer`."""
    raise UsageError("a Worker cannot be sent: it stays in its process; send its name")

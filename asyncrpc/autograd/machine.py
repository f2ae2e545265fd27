"""Which gradients are awaited, and what may run: one backward pass on one worker.

A *start* is a tensor that this worker sent (or a root of the loss): the backward pass
enters the local graph there, once its gradient has arrived.  A *leaf* is a tensor that
this worker received: there the pass leaves for its sender.  Before any gradient flows,
discovery has found all starts and leaves that take part (see `service`).

Where a pass enters a worker once, or its entries do not depend on one another, all
starts run in one engine call (WHOLE), so every node runs once, as in one process.  When
a pass goes through a worker more than once (A -> B -> A -> B), some of its starts wait
for gradients that others must produce first.  Then starts run as they come (PARTIAL):
the gradients of a leaf add up over the runs, and it is sent when the last start that
reaches it has run.  No wait is circular: a start waits for a leaf only if it was sent
before that leaf was received, and reaches it only if it was sent after.

Sans-IO, and without torch: starts and leaves are keys.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Generic, TypeVar

from asyncrpc.errors import LocalProtocolError, RemoteProtocolError

S = TypeVar("S", bound=Hashable)
L = TypeVar("L", bound=Hashable)
W = TypeVar("W", bound=Hashable)


class Mode(enum.Enum):
    """How a worker runs its starts."""

    WHOLE = "all at once, when every gradient is in"
    PARTIAL = "as their gradients come"


class PassMachine(Generic[S, L]):
    """The starts and leaves of one worker in one pass."""

    def __init__(self) -> None:
        self._known: set[S] = set()
        self._waiting: set[S] = set()  # no gradient yet
        self._ready: list[S] = []  # gradient here, not run
        self._reaches: dict[S, frozenset[L]] = {}
        self._missing: dict[L, int] = {}  # starts still to run that reach the leaf
        self._in_hand = 0  # starts that are running

    @property
    def is_done(self) -> bool:
        """Whether every start has run."""
        return not (self._waiting or self._ready or self._in_hand)

    def is_last(self, batch: Collection[S]) -> bool:
        """Say whether nothing runs beside a batch in hand, and nothing after it."""
        return not (self._waiting or self._ready) and self._in_hand == len(batch)

    @property
    def waits_for(self) -> Collection[S]:
        """Starts whose gradients have not come: what a stuck pass is stuck on."""
        return self._waiting

    def add_start(self, start: S) -> None:
        """Discovery has found that this start takes part.

        Raises:
            RemoteProtocolError: it was found before.
        """
        if start in self._known:
            raise RemoteProtocolError(f"{start} was discovered twice")
        self._known.add(start)
        self._waiting.add(start)

    def set_reach(self, reach: Mapping[S, Iterable[L]]) -> None:
        """Say which leaves each start reaches; needed for PARTIAL only."""
        for start, leaves in reach.items():
            self._reaches[start] = frozenset(leaves)
            for leaf in self._reaches[start]:
                self._missing[leaf] = self._missing.get(leaf, 0) + 1

    def arrive(self, starts: Iterable[S], mode: Mode) -> list[S]:
        """Take gradients that have come; return the starts to run now.

        Raises:
            RemoteProtocolError: a gradient nobody waits for.  Nothing changed.
        """
        arrived = list(starts)
        unknown = [start for start in arrived if start not in self._waiting]
        if unknown:
            raise RemoteProtocolError(f"a gradient for {unknown[0]}, which awaits none")
        self._waiting.difference_update(arrived)
        self._ready += arrived
        if mode is Mode.WHOLE and self._waiting:
            return []
        batch, self._ready = self._ready, []
        self._in_hand += len(batch)
        return batch

    def ran(self, batch: Collection[S]) -> list[L]:
        """Take note that starts have run; return leaves whose gradient is complete.

        In WHOLE mode no reach has been set and the caller sends all its leaves.
        """
        if len(batch) > self._in_hand:
            raise LocalProtocolError("more starts have run than were handed out")
        self._in_hand -= len(batch)
        complete = []
        for start in batch:
            for leaf in self._reaches.get(start, ()):
                self._missing[leaf] -= 1
                if not self._missing[leaf]:
                    complete.append(leaf)
        return complete


def workers_in_cycles(edges: Iterable[tuple[W, W]]) -> set[W]:
    """Return the workers that a pass goes through more than once.

    Args:
        edges: pairs of workers (from, to) between which gradients will flow.
    """
    after: dict[W, set[W]] = {}
    for source, target in edges:
        after.setdefault(source, set()).add(target)
    return {worker for worker in after if worker in _reachable(after, worker)}


def _reachable(after: Mapping[W, Collection[W]], start: W) -> set[W]:
    """Return what can be reached from `start` in one step or more."""
    found: set[W] = set()
    todo = list(after.get(start, ()))
    while todo:
        worker = todo.pop()
        if worker not in found:
            found.add(worker)
            todo += after.get(worker, ())
    return found

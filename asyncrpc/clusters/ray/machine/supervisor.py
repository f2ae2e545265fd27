r"""The machine that decides when workers of a gang start, and when the gang gives up.

              every worker is ready             a worker is lost
    STARTING ----------------------> RUNNING ---------------------> WAITING
       ^  \                                                          |   |
       |   +---- a worker is lost ---------------> WAITING           |   |
       +------------- the backoff is over ---------------------------+   |
                      no restart is left: FAILED <-----------------------+

    In every state the program may end the gang: STOPPED.

Each start, of the gang or of some of its workers, makes the next *generation*.  Each
start of a worker gives it the next *life*, which events name: a late event of a former
life changes nothing.

With the scope `GANG` a loss ends all workers, and all start again.  With `WORKER` only
lost workers start again.  Losses during the backoff join the same restart: the loss of
a node with four workers costs one restart.

The first generation is not restarted: if it cannot start, there is an error in the
program or the cluster, and the program gets it at once.

This machine knows neither Ray nor tasks nor clocks.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

from asyncrpc.clusters.restarts import RestartBudget, RestartLimits


class GangState(enum.Enum):
    STARTING = "starting"  # some workers of the generation are not ready yet
    RUNNING = "running"  # all workers are ready
    WAITING = "waiting"  # for the backoff, then workers start again
    FAILED = "failed"  # no restart is left, or the first generation did not start
    STOPPED = "stopped"  # the program ended the gang


class RestartScope(enum.Enum):
    """Which workers start again if one is lost."""

    GANG = "gang"
    WORKER = "worker"


class RankState(enum.Enum):
    ABSENT = "absent"  # never started, or ended
    BEGUN = "begun"  # it starts
    READY = "ready"


OVER: Final = frozenset({GangState.FAILED, GangState.STOPPED})


# --- events --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GangBegun:
    """Event: the bundles are placed; the first generation may start."""

    at_s: float


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """Event: a worker has started, and can be called."""

    rank: int
    life: int
    at_s: float


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """Event: a worker is gone, or could not start; `why` is for the program."""

    rank: int
    life: int
    why: str
    at_s: float


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Event: the time is `at_s`.  Due at `wakes_at_s`; harmless otherwise."""

    at_s: float


@dataclass(frozen=True, slots=True)
class GangEnd:
    """Event: the program ends the gang."""

    at_s: float


# --- effects -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartWorkers:
    """Effect: start these workers, each in its life, as part of a generation."""

    generation: int
    lives: tuple[tuple[int, int], ...]  # rank and life


@dataclass(frozen=True, slots=True)
class EndWorkers:
    """Effect: end these lives, whether or not they still run."""

    lives: tuple[tuple[int, int], ...]  # rank and life


@dataclass(frozen=True, slots=True)
class AnnounceLoss:
    """Effect: tell the program that a generation lost workers, and will be followed."""

    generation: int
    ranks: tuple[int, ...]
    why: str


@dataclass(frozen=True, slots=True)
class AnnounceGeneration:
    """Effect: tell the program that a generation runs; `ranks` are new in it."""

    generation: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AbandonGang:
    """Effect: tell the program that the gang has failed."""

    generation: int
    why: str


GangEvent: TypeAlias = GangBegun | WorkerReady | WorkerEnded | TimePassed | GangEnd
GangEffect: TypeAlias = (
    StartWorkers | EndWorkers | AnnounceLoss | AnnounceGeneration | AbandonGang
)


class GangSupervisor:
    """Decides for the workers with the ranks 0 to `size` - 1.

    Attributes:
        generation: number of the last generation that was started; 0 before the first.
        lives: number of the last life of each worker, by rank; 0 before the first.
        wakes_at_s: when a `TimePassed` is due; None: never.
    """

    def __init__(
        self,
        size: int,
        *,
        scope: RestartScope = RestartScope.GANG,
        limits: RestartLimits | None = None,
    ) -> None:
        self.state = GangState.WAITING
        self.generation = 0
        self.lives = [0] * size
        self.wakes_at_s: float | None = None
        self._scope = scope
        self._workers = [RankState.ABSENT] * size
        self._budget = RestartBudget(limits or RestartLimits())
        self._new: set[int] = set()  # ranks that started after the last announcement
        self._has_run = False

    def advance(self, event: GangEvent) -> list[GangEffect]:
        """Advance by one event."""
        if self.state in OVER:
            return []
        match event:
            case GangBegun():
                return self._start_absent() if self.generation == 0 else []
            case WorkerReady(rank, life):
                return self._on_ready(rank, life)
            case WorkerEnded(rank, life, why, at_s):
                return self._on_ended(rank, life, why, at_s)
            case TimePassed(at_s):
                is_due = self.wakes_at_s is not None and at_s >= self.wakes_at_s
                return self._start_absent() if is_due else []
            case GangEnd():
                return self._finish(GangState.STOPPED)

    def _on_ready(self, rank: int, life: int) -> list[GangEffect]:
        if not self._is_current(rank, life):
            return []
        self._workers[rank] = RankState.READY
        if self.state is not GangState.STARTING or not self._all_ready():
            return []
        self.state = GangState.RUNNING
        self._has_run = True
        ranks, self._new = _in_order(self._new), set()
        return [AnnounceGeneration(self.generation, ranks)]

    def _on_ended(
        self, rank: int, life: int, why: str, at_s: float
    ) -> list[GangEffect]:
        if not self._is_current(rank, life):
            return []
        lost = range(len(self.lives)) if self._scope is RestartScope.GANG else (rank,)
        ended = self._end(lost)
        if self.state is GangState.WAITING:  # it joins the restart that is to come
            return [ended, AnnounceLoss(self.generation, (rank,), why)]
        due_at_s = self._budget.take(at_s) if self._has_run else None
        if due_at_s is None:
            return [ended, *self._finish(GangState.FAILED, why)]
        self.wakes_at_s = due_at_s
        self.state = GangState.WAITING
        return [ended, AnnounceLoss(self.generation, (rank,), why)]

    def _start_absent(self) -> list[GangEffect]:
        self.generation += 1
        self.state = GangState.STARTING
        self.wakes_at_s = None
        lives = []
        for rank, state in enumerate(self._workers):
            if state is RankState.ABSENT:
                self.lives[rank] += 1
                self._workers[rank] = RankState.BEGUN
                self._new.add(rank)
                lives.append((rank, self.lives[rank]))
        return [StartWorkers(self.generation, tuple(lives))]

    def _end(self, ranks: Iterable[int]) -> EndWorkers:
        """Note that these workers end; return the effect."""
        ended = []
        for rank in ranks:
            if self._workers[rank] is not RankState.ABSENT:
                self._workers[rank] = RankState.ABSENT
                ended.append((rank, self.lives[rank]))
        return EndWorkers(tuple(ended))

    def _finish(self, state: GangState, why: str = "") -> list[GangEffect]:
        self.state = state
        self.wakes_at_s = None
        ending = self._end(range(len(self.lives)))
        effects: list[GangEffect] = [ending] if ending.lives else []
        if state is GangState.FAILED:
            effects.append(AbandonGang(self.generation, why))
        return effects

    def _is_current(self, rank: int, life: int) -> bool:
        is_there = self._workers[rank] is not RankState.ABSENT
        return is_there and self.lives[rank] == life

    def _all_ready(self) -> bool:
        return all(worker is RankState.READY for worker in self._workers)


def _in_order(ranks: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(ranks))

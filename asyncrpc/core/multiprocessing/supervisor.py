"""The machine that watches a group of processes: all of them succeed, or none goes on.

    RUNNING --failure, timeout, request--> STOPPING --grace is over--> KILLING
       |                                      |                           |
       +--------------- every process has exited: DONE ------------------+

It decides which processes to signal, when, and which failure was the first; it knows
neither processes nor clocks.  `processes` drives it for `launch`, `tools.cli` for
the command line.

The first failure is not always the first that is seen: a process that lost its peer can
report before the peer's own end is noticed.  So an exception counts from the time at
which its process reported it, and a process that died of a signal from elsewhere comes
before any exception: an exception follows from such a death, seldom the reverse.

Source: torchrun takes the earliest timestamp, that of a process's error file or else
the time at which its end was seen (torch/distributed/elastic/multiprocessing/errors).
It has no rule for signals.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias

from asyncrpc.errors import LocalProtocolError

GRACE_S: Final = 2.0  # seconds from SIGTERM to SIGKILL: time to run `finally` blocks


class LaunchPhase(enum.Enum):
    RUNNING = "running"
    STOPPING = "stopping"  # the rest have been asked to end
    KILLING = "killing"  # the grace is over: SIGKILL was sent
    DONE = "done"


class Reason(enum.Enum):
    """Why a group was stopped before all had returned."""

    FAILURE = "a process failed"
    TIMEOUT = "the time limit passed"
    REQUEST = "the program asked for it"


@dataclass(frozen=True, slots=True)
class Failed:
    """Event: the function of `rank` raised.

    Attributes:
        raised_at_s: when, by the clock of the host, read in that process.
        at_s: when it was seen here.
    """

    rank: int
    raised_at_s: float
    at_s: float


@dataclass(frozen=True, slots=True)
class Exited:
    """Event: `rank` has ended; a negative code is the signal that killed it."""

    rank: int
    exit_code: int
    at_s: float


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Event: the program or its user asks to stop; SIGKILL follows in `grace_s`."""

    at_s: float
    grace_s: float = GRACE_S


@dataclass(frozen=True, slots=True)
class Elapsed:
    """Event: it is `at_s` now.  Due at `Supervisor.wakes_at_s`; harmless otherwise."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Terminate:
    """Effect: ask these processes to end (SIGTERM)."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Kill:
    """Effect: end these processes (SIGKILL)."""

    ranks: tuple[int, ...]


Event: TypeAlias = Failed | Exited | StopRequested | Elapsed
Effect: TypeAlias = Terminate | Kill


@dataclass(frozen=True, slots=True, order=True)
class _Candidate:
    """A failure that may have been the first; the smallest one was."""

    is_exception: bool  # False sorts first: killed by a signal from elsewhere
    at_s: float
    rank: int


class Supervisor:
    """Watches `nprocs` processes, from their start to the end of the last."""

    def __init__(
        self, nprocs: int, *, grace_s: float = GRACE_S, stop_at_s: float | None = None
    ) -> None:
        self.phase = LaunchPhase.RUNNING
        self.reason: Reason | None = None
        self.unfinished: tuple[int, ...] = ()  # ranks that ran when the end was ordered
        self.alive = set(range(nprocs))
        self._grace_s = grace_s
        self._stop_at_s = stop_at_s
        self._ordered_at_s = 0.0
        self._kill_at_s: float | None = None
        self._candidates: dict[int, _Candidate] = {}

    @property
    def first_failed(self) -> int | None:
        """Rank of the process that failed first; final once the phase is DONE."""
        first = min(self._candidates.values(), default=None)
        return None if first is None else first.rank

    @property
    def wakes_at_s(self) -> float | None:
        """When an `Elapsed` is due; None if never."""
        match self.phase:
            case LaunchPhase.RUNNING:
                return self._stop_at_s
            case LaunchPhase.STOPPING:
                return self._kill_at_s
            case LaunchPhase.KILLING | LaunchPhase.DONE:
                return None

    def advance(self, event: Event) -> list[Effect]:
        """Advance by one event."""
        match event:
            case Failed(rank, raised_at_s, at_s):
                self._check_alive(rank)
                return self._on_failed(rank, raised_at_s, at_s)
            case Exited(rank, exit_code, at_s):
                self._check_alive(rank)
                return self._on_exited(rank, exit_code, at_s)
            case StopRequested(at_s, grace_s):
                return self._on_stop_requested(at_s, grace_s)
            case Elapsed(at_s):
                return self._on_elapsed(at_s)

    def _on_failed(self, rank: int, raised_at_s: float, at_s: float) -> list[Effect]:
        if self.phase is LaunchPhase.RUNNING or raised_at_s <= self._ordered_at_s:
            candidate = _Candidate(is_exception=True, at_s=raised_at_s, rank=rank)
            self._candidates.setdefault(rank, candidate)
        return self._stop(Reason.FAILURE, at_s, self._grace_s)

    def _on_exited(self, rank: int, exit_code: int, at_s: float) -> list[Effect]:
        self.alive.remove(rank)
        effects: list[Effect] = []
        if exit_code != 0:
            if rank not in self._candidates and self._is_own_failure(exit_code, at_s):
                self._candidates[rank] = _Candidate(
                    is_exception=exit_code > 0, at_s=at_s, rank=rank
                )
            effects = self._stop(Reason.FAILURE, at_s, self._grace_s)
        if not self.alive:
            self.phase = LaunchPhase.DONE
        return effects

    def _is_own_failure(self, exit_code: int, at_s: float) -> bool:
        """Return whether this end is a cause, not a consequence of our signals."""
        if self.phase is LaunchPhase.RUNNING:
            return True
        if self.reason is not Reason.FAILURE:
            return False
        # SIGTERM can make a process crash in its own way, and exit with any code, but
        # not die of SIGKILL.  An end seen in the same instant as the first failure was
        # not caused by signals that we sent after it.
        by_kill = exit_code == -signal.SIGKILL and self.phase is LaunchPhase.STOPPING
        return by_kill or (exit_code < 0 and at_s <= self._ordered_at_s)

    def _on_stop_requested(self, at_s: float, grace_s: float) -> list[Effect]:
        if self.phase is not LaunchPhase.STOPPING:
            return self._stop(Reason.REQUEST, at_s, grace_s)
        assert self._kill_at_s is not None
        self._kill_at_s = min(self._kill_at_s, at_s + grace_s)  # an earlier time wins
        return self._on_elapsed(at_s)

    def _on_elapsed(self, at_s: float) -> list[Effect]:
        wakes_at_s = self.wakes_at_s
        if wakes_at_s is None or at_s < wakes_at_s:
            return []
        if self.phase is LaunchPhase.RUNNING:
            return self._stop(Reason.TIMEOUT, at_s, self._grace_s)
        self.phase = LaunchPhase.KILLING
        return [Kill(_in_order(self.alive))]

    def _stop(self, reason: Reason, at_s: float, grace_s: float) -> list[Effect]:
        if self.phase is not LaunchPhase.RUNNING:
            return []
        self.phase = LaunchPhase.STOPPING
        self.reason = reason
        self.unfinished = _in_order(self.alive)
        self._ordered_at_s = at_s
        self._kill_at_s = at_s + grace_s
        return [Terminate(self.unfinished)] if self.alive else []

    def _check_alive(self, rank: int) -> None:
        if rank not in self.alive:
            raise LocalProtocolError(f"an event came for rank {rank}, which has ended")


def _in_order(ranks: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(ranks))

"""The machine of one worker of a cluster: when it starts, ends, and starts again.

                   it is ready                it is lost
    STARTING --------------------> RUNNING -----------------> WAITING
       |  ^                           |                        |   |
       |  +---------------------------|------------------------+   |
       |       the backoff is over, or a restart is asked          |
       |                              | a stop is asked            | no restart is left
       v                              v                            v
     ENDED <--------------------- STOPPING                       ENDED

Each start is a new *life*, which events name: a late event of a former life changes
nothing.  A worker that has never been ready is not restarted: there is an error in the
program or on the host, and the program gets it at once.  If all restart together, the
loss of one stops the others, which then wait as it does.

This machine knows neither processes nor clocks.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

from asyncrpc.clusters.restarts import RestartBudget


class ClusterWorkerState(enum.StrEnum):
    """What a worker of a cluster does."""

    STARTING = "starting"
    RUNNING = "running"
    WAITING = "waiting"  # for the backoff, then it starts again
    STOPPING = "stopping"
    ENDED = "ended"


# --- events --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartAsked:
    """Event: the program wants the worker to run."""


@dataclass(frozen=True, slots=True)
class LifeReady:
    """Event: a life can be called."""

    life: int


@dataclass(frozen=True, slots=True)
class LifeEnded:
    """Event: a life has ended, or could not start; `why` is for the program."""

    life: int
    why: str
    at_s: float


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Event: the program wants the worker to end."""


@dataclass(frozen=True, slots=True)
class RestartAsked:
    """Event: the program wants a new life now."""


@dataclass(frozen=True, slots=True)
class OtherLost:
    """Event: another worker was lost, and all start again at `at_s`."""

    why: str
    at_s: float


@dataclass(frozen=True, slots=True)
class TimeCame:
    """Event: it is `at_s` now."""

    at_s: float


# --- effects -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartLife:
    """Effect: start a process for this life."""

    life: int


@dataclass(frozen=True, slots=True)
class StopLife:
    """Effect: end the process of this life, in order."""

    life: int


@dataclass(frozen=True, slots=True)
class RestartOthers:
    """Effect: tell the machines of all other workers `OtherLost`."""

    at_s: float


@dataclass(frozen=True, slots=True)
class TellChange:
    """Effect: tell the program.

    Attributes:
        kind: `"ready"`, `"lost"` (a restart follows), `"failed"` (none does) or
            `"stopped"`.
    """

    kind: str
    life: int
    why: str = ""


Event: TypeAlias = (
    StartAsked | LifeReady | LifeEnded | StopAsked | RestartAsked | OtherLost | TimeCame
)
Order: TypeAlias = StartLife | StopLife | RestartOthers
Effect: TypeAlias = Order | TellChange

_State = ClusterWorkerState


class WorkerMachine:
    """Decides for one worker.

    Attributes:
        life: number of its last life, from 1; 0 before the first.
        wakes_at_s: when a `TimeCame` is due; None: never.
    """

    def __init__(self, budget: RestartBudget | None) -> None:
        """Begin with a worker that does not run.

        Args:
            budget: of its restarts, or of all workers that restart together; None: a
                lost worker is not restarted.
        """
        self.state = _State.ENDED
        self.life = 0
        self.wakes_at_s: float | None = None
        self._budget = budget
        self._has_run = False
        self._begins_anew = False  # once it has stopped
        self._loss: OtherLost | None = None  # for which it stops

    def advance(self, event: Event) -> list[Effect]:
        """Advance by one event."""
        match event:
            case StartAsked():
                if self.state is _State.STOPPING:
                    self._begins_anew = True
                return self._start() if self.state is _State.ENDED else []
            case LifeReady(life):
                return self._on_ready(life)
            case LifeEnded(life, why, at_s):
                return self._on_gone(life, why, at_s) if life == self.life else []
            case StopAsked() | RestartAsked():
                return self._stop(begins_anew=isinstance(event, RestartAsked))
            case OtherLost():
                return self._stop_with(event)
            case TimeCame(at_s):
                is_due = self.wakes_at_s is not None and at_s >= self.wakes_at_s
                return self._start() if is_due else []

    def _start(self) -> list[Effect]:
        self.state, self.wakes_at_s = _State.STARTING, None
        self.life += 1
        return [StartLife(self.life)]

    def _on_ready(self, life: int) -> list[Effect]:
        if life != self.life or self.state is not _State.STARTING:
            return []
        self.state, self._has_run = _State.RUNNING, True
        return [TellChange("ready", life)]

    def _on_gone(self, life: int, why: str, at_s: float) -> list[Effect]:
        if self.state is _State.STOPPING:
            return self._on_stopped()
        if self.state not in (_State.STARTING, _State.RUNNING):
            return []
        if self._has_run and self._budget is not None:
            self.wakes_at_s = self._budget.take(at_s)
        if self.wakes_at_s is None:
            self.state = _State.ENDED
            return [TellChange("failed", life, why)]
        self.state = _State.WAITING
        lost = TellChange("lost", life, why)
        if self._budget is None or not self._budget.limits.together:
            return [lost]
        return [lost, RestartOthers(self.wakes_at_s)]

    def _on_stopped(self) -> list[Effect]:
        if self._loss is not None:
            self.state, self.wakes_at_s = _State.WAITING, self._loss.at_s
            return [TellChange("lost", self.life, self._loss.why)]
        if self._begins_anew:
            return self._start()
        self.state = _State.ENDED
        return [TellChange("stopped", self.life)]

    def _stop_with(self, loss: OtherLost) -> list[Effect]:
        if self.state not in (_State.STARTING, _State.RUNNING):
            return []
        self.state, self._loss = _State.STOPPING, loss
        return [StopLife(self.life)]

    def _stop(self, *, begins_anew: bool) -> list[Effect]:
        match self.state:
            case _State.STARTING | _State.RUNNING:
                self.state, self._loss = _State.STOPPING, None
                self._begins_anew = begins_anew
                return [StopLife(self.life)]
            case _State.STOPPING:
                self._begins_anew, self._loss = begins_anew, None
                return []
            case _State.WAITING | _State.ENDED:
                if begins_anew:
                    return self._start()
                was_waiting = self.state is _State.WAITING
                self.state, self.wakes_at_s = _State.ENDED, None
                return [TellChange("stopped", self.life)] if was_waiting else []

"""The workers of a cluster, each with its machine, and what the program hears of them.

Who feeds the machines is elsewhere: `lives` for workers that the program starts,
`attachment` for those that something else has started.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from asyncrpc.clusters import machine as m
from asyncrpc.clusters.changes import Broadcast, ClusterChange
from asyncrpc.clusters.hosts import WorkerHost, WorkerProcess
from asyncrpc.clusters.restarts import RestartBudget
from asyncrpc.clusters.worker import WorkerFailed
from asyncrpc.core.arguments import wrong

_State = m.ClusterWorkerState


@dataclass(slots=True, eq=False)
class ClusterWorker:
    """One worker of a cluster.

    Attributes:
        host: that starts its processes; None: something else does.
        process: of its last life; None: it has not begun, or is not ours.
        incarnation: of its last life that was ready; 0: of none.
        failure: why it did not start, if that is so.
        why: what happened last, as text.
        awaited: ends the wait of calls while it starts; None: none wait.
        news: wakes all that wait for its machine; it is never set for long.
        timer: of its machine.
    """

    name: str
    machine: m.WorkerMachine
    host: WorkerHost | None = None
    process: WorkerProcess | None = None
    incarnation: int = 0
    failure: WorkerFailed | None = None
    why: str = ""
    awaited: asyncio.Future[None] | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)
    timer: asyncio.TimerHandle | None = None

    @property
    def is_ended(self) -> bool:
        """Whether it does not run, and is not to run again."""
        return self.machine.state is _State.ENDED

    @property
    def is_awaited(self) -> bool:
        """Whether it starts, or is to start."""
        return self.machine.state in {_State.STARTING, _State.WAITING}

    @property
    def is_changing(self) -> bool:
        """Whether it will run, or have ended, soon."""
        return not (self.is_ended or self.is_running)

    @property
    def is_running(self) -> bool:
        """Whether it can be called."""
        return self.machine.state is _State.RUNNING


class Roster:
    """The workers of a cluster, in the order of their start."""

    def __init__(self) -> None:
        self.members: dict[str, ClusterWorker] = {}
        self.broadcast = Broadcast(asyncio.get_running_loop())
        self._loop = asyncio.get_running_loop()

    @property
    def names(self) -> list[str]:
        """The names of the workers that run, or are to run again."""
        return [name for name, member in self.members.items() if not member.is_ended]

    @property
    def running(self) -> list[str]:
        """The names of the workers that can be called now."""
        return [name for name, member in self.members.items() if member.is_running]

    def next_names(self, count: int) -> list[str]:
        """Return the next of `w0`, `w1` and so on that are free."""
        taken = {*self.names}
        free = (name for number in itertools.count() if (name := f"w{number}"))
        return list(itertools.islice((x for x in free if x not in taken), count))

    def add(
        self, name: str, budget: RestartBudget | None, host: WorkerHost | None
    ) -> ClusterWorker:
        """Add a worker that does not run yet, in place of one that does not."""
        member = ClusterWorker(name, m.WorkerMachine(budget), host)
        self.members[name] = member
        return member

    def member(self, name: str) -> ClusterWorker:
        """Return a worker; UsageError: there is none of this name."""
        member = self.members.get(name) if isinstance(name, str) else None
        if member is None:
            known = ", ".join(map(repr, self.members)) or "none"
            raise wrong("name", f"that of a worker of the cluster ({known})", name)
        return member

    def advance(
        self,
        member: ClusterWorker,
        event: m.Event,
        act: Callable[[ClusterWorker, m.Order], None],
    ) -> None:
        """Advance a machine; tell the program, and let `act` do the rest."""
        for effect in member.machine.advance(event):
            match effect:
                case m.TellChange(kind, life, why):
                    member.why = why
                    change = ClusterChange(kind, member.name, life, why)
                    self.broadcast.tell(change)
                case _:
                    act(member, effect)
        if member.timer is not None:
            member.timer.cancel()
            member.timer = None
        due_s = member.machine.wakes_at_s
        if due_s is not None:
            passed = m.TimeCame(due_s)
            member.timer = self._loop.call_at(due_s, self.advance, member, passed, act)
        member.news.set()  # wakes all that wait now
        member.news.clear()

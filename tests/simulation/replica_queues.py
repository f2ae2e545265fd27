"""Queues behind routers, as events in virtual time: what each policy does to the tail.

Each replica works on a few calls at once; the others wait.  The routers share nothing.
What chooses is the machine that the real routers have, `serving.replicas.machine`; the
policies that it is compared with are here.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeAlias

from asyncrpc.serving import ReplicaOptions
from asyncrpc.serving.replicas.machine.attempts import Health
from asyncrpc.serving.replicas.machine.routing import ReplicaRecord, Routing

FUNCTION: Final = "predict"
WIRE_S: Final = 0.0003  # one way
MEDIAN_S: Final = 0.010
SPREAD: Final = 0.4  # sigma of the log-normal distribution


@dataclass(frozen=True, slots=True)
class Traffic:
    """What is asked, and what makes answers late.

    Attributes:
        replicas: how many there are.
        slots: calls that each works on at once.
        routers: how many there are.
        load: share of the slots that is busy, if nothing is late.
        slow_replica: by which factor one of the replicas is slower.
        straggler_share: share of the calls that take longer, wherever they run.
        straggler_factor: by which factor.
        pause_every_s: mean time between two pauses of a replica; 0: it has none.
        pause_s: how long it then does nothing at all, as in a garbage collection.
    """

    replicas: int = 10
    slots: int = 4
    routers: int = 4
    load: float = 0.5
    slow_replica: float = 1.0
    straggler_share: float = 0.0
    straggler_factor: float = 1.0
    pause_every_s: float = 0.0
    pause_s: float = 0.0


@dataclass(slots=True, eq=False)
class Job:
    """One attempt at a replica."""

    work_s: float
    done: Callable[[Job], None]
    end_s: float = 0.0
    began_s: float = -1.0
    is_over: bool = False


@dataclass(slots=True, eq=False)
class Server:
    """One replica: slots, and those who wait for one."""

    clock: Clock
    slots: int
    factor: float = 1.0
    running: set[Job] = field(default_factory=set)
    waiting: deque[Job] = field(default_factory=deque)
    paused_until_s: float = 0.0
    worked_s: float = 0.0

    @property
    def load(self) -> int:
        return len(self.running) + len(self.waiting)

    def take(self, job: Job) -> None:
        self.waiting.append(job)
        self._start()

    def _start(self) -> None:
        now_s = self.clock.now_s
        while self.waiting and len(self.running) < self.slots:
            job = self.waiting.popleft()
            job.began_s = max(now_s, self.paused_until_s)
            job.end_s = job.began_s + job.work_s * self.factor
            self.running.add(job)
            self.clock.at(job.end_s, partial(self._on_time, job))

    def _on_time(self, job: Job) -> None:
        if job.is_over:
            return
        if job.end_s > self.clock.now_s:  # a pause came between
            self.clock.at(job.end_s, lambda: self._on_time(job))
            return
        self._leave(job)
        job.done(job)

    def cancel(self, job: Job) -> None:
        if job.is_over:
            return
        if job in self.running:
            self._leave(job)
        else:
            job.is_over = True
            self.waiting.remove(job)

    def _leave(self, job: Job) -> None:
        job.is_over = True
        self.running.discard(job)
        self.worked_s += max(self.clock.now_s - job.began_s, 0.0)
        self._start()

    def pause(self, duration_s: float) -> None:
        self.paused_until_s = self.clock.now_s + duration_s
        for job in self.running:
            job.end_s += duration_s


class Clock:
    """Events, in the order of their time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._serials = itertools.count()

    def at(self, time_s: float, event: Callable[[], object]) -> None:
        heapq.heappush(self._events, (time_s, next(self._serials), event))

    def run(self) -> None:
        while self._events:
            self.now_s, _, event = heapq.heappop(self._events)
            event()


PLAIN: Final = ReplicaOptions(hedge_quantile=None, warm_s=0.0)
Chooser: TypeAlias = Callable[["Router", list[ReplicaRecord]], ReplicaRecord | None]


def at_random(router: Router, tried: list[ReplicaRecord]) -> ReplicaRecord | None:
    del tried  # these do not hedge
    return router.rng.choice(router.records)


def round_robin(router: Router, tried: list[ReplicaRecord]) -> ReplicaRecord | None:
    del tried
    return next(router.turn)


def least_outstanding(
    router: Router, tried: list[ReplicaRecord]
) -> ReplicaRecord | None:
    """Of all replicas: the one with which this router has the fewest calls."""
    del tried
    fewest = min(record.outstanding for record in router.records)
    return router.rng.choice(
        [record for record in router.records if record.outstanding == fewest]
    )


def two_choices(router: Router, tried: list[ReplicaRecord]) -> ReplicaRecord | None:
    return router.routing.choose(router.clock.now_s, router.rng.random, tried=tried)


@dataclass(frozen=True, slots=True)
class Policy:
    name: str
    choose: Chooser
    options: ReplicaOptions = PLAIN


POLICIES: Final = (
    Policy("random", at_random),
    Policy("round robin", round_robin),
    Policy("least outstanding", least_outstanding),
    Policy("two choices", two_choices),
    Policy("two choices, hedged", two_choices, ReplicaOptions(warm_s=0.0)),
)


class Router:
    """One router, with a machine of its own."""

    def __init__(
        self, clock: Clock, policy: Policy, servers: list[Server], rng: random.Random
    ) -> None:
        self.clock = clock
        self.policy = policy
        self.rng = rng
        self.routing = Routing(policy.options)
        self.latencies_s: list[float] = []
        self.attempts = 0
        self.servers: dict[ReplicaRecord, Server] = {}
        for number, server in enumerate(servers):
            record = self.routing.add(f"model-{number}", number)
            self.routing.make_ready(record, 0.0, age_s=0.0)
            self.servers[record] = server
        self.records = list(self.servers)
        self.turn = itertools.cycle(rng.sample(self.records, len(self.records)))


class Call:
    """One call of a router, with one attempt or two."""

    def __init__(self, router: Router, draw_work_s: Callable[[], float]) -> None:
        self.router = router
        self.draw_work_s = draw_work_s
        self.began_s = router.clock.now_s
        self.jobs: dict[Job, ReplicaRecord] = {}
        self.first: Job | None = None
        self.is_over = False
        router.routing.hedges.pay(self.began_s)
        record = router.policy.choose(router, [])
        assert record is not None
        self.first = self._send(record)
        after_s = None
        if router.policy.options.hedge_quantile is not None:
            after_s = router.routing.hedge_after_s(FUNCTION)
        if after_s is not None:
            router.clock.at(self.began_s + after_s, self._hedge)

    def _send(self, record: ReplicaRecord) -> Job:
        router = self.router
        job = Job(self.draw_work_s(), self._on_done)
        self.jobs[job] = record
        router.routing.begin(record)
        router.attempts += 1
        server = router.servers[record]

        def arrive() -> None:
            if not job.is_over:
                server.take(job)

        router.clock.at(router.clock.now_s + WIRE_S, arrive)
        return job

    def _hedge(self) -> None:
        if self.is_over:
            return
        record = self.router.policy.choose(self.router, list(self.jobs.values()))
        if record is not None and self.router.routing.hedges.take():
            self._send(record)

    def _on_done(self, job: Job) -> None:
        """The replica has answered; the answer is on its way."""
        load = self.router.servers[self.jobs[job]].load
        clock = self.router.clock
        clock.at(clock.now_s + WIRE_S, lambda: self._on_answer(job, load))

    def _on_answer(self, job: Job, load: int) -> None:
        router, now_s = self.router, self.router.clock.now_s
        record = self.jobs[job]
        if self.is_over:
            return
        self.is_over = True
        router.routing.end(record, Health.GOOD, now_s)
        record.tell_load(load, now_s)
        # The first attempt has taken so long, or longer: see `LatencyWindow`.
        router.routing.record_latency(FUNCTION, now_s - self.began_s)
        router.latencies_s.append(now_s - self.began_s)
        for other, there in self.jobs.items():
            if other is not job:
                router.routing.end(there, Health.UNKNOWN, now_s)
                self._cancel(other, router.servers[there])

    def _cancel(self, job: Job, server: Server) -> None:
        def arrive() -> None:
            if job.began_s < 0 and job not in server.waiting:
                job.is_over = True  # it had not come yet
            server.cancel(job)

        clock = self.router.clock
        clock.at(clock.now_s + WIRE_S, arrive)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a policy did.

    Attributes:
        latencies_s: sorted.
        extra_calls: attempts beyond one for each call, as a share of the calls.
        worked_s: time for which slots were busy.
    """

    latencies_s: list[float]
    extra_calls: float
    worked_s: float

    def quantile_s(self, share: float) -> float:
        return self.latencies_s[int(share * len(self.latencies_s))]


def play(policy: Policy, traffic: Traffic, *, calls: int, seed: int) -> Outcome:
    """Let a policy serve some traffic; all policies see the same with one seed."""
    arriving, working, pausing, choosing = (
        random.Random(f"{seed} {of}") for of in ("arrive", "work", "pause", "choose")
    )
    clock = Clock()
    servers = [Server(clock, traffic.slots) for _ in range(traffic.replicas)]
    servers[0].factor = traffic.slow_replica
    routers = [
        Router(clock, policy, servers, random.Random(choosing.random()))
        for _ in range(traffic.routers)
    ]
    mean_s = MEDIAN_S * 2.718281828 ** (SPREAD**2 / 2)
    rate = traffic.load * traffic.replicas * traffic.slots / mean_s

    def draw_work_s() -> float:
        work_s = MEDIAN_S * working.lognormvariate(0.0, SPREAD)
        if working.random() < traffic.straggler_share:
            work_s *= traffic.straggler_factor
        return work_s

    end_s = 0.0
    for _ in range(calls):
        end_s += arriving.expovariate(rate)
        router = arriving.choice(routers)
        clock.at(end_s, partial(Call, router, draw_work_s))
    for server in servers if traffic.pause_every_s else ():
        time_s = pausing.expovariate(1 / traffic.pause_every_s)
        while time_s < end_s:
            clock.at(time_s, partial(server.pause, traffic.pause_s))
            time_s += traffic.pause_s + pausing.expovariate(1 / traffic.pause_every_s)
    clock.run()
    latencies_s = sorted(itertools.chain(*(router.latencies_s for router in routers)))
    assert len(latencies_s) == calls
    attempts = sum(router.attempts for router in routers)
    worked_s = sum(server.worked_s for server in servers)
    return Outcome(latencies_s, attempts / calls - 1.0, worked_s)


STRAGGLING: Final = Traffic(straggler_share=0.01, straggler_factor=40.0)
PAUSING: Final = Traffic(pause_every_s=20.0, pause_s=0.3)
SCENARIOS: Final = {
    "nothing is slow": Traffic(),
    "one replica is three times as slow": Traffic(slow_replica=3.0),
    "each replica pauses for 0.3 s every 20 s": PAUSING,
    "1 % of the calls take 40 times as long": STRAGGLING,
    "all of these": Traffic(
        slow_replica=3.0,
        straggler_share=0.01,
        straggler_factor=40.0,
        pause_every_s=20.0,
        pause_s=0.3,
    ),
}

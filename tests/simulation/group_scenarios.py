"""Groups of workers on virtual time: what goes wrong, and what must hold all the same.

In each run the workers have a group, a duplicate of it, and a group of some of them, in
which they take part in random collectives at the same time, several of each under way.

    groups    late, lost and held up packets, broken connections: nothing fails
    mistakes  a rank does something else, comes too late, gives up, or refuses: that
              collective fails for all who have not ended it, and names the rank
    losses    a worker dies, is cut off for long, or leaves: all of its groups end for
              all, and name it; those who are left make another one

Nobody waits for ever: that is a deadlock, or takes longer than `world.HANG_S`.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from asyncrpc import Group
from asyncrpc.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    GroupChangedError,
    RankLostError,
)
from asyncrpc.parallel.collectives import message_path
from asyncrpc.parallel.collectives.messages import SERVICE
from asyncrpc.testing.loop import DeadlockError, SimLoop
from asyncrpc.testing.network import Network
from tests.simulation import checks
from tests.simulation.group_programs import (
    FOR_ALL,
    KINDS,
    NUMBERED,
    RING_BYTES,
    Op,
    Tensors,
    another,
    bits_of,
    perform,
    problem_with,
    program,
)
from tests.simulation.participant import Participant
from tests.simulation.scenarios import SETTLE_S, TRACE_LINES, Result, watched_log
from tests.simulation.world import OPTIONS, World

OPS: Final = 10  # of each group
WORKERS: Final = (2, 3, 3, 4, 4, 5, 6, 8)  # one of these
AT_A_TIME: Final = 4
TIMEOUT_S: Final = 8.0  # where somebody comes too late
LATE_S: Final = 12.0
LONG_S: Final = 150.0  # where nobody does: a limit that shows what hangs


@dataclass(frozen=True, slots=True)
class Plan:
    """What happens in a scenario.

    Attributes:
        mistakes: how many, in each group.
        deaths: how many workers die.
        leaving: whether a worker may leave its groups.
        cuts: how often the connections of two workers break.
        partitions: how often two workers are parted, for less than it takes to be lost.
        parting: how often they are for longer.
        delay_s: longest mean delay between two workers.
        loss: highest share of packets lost.
        timeout_s: of the groups.
        lost_after_s: of the workers; see `Options`.
    """

    mistakes: int = 0
    deaths: int = 0
    leaving: bool = False
    cuts: int = 0
    partitions: int = 0
    parting: int = 0
    delay_s: float = 0.02
    loss: float = 0.0
    timeout_s: float = LONG_S
    lost_after_s: float = OPTIONS.liveness.lost_after_s


PLANS: Final = {
    "groups": Plan(cuts=4, partitions=2, loss=0.02, lost_after_s=30.0),
    "mistakes": Plan(mistakes=4, cuts=2, timeout_s=TIMEOUT_S),
    "losses": Plan(deaths=1, leaving=True, parting=1, cuts=2),
}


class Lane:
    """One group of the run, at all of its ranks.

    Attributes:
        name: of it.
        members: its workers.
        ops: what they do, in batches that begin together.
        culprits: by number of an op, those whose fault it is if it fails.
        lost: those by whose loss everything may.
        begun: by number, ranks that have begun the op, and nothing else.
        got: by number and rank, all bits of what it got.
        failed: by number and rank, how it failed.
    """

    def __init__(self, name: str, members: Sequence[str], ops: list[Op]) -> None:
        self.name = name
        self.members = tuple(members)
        self.ops = ops
        self.batches: list[list[Op]] = []
        self.mistakes: dict[tuple[int, str], Mistake] = {}
        self.late: set[tuple[int, str]] = set()  # batch and worker
        self.behind: set[int] = set()  # ops to which others come early, or late
        self.culprits: dict[int, set[str]] = {op.number: set() for op in ops}
        self.lost: set[str] = set()
        self.begun: dict[int, set[str]] = {op.number: set() for op in ops}
        self.got: dict[tuple[int, str], list[bytes]] = {}
        self.failed: dict[tuple[int, str], BaseException] = {}

    def problems(self) -> list[str]:
        """Say what should not have been."""
        return [
            f"{self.name}: {problem}"
            for op in self.ops
            for problem in (*self._failures(op), *self._successes(op))
        ]

    def _failures(self, op: Op) -> list[str]:
        failures = []
        for name in self.members:
            culprits = self.culprits[op.number] | self.lost
            error = self.failed.get((op.number, name))
            if error is None or isinstance(error, asyncio.CancelledError):
                continue
            if isinstance(error, CollectiveTimeoutError) and op.number in self.behind:
                culprits = culprits | set(self.members)
            named = set(getattr(error, "ranks", ()))
            if not isinstance(error, CollectiveError):
                failures.append(f"{op} raised {error!r} at {name}")
            elif not named & culprits:
                failures.append(f"{op} failed at {name}, not by {culprits}: {error!r}")
            elif not all(repr(rank) in str(error) for rank in named):
                failures.append(f"{op} at {name} names {named} in no words: {error}")
        return failures

    def _successes(self, op: Op) -> list[str]:
        got = [name for name in self.members if (op.number, name) in self.got]
        missing = set(self.members) - self.begun[op.number]
        successes = []
        if got and missing and op.kind in FOR_ALL:
            successes.append(f"{op} ended at {got} without {missing}")
        if op.kind == "all_reduce":
            different = {tuple(self.got[op.number, name]) for name in got}
            if len(different) > 1:
                successes.append(f"{op} has {len(different)} results")
        return successes


@dataclass(frozen=True, slots=True)
class Mistake:
    """What one rank does in place of an op, or to it: only one of these.

    Attributes:
        takes_for: what it takes the op for.
        cancels_after_s: when it gives the op up.
        refuses: whether it does, with `Group.refuse`.
    """

    takes_for: Op | None = None
    cancels_after_s: float | None = None
    refuses: bool = False


class Run:
    """One run: the workers' groups, and what each does in them."""

    def __init__(self, plan: Plan, world: World) -> None:
        self.plan = plan
        self.world = world
        self.rng = world.rng
        self.names = list(world.neighbours)
        self.groups: dict[tuple[str, str], Group] = {}
        self.are_parted = False  # two of them, for long
        some = self.names
        if len(self.names) > 2:
            some = self.rng.sample(self.names, self.rng.randrange(2, len(self.names)))
        self.lanes = [
            self._lane("whole", self.names),
            self._lane("duplicate", self.names),
            self._lane("part", some),
        ]

    def _lane(self, name: str, members: Sequence[str]) -> Lane:
        rng = self.rng
        # What goes from one to one has no number, and is late by itself.
        kinds = NUMBERED if self.plan.mistakes else KINDS
        lane = Lane(name, members, program(rng, len(members), OPS, kinds))
        left = list(lane.ops)
        while left:
            count = rng.randrange(1, AT_A_TIME + 1)
            lane.batches.append(left[:count])
            del left[:count]
        for _ in range(self.plan.mistakes):
            self._err(lane)
        return lane

    def _err(self, lane: Lane) -> None:
        """Let a member make a mistake."""
        rng = self.rng
        name, number = rng.choice(lane.members), rng.randrange(len(lane.batches))
        kind = rng.choice(["late", "other", "cancel", "refuse"])
        op = rng.choice(lane.batches[number])
        if kind == "late":
            if lane.late:
                return  # who is late twice is late in between, too
            lane.late.add((number, name))
            for operation in lane.batches[number]:
                lane.culprits[operation.number].add(name)
            # Those who need nothing of the late one go on, and wait there for others,
            # who still wait for it.
            lane.behind.update(
                operation.number
                for batch in lane.batches[number + 1 :]
                for operation in batch
            )
            return
        if lane.culprits[op.number]:
            return  # it goes wrong already
        lane.culprits[op.number].add(name)
        mistake = Mistake(refuses=True)
        if kind == "other":
            mistake = Mistake(takes_for=another(rng, op))
        elif kind == "cancel":
            mistake = Mistake(cancels_after_s=rng.choice([0.0, 0.01, 0.1, 1.0]))
        lane.mistakes[op.number, name] = mistake

    # --- what each worker does -------------------------------------------------------

    def open(self, me: Participant) -> None:
        """Make the groups of a worker."""
        whole = Group(me, self.names, timeout_s=self.plan.timeout_s)
        groups = {"whole": whole, "duplicate": whole.duplicate()}
        part = self.lanes[2].members
        if me.name in part:
            ranks = [self.names.index(name) for name in part]
            groups["part"] = whole.subgroup(ranks, name="part")
        self.groups |= {(lane, me.name): group for lane, group in groups.items()}

    async def take_part(self, me: Participant, lane: Lane) -> None:
        """Do all of a group's collectives, whatever becomes of each."""
        group = self.groups[lane.name, me.name]
        for number, batch in enumerate(lane.batches):
            await asyncio.sleep(self.rng.expovariate(20.0))
            if (number, me.name) in lane.late:
                await asyncio.sleep(LATE_S)
            tasks = [
                asyncio.create_task(self._do(group, lane, op, me.name)) for op in batch
            ]
            try:
                await asyncio.wait(tasks)
            finally:  # the worker may die
                for task in tasks:
                    task.cancel()

    async def _do(self, group: Group, lane: Lane, op: Op, name: str) -> None:
        mistake = lane.mistakes.get((op.number, name), Mistake())
        try:
            if mistake.refuses:
                group.refuse("has no time")
                return
            if mistake.takes_for is not None:
                await perform(group, mistake.takes_for)
                self.world.problems.append(f"{lane.name}: {op} was right for {name}")
                return
            lane.begun[op.number].add(name)
            async with asyncio.timeout(None) as patience:
                if mistake.cancels_after_s is not None:
                    now_s = asyncio.get_running_loop().time()
                    patience.reschedule(now_s + mistake.cancels_after_s)
                self._enter(lane, op, name, await perform(group, op))
        except (CollectiveError, asyncio.CancelledError) as error:
            lane.failed[op.number, name] = error
        except TimeoutError:
            if mistake.cancels_after_s is None:
                raise

    def _enter(self, lane: Lane, op: Op, name: str, got: Tensors) -> None:
        lane.got[op.number, name] = [bits_of(tensor) for tensor in got]
        problem = problem_with(op, lane.members.index(name), got)
        if problem:
            self.world.problems.append(f"{lane.name}: {problem}")

    async def see_it_off(self, me: Participant, lane: Lane) -> None:
        """Use a group once more: it works, or all are told why it never will."""
        group = self.groups[lane.name, me.name]
        if not lane.lost:
            await group.barrier()
            return
        for _ in range(2):  # the second fails at once, the first when it is found out
            try:
                await group.barrier()
            except (GroupChangedError, RankLostError) as error:
                if set(error.ranks) & lane.lost:
                    continue
                problem = f"it has lost {lane.lost}, and says {error!r}"
            else:
                problem = f"it works without {lane.lost}"
            self.world.problems.append(f"{lane.name} at {me.name}: {problem}")

    # --- what goes wrong -------------------------------------------------------------

    def troubles(self) -> list[Coroutine[Any, Any, None]]:
        """Return what happens beside."""
        plan = self.plan
        planned = [self._cut() for _ in range(plan.cuts)]
        planned += [
            self._part([0.1, 2.0], losing=False) for _ in range(plan.partitions)
        ]
        ways: list[Callable[[], Coroutine[Any, Any, None]]] = []
        ways += [self._die] * (2 * plan.deaths)
        ways += [self._leave] * plan.leaving
        ways += [lambda: self._part([90.0], losing=True)] * plan.parting
        if ways:  # one of these: after it there is nothing left to lose
            planned.append(self.rng.choice(ways)())
        return planned

    async def _cut(self) -> None:
        await self._wait()
        self.world.network.between(*self._pair()).drop_connections()

    async def _part(self, seconds: Sequence[float], *, losing: bool) -> None:
        await self._wait()
        pair = self._pair()
        if losing:
            self.are_parted = True
            self._lose(*pair)
        link = self.world.network.between(*pair)
        link.partition()
        await asyncio.sleep(self.rng.choice(seconds))
        link.heal()

    async def _die(self) -> None:
        await self._wait()
        name = self.rng.choice(self.names)
        self._lose(name)
        await self.world.crash(name, silent=self.rng.random() < 0.5)

    async def _leave(self) -> None:
        await self._wait()
        name = self.rng.choice(self.names)
        self._lose(name)
        for (_, member), group in self.groups.items():
            if member == name:
                group.close()

    def _lose(self, *names: str) -> None:
        for lane in self.lanes:
            if set(names) <= set(lane.members):
                lane.lost.update(names)

    async def _wait(self) -> None:
        await asyncio.sleep(self.rng.uniform(0.0, 2.0))

    def _pair(self) -> tuple[str, str]:
        first, other = self.rng.sample(self.names, 2)
        return first, other

    # --- all of it -------------------------------------------------------------------

    async def play(self) -> None:
        """Let it happen, and look at what came of it."""
        world = self.world
        for pair in ((a, b) for a in self.names for b in self.names if a < b):
            link = world.network.between(*pair)
            link.delay(self.rng.uniform(0.0001, self.plan.delay_s))
            link.lose(self.rng.uniform(0.0, self.plan.loss))
        await world.begin()
        for worker in world.lives.values():
            # A connection that breaks in its first handshake may end with one side
            # believing the other to be lost, which is no concern of groups.
            await asyncio.gather(*(worker.parts.link_to(name) for name in self.names))
            self.open(worker)
        troubles = [asyncio.create_task(trouble) for trouble in self.troubles()]
        await self._all(self.take_part)
        await asyncio.gather(*troubles)
        await self._all(self.see_it_off)
        world.network.heal_all()
        for (_, name), group in self.groups.items():
            if name in world.lives:
                group.close()
        await self._go_on()
        for lane in self.lanes:
            world.problems += lane.problems()
        await world.settle(SETTLE_S)
        self.groups.clear()
        gc.collect()
        await world.settle(SETTLE_S)
        world.problems += checks.problems_after_drop(world) + self._left()
        await world.end()
        world.problems += checks.problems_after_end()

    async def _all(
        self, action: Callable[[Participant, Lane], Coroutine[Any, Any, None]]
    ) -> None:
        for name, worker in self.world.lives.items():
            for lane in self.lanes:
                if name in lane.members:
                    self.world.do(worker, action(worker, lane))
        await self.world.rest()

    async def _go_on(self) -> None:
        """Those who are left make a group, which works."""
        names = list(self.world.lives)
        if self.are_parted:
            return  # each is dead for the other
        lane = Lane("rest", names, program(self.rng, len(names), 3, NUMBERED))
        lane.batches = [lane.ops]
        for name, worker in self.world.lives.items():
            group = Group(worker, names, name="rest", timeout_s=self.plan.timeout_s)
            self.groups["rest", name] = group
        for worker in self.world.lives.values():
            self.world.do(worker, self.take_part(worker, lane))
        await self.world.rest()
        self.world.problems += lane.problems()
        for name in names:
            self.groups["rest", name].close()

    def _left(self) -> list[str]:
        """Say what is left of groups that are closed."""
        missing = []
        for name, worker in self.world.lives.items():
            service: Any = worker.parts.service(SERVICE)
            if service._groups:  # noqa: SLF001
                missing.append(f"{name} still has {len(service._groups)} groups")  # noqa: SLF001
        return missing


@contextmanager
def small_rings() -> Iterator[None]:
    """Send around a ring what is so large that it would take long to simulate."""
    before = message_path.RING_BYTES_MIN
    message_path.RING_BYTES_MIN = RING_BYTES  # type: ignore[misc]  # for a while
    try:
        yield
    finally:
        message_path.RING_BYTES_MIN = before  # type: ignore[misc]  # for a while


def play_groups(name: str, seed: int, *, workers: int | None = None) -> Result:
    """Run a scenario to its end.

    Args:
        name: of the scenario.
        seed: decides all that is chance.
        workers: how many; None: 2 to 8, as the seed decides.
    """
    gc.collect()
    if not gc.get_freeze_count():  # what is imported is not looked through every time
        gc.freeze()
    gc.disable()  # when it runs is no function of the seed
    try:
        with asyncio.Runner(loop_factory=SimLoop) as runner:
            network = Network(seed, runner.get_loop())
            count = workers or network.rng.choice(WORKERS)
            names = [f"w{number}" for number in range(count)]
            mesh = {name: [other for other in names if other != name] for name in names}
            plan = PLANS[name]
            # Bulk lanes break in ways of their own, which are tested with them.
            options = replace(
                OPTIONS,
                membership="static",
                liveness=replace(OPTIONS.liveness, lost_after_s=plan.lost_after_s),
                network=replace(OPTIONS.network, bulk_lanes=0),
            )
            world = World(network, mesh, options)
            network.loop.set_exception_handler(
                lambda _loop, context: world.problems.append(f"on the loop: {context}")
            )
            try:
                with watched_log(world.problems), small_rings():
                    runner.run(Run(plan, world).play())
            except DeadlockError as error:
                world.problems.append(f"deadlock: {error}")
            last = list(network.trace)[-TRACE_LINES:]
            return Result(network.digest, world.problems, last, world)
    finally:
        gc.enable()

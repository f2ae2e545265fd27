"""Scenarios: what the workers do and what goes wrong meanwhile, from one seed.

A scenario is a `Plan`.  `play` runs it and returns what came of it; the same plan, seed
and number of workers give the same digest, in any process.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import asyncrpc
from asyncrpc import AsyncRpcError
from asyncrpc.testing.loop import DeadlockError, SimLoop
from asyncrpc.testing.network import Network
from tests.simulation import checks, participant
from tests.simulation.participant import Participant, Value
from tests.simulation.world import OPTIONS, World

Action: TypeAlias = Callable[[World, Participant], Coroutine[Any, Any, None]]


def near(world: World, me: Participant) -> str:
    """Choose one of those whom a worker calls."""
    return world.rng.choice(world.neighbours[me.name])


async def call(world: World, me: Participant) -> None:
    function = world.rng.choice([participant.run, participant.run_plain])
    await world.call(me, near(world, me), function)


async def call_on(world: World, me: Participant) -> None:
    to = near(world, me)
    further = world.rng.choice(world.neighbours[to])
    await world.call(me, to, participant.relay, further)


async def call_in_time(world: World, me: Participant) -> None:
    """Call with a deadline that may be too short."""
    allowed_s = world.rng.uniform(0.0005, 0.5)
    takes_s = world.rng.uniform(0.0, 0.5)
    async with asyncrpc.deadline(allowed_s):
        await world.call(me, near(world, me), participant.run_slowly, takes_s)


async def give_up(world: World, me: Participant) -> None:
    """Call, and cancel it after a while."""
    number = world.ledger.new(f"{me.name} calls and gives up")
    seconds = world.rng.uniform(0.0, 1.0)
    to = near(world, me)
    task = asyncio.create_task(
        me.peer(to).call(participant.run_slowly, number, seconds)
    )
    world.ledger.excuse(number)
    try:
        await asyncio.wait([task], timeout=world.rng.uniform(0.0, 1.0))
    finally:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError, AsyncRpcError):
        await task


async def stream(world: World, me: Participant) -> None:
    """Read a generator, to its end or not: items come in order, without a gap."""
    number = world.ledger.new(f"{me.name} reads a stream")
    world.ledger.excuse(number)
    length, wanted = world.rng.randrange(40), world.rng.randrange(40)
    seen = 0
    with contextlib.suppress(AsyncRpcError):
        items = me.peer(near(world, me)).stream(participant.count_to, number, length)
        async with contextlib.aclosing(items):
            async for item in items:
                if item != seen:
                    world.problems.append(f"{me.name}: item {item} in place of {seen}")
                seen += 1
                if seen == wanted:
                    break
            else:
                if seen != length:
                    world.problems.append(f"{me.name}: {seen} items of {length}")


async def make(world: World, me: Participant) -> None:
    """Have a value made by a neighbour, and keep the reference."""
    to, number = near(world, me), world.values.new()
    call_number = world.ledger.new(f"{me.name} makes value {number} on {to}")
    world.ledger.excuse(call_number)  # remote() tells nobody how it ended
    me.kept[number] = me.peer(to).remote(Value, call_number, number)


async def share(world: World, me: Participant) -> None:
    """Pass a reference on to a neighbour, who keeps it."""
    if not me.kept:
        return
    number = world.rng.choice(sorted(me.kept))
    function = world.rng.choice([participant.keep, participant.borrow])
    await world.call(me, near(world, me), function, me.kept[number], number)


async def use(world: World, me: Participant) -> None:
    if me.kept:
        number = world.rng.choice(sorted(me.kept))
        await world.use(me, me.kept[number], number)


async def drop(world: World, me: Participant) -> None:
    if me.kept:
        number = world.rng.choice(sorted(me.kept))
        del me.kept[number]


CALLS: Final[Mapping[Action, int]] = {call: 6, call_on: 3, call_in_time: 3, give_up: 2}
STREAMS: Final[Mapping[Action, int]] = {stream: 6, call: 1}
REFERENCES: Final[Mapping[Action, int]] = {make: 3, share: 4, use: 4, drop: 3, call: 1}
ALL: Final[Mapping[Action, int]] = {**CALLS, **STREAMS, **REFERENCES, call: 6}


TRACE_LINES: Final = 40
SETTLE_S: Final = 15.0  # what is silent is found out, and what was lost is cleared away


@dataclass(frozen=True, slots=True)
class Plan:
    """What happens in a scenario.

    Attributes:
        workers: how many there are, unless told otherwise.
        degree: how many others each of them calls.
        seconds: how long it goes on, in virtual time.
        actions: what they do, with weights.
        pause_s: mean pause of a worker between two actions.
        crashes: how many workers die; each comes back under its name.
        cuts: how often the connections of two workers break.
        partitions: how often two workers are parted; some for good, as it seems.
        delay_s: longest mean delay between two workers.
        loss: highest share of packets lost.
        membership: of the group; what a change costs in a dynamic one, others test.
    """

    workers: int = 4
    degree: int = 2
    seconds: float = 5.0
    actions: Mapping[Action, int] = field(default_factory=lambda: ALL)
    pause_s: float = 0.1
    crashes: int = 0
    cuts: int = 0
    partitions: int = 0
    delay_s: float = 0.02
    loss: float = 0.0
    membership: str = "dynamic"


SCENARIOS: Final[Mapping[str, Plan]] = {
    "calls": Plan(actions=CALLS, cuts=4, loss=0.02),
    "streams": Plan(actions=STREAMS, cuts=4, loss=0.02),
    "rref": Plan(actions=REFERENCES, cuts=2),
    "deaths": Plan(crashes=3, cuts=2),
    "partitions": Plan(partitions=3, seconds=10.0),
    "churn": Plan(
        workers=1000,
        degree=4,
        seconds=10.0,
        pause_s=2.0,
        crashes=30,
        cuts=50,
        partitions=10,
        membership="static",
    ),
}


SMALL: Final = ("calls", "streams", "rref", "deaths", "partitions")


@dataclass(slots=True)
class Result:
    """What came of a run.

    Attributes:
        digest: of every byte and event.
        problems: what should not have been.
        trace: the last events.
        done: how often each action was completed.
        errors: of calls, how often each.
        calls: made, in all.
        world: as it was at the end.
    """

    digest: str
    problems: list[str]
    trace: list[tuple[float, str]]
    world: World


def play(
    name: str,
    seed: int,
    *,
    workers: int | None = None,
    plan: Plan | None = None,
    look: Callable[[World], None] | None = None,
) -> Result:
    """Run a scenario to its end.

    Args:
        name: of the scenario.
        seed: decides all that is chance.
        workers: how many, in place of the scenario's own number.
        plan: in place of the scenario's own.
        look: called at a quiet moment, while everything that is held is held.
    """
    plan = plan or SCENARIOS[name]
    count = workers or plan.workers
    gc.collect()
    if not gc.get_freeze_count():  # what is imported is not looked through every time
        gc.freeze()
    gc.disable()  # when it runs is no function of the seed
    try:
        with asyncio.Runner(loop_factory=SimLoop) as runner:
            network = Network(seed, runner.get_loop())
            options = replace(OPTIONS, membership=plan.membership)
            world = World(network, ring(count, min(plan.degree, count - 1)), options)
            try:
                with watched_log(world.problems):
                    runner.run(_run(plan, world, look or _look_away))
            except DeadlockError as error:
                world.problems.append(f"deadlock: {error}")
            world.problems += world.ledger.problems()
            last = list(network.trace)[-TRACE_LINES:]
            return Result(network.digest, world.problems, last, world)
    finally:
        gc.enable()


@contextmanager
def watched_log(problems: list[str]) -> Iterator[None]:
    """Enter what the package logs as an error; drop warnings: crashes are meant."""
    logger = logging.getLogger("asyncrpc")
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: problems.append(  # type: ignore[method-assign]
        f"logged: {record.getMessage()} {record.exc_info or ''}"
    )
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates


def ring(count: int, degree: int) -> dict[str, list[str]]:
    """Give each worker as its neighbours those next to it on a ring."""
    steps = [
        step for distance in range(1, degree + 1) for step in (distance, -distance)
    ]
    return {
        f"w{number}": [f"w{(number + step) % count}" for step in steps[:degree]]
        for number in range(count)
    }


def _look_away(_world: World) -> None:
    """Do nothing."""


async def _run(plan: Plan, world: World, look: Callable[[World], None]) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(
        lambda _loop, context: world.problems.append(f"on the loop: {context}")
    )
    _slow_down(plan, world)
    await world.begin()
    troubles = [
        asyncio.create_task(trouble)
        for trouble in (
            _crashes(plan, world),
            _cuts(plan, world),
            _partitions(plan, world),
        )
    ]
    working = asyncio.create_task(_work(plan, world))
    await asyncio.gather(*troubles, working)
    await world.settle(0.0)
    await world.rest()
    await world.settle(SETTLE_S)
    world.problems += checks.problems_while_held(world)
    look(world)
    for worker in world.lives.values():
        worker.kept.clear()
    for _ in range(2):  # what ends while it settles may leave a circle, too
        gc.collect()
        await world.settle(SETTLE_S)
    world.problems += checks.problems_after_drop(world)
    await world.end()
    world.problems += checks.problems_after_end()


async def _work(plan: Plan, world: World) -> None:
    """Have every worker do one thing after another, and several at a time."""
    loop, rng = asyncio.get_running_loop(), world.rng
    kinds, weights = list(plan.actions), list(plan.actions.values())
    until_s = loop.time() + plan.seconds
    names = list(world.neighbours)
    while loop.time() < until_s:
        await asyncio.sleep(rng.expovariate(len(names) / plan.pause_s))
        worker = world.lives.get(rng.choice(names))
        action = rng.choices(kinds, weights)[0]
        if worker is not None:
            world.do(worker, action(world, worker))


def _slow_down(plan: Plan, world: World) -> None:
    for name, near in world.neighbours.items():
        for other in near:
            link = world.network.between(name, other)
            link.delay(world.rng.uniform(0.0001, plan.delay_s))
            link.lose(world.rng.uniform(0.0, plan.loss))


async def _crashes(plan: Plan, world: World) -> None:
    for _ in range(plan.crashes):
        await asyncio.sleep(world.rng.expovariate(plan.crashes / plan.seconds))
        name = world.rng.choice(list(world.neighbours))
        if name not in world.lives:
            continue
        await world.crash(name, silent=world.rng.random() < 0.5)
        await asyncio.sleep(world.rng.choice([0.0, 0.01, 1.0]))
        await world.restart(name)


async def _cuts(plan: Plan, world: World) -> None:
    for _ in range(plan.cuts):
        await asyncio.sleep(world.rng.expovariate(plan.cuts / plan.seconds))
        world.network.between(*_pair(world)).drop_connections()


async def _partitions(plan: Plan, world: World) -> None:
    for _ in range(plan.partitions):
        await asyncio.sleep(world.rng.expovariate(plan.partitions / plan.seconds))
        link = world.network.between(*_pair(world))
        link.partition()
        await asyncio.sleep(world.rng.choice([0.1, 2.0, 12.0]))
        link.heal()


def _pair(world: World) -> tuple[str, str]:
    name = world.rng.choice(list(world.neighbours))
    return name, world.rng.choice(world.neighbours[name])

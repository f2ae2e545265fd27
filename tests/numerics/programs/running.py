"""Runs a program on workers and in one process, and compares what came of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

import torch
import uvloop
from rich.table import Table

from asyncrpc import Worker
from asyncrpc.autograd import context
from asyncrpc.core.services.ports import PeerLink
from asyncrpc.testing import Cluster, acting_as
from tests.inner_state import routes_of
from tests.numerics.programs import language as steps
from tests.numerics.programs.language import NAMES, Program
from tests.numerics.programs.program_steps import (
    Here,
    Maybe,
    OneProcess,
    Report,
    Station,
)

Reports = Mapping[str, Report]

RELEASED_S: Final = 60.0

# Sums are added in another order than one process would.
EXACT: Final = 1e-10
# With 8 bits of mantissa; and what a hook clamps may be rounded to either side.
ROUNDED: Final = 0.1


@dataclass(frozen=True)
class Facts:
    """What a program turned out to be, in one process.

    Attributes:
        crossed: tensors in messages that require a gradient.
        travelled: gradients that travelled, in all passes.
        comes_back: whether gradients came back to a station that they had left.
        fired: how often hooks fired.
    """

    crossed: int
    travelled: int
    comes_back: bool
    fired: int


class Counting:
    """Counts the gradients that come to a worker, and those in its answers."""

    def __init__(self, worker: Worker) -> None:
        routes = routes_of(worker.parts.router, "autograd")
        self._counted = [
            route for route in routes if route.method in {"advance", "close"}
        ]
        self._handles = [route.handle for route in self._counted]
        for route in self._counted:
            route.handle = partial(self._count, route.handle)
        self.gradients = 0

    async def _count(
        self, handle: Callable[[PeerLink, Any], Any], link: PeerLink, value: Any
    ) -> Any:
        if type(value[0]) is list:  # of `advance`; some of the gradients may be None
            self.gradients += len(value[0])
        answer = await handle(link, value)
        self.gradients += len(answer[0])
        return answer

    def end(self) -> None:
        for route, handle in zip(self._counted, self._handles, strict=True):
            route.handle = handle


@contextmanager
def counting(workers: list[Worker]) -> Iterator[list[Counting]]:
    counters = [Counting(worker) for worker in workers]
    try:
        yield counters
    finally:
        for counter in counters:
            counter.end()


class Comparison:
    """Workers in this process, on a loop of their own, for many programs in turn."""

    def __init__(self, workers: int = len(NAMES)) -> None:
        self._cluster = Cluster(workers)
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)

    def __enter__(self) -> Self:
        self._runner.__enter__()
        self._runner.run(self._cluster.__aenter__())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._runner.run(self._cluster.__aexit__(kind, error, trace))
        self._runner.__exit__(kind, error, trace)

    def check(self, program: Program) -> Facts:
        """Run a program both ways.

        Raises:
            AssertionError: what came of it differs.
        """
        return self._runner.run(self._check(program))

    async def _check(self, program: Program) -> Facts:
        wanted, facts = await in_one_process(program)
        workers = self._cluster.workers[: program.workers]
        reports, travelled = await on_workers(program, workers)
        assert_same(reports, wanted, ROUNDED if program.is_rounded else EXACT)
        assert travelled == facts.travelled, (
            f"{travelled} gradients travelled; {facts.travelled} crossings take part"
        )
        return facts


async def in_one_process(program: Program) -> tuple[Reports, Facts]:
    world = OneProcess()
    world.stations = {name: Station(name, world) for name in program.names}
    others = {name: Here(station, station) for name, station in world.stations.items()}
    for station in world.stations.values():
        station.meet(others)
    for step in program.steps:
        await world.stations[step.on].do(step)
    reports = {
        name: station.report_of(world.gradients)
        for name, station in world.stations.items()
    }
    fired = sum(
        len(seen) for report in reports.values() for seen in report.seen.values()
    )
    comes_back = has_circle(world.flows)
    return reports, Facts(world.crossed, world.travelled, comes_back, fired)


async def on_workers(program: Program, workers: list[Worker]) -> tuple[Reports, int]:
    """Return what stations have, and how many gradients travelled."""
    first = workers[0]
    with acting_as(first):
        stations = {
            worker.name: first.peer(worker.name).remote(Station, worker.name)
            for worker in workers
        }
        try:
            for station in stations.values():
                await station.rpc_async().meet(stations)
            async with context():
                with counting(workers) as counters:
                    for step in program.steps:
                        await stations[step.on].rpc_async().do(step)
                reports = {
                    name: await station.rpc_async().report()
                    for name, station in stations.items()
                }
            await released(workers)
        finally:
            for station in stations.values():
                await station.rpc_async().part()
    return reports, sum(counter.gradients for counter in counters)


async def released(workers: list[Worker]) -> None:
    """Wait until no worker knows of a context; its end goes from one to the next."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + RELEASED_S
    while left := {
        worker.name: known for worker in workers if (known := contexts(worker))
    }:
        assert loop.time() < end_s, f"contexts that have not ended: {left}"
        for worker in workers[1:]:
            await workers[0].peer(worker.name).call(int)


def contexts(worker: Worker) -> list[tuple[Any, Any]]:
    """Return the contexts that a worker knows, and the peers that they are known to."""
    service: Any = worker.parts.service("autograd")
    return [(key, state.peers) for key, state in service.contexts.open.items()]


def has_circle(flows: set[tuple[str, str]]) -> bool:
    """Say whether one may leave a station and come back to it."""
    left = {source for source, _ in flows} & {target for _, target in flows}
    while True:
        going = {(source, to) for source, to in flows if {source, to} <= left}
        on = {source for source, _ in going} & {to for _, to in going}
        if on == left:
            return bool(left)
        left = on


# --- what is compared ----------------------------------------------------------------


def assert_same(reports: Reports, wanted: Reports, tolerance: float) -> None:
    for name, expected in wanted.items():
        report = reports[name]
        assert report.are_needed == expected.are_needed, f"slots of {name!r} differ"
        for slot, value in expected.values.items():
            assert_close(report.values[slot], value, f"slot {slot}", tolerance)
        for slot, gradient in expected.gradients.items():
            what = f"the gradient of slot {slot} of {name!r}"
            assert_close(report.gradients[slot], gradient, what, tolerance)
        for number, seen in expected.seen.items():
            what = f"what hook {number} of {name!r} saw"
            times = len(report.seen[number])
            assert times == len(seen), f"{what}: {times} times instead of {len(seen)}"
            for theirs, ours in zip(report.seen[number], seen, strict=True):
                assert_close(theirs, ours, what, tolerance)


def assert_close(actual: Maybe, wanted: Maybe, what: str, tolerance: float) -> None:
    if actual is None or wanted is None:
        assert actual is wanted, f"{what}: {actual} instead of {wanted}"
        return
    assert actual.layout == wanted.layout, f"{what}: {actual} instead of {wanted}"
    torch.testing.assert_close(
        actual.to_dense(),
        wanted.to_dense(),
        rtol=tolerance,
        atol=tolerance,
        msg=lambda text: f"{what}: {actual} instead of {wanted}. {text}",
    )


MESSAGES = (
    steps.Fetch,
    steps.Send,
    steps.Relay,
    steps.Remote,
    steps.Share,
    steps.ToHere,
    steps.Method,
)


class Tally:
    """Counts programs by kind."""

    def __init__(self) -> None:
        self.programs: Counter[str] = Counter()
        self.sums: Counter[str] = Counter()

    def add(self, program: Program, facts: Facts) -> None:
        self.programs.update(kinds(program, facts))
        self.sums["steps"] += len(program.steps)
        self.sums["backward passes"] += program.count(steps.Pass)
        self.sums["tensors in messages that require a gradient"] += facts.crossed
        self.sums["gradients that travelled"] += facts.travelled
        self.sums["times a hook fired"] += facts.fired

    def table(self, count: int, took_s: float) -> Table:
        table = Table(title=f"{count:,} programs in {took_s:.0f} s")
        table.add_column("programs that")
        table.add_column("", justify="right")
        for name, number in self.programs.most_common():
            table.add_row(name, f"{number:,}")
        table.add_section()
        for name, number in self.sums.items():
            table.add_row(name, f"{number:,}")
        return table


def kinds(program: Program, facts: Facts) -> Iterator[str]:
    """Say what may be said of a program."""
    yield f"have {program.workers} workers"
    yield from (f"use {kind.__name__}" for kind in MESSAGES if program.count(kind))
    yield from (name for name, is_so in _properties(program, facts) if is_so)


def _properties(program: Program, facts: Facts) -> Iterator[tuple[str, bool]]:
    text = repr(program)
    changing = sum(
        program.count(steps.Hook, how=how) for how in ("double", "clamp", "halve")
    )
    yield "send gradients", facts.travelled > 0
    yield "send gradients that come back to a worker", facts.comes_back
    yield "have crossings that take no part", facts.crossed > facts.travelled
    yield "go backward more than once", program.count(steps.Pass) > 1
    yield (
        "have several roots",
        any(
            len(step.roots) > 1
            for step in program.steps
            if isinstance(step, steps.Pass)
        ),
    )
    yield "have hooks that fire", facts.fired > 0
    yield "have hooks that change gradients", changing > 0
    yield "have sparse gradients", program.count(steps.Rows) > 0
    yield "have nil gradients", program.count(steps.Deaf) > 0
    yield "have complex numbers", "complex" in text
    yield "have bfloat16", program.is_rounded
    yield "have views", program.count(steps.View) > 0
    yield "change tensors in place", program.count(steps.Change) > 0

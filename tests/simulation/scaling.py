"""What does a worker of a large group cost, and how long until all know a change?

Whole workers, each of which knows all others, on virtual time, with 1 ms a hop on
average.  Counts and virtual times are those of the seed, on any machine; processor time
and memory are this one's.

    $ python -m tests.simulation --scale 64 256 1024 4096 --json scale.json

A simulated worker shares the texts of its records with all others of the process.  What
a member takes in a process of its own, `tests.bench.bench_members` measures.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, median
from typing import Final

import numpy as np
from rich.console import Console
from rich.table import Table

from asyncrpc import JoinRendezvous, LimitOptions, Options, Worker
from asyncrpc.testing import Cluster
from asyncrpc.testing.cluster import sim_worker
from asyncrpc.testing.leaks import resident_kib
from asyncrpc.testing.network import Network
from tests.simulated import play

OPTIONS: Final = Options(
    drain_timeout_s=5.0,
    limits=LimitOptions(shared_memory_bytes=0, receive_pool_bytes=0),
)
SETTLE_S: Final = 12.0  # until all have compared what they know, twice at least
REST_S: Final = 20.0
STORM: Final = 32  # that join at once
LIMIT_S: Final = 3600.0  # of virtual time, for all of it


@dataclass(slots=True)
class Costs:
    """What was measured of one size.

    Attributes:
        workers: how many there are.
        figures: by their names, which end in the unit.
    """

    workers: int
    figures: dict[str, float] = field(default_factory=dict)


# The name of a figure, and what it is; in the order of the tables.
FIGURES: Final[Mapping[str, str]] = {
    "start_cpu_ms": "start of all at one place: processor time of each, ms",
    "memory_kib": "memory of each, at rest, KiB",
    "rest_messages_per_s": "at rest: messages of each, 1/s",
    "rest_bytes_per_s": "at rest: bytes of each, 1/s",
    "rest_cpu_us_per_s": "at rest: processor time of each, us/s",
    "rest_links": "at rest: links of each",
    "join_s": "one joins: until it is in, s",
    "join_known_s": "one joins: until half know, s",
    "join_known_s_max": "one joins: until all know, s",
    "join_news": "one joins: news of each",
    "join_news_max": "one joins: news of the one with most",
    "join_bytes": "one joins: bytes of the newcomer and its member",
    "storm_s": "32 join at once: until the last is in, s",
    "storm_known_s_max": "32 join at once: until all know all, s",
    "storm_news": "32 join at once: news of each",
    "leave_known_s": "one leaves: until half know, s",
    "leave_known_s_max": "one leaves: until all know, s",
    "death_known_s": "a process dies: until half know, s",
    "death_known_s_max": "a process dies: until all know, s",
    "death_news": "a process dies: news of each",
    "vanish_known_s": "a host vanishes: until half know, s",
    "vanish_known_s_max": "a host vanishes: until all know, s",
    "links_max": "links of the one with most, after all this",
    "links_mean": "links of each, after all this",
    "barrier_s": "a barrier: s",
    "barrier_messages": "a barrier: messages of each",
    "end_s": "all end in order: s",
    "end_messages": "all end in order: messages of each",
}


class Bench:
    """A group of so many workers, and what is measured of it, step by step."""

    def __init__(self, network: Network, workers: int) -> None:
        self.network = network
        self.costs = Costs(workers)
        self.running: list[Worker] = []
        self._tell = workers >= TELLING_MIN

    # --- counting --------------------------------------------------------------------

    def note(self, **figures: float) -> None:
        self.costs.figures.update(figures)

    @contextmanager
    def step(self, name: str) -> Iterator[Counted]:
        """Count what is sent meanwhile, and how long it takes."""
        counted = Counted(len(self.running) or self.costs.workers)
        news = [worker.parts.membership.gossip.sent for worker in self.running]
        begun = self.network.sent, self.network.sent_bytes, self.network.loop.time()
        cpu_s = time.process_time()
        yield counted
        counted.cpu_s = time.process_time() - cpu_s
        counted.messages = self.network.sent - begun[0]
        counted.sent_bytes = self.network.sent_bytes - begun[1]
        counted.took_s = self.network.loop.time() - begun[2]
        after = [worker.parts.membership.gossip.sent for worker in self.running]
        counted.news = [b - a for a, b in zip(news, after, strict=False)]
        if self._tell:
            say(f"{self.costs.workers:,} workers: {name}, {counted.cpu_s:.0f} s")

    async def heard(self, names: Iterable[str]) -> list[float]:
        """Wait until all others know of a change of each; return how long each took."""
        wanted, begun_s = frozenset(names), self.network.loop.time()

        async def hear(worker: Worker) -> float:
            left = set(wanted)
            async for change in worker.members_changed():
                left.discard(change.member.name)
                if not left:
                    break
            return self.network.loop.time() - begun_s

        others = [worker for worker in self.running if worker.name not in wanted]
        return list(await asyncio.gather(*map(hear, others)))

    def newcomer(self, name: str) -> Worker:
        contact = self.running[len(self.running) // 2].name
        where = JoinRendezvous([f"mem://{contact}"])
        return sim_worker(name, self.network, rendezvous=where, options=OPTIONS)

    def links(self) -> list[int]:
        return [len(worker.parts.directory.links) for worker in self.running]

    # --- the steps -------------------------------------------------------------------

    async def run(self) -> None:
        """Take a group through its life."""
        size = self.costs.workers
        before_kib = resident_kib(os.getpid())
        names = [f"w{number}" for number in range(size)]
        cluster = Cluster(names=names, network=self.network, options=OPTIONS)
        with self.step("start") as start:
            self.running = list(await cluster.__aenter__())
        self.note(start_cpu_ms=1e3 * start.cpu_s / size)
        await asyncio.sleep(SETTLE_S)
        with self.step("rest") as rest:
            await asyncio.sleep(REST_S)
        self.note(
            memory_kib=(resident_kib(os.getpid()) - before_kib) / size,
            rest_messages_per_s=rest.messages / size / REST_S,
            rest_bytes_per_s=rest.sent_bytes / size / REST_S,
            rest_cpu_us_per_s=1e6 * rest.cpu_s / size / REST_S,
            rest_links=mean(self.links()),
        )
        await self.one_joins()
        await self.many_join()
        await self.some_go()
        self.note(links_max=max(self.links()), links_mean=mean(self.links()))
        await self.barriers()
        with self.step("end") as end:
            await asyncio.gather(*(worker.shutdown() for worker in self.running))
        self.note(end_s=end.took_s, end_messages=end.messages / len(self.running))

    async def one_joins(self) -> None:
        begun_bytes = self.network.sent_bytes
        with self.step("join") as join:
            heard = asyncio.ensure_future(self.heard(["late"]))
            await asyncio.sleep(0)
            began_s = self.network.loop.time()
            late = await self.newcomer("late").__aenter__()
            in_s = self.network.loop.time() - began_s
            in_bytes = self.network.sent_bytes - begun_bytes
            known = await heard
        self.running.append(late)
        self.note(
            join_s=in_s,
            join_known_s=median(known),
            join_known_s_max=max(known),
            join_news=sum(join.news) / join.workers,
            join_news_max=max(join.news),
            join_bytes=in_bytes,
        )

    async def many_join(self) -> None:
        names = [f"storm{number}" for number in range(STORM)]
        with self.step("storm") as storm:
            heard = asyncio.ensure_future(self.heard(names))
            await asyncio.sleep(0)
            begun_s = self.network.loop.time()
            coming = [self.newcomer(name) for name in names]
            await asyncio.gather(*(worker.__aenter__() for worker in coming))
            in_s = self.network.loop.time() - begun_s
            known = await heard
        self.running.extend(coming)
        self.note(
            storm_s=in_s,
            storm_known_s_max=max(known),
            storm_news=sum(storm.news) / storm.workers,
        )
        await asyncio.sleep(SETTLE_S)  # the newcomers learn of each other, too

    async def some_go(self) -> None:
        """Let a newcomer leave, another die, and a third vanish with its host."""
        for kind, name in (
            ("leave", "storm0"),
            ("death", "storm1"),
            ("vanish", "storm2"),
        ):
            leaver = next(worker for worker in self.running if worker.name == name)
            self.running.remove(leaver)
            with self.step(kind) as went:
                heard = asyncio.ensure_future(self.heard([name]))
                await asyncio.sleep(0)
                if kind == "leave":
                    await leaver.shutdown(drain_timeout_s=0.0)
                else:
                    self.network.crash(name, silent=kind == "vanish")
                known = await heard
            if kind != "leave":
                await leaver.shutdown(drain_timeout_s=0.0)
            self.note(
                **{
                    f"{kind}_known_s": median(known),
                    f"{kind}_known_s_max": max(known),
                    f"{kind}_news": sum(went.news) / went.workers,
                }
            )

    async def barriers(self) -> None:
        ranked = [worker for worker in self.running if worker.rank >= 0]
        for name in ("connect", "barrier"):
            with self.step(name) as barrier:
                await asyncio.gather(*(worker.barrier() for worker in ranked))
            self.note(
                barrier_s=barrier.took_s,
                barrier_messages=barrier.messages / len(ranked),
            )


@dataclass(slots=True)
class Counted:
    """What one step took.

    Attributes:
        workers: that took part.
        messages: writes of all workers.
        sent_bytes: of all workers.
        took_s: virtual time.
        cpu_s: processor time.
        news: messages of news of each worker.
    """

    workers: int
    messages: int = 0
    sent_bytes: int = 0
    took_s: float = 0.0
    cpu_s: float = 0.0
    news: list[int] = field(default_factory=list)


TELLING_MIN: Final = 1000  # workers: less takes seconds


def measure(workers: int, seed: int) -> Costs:
    """Take a group of this size through its life; return what it cost."""
    costs: list[Costs] = []

    async def scenario(network: Network) -> None:
        bench = Bench(network, workers)
        await bench.run()
        costs.append(bench.costs)

    # To look for circles in all that 4,096 workers hold would take most of the time.
    gc.collect()
    gc.disable()
    try:
        play(scenario, seed, limit_s=LIMIT_S)
    finally:
        gc.enable()
    return costs[0]


# --- many sizes ----------------------------------------------------------------------


def compare(counts: Sequence[int], seed: int, path: Path | None) -> int:
    """Measure groups of these sizes and print them; return the exit status.

    Args:
        counts: of workers.
        seed: decides all that is chance.
        path: of a file for what was measured, which `docs` takes.
    """
    # Each in a process of its own: memory that another has used may be used again.
    with ProcessPoolExecutor(
        1, mp_context=get_context("spawn"), max_tasks_per_child=1
    ) as processes:
        sizes = []
        for count, costs in zip(
            counts, processes.map(measure, counts, [seed] * len(counts)), strict=True
        ):
            sizes.append(costs)
            say(f"{count:,} workers: done")
    if path is not None:
        path.write_text(json.dumps([asdict(size) for size in sizes], indent=1) + "\n")
    Console(highlight=False, width=max(100, 60 + 10 * len(sizes))).print(table(sizes))
    return 0


def exponent(sizes: Sequence[Costs], figure: str) -> float | None:
    """Return by which power of the number of workers a figure grows.

    A line through the logarithms, by least squares; None if there are none.
    """
    values = [size.figures[figure] for size in sizes]
    if len(sizes) < 2 or min(values) <= 0:
        return None
    logs = np.log([size.workers for size in sizes]), np.log(values)
    return round(float(np.polyfit(*logs, 1)[0]), 2) + 0.0  # no -0


def rows(sizes: Sequence[Costs]) -> Iterator[list[str]]:
    """Return the table's rows: what, a value for each size, the exponent."""
    for figure, what in FIGURES.items():
        grows = exponent(sizes, figure)
        values = (short(size.figures[figure]) for size in sizes)
        yield [what, *values, "-" if grows is None else f"{grows:.2f}"]


def table(sizes: Sequence[Costs]) -> Table:
    figures = Table(title="One worker of a large group, in virtual time")
    figures.add_column("workers")
    for size in sizes:
        figures.add_column(f"{size.workers:,}", justify="right")
    figures.add_column("exponent", justify="right")
    for row in rows(sizes):
        figures.add_row(*row)
    return figures


def markdown(sizes: Sequence[Costs]) -> str:
    """Return the table for a page of the documentation."""
    head = ["workers", *(f"{size.workers:,}" for size in sizes), "exponent"]
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows(sizes)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def short(value: float) -> str:
    """Return a number with three digits that say something."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def load(path: Path) -> list[Costs]:
    """Read what `compare` wrote."""
    return [Costs(**fields) for fields in json.loads(path.read_text("utf-8"))]


# --- for docs/explanation/scale.md ---------------------------------------------------

# One panel each: its title, the figures with their names, the scale of its axis.
PANELS: Final = (
    (
        "until all know, s",
        {
            "join_known_s_max": "one joins",
            "storm_known_s_max": "32 join at once",
            "leave_known_s_max": "one leaves",
            "death_known_s_max": "a process dies",
        },
        "linear",
    ),
    (
        "messages of each worker",
        {
            "join_news": "news, one joins",
            "rest_messages_per_s": "at rest, per second",
            "barrier_messages": "a barrier",
            "end_messages": "all end in order",
        },
        "log",
    ),
    (
        "what grows with the number of members",
        {
            "memory_kib": "memory of each, KiB",
            "start_cpu_ms": "start: processor time of each, ms",
            "join_bytes": "one joins: bytes of the newcomer",
        },
        "log",
    ),
)


def draw(sizes: Sequence[Costs], path: Path) -> None:
    """Write the curves to `path`, over the number of workers."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (half a second, only for this)

    figure = Figure(figsize=(13, 5))
    workers = [size.workers for size in sizes]
    for axes, (title, curves, scale) in zip(
        figure.subplots(1, len(PANELS)), PANELS, strict=True
    ):
        for (name, what), marker in zip(curves.items(), "osD^", strict=False):
            values = [size.figures[name] for size in sizes]
            grows = exponent(sizes, name)
            label = f"{what}: {grows:.2f}" if grows is not None else what
            axes.plot(workers, values, marker=marker, markersize=4, label=label)
        axes.set_xscale("log", base=2)
        axes.set_xticks(workers, [f"{count:,}" for count in workers], fontsize=8)
        axes.minorticks_off()
        axes.set_yscale(scale)
        if scale == "linear":
            axes.set_ylim(bottom=0)
        axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
        axes.set_xlabel("workers", fontsize=9)
        axes.grid(color="#dddddd")
        # Below, where no curve is; numbers behind the names are the exponents.
        axes.legend(
            fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.16)
        )
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def say(text: str) -> None:
    """Tell the person who waits; standard output is for results."""
    print(text, file=sys.stderr, flush=True)

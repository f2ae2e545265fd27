"""Does a worker cost more when there are more workers that it never talks to?

Each calls as many others, as often, however many there are; as many die, too.  Counted
is what one worker has at a quiet moment, and what it has sent until then:

    $ python -m tests.simulation --sizes 125 250 500 1000
"""

from __future__ import annotations

import os
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from statistics import mean
from typing import Final

from rich.console import Console
from rich.table import Table

from asyncrpc.testing.leaks import resident_kib
from tests.simulation import checks, scenarios
from tests.simulation.scenarios import Plan
from tests.simulation.world import World

PLAN: Final = Plan(degree=4, seconds=10.0, pause_s=2.0, crashes=10, cuts=10)
SAMPLE: Final = 40  # workers looked into
GROWS: Final = 1.3  # from the fewest workers to the most: less is chance
ELEMENTS_MIN: Final = 20  # in a table; less is no growth worth a name


@dataclass(frozen=True, slots=True)
class Size:
    """What one worker has, on the average."""

    workers: int
    took_s: float
    kib: float
    sent_bytes: float
    messages: float
    links: float
    tables: Counter[str]
    problems: int


def compare(counts: list[int], seed: int) -> int:
    """Measure worlds of these sizes and print them side by side.

    Returns:
        The exit status: 1 if a run went wrong.
    """
    # Each in a process of its own: memory that another has used may be used again.
    with ProcessPoolExecutor(
        1, mp_context=get_context("spawn"), max_tasks_per_child=1
    ) as processes:
        sizes = list(processes.map(measure, counts, [seed] * len(counts)))
    console = Console(highlight=False)
    table = Table(title="One worker's state and messages")
    for heading in (
        *("workers", "run, s", "memory, KiB", "sent, KiB", "writes"),
        *("links", "table elements"),
    ):
        table.add_column(heading, justify="right")
    for size in sizes:
        table.add_row(
            f"{size.workers:,}",
            f"{size.took_s:.1f}",
            f"{size.kib:.0f}",
            f"{size.sent_bytes / 1024:.1f}",
            f"{size.messages:.0f}",
            f"{size.links:.1f}",
            f"{size.tables.total():,.0f}",
        )
    console.print(table)
    console.print(growing(sizes[0], sizes[-1]))
    return 1 if any(size.problems for size in sizes) else 0


def growing(first: Size, last: Size) -> Table:
    """Name the tables of a worker that grow with the number of others."""
    counts = (f"{size.workers:,}" for size in (first, last))
    table = Table("table", *counts, title="What grows")
    for path, count in last.tables.most_common():
        if count >= ELEMENTS_MIN and count > GROWS * first.tables[path]:
            table.add_row(path, f"{first.tables[path]:.0f}", f"{count:.0f}")
    return table


def measure(workers: int, seed: int) -> Size:
    """Run a world of this size, and look into some of its workers before its end."""
    sizes: dict[str, Counter[str]] = {}
    memory = links = 0.0

    def look(world: World) -> None:
        nonlocal memory, links
        memory = (resident_kib(os.getpid()) - before) / len(world.lives)
        links = mean(
            len(worker.parts.directory.links) for worker in world.lives.values()
        )
        for name in list(world.lives)[:: max(1, len(world.lives) // SAMPLE)]:
            sizes[name] = checks.sizes_of(world.lives[name])

    before = resident_kib(os.getpid())
    begun_s = time.monotonic()
    result = scenarios.play(
        "churn", seed, plan=replace(PLAN, workers=workers), look=look
    )
    took_s = time.monotonic() - begun_s
    tables: Counter[str] = Counter()
    for counter in sizes.values():
        tables.update(counter)
    network = result.world.network
    return Size(
        workers,
        took_s,
        memory,
        network.sent_bytes / workers,
        network.sent / workers,
        links,
        Counter({path: count / len(sizes) for path, count in tables.items()}),
        len(result.problems),
    )

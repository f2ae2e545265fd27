"""Does a long life leave anything behind?

Three workers in three processes; one makes calls of every kind at once: plain ones,
small and large tensors, references made, called, fetched, shared and dropped, cancels,
errors, timeouts, and streams that are closed early.  Afterwards every process must have
the memory, descriptors, tasks, threads and tables that it had before.

    $ python -m tests.soak.mixed --calls 200000

The first calls are a warm-up, after which the first reading is taken.  Exits with 1 if
something has leaked.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table

from asyncrpc import LimitOptions, Options, Worker
from asyncrpc.testing import ProcessCluster
from tests.soak.readings import MIB, Reading, take_reading
from tests.soak.work import KINDS, Use

NAMES: Final = ("a", "b", "c")
AT_ONCE: Final = 24
WARM_UP_CALLS: Final = 4000
# What is kept for a while goes within 60 s: slabs, threads, regions.
SETTLE_S: Final = 70.0
LINE_CALLS: Final = 10_000  # a line for each so many, where there is no terminal
INBOUND_BYTES_MAX: Final = 16 * MIB  # so little that large requests have to wait

OnProgress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    before: dict[str, Reading]  # the readings after the warm-up, by worker
    after: dict[str, Reading]  # at the end
    uses: Counter[str]  # how often each kind of use was made

    @property
    def leaks(self) -> list[str]:
        """What there is more of than before, in words."""
        return [
            f"{name}: {leak}"
            for name in self.before
            for leak in self.after[name].leaks_since(self.before[name])
        ]


async def soak(
    calls: int,
    *,
    seed: int = 0,
    warm_up_calls: int = WARM_UP_CALLS,
    settle_s: float = SETTLE_S,
    method: Literal["spawn", "forkserver"] = "spawn",
    on_progress: OnProgress = lambda _calls: None,
) -> Outcome:
    """Make so many calls, and say what they left.

    Args:
        settle_s: seconds before the first reading: after less than `SETTLE_S` it has
            what is kept for a while, and what leaks of that is not seen.
    """
    options = Options(limits=LimitOptions(inbound_bytes_max=INBOUND_BYTES_MAX))
    cluster = ProcessCluster(NAMES[1:], options=options, method=method)
    async with cluster as worker:
        await _use(worker, random.Random(seed), warm_up_calls, lambda _: None)
        await asyncio.sleep(settle_s)  # nothing tells when what is kept has gone
        before = await _read(worker)
        uses = await _use(worker, random.Random(seed + 1), calls, on_progress)
        after = await _settled(worker, before)
    return Outcome(before, after, uses)


async def _use(
    worker: Worker, rng: random.Random, calls: int, on_progress: OnProgress
) -> Counter[str]:
    """Make calls of every kind, `AT_ONCE` uses at a time."""
    uses: Counter[str] = Counter()
    call_count = serial = 0
    weights = [kind.weight for kind in KINDS]

    async def use_on() -> None:
        nonlocal call_count, serial
        while call_count < calls:
            (kind,) = rng.choices(KINDS, weights)
            call_count, serial = call_count + kind.calls, serial + 1
            uses[kind.name] += 1
            await kind.run(Use(worker, rng, serial))
            on_progress(kind.calls)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(use_on())
    return uses


async def _read(worker: Worker) -> dict[str, Reading]:
    return {name: await worker.peer(name).call(take_reading) for name in NAMES}


async def _settled(worker: Worker, before: dict[str, Reading]) -> dict[str, Reading]:
    """Read all workers until there is no more than before, for `SETTLE_S` at most."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + SETTLE_S
    while True:
        after = await _read(worker)
        is_clean = not any(after[name].leaks_since(before[name]) for name in NAMES)
        if is_clean or loop.time() > end_s:
            return after
        await asyncio.sleep(0.5)


# --- for people ----------------------------------------------------------------------


def table_of(outcome: Outcome) -> Table:
    """Return the readings side by side."""
    table = Table(title="in use, before -> after")
    table.add_column("")
    for name in outcome.before:
        table.add_column(name, justify="right")
    table.add_row(
        "memory of its own, MiB",
        *(
            f"{outcome.before[name].rss_bytes / MIB:.0f} -> "
            f"{outcome.after[name].rss_bytes / MIB:.0f}"
            for name in outcome.before
        ),
    )
    for what in outcome.before[NAMES[0]].counts:
        cells = []
        for name in outcome.before:
            first = outcome.before[name].counts[what]
            last = outcome.after[name].counts[what]
            mark = " [red]leak[/red]" if last > first else ""
            cells.append(f"{first} -> {last}{mark}")
        table.add_row(what, *cells)
    return table


def main() -> int:
    """Run the soak; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    console = Console()
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("calls", total=options.calls)

        def on_progress(calls: int) -> None:
            before = int(progress.tasks[bar].completed)
            progress.advance(bar, calls)
            is_mark = before // LINE_CALLS != (before + calls) // LINE_CALLS
            if is_mark and not console.is_terminal:
                console.print(f"{before + calls} calls")

        outcome = asyncio.run(
            soak(options.calls, seed=options.seed, on_progress=on_progress)
        )
    console.print(", ".join(f"{n} x {name}" for name, n in outcome.uses.most_common()))
    console.print(table_of(outcome))
    for leak in outcome.leaks:
        console.print(f"[red]leak[/red] {leak}")
    return 1 if outcome.leaks else 0


if __name__ == "__main__":
    sys.exit(main())

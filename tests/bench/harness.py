"""Timing, statistics and the table; it knows nothing of what is measured.

One *start* is a pair of fresh processes that run every workload once and give one
figure per row.  Starts of the two sides alternate, so that a change in the machine's
mood meets both; a row's value is the median over starts, with its range.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

WARM_UPS: Final = 20  # the calls that connect, allocate and fill caches
SIDES: Final = ("asyncrpc", "torch")


class Row(NamedTuple):
    """One line of the table."""

    name: str
    unit: str
    higher_is_better: bool = False


class Figure(NamedTuple):
    """What several starts gave for one row."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        least, most = short(self.least), short(self.most)
        if least == most:
            return short(self.median)
        return f"{short(self.median)} ({least}-{most})"


class Result(NamedTuple):
    """A row with the figures of each side; None where a side gave none."""

    row: Row
    figures: Mapping[str, Figure | None]

    @property
    def ratio(self) -> float | None:
        """How many times as good as torch asyncrpc is; 2 is twice as fast."""
        ours, theirs = (self.figures[side] for side in SIDES)
        if ours is None or theirs is None or not ours.median or not theirs.median:
            return None
        ratio = ours.median / theirs.median
        return ratio if self.row.higher_is_better else 1 / ratio


class Budget(NamedTuple):
    """How long one workload is repeated, and how often at least."""

    seconds: float
    at_least: int = 3


def measure(
    action: Callable[[], object], budget: Budget, *, warm_ups: int = WARM_UPS
) -> list[float]:
    """Repeat a blocking action; return the seconds of each."""
    for _ in range(warm_ups):
        action()
    times_s: list[float] = []
    end_s = time.perf_counter() + budget.seconds
    while time.perf_counter() < end_s or len(times_s) < budget.at_least:
        start_s = time.perf_counter()
        action()
        times_s.append(time.perf_counter() - start_s)
    return times_s


async def measure_async(
    action: Callable[[], Awaitable[object]], budget: Budget, *, warm_ups: int = WARM_UPS
) -> list[float]:
    """Repeat an action that is awaited; return the seconds of each."""
    for _ in range(warm_ups):
        await action()
    times_s: list[float] = []
    end_s = time.perf_counter() + budget.seconds
    while time.perf_counter() < end_s or len(times_s) < budget.at_least:
        start_s = time.perf_counter()
        await action()
        times_s.append(time.perf_counter() - start_s)
    return times_s


def p50_p99_us(times_s: Sequence[float]) -> list[float]:
    """Return the median and the 99th percentile, in microseconds."""
    if len(times_s) == 1:
        return [times_s[0] * 1e6] * 2
    p99_s = statistics.quantiles(times_s, n=100, method="inclusive")[98]
    return [statistics.median(times_s) * 1e6, p99_s * 1e6]


def per_second(times_s: Sequence[float]) -> float:
    """Return how many actions there were per second, over all of them."""
    return len(times_s) / sum(times_s)


def gb_per_second(times_s: Sequence[float], nbytes: int) -> float:
    """Return what an action of the median time moves, in 10^9 bytes per second."""
    return nbytes / statistics.median(times_s) / 1e9


def short(value: float) -> str:
    """Write a number with three digits that count, without an exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def collect(
    rows: Iterable[Row], starts: Mapping[str, Sequence[Mapping[str, float]]]
) -> list[Result]:
    """Join what the starts of each side gave, row by row.

    Args:
        rows: the lines of the table, in order.
        starts: by side, one mapping from row names to values per start.
    """
    results = []
    for row in rows:
        figures: dict[str, Figure | None] = {}
        for side in SIDES:
            values = [one[row.name] for one in starts.get(side, ()) if row.name in one]
            figures[side] = Figure.of(values) if values else None
        if any(figures.values()):
            results.append(Result(row, figures))
    return results


def cells_of(result: Result) -> list[str]:
    """Return one line of the table."""
    figures = [str(result.figures[side] or "-") for side in SIDES]
    ratio = "-" if result.ratio is None else f"{result.ratio:.2f}"
    return [result.row.name, result.row.unit, *figures, ratio]


def table(results: Sequence[Result], *, markdown: bool = False) -> str:
    """Return the table: text in the first two columns, numbers to the right.

    Args:
        results: its lines.
        markdown: write it for a Markdown document.
    """
    heads = ["workload", "unit", *SIDES, "ratio"]
    lines = [heads, *map(cells_of, results)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(heads))]
    edge, gap = ("| ", " | ") if markdown else ("", "  ")
    texts = [
        edge
        + gap.join(
            cell.ljust(width) if at < 2 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        + edge[::-1]
        for line in lines
    ]
    if markdown:
        rules = [
            "-" * width if at < 2 else "-" * (width - 1) + ":"
            for at, width in enumerate(widths)
        ]
        texts.insert(1, edge + gap.join(rules) + edge[::-1])
    return "\n".join(text.rstrip() for text in texts)


def as_json(results: Sequence[Result]) -> list[dict[str, object]]:
    """Return the results as plain values."""
    return [
        {
            **result.row._asdict(),
            **{side: figure and figure._asdict() for side, figure in _figures(result)},
            "ratio": result.ratio,
        }
        for result in results
    ]


def _figures(result: Result) -> list[tuple[str, Figure | None]]:
    return [(side, result.figures[side]) for side in SIDES]

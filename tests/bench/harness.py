"""Timing, statistics and the table; it knows nothing of what is measured.

One *start* is a pair of fresh processes that run every workload once and give one
figure per row.  Starts of the two sides alternate, so that a change in the machine's
mood meets both; a row's value is the median over starts, with its range.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

WARM_UPS: Final = 20  # the calls that connect, allocate and fill caches
SIDES: Final = ("asyncrpc", "torch")


class Row(NamedTuple):
    name: str  # what was done
    unit: str  # of the figures
    # Of the figures; a ratio is always better when higher.
    higher_is_better: bool = False
    # The ratio that is to be reached; None if there is no such aim.
    target: float | None = None
    # The figure itself is to be no more than this; None likewise.
    limit: float | None = None
    # The side and the row that it is compared with; torch's own if None.
    against: tuple[str, str] | None = None
    ours: str = ""  # the row that has asyncrpc's figure, if it is not this one


class Figure(NamedTuple):
    """What several starts gave for one row, in their order."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def least(self) -> float:
        return min(self.values)

    @property
    def most(self) -> float:
        return max(self.values)

    def __str__(self) -> str:
        least, most = short(self.least), short(self.most)
        if least == most:
            return short(self.median)
        return f"{short(self.median)} ({least}-{most})"


class Result(NamedTuple):
    """A row and what was found; None where a side gave nothing."""

    row: Row
    figures: Mapping[str, Figure | None]
    rival: Figure | None  # what it is compared with
    failure: str = ""  # why asyncrpc gave nothing, if it should have

    @property
    def ratio(self) -> float | None:
        """How many times as good as its rival asyncrpc is; 2 is twice as fast."""
        ours = self.figures[SIDES[0]]
        if ours is None or self.rival is None:
            return None
        return self._ratio(ours.median, self.rival.median)

    @property
    def ratios(self) -> list[float]:
        """The ratio in each pair of starts: its spread."""
        ours = self.figures[SIDES[0]]
        if ours is None or self.rival is None:
            return []
        pairs = zip(ours.values, self.rival.values, strict=False)
        ratios = [self._ratio(value, other) for value, other in pairs]
        return [ratio for ratio in ratios if ratio is not None]

    def _ratio(self, ours: float, theirs: float) -> float | None:
        if not ours or not theirs:
            return None
        return ours / theirs if self.row.higher_is_better else theirs / ours

    @property
    def aim(self) -> str:
        """What was to be reached, in words."""
        if self.row.target is not None:
            return f">= {short(self.row.target)}"
        return "" if self.row.limit is None else f"<= {short(self.row.limit)}"

    @property
    def verdict(self) -> str:
        """`ok`, `short` or `failed`; empty if nothing was aimed at."""
        ours = self.figures[SIDES[0]]
        if ours is None:
            return "failed" if self.failure or self.aim else ""
        if self.row.limit is not None:
            return "ok" if ours.median <= self.row.limit else "short"
        if self.row.target is None:
            return ""
        if self.ratio is None:  # there is nothing to compare with
            return ""
        return "ok" if self.ratio >= self.row.target else "short"


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
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def collect(
    rows: Iterable[Row],
    starts: Mapping[str, Sequence[Mapping[str, float]]],
    failures: Mapping[str, str] | None = None,
) -> list[Result]:
    """Join what the starts of each side gave, row by row.

    Args:
        failures: by row name, why asyncrpc gave nothing.
    """
    failures = failures or {}
    results = []
    for row in rows:
        figures = {
            side: figure_of(starts.get(side, ()), name)
            for side, name in zip(SIDES, (row.ours or row.name, row.name), strict=True)
        }
        side, name = row.against or (SIDES[1], row.name)
        rival = figure_of(starts.get(side, ()), name)
        failure = "" if figures[SIDES[0]] else failures.get(row.name, "")
        if failure or any(figures.values()):
            results.append(Result(row, figures, rival, failure))
    return results


def figure_of(starts: Sequence[Mapping[str, float]], name: str) -> Figure | None:
    """Return what several starts gave for a row; None if nothing."""
    values = tuple(start[name] for start in starts if name in start)
    return Figure(values) if values else None


def cells_of(result: Result) -> list[str]:
    """Return one line of the table."""
    row = result.row
    figures = [str(result.figures[side] or "-") for side in SIDES]
    if row.against and row.against[0] not in SIDES and result.rival:
        figures[1] = f"{row.against[0]}: {result.rival}"
    ratio = "-" if result.ratio is None else f"{result.ratio:.2f}"
    return [row.name, row.unit, *figures, ratio, result.aim or "-", result.verdict]


def table(results: Sequence[Result], *, markdown: bool = False) -> str:
    """Return the table: text in the first two columns, numbers to the right."""
    heads = ["workload", "unit", *SIDES, "ratio", "target", ""]
    lines = [heads, *map(cells_of, results)]
    return aligned(lines, texts=(0, 1, len(heads) - 1), markdown=markdown)


def aligned(
    lines: Sequence[Sequence[str]],
    *,
    texts: Sequence[int] = (0, 1),
    markdown: bool = False,
) -> str:
    """Return lines of cells as columns: those of `texts` to the left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if markdown:
        widths = [max(3, width) for width in widths]
    is_text = [at in texts for at in range(len(widths))]
    edge, gap = ("| ", " | ") if markdown else ("", "  ")
    rows = [
        edge
        + gap.join(
            cell.ljust(width) if text else cell.rjust(width)
            for cell, width, text in zip(line, widths, is_text, strict=True)
        )
        + edge[::-1]
        for line in lines
    ]
    if markdown:
        rules = [
            "-" * width if text else "-" * (width - 1) + ":"
            for width, text in zip(widths, is_text, strict=True)
        ]
        rows.insert(1, edge + gap.join(rules) + edge[::-1])
    return "\n".join(row.rstrip() for row in rows)


def times_as_good(
    row: Row, ours: Figure | None, others: Iterable[Figure | None]
) -> float | None:
    """Return how many times as good as the best of the others ours is."""
    medians = [other.median for other in others if other is not None]
    if ours is None or not medians:
        return None
    if row.higher_is_better:
        best = max(medians)
        return ours.median / best if best else None
    return min(medians) / ours.median if ours.median > 0 else None


def failures_of(results: Sequence[Result]) -> list[str]:
    """Return a line for each row that gave nothing, with the reason."""
    return [
        f"{result.row.name}: {result.failure}" for result in results if result.failure
    ]


def as_json(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return the results as plain values; `from_json` reads them."""
    return [
        {
            **result.row._asdict(),
            **{side: _plain(result.figures[side]) for side in SIDES},
            "rival": _plain(result.rival),
            "ratio": result.ratio,
            "ratios": result.ratios,
            "verdict": result.verdict,
            "failure": result.failure,
        }
        for result in results
    ]


def from_json(written: Sequence[Mapping[str, Any]]) -> list[Result]:
    """Read what `as_json` wrote."""

    def figure(record: Mapping[str, Any] | None) -> Figure | None:
        return None if record is None else Figure(tuple(record["values"]))

    return [
        Result(
            Row(
                **{name: record[name] for name in Row._fields if name != "against"},
                against=tuple(record["against"]) if record["against"] else None,
            ),
            {side: figure(record[side]) for side in SIDES},
            figure(record["rival"]),
            record["failure"],
        )
        for record in written
    ]


def _plain(figure: Figure | None) -> dict[str, Any] | None:
    if figure is None:
        return None
    return {
        "median": figure.median,
        "least": figure.least,
        "most": figure.most,
        "values": list(figure.values),
    }

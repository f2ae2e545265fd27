"""Runs a pair of processes in several ways, in turn: a column for each way."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from tests.bench.harness import short
from tests.bench.processes import reports, say

Found = dict[str, dict[str, list[list[Any]]]]  # by figure and way, of each start


def run(
    module: str, option: str, ways: Sequence[str], starts: int, *more: str
) -> Found:
    """Let the ways of an option take turns; a start that fails is left out."""
    results: Found = defaultdict(dict)
    for start in range(starts):
        for way in ways:
            say(f"start {start + 1} of {starts}: {way}")
            try:
                for name, figures in reports(module, [*more, option, way]):
                    results[name].setdefault(way, []).append(figures)
            except RuntimeError as error:
                say(f"  failed: {error}")
    return results


def table(results: Found, ways: Sequence[str], width: int, about: str) -> str:
    """Return medians over starts."""
    lines = [" " * width + "".join(f"{way:>18}" for way in ways)]
    for name, by_way in results.items():
        cells = [_cell(by_way[way]) if way in by_way else "-" for way in ways]
        lines.append(f"{name:<{width}}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join([*lines, "", f"{about}; medians over starts"])


def _cell(starts: list[list[Any]]) -> str:
    medians = [statistics.median(column) for column in zip(*starts, strict=True)]
    return " / ".join(map(short, medians))

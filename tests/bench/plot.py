"""The table as a picture: one bar per row, how many times as good as torch.

A bar ends at the ratio of the medians; its whisker is the range over pairs of starts;
the tick is the target.  The axis is logarithmic: twice as fast is as long as twice as
slow.  A row without a ratio has no bar and is left out: the table has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from tests.bench.harness import SIDES, Result, short

COLORS: Final = {"ok": "#2a7f62", "short": "#d1495b", "": "#7d8597"}
# For those who do not tell the colours apart.
HATCHES: Final = {"ok": "", "short": "///", "": ""}
MEANINGS: Final = {"ok": "target reached", "short": "falls short", "": "no target"}
TICKS: Final = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8, 16, 32, 64)


def draw(results: Sequence[Result], path: Path, *, subtitle: str) -> None:
    """Write the picture to `path`."""
    shown = [result for result in results if result.ratio is not None][::-1]
    figure = Figure(figsize=(11, 1.5 + 0.3 * len(shown)))
    axes = figure.subplots()
    for at, result in enumerate(shown):
        _bar(axes, at, result)
    _scale(axes, shown)
    axes.set_yticks(range(len(shown)), [result.row.name for result in shown])
    axes.set_ylim(-0.7, len(shown) - 0.3)
    axes.set_title(
        "asyncrpc against torch.distributed.rpc, times as good (asyncrpc : torch)\n",
        loc="left",
        fontweight="bold",
    )
    axes.text(
        0, 1.01, subtitle, transform=axes.transAxes, fontsize=7.5, color="#555555"
    )
    _legend(axes)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _bar(axes: Any, at: int, result: Result) -> None:
    ratio, spread = result.ratio or 1.0, result.ratios or [result.ratio or 1.0]
    # A logarithmic axis has no zero: bars begin at 1, where both are as good.
    axes.barh(
        at,
        ratio - 1,
        left=1,
        height=0.66,
        color=COLORS[result.verdict],
        hatch=HATCHES[result.verdict],
        edgecolor="white",
        linewidth=0,
        zorder=2,
    )
    low, high = min(*spread, ratio), max(*spread, ratio)
    if low < high:
        axes.errorbar(
            ratio,
            at,
            xerr=[[ratio - low], [high - ratio]],
            color="#222222",
            capsize=2.5,
            linewidth=1,
            zorder=3,
        )
    if result.row.target is not None:
        axes.plot(
            [result.row.target] * 2,
            [at - 0.42, at + 0.42],
            color="#111111",
            linewidth=2.2,
            zorder=4,
        )
    text = f"{short(ratio)}x   {_figures(result)}"
    end = max(high, result.row.target or 0, 1)
    axes.annotate(
        text,
        (end, at),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        fontsize=7.5,
        color="#333333",
    )


def _figures(result: Result) -> str:
    ours = result.figures[SIDES[0]]
    both = [
        short(figure.median) for figure in (ours, result.rival) if figure is not None
    ]
    return f"({' : '.join(both)} {result.row.unit})"


def _scale(axes: Any, shown: Sequence[Result]) -> None:
    axes.set_xscale("log", base=2)
    ends = [
        value for result in shown for value in (*result.ratios, result.row.target or 1)
    ]
    least, most = min(*ends, 1) / 1.15, max(*ends, 2)
    # A quarter of the width is for the text behind the longest bar.
    axes.set_xlim(least, most * max(3.2, (most / least) ** (1 / 3)))
    ticks = [tick for tick in TICKS if least <= tick <= most * 1.5]
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.minorticks_off()
    axes.axvline(1, color="#222222", linewidth=1, zorder=3)
    axes.grid(axis="x", color="#dddddd", zorder=0)
    axes.tick_params(axis="y", length=0, labelsize=9)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _legend(axes: Any) -> None:
    handles: list[Any] = [
        Patch(
            facecolor=color,
            edgecolor="white",
            linewidth=0,
            hatch=HATCHES[verdict],
            label=MEANINGS[verdict],
        )
        for verdict, color in COLORS.items()
    ]
    handles += [
        Line2D([], [], color="#111111", linewidth=2.2, label="target"),
        Line2D([], [], color="#222222", linewidth=1, label="range over starts"),
    ]
    axes.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.4, -0.06),
        ncols=len(handles),
        frameon=False,
        fontsize=8,
    )

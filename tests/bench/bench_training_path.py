"""Where does the time of a training step go, in microseconds?

One layer on another worker: forward, backward and the optimizer's step, one step after
the other, as `remote Linear, forward to step` does.  Drawn for asyncrpc, for its facade
and for torch.distributed.rpc, whose program is the facade's.  In a traced start both
processes take down when a step passes which place (`training_path.Place`), on one
clock; starts that trace nothing alternate with them and say what the marks cost.

Torch's optimizer runs compiled on the owner, where a mark has no place: its request,
its work and its answer are one stage.

    $ make bench ONLY=training_path
    $ python -m tests.bench.bench_training_path --starts 5 --plot steps.png
    $ python -m tests.bench.bench_training_path --cores apart --spin off
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tests.bench import pages, tracing
from tests.bench.harness import p50_p99_us
from tests.bench.processes import reports, say
from tests.bench.training_path import Place

MODULE: Final = "tests.bench.sides.training_path_side"
SIDES: Final = ("asyncrpc", "facade", "torch")
PICTURE: Final = pages.PAGE.with_name("training-step.png")
COLORS: Final = {"trainer": "#2a7f62", "owner": "#e0a030"}
SHORT: Final = {
    Place.OPENED: "open",
    Place.GRADIENT: "gradient",
    Place.COMPUTED: "gradients",
    Place.END: "close",
}
WAYS: Final = {"->": (1, 0), "<-": (0, 1)}  # from which height to which


class Side:
    """What all starts of one library found."""

    def __init__(self) -> None:
        self.stages: list[Mapping[Place, Sequence[float]]] = []  # of each traced start
        self.traced_us: list[list[float]] = []  # p50 and p99 of each traced start
        self.plain_us: list[list[float]] = []  # of each other one
        self.usage: list[list[list[float]]] = []  # of both processes, not traced

    def add(self, name: str, values: list[Any], *, traced: bool) -> None:
        """Take up what one process has reported."""
        if name == "marks" and traced:
            self.stages.append(tracing.stages(tracing.cut(values[0], Place)))
        elif name == "times":
            times = self.traced_us if traced else self.plain_us
            times.append(p50_p99_us([took_us / 1e6 for took_us in values[0]]))
        elif name == "usage" and not traced:
            self.usage.append(values)

    def stage(self, place: Place) -> list[float] | None:
        return tracing.stage_of(self.stages, place)

    def used(self, process: int, what: int) -> float:
        """Return what one process used for a step, the median over starts."""
        return statistics.median(start[process][what] for start in self.usage)


def run_starts(starts: int, arguments: Sequence[str]) -> dict[str, Side]:
    """Let the libraries take turns, traced and not."""
    sides = {side: Side() for side in SIDES}
    for start in range(2 * starts):
        traced = bool(start % 2)
        for name, side in sides.items():
            how = "traced" if traced else "plain"
            say(f"start {start + 1} of {2 * starts}: {name}, {how}")
            flags = ["--side", name, *(["--traced"] if traced else [])]
            for what, values in reports(MODULE, [*arguments, *flags]):
                side.add(what, values, traced=traced)
    return sides


def table(results: Mapping[str, Side]) -> str:
    """Return the stages side by side, their sums, and what else a step takes."""
    width = 42
    lines = [
        " " * width + "".join(f"{name:>18}" for name in results),
        f"{'where     stage, us':<{width}}" + f"{'p50':>10}{'p99':>8}" * len(results),
    ]

    def row(
        text: str, pairs: Sequence[Sequence[float] | None], digits: int = 0
    ) -> None:
        cells = "".join(
            f"{'-':>10}{'':>8}"
            if pair is None
            else f"{pair[0]:>10,.{digits}f}"
            + (f"{pair[1]:>8,.{digits}f}" if len(pair) > 1 else " " * 8)
            for pair in pairs
        )
        lines.append(f"{text:<{width}}{cells}".rstrip())

    sides = results.values()
    for place in list(Place)[1:]:
        row(f"{place.at:<10}{place.text}", [side.stage(place) for side in sides])
    row("sum of the medians", [[sum_of(side)] for side in sides])
    row("whole step, traced", [tracing.middle(side.traced_us) for side in sides])
    row("whole step, not traced", [tracing.middle(side.plain_us) for side in sides])
    for process, who in enumerate(("trainer", "owner")):
        row(
            f"{who}: processor time, us",
            [[side.used(process, 2) * 1e6] for side in sides],
        )
        row(f"{who}: waits", [[side.used(process, 0)] for side in sides], 1)
    return "\n".join(lines)


def sum_of(side: Side) -> float:
    pairs = [pair for place in Place if (pair := side.stage(place)) is not None]
    return sum(pair[0] for pair in pairs)


def draw(results: Mapping[str, Side], path: Path, *, subtitle: str) -> None:
    """Draw the median step of each: what the trainer does, what the owner, and when."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (half a second, only here)

    figure = Figure(figsize=(11, 1.4 + 1.2 * len(results)))
    panels = figure.subplots(len(results), sharex=True, squeeze=False)[:, 0]
    for axes, (name, side) in zip(panels, results.items(), strict=True):
        at = 0.0
        known = [place for place in Place if side.stage(place) is not None]
        for place in known:
            pair = side.stage(place)
            assert pair is not None  # it is known
            is_both = place is Place.STEPPED and Place.STEP not in known
            _block(axes, place, at, pair[0], is_both=is_both)
            at += pair[0]
        axes.set_yticks([1, 0], ["trainer", "owner"])
        axes.set_ylim(-0.6, 1.6)
        axes.set_title(f"{name}: {at:,.0f} us", loc="left", fontsize=9, pad=3)
        axes.tick_params(axis="y", length=0, labelsize=8)
        for edge in ("top", "right", "left"):
            axes.spines[edge].set_visible(False)
    panels[-1].set_xlabel("microseconds", fontsize=8)
    figure.suptitle(
        f"One training step of a remote layer: forward, backward, SGD\n{subtitle}",
        fontsize=9,
        x=0.02,
        ha="left",
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _block(axes: Any, place: Place, at: float, long: float, *, is_both: bool) -> None:
    """Draw one stage: at whom it passes, or the way between both."""
    if place.at in WAYS:
        points = [at, at + long / 2, at + long] if is_both else [at, at + long]
        heights = (1, 0, 1) if is_both else WAYS[place.at]
        axes.plot(points, heights, color="#7d8597", linewidth=1.2, zorder=1)
        return
    is_above = place.at == "trainer"
    low = 0.72 if is_above else -0.28
    axes.broken_barh([(at, long)], (low, 0.56), color=COLORS[place.at], zorder=2)
    axes.annotate(
        SHORT.get(place, place.text),
        (at + long / 2, low + (0.62 if is_above else -0.06)),
        fontsize=6.5,
        # Two follow one another without a way between them.
        ha={Place.LOSS: "right", Place.GRADIENT: "left"}.get(place, "center"),
        va="bottom" if is_above else "top",
    )


def main() -> None:
    parser = pages.parser(__doc__, 3)
    parser.add_argument("--steps", type=int, default=300, help="per start")
    parser.add_argument("--cores", choices=("apart", "free"), default="free")
    parser.add_argument(
        "--spin", default="", help="NetworkOptions.spin; empty: the default"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    options = parser.parse_args()
    arguments = ["--steps", str(options.steps), "--cores", options.cores]
    results = run_starts(options.starts, [*arguments, "--spin", options.spin])
    text = table(results)
    print(text)
    about = textwrap.fill(pages.about(), 150)
    if options.plot:
        draw(results, options.plot, subtitle=about)
    if options.update_docs:
        pages.renew("training path", pages.as_block(text))
        draw(results, PICTURE, subtitle=about)


if __name__ == "__main__":
    main()

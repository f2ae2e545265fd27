"""What does polling give a call, and what does it take from others?

Most of a small call's time goes to waking a core that sleeps (`bench_call_path`).  A
loop that polls does not sleep; but it burns a core, and where there are fewer cores
than threads it takes that core from somebody.  One column per setting of
`NetworkOptions.spin`.

    $ make bench ONLY=spin
    $ python -m tests.bench.bench_spin --spin off adaptive 0.0002 --starts 3
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final

from tests.bench import pages
from tests.bench.harness import short
from tests.bench.processes import reports, say

MODULE: Final = "tests.bench.sides.spin_side"


def cell(starts: list[list[Any]]) -> str:
    medians = [statistics.median(column) for column in zip(*starts, strict=True)]
    return " / ".join(map(short, medians))


def table(found: Mapping[str, Mapping[str, list[list[Any]]]], spins: list[str]) -> str:
    """Return a line per thing measured, a column per setting."""
    lines = [" " * 48 + "".join(f"{spin:>18}" for spin in spins)]
    for name, by_spin in found.items():
        cells = [cell(by_spin[spin]) if spin in by_spin else "-" for spin in spins]
        lines.append(f"{name:<48}" + "".join(f"{one:>18}" for one in cells))
    lines += ["", "calls: p50 / p99; cores: caller / callee; medians over starts"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spin", nargs="+", default=["off", "adaptive", "0.0002"])
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.6, help="per cell")
    parser.add_argument("--update-docs", action="store_true")
    options = parser.parse_args()
    found: dict[str, dict[str, list[list[Any]]]] = defaultdict(dict)
    for start in range(options.starts):
        for spin in options.spin:
            say(f"start {start + 1} of {options.starts}: {spin}")
            arguments = ["--seconds", str(options.seconds), "--spin", spin]
            try:
                for name, figures in reports(MODULE, arguments):
                    found[name].setdefault(spin, []).append(figures)
            except RuntimeError as error:
                say(f"  failed: {error}")
    text = table(found, options.spin)
    print(text)
    if options.update_docs:
        pages.renew("spin", pages.as_block(text))


if __name__ == "__main__":
    main()

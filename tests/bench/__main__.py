"""How does asyncrpc compare with torch.distributed.rpc, on this machine, now?

    $ make bench                      # everything, side by side: a quarter of an hour
    $ make bench ONLY=call,rref       # workloads whose names contain one of these
    $ make bench ONLY=transport       # one of the scripts bench_*.py instead
    $ python -m tests.bench --quick   # one start of each side
    $ python -m tests.bench --starts 5 --json FILE --plot FILE.png
    $ python -m tests.bench --spin off --only train_  # asyncrpc does not poll
    $ python -m tests.bench --update-docs FILE   # the page and the picture, from a run

Nothing passes or fails.  Each start is a fresh set of processes; the starts of the two
sides alternate; a cell is the median over starts with its range.  A ratio over 1 means
that asyncrpc does better.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tests.bench import harness, machine, pages
from tests.bench.comparing import Comparison
from tests.bench.processes import say
from tests.bench.workloads import SOCKETS, WORKLOADS, rows_of

STARTS: Final = 3
SECONDS: Final = 0.7  # per workload and start
QUICK_SECONDS: Final = 0.25
SCRIPTS: Final = sorted(
    path.stem.removeprefix("bench_")
    for path in Path(__file__).parent.glob("bench_*.py")
)


# Scripts that compare with torch; the others look into what is here.
BESIDE_TORCH: Final = ("collectives", "ddp", "queue")


def chosen(only: str) -> tuple[list[str], list[str]]:
    """Return the workloads and the scripts that a filter names."""
    words = [word for word in only.split(",") if word]
    if not words:
        return list(WORKLOADS), list(BESIDE_TORCH)
    if set(words) <= set(SCRIPTS):  # `call_path` is a script, not what has `call` in it
        return [], words

    def pick(names: Sequence[str]) -> list[str]:
        return [name for name in names if any(word in name for word in words)]

    return with_partners(pick(list(WORKLOADS))), pick(SCRIPTS)


def with_partners(names: Sequence[str]) -> list[str]:
    """Add the workloads that have asyncrpc's figures for rows of others."""
    found_in = {row.name: name for name in WORKLOADS for row in rows_of([name])}
    partners = {found_in[row.ours] for row in rows_of(names) if row.ours}
    return [name for name in WORKLOADS if name in names or name in partners]


def measure(
    names: Sequence[str], *, starts: int, seconds: float, spin: str
) -> dict[str, Any]:
    """Measure both sides; return what `--json` writes."""
    load = machine.load()
    sides = (*harness.SIDES, SOCKETS)
    comparison = Comparison(names, seconds=seconds, sides=sides, spin=spin)
    comparison.run(starts)
    return {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "machine": machine.describe(),
        "load": load,
        "starts": starts,
        "seconds": seconds,
        "spin": spin,
        "rows": harness.as_json(comparison.results()),
    }


def show(written: dict[str, Any], *, markdown: bool) -> None:
    """Print the table of a run."""
    results = harness.from_json(written["rows"])
    print(written["machine"] + "\n")
    print(harness.table(results, markdown=markdown))
    for failure in harness.failures_of(results):
        print(f"failed: {failure}")
    print("\nmedian (least-most) over starts; ratio over 1: asyncrpc does better")


def draw(written: dict[str, Any], path: Path) -> None:
    from tests.bench import plot  # noqa: PLC0415  (half a second, only for this)

    subtitle = f"{written['machine']}; {written['starts']} starts"
    plot.draw(harness.from_json(written["rows"]), path, subtitle=subtitle)


def update_docs(written: dict[str, Any]) -> None:
    if written.get("spin") == "off":
        pages.renew("table, not polling", pages.section(written))
        return
    pages.renew("table", pages.section(written))
    draw(written, pages.PICTURE)


def parse() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--quick", action="store_true", help="one short start a side")
    add("--starts", type=int, default=STARTS, metavar="N", help="of each side")
    add("--only", default=os.environ.get("ONLY", ""), metavar="NAMES")
    add("--spin", default="", help="asyncrpc's NetworkOptions.spin: off, adaptive")
    add("--json", type=Path, metavar="FILE", help="write figures there")
    add("--markdown", action="store_true", help="print for a document")
    add("--plot", type=Path, metavar="FILE.png", help="draw the ratios")
    add("--from", dest="source", type=Path, metavar="FILE", help="measure nothing")
    add("--update-docs", type=Path, metavar="FILE", help="renew docs/ from a run")
    return parser


def main() -> int:
    parser = parse()
    options = parser.parse_args()
    if options.update_docs:
        update_docs(json.loads(options.update_docs.read_text("utf-8")))
        return 0
    names, scripts = chosen(options.only)
    if not names and not scripts:
        parser.error(
            f"nothing is called {options.only!r}; there are the workloads "
            f"{', '.join(WORKLOADS)} and the scripts {', '.join(SCRIPTS)}"
        )
    begun_s = time.monotonic()
    if options.source or names:
        written = (
            json.loads(options.source.read_text("utf-8"))
            if options.source
            else measure(
                names,
                starts=1 if options.quick else options.starts,
                seconds=QUICK_SECONDS if options.quick else SECONDS,
                spin=options.spin,
            )
        )
        show(written, markdown=options.markdown)
        if options.json:
            options.json.write_text(json.dumps(written, indent=2) + "\n", "utf-8")
        if options.plot:
            draw(written, options.plot)
    for script in scripts if not options.source else ():
        say(f"bench_{script}.py")
        subprocess.run(
            [sys.executable, "-m", f"tests.bench.bench_{script}"], check=False
        )
    say(f"{time.monotonic() - begun_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

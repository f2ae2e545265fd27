"""What does the flight recorder cost, which is always on?

Calls, and training steps, per second between two processes, with their ends noted at
both ends and without, in turn, many times in each of several starts; and the processor
time of both for one.

    $ python -m tests.bench.bench_recorder --starts 5
    $ python -m tests.bench.bench_recorder --starts 5 --update-docs
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from typing import Final

from tests.bench import pages
from tests.bench.bench_metrics import Start, table
from tests.bench.processes import reports, say

MODULE: Final = "tests.bench.sides.recorder_side"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=30, help="of each, per start")
    parser.add_argument("--seconds", type=float, default=0.25, help="per round")
    parser.add_argument("--update-docs", action="store_true")
    options = parser.parse_args()
    found: dict[str, list[Start]] = defaultdict(list)
    for start in range(options.starts):
        say(f"start {start + 1} of {options.starts}")
        arguments = [f"--rounds={options.rounds}", f"--seconds={options.seconds}"]
        for name, figures in reports(MODULE, arguments):
            found[name] += figures
    text = table(found)
    print(text)
    if options.update_docs:
        pages.renew("recorder", pages.as_block(text))


if __name__ == "__main__":
    main()

"""What do traces cost a call?

One column per way: not turned on; turned on at both ends, by a root that leaves the
trace out; and recorded at both ends, by the SDK of OpenTelemetry, to an exporter that
drops the spans.  Starts of the ways alternate.

    $ make bench ONLY=traces
    $ python -m tests.bench.bench_traces --starts 5 --update-docs
"""

from __future__ import annotations

from typing import Final

from tests.bench import pages, ways

MODULE: Final = "tests.bench.sides.traces_side"
WAYS: Final = ("off", "left out", "recorded")


def main() -> None:
    parser = pages.parser(__doc__, 3)
    parser.add_argument("--seconds", type=float, default=1.0, help="per cell")
    options = parser.parse_args()
    seconds = ("--seconds", str(options.seconds))
    result = ways.run(MODULE, "--way", WAYS, options.starts, *seconds)
    about = "us: p50 / p99; processor time: caller / callee"
    pages.show("traces", ways.table(result, WAYS, 32, about), options)


if __name__ == "__main__":
    main()

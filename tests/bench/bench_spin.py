"""What does polling give a call, and what does it take from others?

Most of a small call's time goes to waking a core that sleeps (`bench_call_path`).  A
loop that polls does not sleep; but it burns a core, and where there are fewer cores
than threads it takes that core from somebody.  One column per setting of
`NetworkOptions.spin`.

    $ make bench ONLY=spin
    $ python -m tests.bench.bench_spin --spin off adaptive 0.0002 --starts 3
"""

from __future__ import annotations

from typing import Final

from tests.bench import pages, ways

MODULE: Final = "tests.bench.sides.spin_side"


def main() -> None:
    parser = pages.parser(__doc__, 2)
    parser.add_argument("--spin", nargs="+", default=["off", "adaptive", "0.0002"])
    parser.add_argument("--seconds", type=float, default=0.6, help="per cell")
    options = parser.parse_args()
    seconds = ("--seconds", str(options.seconds))
    result = ways.run(MODULE, "--spin", options.spin, options.starts, *seconds)
    about = "calls: p50 / p99; cores: caller / callee"
    pages.show("spin", ways.table(result, options.spin, 48, about), options)


if __name__ == "__main__":
    main()

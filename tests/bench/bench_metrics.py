"""What do metrics cost?

Calls per second between two processes, with metrics counted at both ends and without,
in turn, many times in each of several starts; and the processor time of both for one
call, which a busy machine changes less.

    $ python -m tests.bench.bench_metrics --starts 5
    $ python -m tests.bench.bench_metrics --starts 5 --update-docs
"""

from __future__ import annotations

from tests.bench.on_and_off import compare

if __name__ == "__main__":
    compare("metrics", __doc__, rounds=6, seconds=0.5)

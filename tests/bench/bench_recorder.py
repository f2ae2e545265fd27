"""What does the flight recorder cost, which is always on?

Calls, and training steps, per second between two processes, with their ends noted at
both ends and without, in turn, many times in each of several starts; and the processor
time of both for one.

    $ python -m tests.bench.bench_recorder --starts 5
    $ python -m tests.bench.bench_recorder --starts 5 --update-docs
"""

from __future__ import annotations

from tests.bench.on_and_off import compare

if __name__ == "__main__":
    compare("recorder", __doc__, rounds=30, seconds=0.25)

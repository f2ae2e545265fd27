"""What does Python's collector of cycles cost, and what does `gc.freeze()` save of it?

Calls, and training steps, per second between two processes, with `gc.freeze()` called
at both ends when all had been imported and made, and without, in turn, many times in
each of several starts; and the processor time of both for one.

    $ python -m tests.bench.bench_collector --starts 5
    $ python -m tests.bench.bench_collector --starts 5 --update-docs
"""

from __future__ import annotations

from tests.bench.on_and_off import compare

if __name__ == "__main__":
    compare("collector", __doc__, rounds=10, seconds=1.0)

"""One of two processes whose heap is nothing to Python's collector, now and then."""

from __future__ import annotations

import gc

from tests.bench.sides.on_and_off import run_side


def freeze(wanted: str) -> None:
    """Take all that is there from the collector's care, or give it back."""
    gc.unfreeze()
    gc.collect()
    if wanted == "on":
        gc.freeze()


if __name__ == "__main__":
    run_side(freeze, __doc__)

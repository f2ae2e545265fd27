"""A run that is resumed has the losses of one that was not interrupted."""

from __future__ import annotations

import pytest

from tests.examples.programs import run


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_resumed_run_has_the_same_losses(ranks: int) -> None:
    printed = run("powersgd_checkpoint.py", "--ranks", str(ranks))
    for rank in range(ranks):
        said = [line for line in printed.splitlines() if f"rank {rank}:" in line]
        assert said[0].endswith("all 10 are the same")
        # A matrix of 24 x 24 as 2 x 24, one of 12 x 24 as 36; and 36 biases.
        assert said[1].endswith(f"rate {900 / 120:.2f}")

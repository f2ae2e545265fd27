"""Local SGD comes to what torch's does, step by step.

Over two ranks parameters have the same bits.  Over more, gloo adds in another order:
then they are the same to a few units of the dtype in which they are added.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrpc.multiprocessing import launch
from tests.numerics.ddp.local_beside_torch import Case, play

MEANS = 2.0  # units: sums are made in double precision, but for the last digit
TRAINED = 16.0  # units: sums in float32, in steps that come after each other


@pytest.mark.slow
def test_two_ranks_match_torch_bitwise(tmp_path: Path) -> None:
    averaging = [
        Case(((2, 2),)),
        Case(((3, 2),), warmup=2),
        Case(((1, 2),), warmup=4),
        Case(((2, 1), (4, 2)), warmup=1),
    ]
    training = [Case(((2, 2),), warmup=3), Case(((2, 1), (3, 2)), goes_local=True)]
    launch(play, (str(tmp_path), averaging, training), 2, method="forkserver")


@pytest.mark.slow
def test_four_ranks_match_torch_closely(tmp_path: Path) -> None:
    averaging = [
        Case(((3, 4),), warmup=2, units=MEANS),
        Case(((2, 2), (4, 4)), warmup=1, units=MEANS),
        Case(((1, 1), (2, 2), (6, 4)), units=MEANS),
    ]
    training = [
        Case(((3, 4),), warmup=2, units=TRAINED),
        Case(((4, 2), (6, 4)), warmup=2, units=TRAINED, goes_local=True),
    ]
    launch(play, (str(tmp_path), averaging, training), 4, method="forkserver")

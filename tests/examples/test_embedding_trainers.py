"""DistributedDataParallel and remote embeddings train as one process would."""

from __future__ import annotations

import pytest

from tests.examples.programs import rows, run


@pytest.mark.slow
@pytest.mark.parametrize(("trainers", "epochs", "least"), [(2, 8, 90.0), (3, 5, 80.0)])
def test_trainers_learn_the_same_as_one_process(
    trainers: int, epochs: int, least: float
) -> None:
    options = ("--trainers", str(trainers), "--epochs", str(epochs))
    table = rows(run("embedding_trainers.py", *options))
    *shown, (accuracy, _, between, from_one) = table
    for losses in zip(*(row[1:] for row in shown), strict=True):
        assert float(losses[-1]) < 0.3 * float(losses[0])
    assert float(accuracy.rstrip("%")) >= least
    # DDP's copies are equal to the bit.  What differs is the order of sums, in float64.
    assert float(between) == 0.0
    assert float(from_one) < 1e-9

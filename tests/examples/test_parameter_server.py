"""Trainers that do not wait for each other train one model."""

from __future__ import annotations

import re

import pytest

from tests.examples.programs import rows, run


@pytest.mark.slow
@pytest.mark.parametrize("trainers", [1, 4])
def test_model_reads_unseen_digits(trainers: int) -> None:
    printed = run("parameter_server.py", "--trainers", str(trainers))
    table = rows(printed)
    assert sorted(row[0] for row in table) == [f"trainer{i}" for i in range(trainers)]
    total = re.search(r"(\d+) steps on one model", printed)
    assert total is not None
    assert int(total[1]) == sum(int(row[2]) for row in table)
    accuracy = re.search(r"([\d.]+)% of 360", printed)
    assert accuracy is not None
    assert float(accuracy[1]) >= 92.0

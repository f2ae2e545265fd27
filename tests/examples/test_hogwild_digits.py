"""Processes without a lock learn to read, whether or not they share all the time."""

from __future__ import annotations

import os

import pytest

from tests.examples.programs import rows, run


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["shared", "periodic"])
def test_processes_learn_together(mode: str) -> None:
    printed = run(
        *("hogwild_digits.py", "--mode", mode, "--processes", "2", "--epochs", "4")
    )
    ((threads, _time, _rate, accuracy),) = rows(printed)
    assert threads == str(max(1, (os.cpu_count() or 1) // 2))
    assert float(accuracy.rstrip("%")) > 85.0


@pytest.mark.slow
def test_oversubscribed_run_prints_both_times() -> None:
    printed = run(
        *("hogwild_digits.py", "--processes", "2", "--epochs", "1", "--oversubscribe")
    )
    shared, too_many = rows(printed)
    cores = os.cpu_count() or 1
    assert (shared[0], too_many[0]) == (str(max(1, cores // 2)), str(cores))
    assert all(row[1].endswith(" s") for row in (shared, too_many))

"""The demo learns what it says, and ends when one of its processes fails."""

from __future__ import annotations

import re

import pytest

from tests.examples.programs import ran, run


@pytest.mark.slow
def test_model_reads_unseen_digits() -> None:
    printed = run("train_split_model.py")
    assert len(re.findall(r"epoch +\d+ of 12, loss 0\.\d+|loss 1", printed)) == 12
    accuracy = re.search(r"([\d.]+)%", printed)
    assert accuracy is not None
    assert float(accuracy[1]) >= 95.0


@pytest.mark.slow
def test_failure_ends_all_processes_and_shows_its_origin() -> None:
    done = ran("train_split_model.py", "--fail-at", "3")
    assert done.returncode == 1
    assert "training failed: rank 2 of 4" in done.stderr
    assert "told to fail at step 3" in done.stderr
    assert "on worker 'trainer1'" in done.stderr
    assert 'raise RuntimeError(f"told to fail' in done.stderr
    assert "accuracy" not in done.stdout

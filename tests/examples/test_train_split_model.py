"""The demo learns what it says, and ends when one of its processes fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
DEMO = REPOSITORY / "examples" / "train_split_model.py"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(DEMO), *options],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240.0,
        check=False,
    )


@pytest.mark.slow
def test_it_reads_digits_that_it_has_not_seen() -> None:
    done = run()
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"epoch +\d+ of 12, loss 0\.\d+|loss 1", done.stdout)) == 12
    found = re.search(r"([\d.]+)%", done.stdout)
    assert found is not None
    assert float(found[1]) >= 95.0


@pytest.mark.slow
def test_a_failure_ends_all_processes_and_shows_where_it_was() -> None:
    """`run` returns when the last holder of its pipes has ended."""
    done = run("--fail-at", "3")
    assert done.returncode == 1
    assert "training failed: rank 2 of 4" in done.stderr
    assert "told to fail at step 3" in done.stderr
    assert "on worker 'trainer1'" in done.stderr
    assert 'raise RuntimeError(f"told to fail' in done.stderr
    assert "accuracy" not in done.stdout

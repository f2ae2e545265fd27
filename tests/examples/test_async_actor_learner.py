"""Actors that share a policy and an optimizer learn to keep a pole up."""

from __future__ import annotations

import re

import pytest

from tests.examples.programs import run


@pytest.mark.slow
def test_returns_grow_during_training() -> None:
    printed = run("async_actor_learner.py", "--processes", "2", "--steps", "20000")
    best = re.search(r"of the best 50 in a row: ([\d.]+)", printed)
    assert best is not None, printed
    # A pole that is pushed at random stays up for 22 steps.  Which of two processes
    # comes first is chance, so what was learned may be lost again before the end.
    assert float(best[1]) > 1.5 * 22

"""Actors that share a policy and an optimizer learn to keep a pole up."""

from __future__ import annotations

import re

import pytest

from tests.examples.programs import run


@pytest.mark.slow
def test_returns_grow() -> None:
    printed = run("async_actor_learner.py", "--processes", "2", "--steps", "20000")
    found = re.search(r"the first 50: ([\d.]+), of the last 50: ([\d.]+)", printed)
    assert found is not None, printed
    assert float(found[2]) > 1.5 * float(found[1])

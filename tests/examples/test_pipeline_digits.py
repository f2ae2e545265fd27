"""The pipeline learns what it says, alike by both schedules, and draws what it did."""

from __future__ import annotations

import re

import pytest

from tests.examples.programs import run

CHUNKS, COLUMNS = 8, 64


@pytest.mark.slow
def test_schedules_learn_alike_and_their_stages_are_drawn() -> None:
    printed = run("pipeline_digits.py")
    losses = {
        schedule: re.findall(rf"{schedule}: epoch +\d+, loss ([\d.]+)", printed)
        for schedule in ("gpipe", "1f1b")
    }
    assert len(losses["gpipe"]) == 8
    # The sums are taken in the same order: not a bit differs.
    assert losses["1f1b"] == losses["gpipe"]
    table = re.findall(r"│ (\w+) +│ [\d.]+ +│ ([\d.]+)% .*│ (\d, \d) │ .*", printed)
    assert [(schedule, held) for schedule, _, held in table] == [
        ("gpipe", "8, 8"),
        ("1f1b", "2, 1"),
    ]
    assert all(float(accuracy) > 90.0 for _, accuracy, _ in table), printed
    assert printed.count("11.1%") == 2  # the formula: 1 / (8 + 2 - 1)
    drawings = re.findall(r"^stage\d (\S+)$", printed, re.MULTILINE)
    assert len(drawings) == 4
    assert {len(drawing) for drawing in drawings} == {COLUMNS}
    for drawing in drawings:
        for kind in (str.islower, str.isupper):
            letters = [letter for letter in drawing if kind(letter)]
            assert letters == sorted(letters)  # one micro-batch after the other
    for first, last in (drawings[:2], drawings[2:]):
        assert len(first.rstrip(".")) >= len(last.rstrip("."))  # the first ends last

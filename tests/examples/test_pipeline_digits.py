"""The pipeline learns what it says, alike by both schedules, and draws what it did."""

from __future__ import annotations

import re

import pytest

from tests.examples.programs import run

CHUNKS, COLUMNS = 8, 64


@pytest.mark.slow
def test_it_reads_digits_and_shows_how_its_stages_worked() -> None:
    printed = run("pipeline_digits.py")
    losses = {
        schedule: re.findall(rf"{schedule}: epoch +\d+, loss ([\d.]+)", printed)
        for schedule in ("gpipe", "1f1b")
    }
    assert len(losses["gpipe"]) == 8
    # The sums are taken in the same order: not a bit differs.
    assert losses["1f1b"] == losses["gpipe"]
    found = re.findall(r"│ (\w+) +│ [\d.]+ +│ ([\d.]+)% .*│ (\d, \d) │ .*", printed)
    assert [(schedule, held) for schedule, _, held in found] == [
        ("gpipe", "8, 8"),
        ("1f1b", "2, 1"),
    ]
    assert all(float(accuracy) > 90.0 for _, accuracy, _ in found), printed
    assert printed.count("11.1%") == 2  # the formula: 1 / (8 + 2 - 1)
    drawings = re.findall(r"^stage\d (\S+)$", printed, re.MULTILINE)
    assert len(drawings) == 4
    assert {len(drawing) for drawing in drawings} == {COLUMNS}
    for drawing in drawings:
        for kind in (str.islower, str.isupper):
            letters = [one for one in drawing if kind(one)]
            assert letters == sorted(letters)  # one micro-batch after the other
    for first, last in (drawings[:2], drawings[2:]):
        assert len(first.rstrip(".")) >= len(last.rstrip("."))  # the first ends last

"""The language model learns from one part of the text what holds in another."""

from __future__ import annotations

import re

import pytest

from tests.examples.programs import rows, run


@pytest.mark.slow
def test_perplexity_falls_on_unseen_text() -> None:
    printed = run("language_model.py", "--write", "80", "--start", "The Mouse ")
    known = re.search(r"by frequency alone, perplexity ([\d.]+)", printed)
    assert known is not None
    table = rows(printed)
    assert [row[0] for row in table] == [str(epoch) for epoch in range(1, 7)]
    training, held_out = ([float(row[column]) for row in table] for column in (1, 2))
    assert training == sorted(training, reverse=True)
    assert held_out[-1] < 0.5 * float(known[1])
    assert held_out[-1] < 0.75 * held_out[0]
    assert "100%" not in {row[3] for row in table}  # some are short enough
    written = printed[printed.rindex("╯" if "╯" in printed else "┘") + 1 :].strip("\n")
    assert written.startswith("The Mouse ")
    assert len(written) >= len("The Mouse ") + 80 - 10  # ends may be spaces and lines


@pytest.mark.slow
def test_gradients_are_clipped_by_the_norm_over_both_workers() -> None:
    """Adam adds 1e-8 to its divisor: gradients far shorter teach nobody anything."""
    table = rows(run("language_model.py", "--quick", "--write", "0", "--clip", "1e-10"))
    assert {row[3] for row in table} == {"100%"}
    assert float(table[-1][2]) > 40.0

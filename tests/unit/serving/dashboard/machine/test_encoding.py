"""Answers as JSON: the same text, a piece at a time."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrpc.serving.dashboard.machine.encoding import PIECE_MAX, VALUES_MAX, encoded
from tests.unit.serving.dashboard.machine.told import NO_NUMBERS, ODD_NAMES, done

ROW = {f"key {number}": number / 7 for number in range(20)}
MATRIX = {"workers": ["a"] * 32, "cells": [[ROW] * 32] * 32}
ANSWERS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a little": {"a": 1, "b": None, "c": [True, "x"], "d": {"e": []}},
    "one piece": {"a": [0] * (PIECE_MAX - 2)},
    "one more": {"a": [0] * (PIECE_MAX - 1)},
    "rows": {"rows": [ROW] * 200, "total": 200},
    "a matrix": {"links": MATRIX},
    "long rows": {"rows": [{"spans": [ROW] * 300, "name": "x"}] * 3},
    "many keys": {f"key {number}": number for number in range(3 * VALUES_MAX)},
    "numbers": {"a": list(range(5 * VALUES_MAX)), "b": (1, 2)},
    "a tuple": {"a": (0,) * (2 * PIECE_MAX)},
    "odd texts": {name: [*ODD_NAMES] * PIECE_MAX for name in ODD_NAMES},
    "empty parts": {"a": [[], {}, "", None] * PIECE_MAX},
}


@pytest.mark.parametrize("name", ANSWERS)
def test_it_is_the_text_that_the_encoder_makes_of_all(name: str) -> None:
    text, _ = done(encoded(ANSWERS[name]))
    assert text == json.dumps(ANSWERS[name])


def test_what_is_small_is_one_slice() -> None:
    assert done(encoded(ANSWERS["a little"]))[1] == []
    assert done(encoded({}))[0] == "{}"


@pytest.mark.parametrize("name", ANSWERS)
def test_no_more_than_a_slice_is_done_at_once(name: str) -> None:
    _, steps = done(encoded(ANSWERS[name]))
    assert all(VALUES_MAX <= step <= VALUES_MAX + PIECE_MAX for step in steps)
    assert len(steps) >= count_in(ANSWERS[name]) // (VALUES_MAX + PIECE_MAX)


def count_in(value: Any) -> int:
    """Return how many numbers and texts there are."""
    if isinstance(value, dict):
        value = list(value.values())
    return sum(map(count_in, value)) if isinstance(value, (list, tuple)) else 1


@pytest.mark.parametrize("value", NO_NUMBERS)
@pytest.mark.parametrize("count", [0, 10 * PIECE_MAX])
def test_what_is_no_number_is_refused(value: float, count: int) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        done(encoded({"a": [0.5] * count + [value]}))


def test_a_line_of_an_event_stays_one_line() -> None:
    text, _ = done(encoded({"name": "\r\n\u2028\x00" * PIECE_MAX}))
    assert text.isascii()
    assert text.isprintable()


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.just(math.pi),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=400,
)


@given(st.dictionaries(st.text(max_size=3), values))
def test_any_answer_is_read_as_it_was(answer: dict[str, Any]) -> None:
    text, _ = done(encoded(answer))
    assert json.loads(text) == answer

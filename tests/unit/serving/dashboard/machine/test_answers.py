"""What all answers have in common: the group, who is silent, and a page of rows."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrpc.serving.dashboard.machine.answers import (
    PIECE_MAX,
    SILENT_MAX,
    VALUES_MAX,
    encoded,
    heading_of,
    known,
    known_age,
    known_bytes,
    listing_of,
)
from asyncrpc.serving.dashboard.machine.paging import RowsPage
from asyncrpc.serving.dashboard.machine.query import ViewQuery
from asyncrpc.tools.inspection.records import NoAnswer, Trouble
from tests.unit.serving.dashboard.machine.told import (
    NO_NUMBERS,
    ODD_NAMES,
    as_sent,
    done,
)


def heading(silent: dict[str, NoAnswer], workers: int = 100) -> dict[str, object]:
    return heading_of(
        "calls",
        taken_at_s=1.0,
        took_s=0.25,
        every_s=2.0,
        workers=workers,
        silent=silent,
    )


def test_heading_names_the_view_its_time_and_its_group() -> None:
    assert heading({}) == {
        "view": "calls",
        "taken_at_s": 1.0,
        "took_s": 0.25,
        "every_s": 2.0,
        "group": {"workers": 100, "answering": 100, "silent": 0},
        "silent": [],
        "silent_left_out": 0,
    }


@pytest.mark.parametrize("trouble", list(Trouble))
def test_each_trouble_is_named_and_explained(trouble: Trouble) -> None:
    head = heading({"b": NoAnswer(trouble, "more"), "a": NoAnswer(trouble, "")})
    name = trouble.name.lower()
    assert head["silent"] == [
        {"worker": "a", "trouble": name, "why": trouble.value},
        {"worker": "b", "trouble": name, "why": f"{trouble.value}: more"},
    ]
    assert head["group"] == {"workers": 100, "answering": 98, "silent": 2}


@pytest.mark.parametrize("more", [0, 1, 950])
def test_listed_silent_workers_are_limited_and_the_rest_counted(more: int) -> None:
    names = [f"w{number:04}" for number in range(SILENT_MAX + more)]
    silent = {name: NoAnswer(Trouble.SILENT, "") for name in reversed(names)}
    head = heading(silent, 1000)
    assert [worker["worker"] for worker in head["silent"]] == names[:SILENT_MAX]  # type: ignore[attr-defined]
    assert head["silent_left_out"] == more
    assert head["group"] == {
        "workers": 1000,
        "answering": 1000 - len(names),
        "silent": len(names),
    }


def test_odd_names_of_silent_workers_stay_text() -> None:
    head = as_sent(heading({name: NoAnswer(Trouble.GONE, name) for name in ODD_NAMES}))
    assert {worker["worker"] for worker in head["silent"]} == set(ODD_NAMES)
    assert all(worker["why"].endswith(worker["worker"]) for worker in head["silent"])


@pytest.mark.parametrize(("is_up", "order"), [(True, "up"), (False, "down")])
def test_listing_echoes_its_query(*, is_up: bool, order: str) -> None:
    page = RowsPage([{"a": 1}], 201, 101)
    query = ViewQuery("a", is_up=is_up, page=3, per_page=50)
    assert listing_of(page, query, 7) == {
        "rows": [{"a": 1}],
        "total": 201,
        "first": 101,
        "left_out": 7,
        "page": 3,
        "per_page": 50,
        "sort": "a",
        "order": order,
    }
    assert listing_of(page, query)["left_out"] == 0


FINITE = (0.0, -0.0, 1e-300, -1.5, 7, sys.float_info.max, 1 << 63)


@pytest.mark.parametrize("value", FINITE)
def test_finite_number_is_unchanged(value: float) -> None:
    assert known(value) == value


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_nonfinite_number_is_unknown(value: float) -> None:
    assert known(value) is None
    assert known_age(value) is None


def test_negative_age_is_unknown() -> None:
    assert known_age(-1.0) is None
    assert known_age(-1e-9) is None
    assert known_age(0.0) == 0.0
    assert known_age(math.pi) == math.pi


def test_negative_byte_count_is_unknown() -> None:
    assert known_bytes(-1) is None
    assert known_bytes(0) == 0
    assert known_bytes(1 << 62) == 1 << 62


ROW = {f"key {number}": number / 7 for number in range(20)}
MATRIX = {"workers": ["a"] * 32, "cells": [[ROW] * 32] * 32}
ANSWERS: dict[str, dict[str, Any]] = {
    "an empty answer": {},
    "a little": {"a": 1, "b": None, "c": [True, "x"], "d": {"e": []}},
    "one piece": {"a": [0] * (PIECE_MAX - 2)},
    "a piece and a value": {"a": [0] * (PIECE_MAX - 1)},
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
def test_sliced_encoding_equals_the_json_encoder(name: str) -> None:
    text, _ = done(encoded(ANSWERS[name]))
    assert text == json.dumps(ANSWERS[name])


def test_small_answer_is_one_slice() -> None:
    assert done(encoded(ANSWERS["a little"]))[1] == []
    assert done(encoded({}))[0] == "{}"


@pytest.mark.parametrize("name", ANSWERS)
def test_encoding_does_a_slice_at_a_time(name: str) -> None:
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
def test_nonfinite_number_is_refused(value: float, count: int) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        done(encoded({"a": [0.5] * count + [value]}))


def test_event_text_stays_on_one_line() -> None:
    text, _ = done(encoded({"name": "\r\n\u2028\x00" * PIECE_MAX}))
    assert text.isascii()
    assert text.isprintable()


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.just(math.pi),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=400,
)


@given(st.dictionaries(st.text(max_size=3), values))
def test_every_answer_survives_json(answer: dict[str, Any]) -> None:
    text, _ = done(encoded(answer))
    assert json.loads(text) == answer

"""What all answers have in common: the group, who is silent, and a page of rows."""

from __future__ import annotations

import pytest

from asyncrpc.inspection.records import NoAnswer, Trouble
from asyncrpc.serving.dashboard.machine.answers import (
    SILENT_MAX,
    heading_of,
    listing_of,
)
from asyncrpc.serving.dashboard.machine.paging import RowsPage
from asyncrpc.serving.dashboard.machine.query import ViewQuery
from tests.unit.serving.dashboard.machine.told import ODD_NAMES, as_sent


def heading(silent: dict[str, NoAnswer], workers: int = 100) -> dict[str, object]:
    return heading_of(
        "calls",
        taken_at_s=1.0,
        took_s=0.25,
        every_s=2.0,
        workers=workers,
        silent=silent,
    )


def test_a_heading_says_of_what_and_of_when_it_is() -> None:
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
    found = heading({"b": NoAnswer(trouble, "more"), "a": NoAnswer(trouble, "")})
    name = trouble.name.lower()
    assert found["silent"] == [
        {"worker": "a", "trouble": name, "why": trouble.value},
        {"worker": "b", "trouble": name, "why": f"{trouble.value}: more"},
    ]
    assert found["group"] == {"workers": 100, "answering": 98, "silent": 2}


@pytest.mark.parametrize("more", [0, 1, 950])
def test_so_many_silent_workers_are_listed_and_the_others_counted(more: int) -> None:
    names = [f"w{number:04}" for number in range(SILENT_MAX + more)]
    silent = {name: NoAnswer(Trouble.SILENT, "") for name in reversed(names)}
    found = heading(silent, 1000)
    assert [one["worker"] for one in found["silent"]] == names[:SILENT_MAX]  # type: ignore[attr-defined]
    assert found["silent_left_out"] == more
    assert found["group"] == {
        "workers": 1000,
        "answering": 1000 - len(names),
        "silent": len(names),
    }


def test_odd_names_of_silent_workers_stay_text() -> None:
    silent = {name: NoAnswer(Trouble.GONE, name) for name in ODD_NAMES}
    found = as_sent(heading(silent))
    assert {one["worker"] for one in found["silent"]} == set(ODD_NAMES)
    assert all(one["why"].endswith(one["worker"]) for one in found["silent"])


@pytest.mark.parametrize(("is_up", "order"), [(True, "up"), (False, "down")])
def test_a_page_is_told_with_what_it_answers(*, is_up: bool, order: str) -> None:
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

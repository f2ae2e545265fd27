"""What a browser may ask for: pages of sorted rows, a slice at a time."""

from __future__ import annotations

import random
from typing import Any

import pytest

from asyncrpc.errors import UsageError
from asyncrpc.serving.dashboard.machine.paging import Row, RowsPage, page_of
from asyncrpc.serving.dashboard.machine.query import (
    NAMES_MAX,
    PAGE_MAX,
    ViewQuery,
    read_query,
)
from asyncrpc.tools.inspection.machine.slices import SLICE_MAX, Slices, finished
from tests.unit.serving.dashboard.machine.told import ODD_NAMES

COUNT = 3 * SLICE_MAX + 7


def rows(count: int = COUNT) -> list[dict[str, Any]]:
    all_rows: list[dict[str, Any]] = [
        {"worker": f"w{number:04}", "age_s": float(number)} for number in range(count)
    ]
    random.Random(7).shuffle(all_rows)
    return all_rows


def steps_of(work: Slices[RowsPage]) -> tuple[RowsPage, list[int]]:
    steps = []
    while True:
        try:
            steps.append(next(work))
        except StopIteration as end:
            return end.value, steps


def all_pages(source: list[dict[str, Any]], **query: Any) -> list[Row]:
    collected: list[Row] = []
    page = 1
    while True:
        shown = finished(page_of(source, ViewQuery(page=page, **query)))
        if not shown.rows:
            assert shown.first == 0
            return collected
        assert shown.first == len(collected) + 1
        collected += shown.rows
        page += 1


@pytest.mark.parametrize("sort", ["worker", "age_s"])
@pytest.mark.parametrize("is_up", [True, False])
def test_pages_have_all_rows_in_order(sort: str, *, is_up: bool) -> None:
    source = rows()
    collected = all_pages(source, sort=sort, is_up=is_up, per_page=200)
    assert collected == sorted(source, key=lambda row: row[sort], reverse=not is_up)


@pytest.mark.parametrize("page", [1, 4, 8, 1000])
def test_rows_are_sorted_a_slice_at_a_time(page: int) -> None:
    query = ViewQuery("age_s", is_up=False, page=page, per_page=200)
    shown, steps = steps_of(page_of(rows(), query))
    assert shown.total == COUNT
    assert max(steps) <= SLICE_MAX
    assert sum(steps) >= COUNT


@pytest.mark.parametrize("is_up", [True, False])
def test_unknown_values_are_last_in_both_orders(*, is_up: bool) -> None:
    source = [{"age_s": None, "worker": "x"}, *rows(3)]
    shown = finished(page_of(source, ViewQuery("age_s", is_up=is_up)))
    assert shown.rows[-1]["worker"] == "x"


def test_lists_are_sorted_by_their_length() -> None:
    source: list[Row] = [{"holders": ["a", "b"]}, {"holders": []}, {"holders": ["z"]}]
    shown = finished(page_of(source, ViewQuery("holders", is_up=True)))
    assert [len(row["holders"]) for row in shown.rows] == [0, 1, 2]


def test_page_contains_matching_rows_only() -> None:
    source: list[Row] = [
        {"caller": "a", "callee": "b", "function": "Train"},
        {"caller": "b", "callee": "c", "function": "evict"},
        {"caller": "c", "callee": "c", "function": None},
    ]
    owners = ("caller", "callee")

    def shown(**query: Any) -> list[Any]:
        asked = ViewQuery("caller", is_up=True, **query)
        page = finished(page_of(source, asked, owners))
        assert page.total == len(page.rows)
        return [row["caller"] for row in page.rows]

    assert shown(workers=frozenset({"b"})) == ["a", "b"]
    assert shown(find="train") == ["a"]
    assert shown(find="train", workers=frozenset({"c"})) == []


def test_list_of_names_counts_as_owners() -> None:
    source: list[Row] = [
        {"owner": "a", "holders": ["b", "c"]},
        {"owner": "d", "holders": []},
    ]
    query = ViewQuery("owner", is_up=True, workers=frozenset({"c"}))
    shown = finished(page_of(source, query, ("owner", "holders")))
    assert [row["owner"] for row in shown.rows] == ["a"]


def test_empty_view_has_an_empty_page() -> None:
    assert finished(page_of([], ViewQuery("age_s", is_up=True))) == RowsPage([], 0, 0)


@pytest.mark.parametrize("is_up", [True, False])
@pytest.mark.parametrize("value", [0, 0.0, "", "x", None, [], ["a"]])
def test_equal_rows_keep_their_order_on_all_pages(
    value: object, *, is_up: bool
) -> None:
    source = [{"key": value, "place": place} for place in range(COUNT)]
    collected = all_pages(source, sort="key", is_up=is_up, per_page=200)
    assert [row["place"] for row in collected] == list(range(COUNT))


@pytest.mark.parametrize("is_up", [True, False])
def test_numbers_of_any_size_are_sorted_by_value(*, is_up: bool) -> None:
    values = [-1.5, -0.0, 0, 1e-300, 3, 3.5, 1 << 53, (1 << 63) - 1, 1 << 90, 1e300]
    source: list[Row] = [
        {"key": value} for value in random.Random(1).sample(values, 10)
    ]
    shown = finished(page_of(source, ViewQuery("key", is_up=is_up)))
    assert [row["key"] for row in shown.rows] == (values if is_up else values[::-1])


@pytest.mark.parametrize("is_up", [True, False])
def test_odd_names_are_sorted_and_found_as_text(*, is_up: bool) -> None:
    source: list[Row] = [{"worker": name} for name in ODD_NAMES]
    shown = finished(page_of(source, ViewQuery("worker", is_up=is_up)))
    assert [row["worker"] for row in shown.rows] == sorted(ODD_NAMES, reverse=not is_up)
    for name in ODD_NAMES:
        query = ViewQuery("worker", is_up=is_up, workers=frozenset({name}))
        assert finished(page_of(source, query)).rows == [{"worker": name}]
        query = ViewQuery("worker", is_up=is_up, find=name.casefold())
        assert {"worker": name} in finished(page_of(source, query)).rows


def test_numbers_and_lists_are_not_searched() -> None:
    source: list[Row] = [{"worker": "a", "pid": 77, "holders": ["77"], "host": None}]
    assert finished(page_of(source, ViewQuery("pid", is_up=True, find="77"))).total == 0


def test_missing_key_sorts_as_unknown() -> None:
    source = rows(3)
    assert finished(page_of(source, ViewQuery("nothing", is_up=True))).rows == source


def test_row_without_an_owner_belongs_to_no_worker() -> None:
    source: list[Row] = [{"owner": None, "holders": None}, {}, {"owner": "a"}]
    query = ViewQuery("owner", is_up=True, workers=frozenset({"a"}))
    assert finished(page_of(source, query, ("owner", "holders"))).total == 1


@pytest.mark.parametrize(
    ("count", "page", "first", "shown"),
    [
        (1, 1, 1, 1),
        (1, 2, 0, 0),
        (50, 1, 1, 50),
        (51, 2, 51, 1),
        (SLICE_MAX, 10, 451, 50),
        (SLICE_MAX + 1, 11, 501, 1),
        (COUNT, PAGE_MAX, 0, 0),
    ],
)
def test_page_starts_where_the_previous_one_ends(
    count: int, page: int, first: int, shown: int
) -> None:
    query = ViewQuery("worker", is_up=True, page=page, per_page=50)
    shown_page, steps = steps_of(page_of(rows(count), query))
    assert (shown_page.total, shown_page.first, len(shown_page.rows)) == (
        count,
        first,
        shown,
    )
    # However far away the page is: sorted, passed over, and let go of.
    assert sum(steps) <= 3 * count


KEYS = ("worker", "age_s")


def read(*parameters: tuple[str, str]) -> ViewQuery:
    return read_query(parameters, keys=KEYS, sort="worker", is_up=True)


def test_empty_query_asks_for_the_first_page_in_view_order() -> None:
    query = read()
    assert (query.sort, query.is_up, query.page, query.per_page) == (
        *("worker", True, 1, 50),
    )


def test_other_keys_are_sorted_down_by_default() -> None:
    assert not read(("sort", "age_s")).is_up
    assert read(("sort", "age_s"), ("order", "up")).is_up
    assert not read(("order", "down")).is_up


def test_query_fields_are_read() -> None:
    query = read(
        *(("page", "3"), ("per_page", "200"), ("worker", "a"), ("worker", "b")),
        *(("find", "Ä x"), ("thorough", "yes")),
    )
    assert (query.page, query.per_page, query.workers) == (3, 200, frozenset("ab"))
    assert (query.find, query.is_thorough) == ("ä x", True)


@pytest.mark.parametrize(
    "wrong",
    [
        ("page", "0"),
        ("page", "-1"),
        ("page", "1.5"),
        ("page", "\N{SUPERSCRIPT TWO}"),
        ("page", "9" * 5000),
        ("per_page", "201"),
        ("per_page", ""),
        ("sort", "pid"),
        ("order", "UP"),
        ("thorough", "maybe"),
        ("find", "x" * 201),
        ("worker", "x" * 201),
        ("what", "this"),
    ],
)
def test_wrong_value_is_refused_by_name(wrong: tuple[str, str]) -> None:
    with pytest.raises(UsageError, match=wrong[0]) as error:
        read(wrong)
    assert len(str(error.value)) < 400


def test_repeated_field_is_refused() -> None:
    with pytest.raises(UsageError, match="page must be given once"):
        read(("page", "1"), ("page", "2"))
    with pytest.raises(UsageError, match=f"worker may be given {NAMES_MAX} times"):
        read(*[("worker", str(number)) for number in range(NAMES_MAX + 1)])


def test_view_without_rows_has_no_sort_key() -> None:
    assert read_query([], keys=(), sort="", is_up=False).sort == ""

"""What a browser may ask for."""

from __future__ import annotations

import pytest

from asyncrpc.errors import UsageError
from asyncrpc.serving.dashboard.machine.query import NAMES_MAX, ViewQuery, read_query

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
    query = read_query([], keys=(), sort="", is_up=False)
    assert query.sort == ""

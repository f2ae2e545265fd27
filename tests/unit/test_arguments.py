"""What a user gives is checked, and the error names it, whatever the value does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from asyncrpc.arguments import (
    check_callable,
    check_count,
    check_kind,
    check_seconds,
    check_text,
    shown,
)
from asyncrpc.errors import UsageError


class Unspeakable:
    def __repr__(self) -> str:
        raise ValueError("no words")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (True, "True"),
        (5, "5 of type int"),
        ("x" * 100, f"'{'x' * 59}... of type str"),
        (Unspeakable(), "a Unspeakable (its repr raised ValueError)"),
    ],
)
def test_a_value_is_shown_in_short(value: object, text: str) -> None:
    assert shown(value) == text


CHECKS: dict[Callable[..., None], tuple[list[Any], list[Any], str]] = {
    check_seconds: (
        [0, 1.5, float("inf")],
        [None, "1", True, float("nan"), b"1", [1], Unspeakable()],
        "a number of seconds",
    ),
    check_count: ([0, 7], [None, -1, 1.0, True, "1"], "an integer of at least 0"),
    check_text: (["a"], [None, "", b"a", 1, Unspeakable()], "a non-empty string"),
    check_callable: ([len, int], [None, 1, "len", Unspeakable()], "callable"),
}


@pytest.mark.parametrize("check", CHECKS)
def test_a_check_names_the_argument(check: Callable[..., None]) -> None:
    right, wrong, wanted = CHECKS[check]
    for value in right:
        check("the_argument", value)
    for value in wrong:
        with pytest.raises(UsageError, match=f"^the_argument must be {wanted}"):
            check("the_argument", value)


def test_a_truth_value_is_a_number_only_where_it_is_asked_for() -> None:
    check_kind("flag", True, bool, "True or False")  # noqa: FBT003  (what is checked)
    check_kind("size", 3, (int, float), "a number")
    with pytest.raises(UsageError, match="size must be a number, not True"):
        check_kind("size", True, (int, float), "a number")  # noqa: FBT003  (likewise)
    with pytest.raises(UsageError, match="flag must be True or False, not 1 of type"):
        check_kind("flag", 1, bool, "True or False")

"""What a user gives is checked, and the error names it, whatever the value does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from asyncrpc.core.arguments import (
    check_above,
    check_callable,
    check_choice,
    check_count,
    check_flag,
    check_kind,
    check_seconds,
    check_sequence,
    check_text,
    listed,
    shown,
)
from asyncrpc.errors import UsageError


class Unspeakable:
    def __repr__(self) -> str:
        raise ValueError("no words")


class Leaving:
    def __repr__(self) -> str:
        raise SystemExit


def test_value_without_a_repr_is_shown_by_its_type() -> None:
    assert "Unspeakable" in shown(Unspeakable())


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (True, "True"),
        (5, "5 of type int"),
        ("x" * 100, f"'{'x' * 27}...{'x' * 28}' of type str"),
        (list(range(100)), "[0, 1, 2, 3, 4, 5, ...] of type list"),
        (torch.ones(2, 3), "a tensor of shape (2, 3), torch.float32, of type Tensor"),
        (Leaving(), "an object of type Leaving, whose repr raised SystemExit"),
    ],
)
def test_long_value_is_shown_in_short(value: object, text: str) -> None:
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
    check_flag: ([True, False], [None, 1, "", torch.ones(2)], "True or False"),
}


@pytest.mark.parametrize("check", CHECKS)
def test_check_names_the_argument(check: Callable[..., None]) -> None:
    right, wrong, wanted = CHECKS[check]
    for value in right:
        check("the_argument", value)
    for value in wrong:
        with pytest.raises(UsageError, match=f"^the_argument must be {wanted}"):
            check("the_argument", value)


class Endless:
    def __iter__(self) -> Any:
        raise ValueError("no end")

    def __eq__(self, other: object) -> bool:
        raise ValueError("no like")

    __hash__ = object.__hash__


@pytest.mark.parametrize("value", [None, 0, -1, True, float("nan"), "1", Endless()])
def test_number_above_another_is_checked(value: Any) -> None:
    check_above("size", 0.5, 0)
    with pytest.raises(UsageError, match=r"^size must be a number above 0, not "):
        check_above("size", value, 0)


@pytest.mark.parametrize("value", [None, "c", ["a"], Endless()])
def test_choice_must_be_in_the_list(value: Any) -> None:
    check_choice("mode", "a", ("a", "b"))
    with pytest.raises(UsageError, match=r"^mode must be 'a' or 'b', not "):
        check_choice("mode", value, ("a", "b"))


@pytest.mark.parametrize("value", [None, 1, "ab", b"ab", {"a": 1}, Endless()])
def test_items_of_a_list_must_not_be_a_string(value: Any) -> None:
    check_sequence("things", (1, 2), "things in a list")
    assert listed("things", (number for number in range(2)), "things") == [0, 1]
    for check in (check_sequence, listed):
        with pytest.raises(UsageError, match=r"^things must be things in a list, not "):
            check("things", value, "things in a list")


def test_bool_is_a_number_only_on_request() -> None:
    check_kind("flag", True, bool, "True or False")  # noqa: FBT003  (what is checked)
    check_kind("size", 3, (int, float), "a number")
    with pytest.raises(UsageError, match="size must be a number, not True"):
        check_kind("size", True, (int, float), "a number")  # noqa: FBT003  (likewise)
    with pytest.raises(UsageError, match="flag must be True or False, not 1 of type"):
        check_kind("flag", 1, bool, "True or False")

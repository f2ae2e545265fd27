"""Wrong arguments and shortages are named, with the cure, whatever the value does."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any, cast

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
from asyncrpc.core.host.shortage import shortage_of
from asyncrpc.core.options import CallOptions
from asyncrpc.core.peers.group import PeerGroup
from asyncrpc.core.peers.peer import CallStarter, Peer
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


CASES = [
    (OSError(errno.EMFILE, ""), "`ulimit -n`"),
    (OSError(errno.ENFILE, ""), "`sysctl fs.file-max`"),
    (OSError(errno.ENOMEM, ""), "no memory left: raise its limit, `ulimit -v`"),
    (MemoryError(), "no memory left: raise its limit, `ulimit -v`"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you"), "no memory left"),
    (RuntimeError("std::bad_alloc"), "no memory left"),
    (RuntimeError("unable to open file </proc/9>: Too many open files (24)"), "-n`"),
    (RuntimeError("unable to mmap 9 bytes: Cannot allocate memory (12)"), "-v`"),
    (RuntimeError("Too many open files\nin a stack"), "`ulimit -n`"),
    (RuntimeError("No space left on device"), "no space is left: free some"),
    (OSError(errno.ENOSPC, "", "/run/x"), "no space is left where '/run/x' is: free"),
    (OSError(errno.EDQUOT, ""), "nothing is left of the user's quota: free some"),
    (OSError(errno.EFBIG, ""), "`ulimit -f`"),
]


@pytest.mark.parametrize(("error", "words"), CASES)
def test_shortage_is_named_with_its_remedy(error: Exception, words: str) -> None:
    assert words in shortage_of(error)
    outer = ValueError("of the program")
    outer.__cause__ = error
    assert words in shortage_of(outer)


@pytest.mark.parametrize(
    "error",
    [None, OSError(errno.EACCES, ""), RuntimeError("line (24) is wrong"), ValueError()],
)
def test_other_errors_are_not_a_shortage(error: Exception | None) -> None:
    assert not shortage_of(error)


CALLS = cast("CallStarter", None)  # nothing is called
USINGS = [Peer(CALLS, "b").using, PeerGroup(CALLS, ["b"]).using]


@pytest.mark.parametrize("using", USINGS)
def test_unknown_option_is_refused_with_known_ones(using: Callable[..., Any]) -> None:
    with pytest.raises(
        UsageError, match=r"^there is no call option 'timeout'; .* are timeout_s, out, "
    ) as refused:
        using(timeout=2.0)
    for name in CallOptions.__slots__:
        assert name in str(refused.value)


@pytest.mark.parametrize("using", USINGS)
def test_option_values_are_checked(using: Callable[..., Any]) -> None:
    using(timeout_s=2.0).using(codec="bf16")
    with pytest.raises(UsageError, match="timeout_s must be a number of seconds"):
        using(timeout_s="2")


def test_group_calls_have_no_out_option() -> None:
    with pytest.raises(UsageError, match="`out` is for one result"):
        PeerGroup(CALLS, ["b"]).using(out=torch.ones(1))

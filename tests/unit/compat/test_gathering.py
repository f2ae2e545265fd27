"""What callees' ranges become at the caller, and what a wish must look like."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrpc.compat.rpc import gathering
from asyncrpc.compat.rpc.functions import async_execution
from asyncrpc.compat.rpc.gathering import (
    Gatherer,
    ProfiledThreads,
    ProfilingRequest,
    Range,
    Session,
    Settings,
)
from asyncrpc.errors import MalformedError


class Here:
    """As much of a worker as is asked for."""

    name = "a"
    rank = 3


HERE: Any = Here()
WISH = [list(Settings()), ""]


def taken(
    monkeypatch: pytest.MonkeyPatch, gatherer: Gatherer, *ranges: Range
) -> list[Range]:
    """Return the ranges of a call from 1000 us to 2000 us."""
    clock = iter([1000.0, 2000.0])
    monkeypatch.setattr(gathering, "wall_us", lambda: next(clock))
    ProfilingRequest(gatherer, "call", HERE).take(list(ranges), is_async=True)
    return gatherer.ranges


def test_ranges_within_the_call_stay_where_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inner = Range("inner", 1100.0, 1900.0, thread=1, rank=4)
    (found,) = taken(monkeypatch, Gatherer(Settings()), inner)
    assert found == inner._replace(name="call#remote_op: inner")


@pytest.mark.parametrize("off_us", [-1e9, -300.0, 500.0, 1e9])
def test_those_of_another_clock_are_moved_together_into_its_middle(
    monkeypatch: pytest.MonkeyPatch, off_us: float
) -> None:
    outer = Range("outer", 1100.0 + off_us, 1700.0 + off_us, thread=1, rank=4)
    inner = outer._replace(name="inner", start_us=1200.0 + off_us)
    found = taken(monkeypatch, Gatherer(Settings()), outer, inner)
    assert [(one.start_us, one.end_us) for one in found] == [
        (1200.0, 1800.0),
        (1300.0, 1800.0),
    ]


def test_who_has_ended_takes_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    gatherer = Gatherer(Settings())
    gatherer.begin()
    gatherer.end()
    assert gathering.gatherer_here() is None
    assert taken(monkeypatch, gatherer, Range("late", 1.0, 2.0, 1, 1)) == []


def test_a_function_s_calls_are_its_ranges_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that fail, too, of which nothing came back; in the function's thread."""
    session = Session(Settings(), rank=3)
    with session:
        pass
    taken(monkeypatch, session)
    (found,) = session.closed()
    assert found[:3] == ("call", 1000.0, 2000.0)
    assert found.thread > 0
    assert (found.rank, found.is_async) == (3, True)


def test_a_thread_that_is_profiled_already_is_left_alone() -> None:
    with Session(Settings(), rank=3) as outer, Session(Settings(), rank=3) as inner:
        assert gathering.gatherer_here() is inner
    assert gathering.gatherer_here() is None
    assert outer.closed() == inner.closed() == []


@pytest.mark.parametrize("wish", [None, 3, [], [[True]], [1, ""], [[True] * 6, ""]])
def test_a_wish_that_cannot_be_read_is_refused(wish: Any) -> None:
    with pytest.raises(MalformedError, match="is malformed"):
        ProfiledThreads(HERE).surround(wish, int)


def test_the_oldest_that_nobody_asks_for_are_dropped() -> None:
    threads = ProfiledThreads(HERE)
    for number in range(gathering.KEPT_MAX + 1):
        token = f"b {number}"
        assert threads.surround([WISH[0], token], int)("7") == 7
    assert len(threads._kept) == gathering.KEPT_MAX  # noqa: SLF001
    assert "b 0" not in threads._kept  # noqa: SLF001
    assert threads.take_kept("b 1") == threads.take_kept("b 1") == []
    assert len(threads._kept) == gathering.KEPT_MAX - 1  # noqa: SLF001


def test_a_marked_function_that_returns_no_future_is_left_to_be_refused() -> None:
    @async_execution
    def forgetful() -> int:
        return 7

    assert ProfiledThreads(HERE).surround(WISH, forgetful)() == 7

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


def gathered_ranges(
    monkeypatch: pytest.MonkeyPatch, gatherer: Gatherer, *ranges: Range
) -> list[Range]:
    """Return the ranges of a call from 1000 us to 2000 us."""
    clock = iter([1000.0, 2000.0])
    monkeypatch.setattr(gathering, "wall_us", lambda: next(clock))
    ProfilingRequest(gatherer, "call", HERE).take(list(ranges), is_async=True)
    return gatherer.ranges


def test_ranges_within_call_keep_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = Range("inner", 1100.0, 1900.0, thread=1, rank=4)
    (moved,) = gathered_ranges(monkeypatch, Gatherer(Settings()), inner)
    assert moved == inner._replace(name="call#remote_op: inner")


@pytest.mark.parametrize("off_us", [-1e9, -300.0, 500.0, 1e9])
def test_ranges_of_another_clock_are_moved_into_the_call(
    monkeypatch: pytest.MonkeyPatch, off_us: float
) -> None:
    outer = Range("outer", 1100.0 + off_us, 1700.0 + off_us, thread=1, rank=4)
    inner = outer._replace(name="inner", start_us=1200.0 + off_us)
    moved = gathered_ranges(monkeypatch, Gatherer(Settings()), outer, inner)
    assert [(span.start_us, span.end_us) for span in moved] == [
        (1200.0, 1800.0),
        (1300.0, 1800.0),
    ]


def test_ended_gatherer_takes_no_more_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    gatherer = Gatherer(Settings())
    gatherer.begin()
    gatherer.end()
    assert gathering.gatherer_here() is None
    assert gathered_ranges(monkeypatch, gatherer, Range("late", 1.0, 2.0, 1, 1)) == []


def test_calls_made_by_a_function_are_among_its_ranges(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that fail, too, of which nothing came back; in the function's thread."""
    session = Session(Settings(), rank=3)
    with session:
        pass
    gathered_ranges(monkeypatch, session)
    (span,) = session.closed()
    assert span[:3] == ("call", 1000.0, 2000.0)
    assert span.thread > 0
    assert (span.rank, span.is_async) == (3, True)


def test_thread_under_another_profiler_is_left_alone() -> None:
    with Session(Settings(), rank=3) as outer, Session(Settings(), rank=3) as inner:
        assert gathering.gatherer_here() is inner
    assert gathering.gatherer_here() is None
    assert outer.closed() == inner.closed() == []


@pytest.mark.parametrize("wish", [None, 3, [], [[True]], [1, ""], [[True] * 6, ""]])
def test_unreadable_profiling_wish_is_refused(wish: Any) -> None:
    with pytest.raises(MalformedError, match="is malformed"):
        ProfiledThreads(HERE).surround(wish, int)


def test_oldest_unclaimed_ranges_are_dropped() -> None:
    threads = ProfiledThreads(HERE)
    for number in range(gathering.KEPT_MAX + 1):
        token = f"b {number}"
        assert threads.surround([WISH[0], token], int)("7") == 7
    assert len(threads._kept) == gathering.KEPT_MAX  # noqa: SLF001
    assert "b 0" not in threads._kept  # noqa: SLF001
    assert threads.take_kept("b 1") == threads.take_kept("b 1") == []
    assert len(threads._kept) == gathering.KEPT_MAX - 1  # noqa: SLF001


def test_async_function_without_a_future_is_passed_through() -> None:
    @async_execution
    def forgetful() -> int:
        return 7

    assert ProfiledThreads(HERE).surround(WISH, forgetful)() == 7

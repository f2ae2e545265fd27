"""Calls end at their deadlines, whatever their timeouts, and few timers are needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrpc.core.calls.context import QUEUES_MAX, Deadlines, Watch
from asyncrpc.core.loop.clock import Deadline
from tests.unit.core.calls.fakes import FakeLoop, Timer

SLACK_S = 0.001 + 1e-9


class Clockwork(FakeLoop):
    """A loop whose timers act when the time comes."""

    @property
    def running(self) -> list[Timer]:
        return [timer for timer in self.timers if not timer.is_cancelled]

    def advance(self, to_s: float) -> None:
        """Let time pass, and timers act in their order."""
        while due := [timer for timer in self.running if timer.at_s <= to_s]:
            first = min(due, key=lambda timer: timer.at_s)
            self.timers.remove(first)
            first.act()
        self.now_s = to_s


class Calls:
    """Calls by number, and when each was ended."""

    def __init__(self) -> None:
        loop: Any = Clockwork  # as far as calls go
        self.loop: Clockwork = loop()
        self.ended_s: dict[int, float] = {}
        self.deadlines = Deadlines(self.loop, self.end)
        self.watches: dict[int, Watch] = {}
        self.wanted_s: dict[int, float] = {}

    def end(self, call: int) -> None:
        assert call not in self.ended_s
        self.ended_s[call] = self.loop.now_s

    def begin(self, timeout_s: float, *, used_s: float = 0.0) -> int:
        """Begin a call, of whose time some has been used on the way."""
        call = len(self.watches)
        deadline = Deadline(self.loop.now_s + timeout_s - used_s, timeout_s)
        self.wanted_s[call] = deadline.at_s
        self.watches[call] = self.deadlines.watch(call, deadline)
        return call

    def answer(self, call: int) -> None:
        self.watches[call].stop(call)


@pytest.fixture
def calls() -> Calls:
    return Calls()


def test_calls_of_one_timeout_share_a_timer(calls: Calls) -> None:
    for step in range(100):
        calls.loop.advance(100.0 + step / 100)
        calls.begin(60.0)
    assert len(calls.loop.timers) == 1
    calls.loop.advance(200.0)
    assert sorted(calls.ended_s) == list(range(100))
    assert not calls.loop.timers


def test_answered_call_is_not_ended(calls: Calls) -> None:
    first, second = calls.begin(1.0), calls.begin(1.0)
    calls.answer(first)
    calls.answer(first)  # as when it is cancelled, too
    calls.loop.advance(200.0)
    assert list(calls.ended_s) == [second]


def test_each_timeout_has_a_timer(calls: Calls) -> None:
    many = [calls.begin(1.0 + number) for number in range(QUEUES_MAX + 5)]
    calls.answer(many[-1])
    assert len(calls.loop.running) == QUEUES_MAX + 4
    calls.loop.advance(200.0)
    assert list(calls.ended_s) == many[:-1]


def test_shorter_remaining_time_ends_a_call_in_time(calls: Calls) -> None:
    calls.begin(60.0)
    late = calls.begin(60.0, used_s=59.0)
    calls.loop.advance(101.0)
    assert list(calls.ended_s) == [late]


def test_call_that_cannot_be_ended_delays_no_other(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[dict[str, Any]] = []
    monkeypatch.setattr(calls.loop, "call_exception_handler", errors.append)
    ended = []

    def end(call: int) -> None:
        if call == 0:
            raise MemoryError
        ended.append(call)

    deadlines = Deadlines(calls.loop, end)
    for call in (0, 1):
        deadlines.watch(call, Deadline(101.0, 1.0))
    calls.loop.advance(101.0)
    assert ended == [1]
    assert isinstance(errors[0]["exception"], MemoryError)


def test_ending_call_may_end_another(calls: Calls) -> None:
    ended = []

    def end(call: int) -> None:
        ended.append(call)
        watch.stop(1)

    deadlines = Deadlines(calls.loop, end)
    watch = deadlines.watch(0, Deadline(101.0, 1.0))
    assert deadlines.watch(1, Deadline(101.0, 1.0)) is watch
    calls.loop.advance(200.0)
    assert ended == [0]


def test_call_begun_while_others_end_is_ended_in_time(calls: Calls) -> None:
    ended = []

    def end(call: int) -> None:
        ended.append((call, calls.loop.now_s))
        if call < 2:
            deadlines.watch(call + 1, Deadline(calls.loop.now_s + 1.0, 1.0))

    deadlines = Deadlines(calls.loop, end)
    deadlines.watch(0, Deadline(101.0, 1.0))
    calls.loop.advance(200.0)
    assert ended == [(0, 101.0), (1, 102.0), (2, 103.0)]


def test_closed_deadlines_end_nothing(calls: Calls) -> None:
    calls.begin(1.0)
    calls.begin(2.0)
    calls.deadlines.close()
    assert not calls.loop.running


TIMEOUTS = st.sampled_from([0.0, 0.0004, 0.5, 2.0, 2.000000001, 60.0, 3600.0])
STEPS = st.one_of(
    st.tuples(st.just("begin"), TIMEOUTS, st.sampled_from([0.0, 0.0, 0.3])),
    st.tuples(st.just("answer"), st.integers(0, 30), st.just(0.0)),
    st.tuples(
        st.just("wait"), st.sampled_from([0.0, 0.0003, 0.4, 1.7, 59.0]), st.just(0.0)
    ),
)


@given(st.lists(STEPS, max_size=60))
def test_every_call_ends_once_and_in_time(
    steps: Sequence[tuple[str, Any, Any]],
) -> None:
    calls = Calls()
    answered: set[int] = set()
    for step, value, used_s in steps:
        if step == "begin":
            calls.begin(value, used_s=min(used_s, value))
        elif step == "wait":
            calls.loop.advance(calls.loop.now_s + value)
        elif value in calls.watches and value not in calls.ended_s:
            calls.answer(value)
            answered.add(value)
    calls.loop.advance(now_s := calls.loop.now_s)
    for call, wanted_s in calls.wanted_s.items():
        if call not in calls.ended_s and call not in answered:
            assert wanted_s > now_s - SLACK_S
    calls.loop.advance(now_s + 4000.0)
    assert calls.ended_s.keys() == calls.wanted_s.keys() - answered
    for call, at_s in calls.ended_s.items():
        assert at_s >= calls.wanted_s[call] - SLACK_S


@pytest.mark.parametrize("queues", [1, QUEUES_MAX + 1], ids=["queue", "timer"])
def test_answer_that_came_while_the_process_was_stopped_counts(queues: int) -> None:
    calls = Calls()
    numbers = [calls.begin(1.0 + number) for number in range(queues)]
    first = numbers[-1]
    second = calls.begin(float(queues))
    calls.loop.now_s = 1000.0  # stopped; every timer is late now
    calls.loop.advance(1000.0)
    assert not calls.ended_s
    calls.answer(first)  # which has been there
    calls.loop.advance(1001.0)
    assert set(calls.ended_s) == {*numbers, second} - {first}
    assert not calls.loop.running


@pytest.mark.parametrize("queues", [1, QUEUES_MAX + 1], ids=["queue", "timer"])
def test_received_answers_are_read_before_late_timers(queues: int) -> None:
    """Turns of the loop count: each of them may come late."""
    calls = Calls()
    numbers = [calls.begin(1.0 + number) for number in range(queues)]
    calls.loop.now_s = 1000.0
    for _ in range(10):
        calls.loop.advance(calls.loop.now_s)
        assert not calls.ended_s
        calls.loop.now_s += 1.0
    calls.answer(numbers[-1])
    calls.loop.advance(calls.loop.now_s)
    assert set(calls.ended_s) == set(numbers[:-1])

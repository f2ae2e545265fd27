"""Whom to ask next: all that are due, and those that are silent less and less often."""

from __future__ import annotations

from itertools import product
from typing import Final

from asyncrpc.tools.inspection.machine.asking import (
    FIRST_PAUSE_S,
    PAUSE_MAX_S,
    AskingPlan,
)

NAMES: Final = ("a", "b", "c")
ALL: Final = list(NAMES)


def silence(plan: AskingPlan, name: str, now_s: float) -> None:
    """Ask a worker that does not answer."""
    plan.on_asked(name)
    plan.on_silence(name, now_s)
    plan.on_end(name)


def test_workers_are_all_due_at_first_in_group_order() -> None:
    plan = AskingPlan()
    assert plan.due(NAMES, 0.0) == ALL
    assert plan.due(reversed(NAMES), 0.0) == ALL[::-1]
    assert plan.due([], 0.0) == []
    assert plan.asking == frozenset()


def test_asked_worker_is_not_due_until_the_question_ends() -> None:
    plan = AskingPlan()
    plan.on_asked("b")
    assert plan.asking == {"b"}
    assert plan.due(NAMES, 1e9) == ["a", "c"]
    plan.on_answer("b")
    assert plan.due(NAMES, 1e9) == ["a", "c"]
    plan.on_end("b")
    assert plan.due(NAMES, 0.0) == ALL


def test_abandoned_question_leaves_the_worker_due() -> None:
    plan = AskingPlan()
    plan.on_asked("a")
    plan.on_end("a")
    plan.on_end("a")  # twice is once
    assert plan.due(NAMES, 0.0) == ALL


def test_pause_of_a_silent_worker_doubles_up_to_a_limit() -> None:
    plan = AskingPlan()
    now_s, pauses = 0.0, []
    for _ in range(6):
        silence(plan, "a", now_s)
        assert "a" not in plan.due(NAMES, now_s)
        pause_s = next(
            step / 4 for step in range(100) if "a" in plan.due(NAMES, now_s + step / 4)
        )
        pauses.append(pause_s)
        now_s += pause_s
    assert pauses == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, *[PAUSE_MAX_S] * 4]


def test_pause_ends_exactly_on_time() -> None:
    plan = AskingPlan()
    silence(plan, "a", 100.0)
    until_s = 100.0 + FIRST_PAUSE_S
    assert plan.due(["a"], until_s - 1e-6) == []
    assert plan.due(["a"], until_s) == ["a"]


def test_answer_ends_the_pause_and_resets_its_length() -> None:
    plan = AskingPlan()
    silence(plan, "a", 0.0)
    silence(plan, "a", 10.0)
    plan.on_answer("a")
    assert plan.due(["a"], 10.0) == ["a"]
    silence(plan, "a", 20.0)
    assert plan.due(["a"], 20.0 + FIRST_PAUSE_S) == ["a"]


def test_silent_worker_delays_no_other_worker() -> None:
    plan = AskingPlan()
    silence(plan, "b", 0.0)
    assert plan.due(NAMES, 1.0) == ["a", "c"]


def test_worker_that_left_is_due_when_it_is_back() -> None:
    plan = AskingPlan()
    silence(plan, "a", 0.0)
    assert plan.due(["b"], 1.0) == ["b"]
    assert plan.due(["a", "b"], 1.0) == ["a", "b"]


def test_worker_that_left_during_a_question_is_still_asked() -> None:
    plan = AskingPlan()
    plan.on_asked("a")
    assert plan.due([], 0.0) == []
    assert plan.due(["a"], 0.0) == []  # under its old name another one may be back
    plan.on_end("a")
    assert plan.due(["a"], 0.0) == ["a"]


def test_worker_is_always_asked_paused_or_due() -> None:
    """A: it answers, S: it is silent, E: it is given up, s: time passes, N: it left."""
    for events in product("ASEsN", repeat=5):
        check_story(events)


def check_story(events: tuple[str, ...]) -> None:
    plan = AskingPlan()
    now_s, silences = 0.0, 0
    until_s = 0.0
    for event in events:
        if event == "s":
            now_s += 3.0
            continue
        if event == "N":
            plan.due([], now_s)
            silences, until_s = 0, 0.0
            continue
        is_due = now_s >= until_s
        assert plan.due(["x"], now_s) == (["x"] if is_due else [])
        if not is_due:
            continue
        plan.on_asked("x")
        assert plan.due(["x"], now_s) == []
        if event == "A":
            plan.on_answer("x")
            silences, until_s = 0, 0.0
        elif event == "S":
            plan.on_silence("x", now_s)
            silences += 1
            until_s = now_s + min(FIRST_PAUSE_S * 2 ** (silences - 1), PAUSE_MAX_S)
        plan.on_end("x")
        assert plan.asking == frozenset()

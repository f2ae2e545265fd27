"""Turns: who shares nothing goes at once, who shares waits in the order of arrival."""

from __future__ import annotations

import random

import pytest

from asyncrpc.core.optim.machine import Turns
from asyncrpc.errors import LocalProtocolError


def test_steps_that_share_a_parameter_wait_for_each_other() -> None:
    turns = Turns()
    assert turns.ask(1, {10, 11})
    assert not turns.ask(2, {11, 12})
    assert turns.ask(3, {13})
    assert turns.end(3) == []
    assert turns.end(1) == [2]
    assert turns.end(2) == []
    assert len(turns) == 0


def test_later_step_does_not_overtake_a_waiting_one() -> None:
    """The third could go now, but the second, which came before, shares with it."""
    turns = Turns()
    assert turns.ask(1, {10})
    assert not turns.ask(2, {10, 11})
    assert not turns.ask(3, {11})
    assert turns.end(1) == [2]
    assert turns.end(2) == [3]


def test_abandoned_turn_lets_the_next_step_begin() -> None:
    turns = Turns()
    turns.ask(1, {10})
    turns.ask(2, {10, 11})
    turns.ask(3, {11})
    assert turns.end(2) == [3]
    assert turns.end(1) == []


def test_several_steps_may_begin_at_once() -> None:
    turns = Turns()
    turns.ask(1, {10, 11})
    turns.ask(2, {10})
    turns.ask(3, {11})
    turns.ask(4, {10, 11})
    assert turns.end(1) == [2, 3]
    assert turns.end(2) == []
    assert turns.end(3) == [4]


def test_ended_turn_is_forgotten() -> None:
    turns = Turns()
    assert turns.ask(1, {10})
    with pytest.raises(LocalProtocolError, match="asked for a turn before"):
        turns.ask(1, {11})
    turns.end(1)
    assert turns.end(1) == []
    assert turns.ask(1, {10})


@pytest.mark.parametrize("seed", range(20))
def test_turns_never_overlap_and_all_are_granted(seed: int) -> None:
    rng = random.Random(seed)
    turns, keys = Turns(), {}
    active: set[int] = set()
    waiting: list[int] = []
    for holder in range(60):
        keys[holder] = frozenset(rng.sample(range(6), rng.randint(1, 3)))
        if turns.ask(holder, keys[holder]):
            active.add(holder)
        else:
            waiting.append(holder)
        if rng.random() < 0.6:
            ended = rng.choice(sorted(active | set(waiting)))
            active.discard(ended)
            begun = turns.end(ended)
            active.update(begun)
            waiting = [
                holder for holder in waiting if holder != ended and holder not in begun
            ]
        held = [key for holder in active for key in keys[holder]]
        assert len(held) == len(set(held))
        assert bool(active) or not waiting
    while active:
        ended = active.pop()
        active.update(turns.end(ended))
    assert len(turns) == 0

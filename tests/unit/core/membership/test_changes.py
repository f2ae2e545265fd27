"""Changes that a slow program has not taken are combined without changing the end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from asyncrpc.core.ids import WorkerInfo
from asyncrpc.core.membership.changes import RESYNC, MemberChange, combined
from asyncrpc.core.membership.machine.records import (
    ChangeKind,
)

STEPS_MAX = 5
A = WorkerInfo("a", 0)
AWAY: tuple[bool, int] = (False, 0)

State = tuple[bool, int]  # whether the worker is there, and its last life


def following(state: State) -> Iterator[MemberChange]:
    """Yield what can happen to a worker next."""
    is_there, life = state
    if is_there:
        yield MemberChange(ChangeKind.LEFT, A, life)
        yield MemberChange(ChangeKind.LOST, A, life)
        yield MemberChange(ChangeKind.RESTARTED, A, life + 1, life)
    else:
        yield MemberChange(ChangeKind.JOINED, A, life + 1)
        if life:
            yield MemberChange(ChangeKind.BACK, A, life)


def after(state: State, change: MemberChange) -> State:
    """Return what a program knows after a change."""
    return change.kind not in (ChangeKind.LEFT, ChangeKind.LOST), change.incarnation


def histories(state: State, steps: int) -> Iterator[list[MemberChange]]:
    yield []
    if steps:
        for change in following(state):
            for rest in histories(after(state, change), steps - 1):
                yield [change, *rest]


def state_after(state: State, changes: Sequence[MemberChange]) -> State:
    for change in changes:
        state = after(state, change)
    return state


def test_combined_changes_lead_to_the_same_knowledge() -> None:
    for start in (AWAY, (True, 1)):
        for history in histories(start, STEPS_MAX):
            changes = combined(history)
            assert len(changes) <= 1
            there, life = state_after(start, history)
            known_there, known_life = state_after(start, changes)
            assert known_there is there
            assert not there or known_life == life
            if changes and changes[0].kind is ChangeKind.RESTARTED:
                assert changes[0].previous == start[1] != changes[0].incarnation
            if changes and not there:
                assert changes[0].incarnation == start[1]  # the life that it knew


def test_changes_of_several_workers_stay_apart() -> None:
    b = WorkerInfo("b", 1)
    left, joined = (
        MemberChange(ChangeKind.LEFT, A, 1),
        MemberChange(ChangeKind.JOINED, b, 2),
    )
    for order in itertools.permutations([left, joined]):
        assert combined(order) == list(order)


def test_changes_before_a_resync_are_dropped() -> None:
    left = MemberChange(ChangeKind.LEFT, A, 1)
    assert combined([left, RESYNC]) == [RESYNC]
    assert combined([RESYNC, left]) == [RESYNC, left]

"""The state of many optimizers, and that of one over all their parameters."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrpc import UsageError
from asyncrpc.core.ids import Incarnation, WorkerId
from asyncrpc.core.optim import states

A, B = (WorkerId(name, Incarnation(1)) for name in "ab")


class Reference:
    def __init__(self, owner: WorkerId) -> None:
        self.owner_id = owner


def groups_on(*owners: str) -> list[dict[str, Any]]:
    known = {"a": A, "b": B}
    return [{"params": [Reference(known[name]) for name in group]} for group in owners]


def owner_state(*names: str, groups: list[list[int]]) -> dict[str, Any]:
    """Return a state whose parameters have these names."""
    return {
        "state": {number: {"name": name} for number, name in enumerate(names) if name},
        "param_groups": [{"lr": 0.1, "params": group} for group in groups],
    }


GROUPS = groups_on("aba", "bb")
TOGETHER = {
    "state": {
        0: {"name": "a0"},
        1: {"name": "b0"},
        2: {"name": "a1"},
        4: {"name": "b2"},
    },
    "param_groups": [
        {"lr": 0.5, "params": [0, 1, 2]},
        {"lr": 0.25, "params": [3, 4]},
    ],
}


def test_states_are_joined_by_parameter_positions() -> None:
    parts = {
        A: owner_state("a0", "a1", groups=[[0, 1], []]),
        B: owner_state("b0", "", "b2", groups=[[0], [1, 2]]),
    }
    joined = states.joined(GROUPS, parts, [{"lr": 0.5}, {"lr": 0.25}])
    assert joined == TOGETHER
    assert list(joined["state"]) == [0, 1, 2, 4]


def test_joined_state_is_split_by_owner() -> None:
    a = states.part_for(GROUPS, TOGETHER, A)
    assert a["state"] == {0: {"name": "a0"}, 1: {"name": "a1"}}
    assert [group["params"] for group in a["param_groups"]] == [[0, 1], []]
    b = states.part_for(GROUPS, TOGETHER, B)
    assert b["state"] == {0: {"name": "b0"}, 2: {"name": "b2"}}
    assert b["param_groups"] == [
        {"lr": 0.5, "params": [0]},
        {"lr": 0.25, "params": [1, 2]},
    ]


def test_state_entry_of_no_parameter_cannot_be_joined() -> None:
    state = owner_state("a0", groups=[[0]])
    state["state"]["round"] = 3
    with pytest.raises(UsageError, match=r"'round'.*per_owner=True"):
        states.joined(groups_on("a"), {A: state}, [{}])


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({"state": {}}, "it has no 'param_groups'"),
        ({"param_groups": []}, "it has no 'state'"),
        ({"state": {}, "param_groups": [{"params": [0]}]}, r"\[1\] parameters"),
        ({**TOGETHER, "state": {5: {}}}, r"has\s+groups of \[3, 2\]"),
    ],
)
def test_state_of_another_optimizer_is_refused(state: Any, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        states.check_fits(GROUPS, state)
    states.check_fits(GROUPS, TOGETHER)

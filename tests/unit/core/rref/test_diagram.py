"""The picture in the reference is the table in the code.

$ python -m tests.unit.core.rref.test_diagram    # prints the picture
"""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrpc.core.rref.machine import TRANSITIONS, HoldingEvent, HoldingState

DOC = Path(__file__).parents[4] / "docs" / "reference" / "rref-protocol.md"


def diagram() -> str:
    """Draw `TRANSITIONS` as mermaid text, without the steps that stay in a state."""
    lines = ["stateDiagram-v2"]
    starts = ("PENDING: remote()", "BORROWED: loan", "CONFIRMED: fork")
    lines += [f"    [*] --> {start}" for start in starts]
    for state, row in TRANSITIONS.items():
        lines += [
            f"    {state.name} --> {after.name}: {event.value}"
            for event, after in row.items()
            if after is not state
        ]
    lines.append("    RELEASED --> [*]")
    return "\n".join(lines)


def test_picture_shows_the_transition_table() -> None:
    text = DOC.read_text(encoding="utf-8")
    drawn = text.split("```mermaid\n", 1)[1].split("\n```", 1)[0]
    assert drawn == diagram()


def test_every_state_has_a_row() -> None:
    assert TRANSITIONS.keys() == set(HoldingState)


def test_every_event_occurs_in_the_table() -> None:
    assert {event for row in TRANSITIONS.values() for event in row} == set(HoldingEvent)


@pytest.mark.parametrize(
    "state", [state for state in HoldingState if state is not HoldingState.RELEASED]
)
def test_every_state_leads_to_release(state: HoldingState) -> None:
    reached = {state}
    while True:
        more = {after for state in reached for after in TRANSITIONS[state].values()}
        if more <= reached:
            break
        reached |= more
    assert HoldingState.RELEASED in reached


if __name__ == "__main__":
    print(diagram())  # noqa: T201  # to be pasted

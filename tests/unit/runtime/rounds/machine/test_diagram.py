"""The picture in the explanation is the table in the code.

$ python -m tests.unit.runtime.rounds.machine.test_diagram    # prints the picture
"""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrpc.runtime.rounds.machine.series import (
    TRANSITIONS,
    SeriesEvent,
    SeriesState,
)

DOC = Path(__file__).parents[5] / "docs" / "explanation" / "architecture.md"


def diagram() -> str:
    """Draw `TRANSITIONS` as mermaid text, without the steps that stay in a state."""
    lines = ["stateDiagram-v2", "    [*] --> AWAY"]
    for state, row in TRANSITIONS.items():
        lines += [
            f"    {state.name} --> {after.name}: {event.value}"
            for event, after in row.items()
            if after is not state
        ]
    return "\n".join(lines)


def test_the_picture_is_the_table() -> None:
    text = DOC.read_text(encoding="utf-8")
    assert f"```mermaid\n{diagram()}\n```" in text


def test_every_state_has_a_row() -> None:
    assert TRANSITIONS.keys() == set(SeriesState)


def test_every_event_happens_somewhere() -> None:
    assert {event for row in TRANSITIONS.values() for event in row} == set(SeriesEvent)


@pytest.mark.parametrize("state", [SeriesState.GATHERING, SeriesState.REPORTED])
def test_who_waits_can_always_pass_and_fail(state: SeriesState) -> None:
    assert {SeriesEvent.PASS, SeriesEvent.FAIL} <= TRANSITIONS[state].keys()


if __name__ == "__main__":
    print(diagram())  # noqa: T201  # to be pasted

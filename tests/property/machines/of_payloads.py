"""The ways of large payloads."""

from __future__ import annotations

import enum
from types import ModuleType
from typing import Final

from asyncrpc.runtime.payloads.machine import lanes
from tests.property.machines.spec import Guard, Machine, table_of


class _Follower:
    """What a service does that follows a table: an event not listed changes nothing."""

    def __init__(self, build: ModuleType, state: enum.Enum) -> None:
        self.table = table_of(build)
        self.state = state

    def on(self, event: enum.Enum) -> None:
        """Take an event."""
        self.state = self.table[self.state].get(event, self.state)


LANES: Final = Machine(
    name="The lanes of a link",
    about="Whether payloads leave over lanes, or over the connection of small "
    "messages.",
    source=lanes,
    states="LanesState",
    events="LanesEvent",
    starts=("NONE", "OFF"),
    begin=lambda build, start: _Follower(build, build.LanesState[start]),
    feed=lambda one, event: one.on(event),
    state_of=lambda one: one.state,
    stories="""
a payload opens them:
    NONE -WANT-> OPENING -OPENED-> UP -WANT-> UP
the peer opens one:
    NONE -OPENED-> UP -OPENED-> UP
they open late:
    NONE -WANT-> OPENING -WAITED-> LATE -OPENED-> UP
they cannot be opened:
    OPENING -FAILED-> OFF -WANT-> OFF
they cannot be opened, which takes long:
    LATE -FAILED-> OFF -WAITED-> OFF
the peer cannot open them:
    NONE -FAILED-> OFF
the last one ends:
    UP -LOST-> OFF -OPENED-> UP
what fails later changes nothing:
    UP -FAILED-> UP -WAITED-> UP
the link ends before anybody needs them:
    NONE -CLOSE-> CLOSED -WANT-> CLOSED
the link ends meanwhile:
    OPENING -CLOSE-> CLOSED -OPENED-> CLOSED
the link ends while they are late:
    LATE -CLOSE-> CLOSED -FAILED-> CLOSED
the link ends with its lanes:
    UP -CLOSE-> CLOSED -LOST-> CLOSED
the link ends without lanes:
    OFF -CLOSE-> CLOSED
""",
    refusal="",
    tests=("tests/unit/runtime/payloads/machine/test_lanes.py",),
    guards=(
        Guard(
            "a-turn-is-never-quiet",
            "quiet = self._quiet_turns >= QUIET_TURNS",
            "quiet = False",
        ),
        Guard(
            "a-message-does-not-end-the-quiet",
            "0 if reads != self._reads else self._quiet_turns + 1",
            "self._quiet_turns + 1",
        ),
        Guard(
            "reads-are-forgotten",
            "        self._reads = reads\n",
            "",
        ),
    ),
)

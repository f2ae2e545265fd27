"""A model that generates several sequences at once, for tests: numbers down to 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

FAILS_AT: Final = 13


class Countdown:
    """Counts down from the number that was asked for; it fails at `FAILS_AT`.

    A `serving.SequenceModel`.
    """

    def enter(self, requests: Sequence[int]) -> list[list[int]]:
        return [[number] for number in requests]

    def step(
        self, states: Sequence[list[int]]
    ) -> list[tuple[list[int], bool] | Exception]:
        return [_count(state) for state in states]

    def leave(self, state: list[int]) -> None:
        state.clear()


def _count(state: list[int]) -> tuple[list[int], bool] | Exception:
    state[0] -= 1
    if state[0] == FAILS_AT:
        return ValueError("no luck")
    return [state[0]], not state[0]

"""The last minutes of a group, as the dashboard has seen them."""

from __future__ import annotations

from collections import deque
from typing import Any, Final, NamedTuple

HISTORY_S: Final = 600.0
MOMENTS_MAX: Final = 600


class Moment(NamedTuple):
    """A group at one moment.

    Attributes:
        at_s: when, in seconds since 1970.
        made_per_s: calls that its workers made; None: beyond the range of numbers.
        p99_s: of the calls of the slowest worker; None: there were no calls.
        memory_bytes: of its processes.
    """

    at_s: float
    made_per_s: float | None
    p99_s: float | None
    memory_bytes: int


class GroupHistory:
    """Moments, the oldest first; those older than `HISTORY_S` are forgotten."""

    def __init__(self) -> None:
        """Begin without moments."""
        self._moments: deque[Moment] = deque(maxlen=MOMENTS_MAX)

    def add(self, moment: Moment) -> None:
        """Add a moment; drop later ones, which exist if the clock was set back."""
        while self._moments and self._moments[-1].at_s > moment.at_s:
            self._moments.pop()
        self._moments.append(moment)
        while self._moments[0].at_s < moment.at_s - HISTORY_S:
            self._moments.popleft()

    def columns(self) -> dict[str, list[Any]]:
        """Return the moments column by column."""
        return {
            name: [one[place] for one in self._moments]
            for place, name in enumerate(Moment._fields)
        }

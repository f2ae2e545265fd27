"""Which workers to ask next, in a group that is polled.

A worker that has not answered is asked less and less often: a dead worker costs little,
and is still found when it is back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

FIRST_PAUSE_S: Final = 2.0
PAUSE_MAX_S: Final = 8.0


class AskingPlan:
    """Decides who is asked in each round.

    A worker is being asked, or rests after a silence, or is due.  Names that are no
    longer wanted are forgotten.
    """

    def __init__(self) -> None:
        self._asking: set[str] = set()
        self._rests: dict[str, tuple[float, float]] = {}  # until when, how long

    @property
    def asking(self) -> frozenset[str]:
        """Names of the workers that have been asked and have not answered yet."""
        return frozenset(self._asking)

    def due(self, names: Iterable[str], now_s: float) -> list[str]:
        """Return the members to ask now; forget workers that are no longer members."""
        wanted = list(names)
        self._rests = {
            name: self._rests[name] for name in wanted if name in self._rests
        }
        return [
            name
            for name in wanted
            if name not in self._asking and self._rest_of(name) <= now_s
        ]

    def _rest_of(self, name: str) -> float:
        return self._rests.get(name, (0.0, 0.0))[0]

    def on_asked(self, name: str) -> None:
        """Note that a worker is being asked."""
        self._asking.add(name)

    def on_answer(self, name: str) -> None:
        """Note that a worker has answered."""
        self._rests.pop(name, None)

    def on_end(self, name: str) -> None:
        """Note that a question has ended: answered, failed or given up."""
        self._asking.discard(name)

    def on_silence(self, name: str, now_s: float) -> None:
        """Note that a worker did not answer in time, or could not be asked."""
        _, before_s = self._rests.get(name, (0.0, 0.0))
        pause_s = min(2 * before_s, PAUSE_MAX_S) or FIRST_PAUSE_S
        self._rests[name] = now_s + pause_s, pause_s

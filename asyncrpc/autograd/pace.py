"""Which work is so short that the loop does it itself.

To hand work to a thread and hear of its end takes the time of a small backward run.  So
work that has been short, each time that it ran in a thread, is done at once by the loop
from then on; once it takes long, it is not.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final

# The loop is not to be held up longer than a small call takes.
SHORT_S: Final = 300e-6
LONG_S: Final = 500e-6
TRIALS: Final = 3  # in a thread, before the loop does it
KINDS_MAX: Final = 1024  # that are remembered
_NEVER: Final = -1


class Pace:
    """What is known of the time that kinds of work take.

    Thread safety: none; all calls on the worker's loop.
    """

    def __init__(self) -> None:
        self._short: OrderedDict[Hashable, int] = OrderedDict()

    def is_short(self, kind: Hashable) -> bool:
        """Say whether work of this kind has always been short."""
        return self._short.get(kind, 0) >= TRIALS

    def note(self, kind: Hashable, took_s: float) -> None:
        """Take note of how long work of this kind took."""
        trials = self._short.get(kind, 0)
        if trials >= TRIALS:
            if took_s > LONG_S:
                self._short[kind] = _NEVER
            return
        if trials == _NEVER:
            return
        # A thread may have to wait for its turn: slow is only what always is.
        self._short[kind] = trials + 1 if took_s <= SHORT_S else 0
        if len(self._short) > KINDS_MAX:
            self._short.popitem(last=False)

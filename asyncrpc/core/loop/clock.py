"""Time: the only module that reads it.  Monotonic seconds from an arbitrary zero."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final

NS_PER_S: Final = 1_000_000_000

# Nanoseconds since 1970: to compare with records of other programs.
wall_ns: Final = time.time_ns
# The time in seconds: for measurements too short to ask a `Clock`.
now_s: Final = time.perf_counter
# Processor time of the calling thread, in seconds.
thread_cpu_s: Final = time.thread_time
# Processor time of this process, in seconds.
process_cpu_s: Final = time.process_time
NO_LIMIT_NS: Final = -1  # on the wire: the call has no deadline


@dataclass(frozen=True, slots=True)
class Clock:
    """The source of the time; a simulation passes its loop's virtual time."""

    now_s: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in a clock's time, and the timeout that it came from.

    Attributes:
        at_s: the point, in seconds; of a worker, by the clock of its event loop.
        allowed_s: the timeout, in seconds, for the texts of errors.
    """

    at_s: float
    allowed_s: float

    is_lifted: ClassVar[bool] = False  # what it limited is over: it limits no more

    @classmethod
    def after(cls, timeout_s: float, now_s: float) -> Deadline:
        """Make the deadline that is `timeout_s` seconds from `now_s`.

        Raises:
            ValueError: `timeout_s` is not a number.
        """
        if math.isnan(timeout_s):
            raise ValueError("timeout must be a number of seconds, not nan")
        return cls(now_s + timeout_s, timeout_s)

    def remaining_s(self, now_s: float) -> float:
        """Return the seconds left: zero or less once the deadline has passed."""
        return self.at_s - now_s

    def budget_ns(self, now_s: float) -> int:
        """Return the remaining time as it is sent: nanoseconds, at least 0."""
        return max(0, int((self.at_s - now_s) * NS_PER_S))

    @classmethod
    def from_budget(cls, budget_ns: int, now_s: float) -> Deadline | None:
        """Return the deadline that `budget_ns` wrote; None for no limit."""
        if budget_ns < 0:
            return None
        return cls.after(budget_ns / NS_PER_S, now_s)

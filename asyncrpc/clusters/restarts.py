"""How often lost workers start again, and how soon.

Source: the limit of restarts within a time is that of Erlang's supervisors (`intensity`
and `period`); torchrun's `--max-restarts` has no period.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from asyncrpc.core.arguments import (
    check_count,
    check_duration,
    check_flag,
    check_timeout,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """How often workers restart, and how long a restart waits.

    Attributes:
        restarts_max: restarts within `window_s`; one more loss is final.  0: the first
            loss is.
        window_s: seconds after which a restart is forgotten; None: never.
        backoff_s: seconds before the first restart; each further one within the window
            waits twice as long.
        backoff_max_s: seconds that a restart waits at most.
        together: whether the loss of one worker restarts all of them, as programs want
            whose workers hold parts of one state.
    """

    restarts_max: int = 3
    window_s: float | None = 3600.0
    backoff_s: float = 1.0
    backoff_max_s: float = 60.0
    together: bool = False

    def __post_init__(self) -> None:
        """Validate the fields.

        Raises:
            UsageError: a field is negative, or has the wrong type.
        """
        check_count("RestartLimits.restarts_max", self.restarts_max)
        check_timeout("RestartLimits.window_s", self.window_s)
        check_duration("RestartLimits.backoff_s", self.backoff_s)
        check_duration("RestartLimits.backoff_max_s", self.backoff_max_s)
        check_flag("RestartLimits.together", self.together)


@dataclass(slots=True)
class RestartBudget:
    """The restarts that have been used, and those that are left.

    Attributes:
        limits: how often workers restart.
        restarts: when those restarts took place that are not forgotten, in seconds.
    """

    limits: RestartLimits
    restarts: deque[float] = field(default_factory=deque)

    def take(self, at_s: float) -> float | None:
        """Use a restart; return when it is due, or None if none is left."""
        limits = self.limits
        window_s = limits.window_s
        while (
            window_s is not None
            and self.restarts
            and self.restarts[0] <= at_s - window_s
        ):
            self.restarts.popleft()
        if len(self.restarts) >= limits.restarts_max:
            return None
        self.restarts.append(at_s)
        # The exponent is bounded: a float has no 2 ** 5000.
        doublings = min(len(self.restarts) - 1, 64)
        return at_s + min(limits.backoff_s * 2.0**doublings, limits.backoff_max_s)

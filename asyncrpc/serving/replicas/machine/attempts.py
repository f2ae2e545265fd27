"""What becomes of a call whose attempt at one replica has failed.

What matters is whether the function may have run, and whether it may run twice: see
`Outcome`.  What a replica certainly did not run may move to another one; this adds no
load if the replica did not work for it, and counts against the budget of retries if
the replica is overloaded: then the others may be, too.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final


class AttemptFailure(enum.Enum):
    """How an attempt has failed."""

    DRAINING = "the replica takes no calls any more; it did not run this one"
    UNREACHED = "the replica is gone, and had not got the call"
    OVERLOADED = "the replica has too much to do; it did not run this one"
    LOST = "the replica is gone, and may have run it"
    LATE = "the deadline has passed"
    RAISED = "the function raised"
    MISUSED = "the caller is at fault: an argument, say, cannot be sent"


class NextStep(enum.Enum):
    """What to do next."""

    MOVE = "try another replica"
    RETRY = "try another replica, if the budget of retries allows it"
    RAISE = "tell the program"


class Health(enum.Enum):
    """What an attempt says of its replica."""

    GOOD = "it works"
    BAD = "it may be broken"
    UNKNOWN = "nothing"


_F = AttemptFailure

# By failure: of a function that may run twice, and of any other.
STEPS: Final[Mapping[AttemptFailure, tuple[NextStep, NextStep]]] = {
    _F.DRAINING: (NextStep.MOVE, NextStep.MOVE),
    _F.UNREACHED: (NextStep.MOVE, NextStep.MOVE),
    _F.OVERLOADED: (NextStep.RETRY, NextStep.RETRY),
    _F.LOST: (NextStep.RETRY, NextStep.RAISE),
    _F.LATE: (NextStep.RAISE, NextStep.RAISE),
    _F.RAISED: (NextStep.RAISE, NextStep.RAISE),
    _F.MISUSED: (NextStep.RAISE, NextStep.RAISE),
}

# An overloaded replica is no broken one: to eject it would overload the others.
HEALTH: Final[Mapping[AttemptFailure, Health]] = {
    _F.DRAINING: Health.UNKNOWN,
    _F.UNREACHED: Health.BAD,
    _F.OVERLOADED: Health.UNKNOWN,
    _F.LOST: Health.BAD,
    _F.LATE: Health.BAD,
    _F.RAISED: Health.BAD,
    _F.MISUSED: Health.UNKNOWN,
}


def step_after(
    failure: AttemptFailure, *, is_idempotent: bool, attempts_left: int
) -> NextStep:
    """Return what to do after a failed attempt.

    Args:
        failure: how it failed.
        is_idempotent: whether the function may run twice.
        attempts_left: how many retries the call may still have; moves are limited by
            the number of replicas, as each is tried once.
    """
    step = STEPS[failure][0 if is_idempotent else 1]
    if step is NextStep.RETRY and attempts_left <= 0:
        return NextStep.RAISE
    return step

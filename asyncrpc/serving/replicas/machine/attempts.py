"""What happens to a call after its attempt at one replica has failed.

This depends on whether the function may have run, and whether it may run twice: see
`Outcome`.  A call that a replica certainly did not run may move to another one.  This
adds no load if the replica did no work for it.  If the replica is overloaded, it counts
against the budget of retries: the other replicas may be overloaded as well.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final


class AttemptFailure(enum.Enum):
    """How an attempt has failed."""

    DRAINING = "the replica no longer takes calls; it did not run this one"
    UNREACHED = "the replica is gone, and had not received the call"
    OVERLOADED = "the replica has too much to do; it did not run this one"
    LOST = "the replica is gone, and may have run it"
    LATE = "the deadline has passed"
    RAISED = "the function raised"
    MISUSED = "the caller is at fault, such as by an argument that cannot be sent"


class NextStep(enum.Enum):
    """What to do next."""

    MOVE = "try another replica"
    RETRY = "try another replica, if the budget of retries allows it"
    RAISE = "tell the program"


class Health(enum.Enum):
    """What an attempt tells about its replica."""

    GOOD = "it works"
    BAD = "it may be broken"
    UNKNOWN = "nothing"


_F = AttemptFailure

# By failure: for a function that may run twice, and for any other.
STEPS: Final[Mapping[AttemptFailure, tuple[NextStep, NextStep]]] = {
    _F.DRAINING: (NextStep.MOVE, NextStep.MOVE),
    _F.UNREACHED: (NextStep.MOVE, NextStep.MOVE),
    _F.OVERLOADED: (NextStep.RETRY, NextStep.RETRY),
    _F.LOST: (NextStep.RETRY, NextStep.RAISE),
    _F.LATE: (NextStep.RAISE, NextStep.RAISE),
    _F.RAISED: (NextStep.RAISE, NextStep.RAISE),
    _F.MISUSED: (NextStep.RAISE, NextStep.RAISE),
}

# An overloaded replica is not broken: ejecting it would overload the others.
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
        attempts_left: how many retries are left; moves are limited by the number of
            replicas, as each is tried once.
    """
    step = STEPS[failure][0 if is_idempotent else 1]
    if step is NextStep.RETRY and attempts_left <= 0:
        return NextStep.RAISE
    return step

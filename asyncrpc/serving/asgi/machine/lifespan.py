"""The lifespan of an application as a middleware sees it that starts a worker itself.

The worker starts before the application and ends after it, so the messages of an
application that ends are held back until the worker has ended.  An application that
knows no lifespan raises, or returns, before it has answered: then it has none, and the
worker begins and ends all the same.

Source: the ASGI specification 3.0, "Lifespan Protocol".
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Final

STARTUP_COMPLETE: Final = "lifespan.startup.complete"
STARTUP_FAILED: Final = "lifespan.startup.failed"
SHUTDOWN_COMPLETE: Final = "lifespan.shutdown.complete"
SHUTDOWN_FAILED: Final = "lifespan.shutdown.failed"


class LifespanState(enum.Enum):
    """How far the lifespan of an application is."""

    STARTING = "starting"
    STARTED = "started"
    FAILED = "failed"  # to start
    ENDED = "ended"


_NEXT: Final[Mapping[tuple[LifespanState, str], LifespanState]] = {
    (LifespanState.STARTING, STARTUP_COMPLETE): LifespanState.STARTED,
    (LifespanState.STARTING, STARTUP_FAILED): LifespanState.FAILED,
    (LifespanState.STARTED, SHUTDOWN_COMPLETE): LifespanState.ENDED,
    (LifespanState.STARTED, SHUTDOWN_FAILED): LifespanState.ENDED,
}


class InnerLifespan:
    """The lifespan of the application inside a middleware.

    Attributes:
        state: how far it is.
        last: the message that goes to the server when the worker has ended.
    """

    def __init__(self) -> None:
        """Begin before the start."""
        self.state = LifespanState.STARTING
        self.last: dict[str, Any] = {"type": SHUTDOWN_COMPLETE}

    def sends(self, message: Mapping[str, Any]) -> bool:
        """The application sends a message; return whether it goes on at once."""
        following = _NEXT.get((self.state, message["type"]))
        if following is None:
            return True  # the server says what is wrong with it
        self.state = following
        if following is LifespanState.STARTED:
            return True
        self.last = dict(message)
        return False

    @property
    def is_unknown(self) -> bool:
        """Whether an application that has returned, or raised, knows no lifespan."""
        return self.state is LifespanState.STARTING

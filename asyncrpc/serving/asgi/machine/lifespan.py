"""The lifespan of an application inside a middleware that starts a worker itself.

The worker starts before the application and ends after it, so the final message of an
application is held back until the worker has ended.  An application that does not
support the lifespan raises or returns before it has answered; the worker starts and
ends nevertheless.

Source: the ASGI specification 3.0, "Lifespan Protocol".
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Final

from asyncrpc.core.state_table import StateTable

STARTUP_COMPLETE: Final = "lifespan.startup.complete"
STARTUP_FAILED: Final = "lifespan.startup.failed"
SHUTDOWN_COMPLETE: Final = "lifespan.shutdown.complete"
SHUTDOWN_FAILED: Final = "lifespan.shutdown.failed"


class LifespanState(enum.Enum):
    """How far the lifespan of an application is."""

    STARTING = "the application starts"
    STARTED = "the application has started"
    FAILED = "the application could not start"
    ENDED = "the application has ended"
    UNSUPPORTED = "the application does not support the lifespan"


class LifespanStep(enum.Enum):
    """What changes the state."""

    START = "the application says that it has started"
    FAIL = "the application says that it could not start"
    END = "the application says that it has ended, with success or failure"
    RETURN = "the application returns, or raises"


_S, _E = LifespanState, LifespanStep

TRANSITIONS: Final = StateTable(
    "the application",
    {
        _S.STARTING: {
            _E.START: _S.STARTED,
            _E.FAIL: _S.FAILED,
            _E.RETURN: _S.UNSUPPORTED,
        },
        _S.STARTED: {_E.END: _S.ENDED, _E.RETURN: _S.ENDED},
        _S.FAILED: {},
        _S.ENDED: {},
        _S.UNSUPPORTED: {},
    },
    late=LifespanStep,
)

_STEPS: Final[Mapping[str, LifespanStep]] = {
    STARTUP_COMPLETE: _E.START,
    STARTUP_FAILED: _E.FAIL,
    SHUTDOWN_COMPLETE: _E.END,
    SHUTDOWN_FAILED: _E.END,
}
_HELD_BACK: Final = (LifespanState.FAILED, LifespanState.ENDED)


class InnerLifespan:
    """The lifespan of the application inside a middleware.

    Attributes:
        last: the message that goes to the server when the worker has ended.
    """

    def __init__(self) -> None:
        self.state = LifespanState.STARTING
        self.last: dict[str, Any] = {"type": SHUTDOWN_COMPLETE}

    def advance(self, step: LifespanStep) -> bool:
        """Go to the next state; return whether the step is listed for this state."""
        before, self.state = self.state, TRANSITIONS.after(self.state, step)
        return step in TRANSITIONS[before]

    def sends(self, message: Mapping[str, Any]) -> bool:
        """Take a message of the application; return whether to pass it on at once."""
        step = _STEPS.get(message["type"])
        if step is None or not self.advance(step):
            return True  # the server says what is wrong with it
        if self.state not in _HELD_BACK:
            return True
        self.last = dict(message)
        return False

    def returned(self) -> bool:
        """Note the end of the application; return whether it supports no lifespan."""
        self.advance(LifespanStep.RETURN)
        return self.state is LifespanState.UNSUPPORTED

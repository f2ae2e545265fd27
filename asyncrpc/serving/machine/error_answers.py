"""Which error gets which answer, over HTTP, in an event stream, and by a websocket.

aiohttp and ASGI applications answer the same error with the same status, headers and
body.

Source: RFC 9110 for the statuses and `Retry-After`; the registry of RFC 6455 for close
codes, where 1013 is "try again later"; 4000 to 4999 are free for applications.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Final

from asyncrpc.core.arguments import is_seconds
from asyncrpc.errors import (
    AsyncRpcError,
    CallKindError,
    DeadlineExceededError,
    NotStartedError,
    OverloadedError,
    OwnerLostError,
    RejectedError,
    RemoteError,
    WorkerLostError,
)

RETRY_AFTER_S: Final = 1.0
OVERLOADED_STATUS: Final = 503
CLIENT_LEFT_STATUS: Final = 499  # nginx's; only logs show it
_RETRY_AFTER_MAX_S: Final = 3600.0  # more is not a credible estimate
NORMAL_CLOSURE: Final = 1000
INTERNAL_ERROR: Final = 1011
TRY_AGAIN_LATER: Final = 1013
DEADLINE_PASSED: Final = 4504
BAD_REQUEST: Final = 4400
# Close codes of answers whose status would be 500 or more.
FAILED_CLOSURES: Final = frozenset({INTERNAL_ERROR, TRY_AGAIN_LATER, DEADLINE_PASSED})
REASON_BYTES_MAX: Final = 123  # of a close frame: 125 without the code

# Errors after which a client may try again.  An error from another worker may be of a
# class made at run time, so the client is told the name of the class listed here.
_UNAVAILABLE: Final[tuple[type[AsyncRpcError], ...]] = (
    RejectedError,
    WorkerLostError,
    OwnerLostError,
)


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """The answer of a server to an error.

    Attributes:
        error: name of the error's class.
        retry_after_s: seconds after which the client may try again; None: not told.
    """

    status: int
    error: str
    message: str
    close_code: int
    retry_after_s: float | None = None

    @property
    def body(self) -> str:
        """The JSON that is sent as the body of a response or the data of an event."""
        return json.dumps({"error": self.error, "message": self.message})

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the response, without its length."""
        headers = {"Content-Type": "application/json; charset=utf-8"}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(math.ceil(self.retry_after_s))
        return headers

    @property
    def reason(self) -> str:
        """The reason of a close frame, cut to the allowed length."""
        text = f"{self.error}: {self.message}"
        if self.retry_after_s is not None:
            text = f"{self.error}: retry after {self.headers['Retry-After']} s: "
            text += self.message
        whole = text.encode("utf-8", "replace")
        return whole[:REASON_BYTES_MAX].decode("utf-8", "ignore")


# For an error that the client must not see.
INTERNAL: Final = ErrorAnswer(
    500, "InternalError", "the server failed; see its log", INTERNAL_ERROR
)


def is_overloaded_status(value: object) -> bool:
    """Return whether an `OverloadedError` may be answered with this status.

    Source: RFC 6585 for 429, "Too Many Requests".
    """
    return type(value) is int and value in {OVERLOADED_STATUS, 429}


def bad_request(message: str) -> ErrorAnswer:
    """Return the answer to an invalid request."""
    return ErrorAnswer(400, "BadRequest", message, BAD_REQUEST)


def answer_to(
    error: BaseException,
    *,
    is_over: bool,
    is_closed: bool,
    retry_after_s: float = RETRY_AFTER_S,
    overloaded_status: int = OVERLOADED_STATUS,
) -> ErrorAnswer | None:
    """Return the answer to an error; None: it is not answered here."""
    if isinstance(error, DeadlineExceededError):
        return _too_late(str(error))
    if isinstance(error, OverloadedError):
        after_s = _told_s(error, retry_after_s)
        return _unavailable(OverloadedError, error, after_s, overloaded_status)
    if isinstance(error, CallKindError):  # a retry would end the same
        return ErrorAnswer(500, CallKindError.__name__, str(error), INTERNAL_ERROR)
    for kind in (*_UNAVAILABLE, *([NotStartedError] if is_closed else [])):
        if isinstance(error, kind):
            return _unavailable(kind, error, retry_after_s)
    # The deadline's own TimeoutError, not one that a called function raised.
    is_own = isinstance(error, TimeoutError) and not isinstance(error, RemoteError)
    if is_own and is_over:
        return _too_late("the request took longer than it may")
    return None


def _too_late(message: str) -> ErrorAnswer:
    return ErrorAnswer(504, DeadlineExceededError.__name__, message, DEADLINE_PASSED)


def _told_s(error: OverloadedError, otherwise_s: float) -> float:
    """Return the seconds after which, by an error, a client may try again."""
    # The attributes of an error from another worker are unchecked.
    told_s = getattr(error, "retry_after_s", None)
    if not is_seconds(told_s):
        return otherwise_s
    return min(max(told_s, 0.0), _RETRY_AFTER_MAX_S)


def _unavailable(
    kind: type[AsyncRpcError],
    error: BaseException,
    after_s: float,
    status: int = 503,
) -> ErrorAnswer:
    return ErrorAnswer(status, kind.__name__, str(error), TRY_AGAIN_LATER, after_s)

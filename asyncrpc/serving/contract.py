"""The contract that aiohttp and ASGI share: deadlines from headers, error answers.

The header of a deadline holds whole milliseconds from the arrival of the request.  A
client can only shorten the time that the server allows.

Source: Envoy's `x-envoy-expected-rq-timeout-ms`, which it sets so that the upstream
host can stop early; the Connect protocol's `Connect-Timeout-Ms` has the same form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

from asyncrpc.core.arguments import check_duration, wrong
from asyncrpc.serving.machine.error_answers import (
    ErrorAnswer,
    answer_to,
    bad_request,
    is_overloaded_status,
)

DEADLINE_HEADER: Final = "X-Envoy-Expected-Rq-Timeout-Ms"
_DIGITS_MAX: Final = 10  # 115 days
_SHOWN_CHARACTERS: Final = 40


class BadDeadlineError(ValueError):
    """The header is invalid; the text is for the client."""


class NoTimeLeftError(TimeoutError):
    """The request may take no time, so it is not begun."""


def time_allowed_s(
    name: str, values: Sequence[str], timeout_s: float | None
) -> float | None:
    """Return the seconds that a request may take; None: there is no limit.

    Args:
        timeout_s: what the server allows; None: it sets no limit.
    """
    allowed_s = timeout_s
    if values:
        asked_s = _read(name, values)
        allowed_s = asked_s if timeout_s is None else min(asked_s, timeout_s)
    if allowed_s == 0:
        raise NoTimeLeftError("the request may take no time")
    return allowed_s


def _read(name: str, values: Sequence[str]) -> float:
    if len(values) > 1:
        raise BadDeadlineError(
            f"the header {name} was sent {len(values)} times; send it once"
        )
    text = values[0].strip()
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX):
        raise BadDeadlineError(
            f"the header {name} must be whole milliseconds, of at most {_DIGITS_MAX} "
            f"digits, not {text[:_SHOWN_CHARACTERS]!r}"
        )
    return int(text) / 1000


# The name of a header is a token of RFC 9110.
_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")


class Contract:
    """The options of a middleware, applied to single requests.

    Source: docs/reference/serving.md.
    """

    def __init__(
        self,
        timeout_s: float | None,
        retry_after_s: float,
        deadline_header: str | None,
        overloaded_status: int,
    ) -> None:
        """Check the options.

        Args:
            timeout_s: seconds that a request may take; None: no limit.
            deadline_header: name of the header that shortens `timeout_s`; None: no
                header does.
        """
        if timeout_s is not None:
            check_duration("timeout_s", timeout_s)
        check_duration("retry_after_s", retry_after_s)
        if deadline_header is not None and not _is_header_name(deadline_header):
            wanted = "the name of a header, or None"
            raise wrong("deadline_header", wanted, deadline_header)
        if not is_overloaded_status(overloaded_status):
            raise wrong("overloaded_status", "503 or 429", overloaded_status)
        self._timeout_s = timeout_s
        self._retry_after_s = retry_after_s
        self._deadline_header = deadline_header
        self._overloaded_status = overloaded_status

    def header_of(self, find: Callable[[str], Sequence[str]]) -> Sequence[str]:
        """Return the values of the headers that may shorten the deadline."""
        name = self._deadline_header
        return () if name is None else find(name)

    def time_allowed_s(self, values: Sequence[str]) -> float | None:
        """Return the seconds that a request may take; None: there is no limit."""
        return time_allowed_s(self._deadline_header or "", values, self._timeout_s)

    def answer_to(
        self, error: Exception, *, is_over: bool, is_closed: bool
    ) -> ErrorAnswer | None:
        """Return the answer to an error; None: the middleware does not answer it."""
        if isinstance(error, BadDeadlineError):
            return bad_request(str(error))
        return answer_to(
            error,
            is_over=is_over or isinstance(error, NoTimeLeftError),
            is_closed=is_closed,
            retry_after_s=self._retry_after_s,
            overloaded_status=self._overloaded_status,
        )


def _is_header_name(value: object) -> bool:
    return isinstance(value, str) and _HEADER_NAME.fullmatch(value) is not None

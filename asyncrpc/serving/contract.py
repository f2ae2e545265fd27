"""The contract that aiohttp and ASGI share: deadlines from headers, error answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

from asyncrpc.core.arguments import check_duration, wrong
from asyncrpc.serving.machine.deadline_header import (
    BadDeadlineError,
    NoTimeLeftError,
    time_allowed_s,
)
from asyncrpc.serving.machine.error_answers import (
    ErrorAnswer,
    answer_to,
    bad_request,
    is_overloaded_status,
)

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

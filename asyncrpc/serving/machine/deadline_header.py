"""The time that a client or a proxy allows a request, by a header.

The header holds whole milliseconds from the arrival of the request.  A client can only
shorten the time that the server allows.

Source: Envoy's `x-envoy-expected-rq-timeout-ms`, which it sets so that the upstream
host can stop early; the Connect protocol's `Connect-Timeout-Ms` has the same form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

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

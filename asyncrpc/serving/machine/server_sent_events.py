"""Server-sent events as bytes.

Invariants: the encoding is UTF-8, in which JSON escapes what it cannot carry (lone
surrogates); a line break in the data never ends the
event; a field of one line never holds a line break.

Source: the HTML standard, "Server-sent events", section "Parsing an event stream".
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from asyncrpc.core.arguments import check_duration, check_kind, wrong
from asyncrpc.errors import UsageError

HEADERS: Final[Mapping[str, str]] = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",  # nginx: pass it on at once
}
COMMENT: Final = b":\n\n"  # browsers ignore it; proxies see that the stream is alive
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_LINE_BREAK: Final = re.compile(r"\r\n|\r|\n")  # and no other, unlike `splitlines`

Encode = Callable[[Any], str]


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """An event of a stream with more fields than its data.

    Attributes:
        data: any value; `encode` of the response makes its text.
        event: its type; a browser calls the listeners of this type.  Empty: `message`.
        id: its position in the stream; a browser that connects again sends the last one
            as `Last-Event-ID`.  Empty: no position.
        retry_s: seconds after which a browser that lost the stream connects again;
            None: unchanged.
    """

    data: Any = None
    event: str = ""
    id: str = ""
    retry_s: float | None = None

    def __post_init__(self) -> None:
        """Refuse fields that would break the stream.

        Raises:
            UsageError: a field has the wrong type, or has a line break.
        """
        check_line("event", self.event)
        check_line("id", self.id)
        if self.retry_s is not None:
            check_duration("retry_s", self.retry_s)


def check_line(name: str, value: object) -> None:
    """Raise UsageError unless a value fits into a field of one line."""
    check_kind(name, value, str, "a string")
    text = str(value)
    if _LINE_BREAK.search(text) or "\0" in text or has_surrogate(text):
        wanted = "a string without line breaks, NUL and lone surrogates"
        raise wrong(name, wanted, value)


def checked_headers(headers: Mapping[str, str] | None) -> Mapping[str, str]:
    """Return the headers that a program adds to a response."""
    if headers is None:
        return {}
    check_kind("headers", headers, Mapping, "a map of names to values")
    for pair in headers.items():
        for text in pair:
            if not isinstance(text, str) or not text.isprintable() or not text:
                wanted = "a map of printable text to printable text"
                raise wrong("headers", wanted, headers)
    return headers


def check_period(name: str, value: object) -> None:
    """Raise UsageError unless an argument is a number of seconds above 0, or None."""
    if value is not None:
        check_duration(name, value)
        if not value:
            raise wrong(name, "seconds above 0, or None for never", value)


def has_surrogate(text: str) -> bool:
    """Return whether a text has a lone surrogate, which UTF-8 cannot carry."""
    return not text.isascii() and _SURROGATE.search(text) is not None


def check_sendable(text: object) -> None:
    """Raise UsageError unless what a program's `encode` returned is a text of UTF-8."""
    if not isinstance(text, str):
        raise wrong("what encode returns", "a string", text)
    if has_surrogate(text):
        raise UsageError(
            "what encode returns must be text that UTF-8 can carry, without lone"
            " surrogates (U+D800 to U+DFFF); as JSON they can be escaped: leave out"
            " `encode`, or use json.dumps(...) with ensure_ascii=True"
        )


def as_json(value: Any) -> str:
    """Return a value as JSON, for `encode`."""
    try:
        text = json.dumps(
            value, allow_nan=False, ensure_ascii=False, separators=(",", ":")
        )
        if not has_surrogate(text):
            return text
        return json.dumps(value, allow_nan=False, separators=(",", ":"))  # escapes it
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"an item of type {type(value).__name__} cannot be written as JSON: "
            f"{error}; yield plain values, or give `encode`"
        ) from error


def encoded(item: Any, encode: Encode = as_json) -> bytes:
    """Return the bytes of an item: a `ServerSentEvent`, or the data of an event."""
    event = item if isinstance(item, ServerSentEvent) else ServerSentEvent(item)
    text = encode(event.data)
    check_sendable(text)
    lines = []
    if event.event:
        lines.append(f"event: {event.event}\n")
    if event.id:
        lines.append(f"id: {event.id}\n")
    if event.retry_s is not None:
        lines.append(f"retry: {math.ceil(event.retry_s * 1000)}\n")
    lines.extend(f"data: {line}\n" for line in _LINE_BREAK.split(text))
    lines.append("\n")
    return "".join(lines).encode()

"""Events as bytes, read back as the standard says that a browser reads them."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrpc.errors import UsageError
from asyncrpc.serving.machine.server_sent_events import (
    COMMENT,
    ServerSentEvent,
    as_json,
    check_period,
    checked_headers,
    encoded,
)

LINE = st.text().filter(lambda text: not re.search("[\r\n\0]", text))


def read(stream: bytes) -> list[dict[str, str]]:
    """Read a stream as the HTML standard says, "Interpreting an event stream"."""
    events: list[dict[str, str]] = []
    data: list[str] = []
    fields: dict[str, str] = {}
    for line in re.split("\r\n|\r|\n", stream.decode()):
        if not line:
            if data:
                events.append({**fields, "data": "\n".join(data)})
            data, fields = [], {}
        elif not line.startswith(":"):
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if name == "data":
                data.append(value)
            else:
                fields[name] = value
    return events


@given(st.lists(st.tuples(st.text(), LINE, LINE)))
def test_any_text_is_one_event(texts: list[tuple[str, str, str]]) -> None:
    """Each kind of line break is a line break in the browser."""
    sent = b""
    for data, event, name in texts:
        sent += encoded(ServerSentEvent(data, event, name), lambda text: text) + COMMENT
    expected = [
        {
            "data": re.sub("\r\n|\r", "\n", data),
            **({"event": event} if event else {}),
            **({"id": name} if name else {}),
        }
        for data, event, name in texts
    ]
    surrogates = re.compile("[\ud800-\udfff]")
    assert read(sent) == [
        {key: surrogates.sub("?", value) for key, value in fields.items()}
        for fields in expected
    ]


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists))
def test_json_is_the_default_encoding(value: Any) -> None:
    (event,) = read(encoded(value))
    assert json.loads(event["data"]) == value


def test_event_bytes_contain_all_fields() -> None:
    event = ServerSentEvent([1], event="e", id="i", retry_s=0.0001)
    assert encoded(event) == b"event: e\nid: i\nretry: 1\ndata: [1]\n\n"
    assert encoded("") == b'data: ""\n\n'
    assert encoded("", str) == b"data: \n\n"
    assert encoded(None) == b"data: null\n\n"


@pytest.mark.parametrize("text", ["a\nb", "a\rb", "\r\n", "\0", "a\ud800b"])
@pytest.mark.parametrize("name", ["event", "id"])
def test_field_with_a_line_break_is_refused(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=f"{name} must be a string without line"):
        dataclasses.replace(ServerSentEvent(), **{name: text})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [math.nan, math.inf, object(), {1j: 2}, b"bytes"])
def test_value_without_json_is_refused_with_advice(value: Any) -> None:
    with pytest.raises(UsageError, match=r"as JSON: .*; yield plain values, or give"):
        as_json(value)


def test_encoder_must_return_text_of_utf8() -> None:
    with pytest.raises(UsageError, match="must be text that UTF-8 can carry"):
        encoded("a\udfffb", str)


def test_json_escapes_surrogates_only() -> None:
    assert as_json("ä\U0001f600") == '"ä\U0001f600"'
    assert as_json(["ä\ud800"]) == '["\\u00e4\\ud800"]'


def test_encoder_must_return_text() -> None:
    wrong: Any = lambda _: b"x"  # noqa: E731
    with pytest.raises(UsageError, match="what encode returns must be a string"):
        encoded(1, wrong)


@pytest.mark.parametrize("headers", [{"a": 1}, {1: "a"}, {"a": "b\nc"}, {"a\r": "b"}])
def test_headers_that_would_break_the_response_are_refused(headers: Any) -> None:
    with pytest.raises(UsageError, match="headers must be a map of printable"):
        checked_headers(headers)
    assert checked_headers(None) == {}
    assert checked_headers({"X-A": "b c"}) == {"X-A": "b c"}


def test_period_is_never_zero() -> None:
    check_period("every_s", None)
    check_period("every_s", 0.1)
    with pytest.raises(UsageError, match="every_s must be seconds above 0, or None"):
        check_period("every_s", 0)

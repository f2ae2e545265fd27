"""The tables of messages in the wire protocol are those of the records that travel."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from asyncrpc.core.services.schema import Message, Notice, Request, names_of
from asyncrpc.core.wire.frames import FRAMES_ABOUT, FrameKind
from tests.architecture.sources import PACKAGE, name_of, python_files

PAGE: Final = Path("docs/reference/wire-protocol.md")
HEADER: Final = "| service | kind | method | value |"
SENDERS: Final = "| service | kind | method | from | about |"
KINDS: Final = "| | kind | head | control | `call_id` | `aux` | about |"
SHORT: Final = "| short | stands for |"


class Row(NamedTuple):
    """What the page says of a message.

    Attributes:
        value: its content.
        answer: to it; empty if it is told in words.
    """

    value: str
    answer: str


def tables(header: str) -> Iterator[list[str]]:
    """Yield the cells of each row below a header."""
    lines = iter(PAGE.read_text(encoding="utf-8").splitlines())
    for line in lines:
        if line != header:
            continue
        next(lines)
        for row in lines:
            if not row.startswith("|"):
                break
            yield [cell.strip() for cell in row.strip("|").split("|")]


def documented() -> dict[tuple[str, str, str], Row]:
    """Return what the page says, by service, kind and method."""
    documented_rows: dict[tuple[str, str, str], Row] = {}
    service = ""
    for name, kind, methods, text in tables(HEADER):
        service = name.strip("`") or service
        value, _, answer = text.partition("nswer")
        for method in methods.split(","):
            key = service, kind, method.strip().strip("`")
            assert key not in documented_rows, key
            documented_rows[key] = Row(_code(value), _code(answer, r"^[^:.]*: "))
    return documented_rows


def _code(text: str, before: str = "") -> str:
    """Return the first code in a text, what is before it given as a pattern."""
    match = re.search(before + r"`([^`]*)`", text)
    return match[1] if match else ""


def declared() -> dict[tuple[str, str, str], type[Message]]:
    """Return all messages of the package, by service, kind and method."""
    for path in python_files(PACKAGE):
        if "@message(" in path.read_text(
            "utf-8"
        ) or "@extend.message(" in path.read_text("utf-8"):
            importlib.import_module(".".join(Path(name_of(path)).with_suffix("").parts))
    messages: dict[tuple[str, str, str], type[Message]] = {}
    kinds: list[tuple[str, type[Message]]] = [("NOTICE", Notice), ("SERVICE", Request)]
    for kind, base in kinds:
        for message in base.__subclasses__():
            is_whole = "record" in message.__dict__  # not the class without its slots
            if is_whole and not message.__module__.startswith(
                ("tests.", "asyncrpc.test")
            ):
                messages[message.service, kind, message.method] = message
    return messages


# --- shapes --------------------------------------------------------------------------

# A name, or a list; `{"fields": shape}` is a list of one.
Shape = str | list[Any]


def parsed(text: str) -> Shape:
    """Return a shape; the short names that the page explains are written out."""
    short = {name.strip("`"): _code(means) for name, means in tables(SHORT)}
    while True:
        longer = re.sub(
            r"\*?\b[a-z]+\b(?!\")",
            lambda match: short.get(match[0], match[0]),
            text,
        )
        if longer == text:
            break
        text = longer
    tokens = re.findall(r'\[|\]|\{"fields":|\}|or nil|[\w*]+|…', text)
    shape = _shape(tokens)
    assert not tokens, text
    return shape


def _shape(tokens: list[str]) -> Shape:
    """Take one shape from the front of tokens."""
    first = tokens.pop(0)
    shape: Shape = first
    if first in ("[", '{"fields":'):
        shape = []
        while tokens[0] not in "]}":
            shape.append(_shape(tokens))
        tokens.pop(0)
    if tokens and tokens[0] == "or nil":
        tokens.pop(0)
        shape = ["or nil", shape]
    return shape


def is_same(documented_shape: Shape, shape: Shape) -> bool:
    """Return whether a shape is what the page says; `*` is what has no name."""
    if isinstance(documented_shape, list) and isinstance(shape, list):
        return len(documented_shape) == len(shape) and all(
            map(is_same, documented_shape, shape)
        )
    return documented_shape == shape or (
        isinstance(documented_shape, str) and shape == "*"
    )


PAGE_ROWS: Final = documented()
MESSAGES: Final = declared()


def test_page_lists_senders_and_subjects_of_each_message() -> None:
    listed: dict[tuple[str, str, str], tuple[str, str]] = {}
    service = ""
    for name, kind, methods, by, about in tables(SENDERS):
        service = name.strip("`") or service
        for method in methods.split(","):
            listed[service, kind, method.strip().strip("`")] = by, about
    assert listed == {
        key: (names_of(message.by), message.about) for key, message in MESSAGES.items()
    }


def test_page_lists_the_subject_of_each_frame() -> None:
    listed = {int(number): cells[-1] for number, *cells in tables(KINDS)}
    assert listed == {int(kind): about for kind, about in FRAMES_ABOUT.items()}
    assert set(FRAMES_ABOUT) == set(FrameKind)


def test_page_lists_exactly_the_messages() -> None:
    assert set(PAGE_ROWS) == set(MESSAGES)


@pytest.mark.parametrize("key", sorted(MESSAGES), ids=" ".join)
def test_page_shows_the_content_of_each_message(key: tuple[str, str, str]) -> None:
    record = MESSAGES[key].record
    assert is_same(parsed(PAGE_ROWS[key].value), parsed(record.shape)), (
        f"the page: {PAGE_ROWS[key].value}; the record: {record.shape}"
    )


@pytest.mark.parametrize(
    "key",
    sorted(message for message in MESSAGES if message[1] == "SERVICE"),
    ids=" ".join,
)
def test_page_shows_the_answer_of_each_request(key: tuple[str, str, str]) -> None:
    """What has no parts may be told in words."""
    kind = MESSAGES[key]
    assert issubclass(kind, Request)
    shape, answer_cell = kind.answer.shape, PAGE_ROWS[key].answer
    if "[" in shape or answer_cell:
        assert is_same(parsed(answer_cell), parsed(shape)), (
            f"the page: {answer_cell}; the record: {shape}"
        )


@pytest.mark.parametrize(
    "wrong", ["[a]", "[a, b, c]", "[a, [b, …]]", "[b, a]", "[a, b or nil]", "a"]
)
def test_another_shape_is_noticed(wrong: str) -> None:
    assert not is_same(parsed(wrong), parsed("[a, b]"))
    assert is_same(parsed("[a, [b, …]]"), parsed("[a, [*, …]]"))

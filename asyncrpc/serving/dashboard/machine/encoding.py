"""Answers as JSON, a piece at a time.

A page of 200 rows and a matrix of 32 workers has ten thousand numbers and texts, which
take several milliseconds to write.  So small parts are written by the fast encoder at
once, and large ones piece by piece.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from asyncrpc.inspection.machine.slices import Slices

PIECE_MAX: Final = 100  # numbers, texts, lists and objects that are written at once
VALUES_MAX: Final = 500  # of one slice: half a millisecond
_ENCODER: Final = json.JSONEncoder(allow_nan=False)  # JSON has no nan


def encoded(answer: Mapping[str, Any]) -> Slices[str]:
    """Return an answer as JSON, in slices.

    Raises:
        ValueError: the answer has a number that JSON does not have, such as nan.
    """
    texts: list[str] = []
    done = 0
    for text, count in _pieces(answer):
        texts.append(text)
        done += count
        if done >= VALUES_MAX:
            yield done
            done = 0
    return "".join(texts)


def _pieces(value: Any) -> Iterator[tuple[str, int]]:
    """Yield the JSON of a value in pieces, each with its size in values."""
    count = _size(value)
    if count <= PIECE_MAX or isinstance(value, str):
        yield _ENCODER.encode(value), count
    elif isinstance(value, Mapping):
        before = "{"
        for key, one in value.items():
            yield f"{before}{_ENCODER.encode(key)}: ", 1
            yield from _pieces(one)
            before = ", "
        yield "}", 0
    else:
        before = "["
        for one in value:
            yield before, 0
            yield from _pieces(one)
            before = ", "
        yield "]", 0


def _size(value: Any) -> int:
    """Return the size of a value, counted up to just above `PIECE_MAX`."""
    left, count = [value], 0
    while left and count <= PIECE_MAX:
        one = left.pop()
        count += 1
        if isinstance(one, Mapping):
            left.extend(one.values())
        elif isinstance(one, (list, tuple)):
            left.extend(one)
    return count

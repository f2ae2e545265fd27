"""Records travel as their types say, and what comes is what they say, or is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import pytest
import torch

from asyncrpc.core.ids import Incarnation, RRefId
from asyncrpc.core.services.schema import (
    Count,
    Integer,
    Leading,
    Number,
    Positive,
    RecordSchema,
    Signed,
    Spread,
    UnfitError,
    kind_of,
    refusal,
)
from asyncrpc.errors import MalformedError

RREF = RRefId(Incarnation(2**64 - 1), 7)


class Point(NamedTuple):
    x: int
    name: str


@dataclass
class Everything:
    rref: Spread[RRefId]
    nested: RRefId
    points: list[Point]
    names: tuple[str, ...]
    maybe: Point | None
    flag: bool
    real: float
    raw: bytes
    options: dict[str, Any]
    anything: Any
    tensor: torch.Tensor
    tensors: list[torch.Tensor | None]
    shape: tuple[Count, ...] | None
    rank: Number = -1


FIELDS: dict[str, Any] = {
    "rref": RREF,
    "nested": RREF,
    "points": [Point(1, "a"), Point(2, "b")],
    "names": ("a", "b"),
    "maybe": None,
    "flag": True,
    "real": 0.5,
    "raw": b"raw",
    "options": {"lr": 1},
    "anything": [1, "x"],
    "tensor": torch.ones(1),
    "tensors": [None, torch.ones(1)],
    "shape": (3, 4),
    "rank": -1,
}


def test_record_is_read_as_it_was_written() -> None:
    record = RecordSchema(Everything)
    everything = Everything(**FIELDS)
    written = record.write(everything)
    assert written[:6] == [*RREF, [*RREF], [[1, "a"], [2, "b"]], ["a", "b"], None]
    assert written[-2:] == [[3, 4], -1]
    assert record.read(written) == everything
    assert record.read([*written, "a later field"]) == everything


def test_nil_stands_for_none() -> None:
    record = RecordSchema(Everything)
    everything = Everything(**{**FIELDS, "maybe": Point(3, "c"), "shape": None})
    assert record.read(record.write(everything)) == everything


def test_record_shape_is_that_of_the_documentation() -> None:
    assert RecordSchema(Everything).shape == (
        "[creator, serial, [creator, serial], [[x, name], …], [*, …], [x, name] or nil,"
        " flag, real, raw, options, anything, tensor, [* or nil, …], [*, …] or nil, "
        "rank]"
    )


@dataclass
class Numbers:
    plain: int
    count: Count
    positive: Positive
    number: Number
    signed: Signed
    small: Annotated[int, Integer(0, 2, "0 or 1")]


RIGHT = [2**64 - 1, 0, 1, -1, -(2**63), 1]


def test_numbers_at_their_limits_are_accepted() -> None:
    assert RecordSchema(Numbers).read(RIGHT) == Numbers(*RIGHT)


@pytest.mark.parametrize(
    ("place", "wrong", "problem"),
    [
        (0, 2**64, "plain must be an unsigned integer of 64 bits"),
        (0, True, "plain must be an unsigned integer of 64 bits, not True"),
        (0, -1, "plain must be an unsigned"),
        (1, 2**63, "count must be an integer of at least 0"),
        (2, 0, "positive must be an integer of at least 1"),
        (3, -2, "number must be an integer of at least -1"),
        (4, 2**63, "signed must be a signed integer of 64 bits"),
        (5, 2, "small must be 0 or 1, not 2 of type int"),
    ],
)
def test_wrong_number_is_named(place: int, wrong: object, problem: str) -> None:
    record = RecordSchema(Numbers)
    value = [*RIGHT]
    value[place] = wrong  # type: ignore[call-overload]
    with pytest.raises(UnfitError, match=problem):
        record.read(value)


@pytest.mark.parametrize(
    ("name", "place", "wrong", "problem"),
    [
        ("nested", 2, [1, "x"], "serial of nested must be"),
        ("nested", 2, [1], r"nested must be an array of \[creator, serial\]"),
        ("points", 3, [[1, "a"], [1, 2]], "name of element 1 of points must be a text"),
        ("points", 3, {}, "points must be an array"),
        ("names", 4, ["a", 1], "element 1 of names must be a text"),
        ("maybe", 5, [1], r"maybe must be an array of \[x, name\]"),
        ("flag", 6, 1, "flag must be true or false, not 1"),
        ("real", 7, True, "real must be a number, not True"),
        ("raw", 8, "raw", "raw must be bytes"),
        ("options", 9, [], "options must be a map"),
        ("tensor", 11, 5, "tensor must be a tensor, not 5"),
        ("tensors", 12, [5], "element 0 of tensors must be a tensor"),
    ],
)
def test_wrong_field_is_named(
    name: str, place: int, wrong: object, problem: str
) -> None:
    record = RecordSchema(Everything)
    value = record.write(Everything(**FIELDS))
    value[place] = wrong
    with pytest.raises(UnfitError, match=problem):
        record.read(value)


@pytest.mark.parametrize("value", [None, 5, {}, [], [1], (1, 2)])
def test_record_must_be_an_array_of_its_fields(value: object) -> None:
    record = RecordSchema(RRefId)
    with pytest.raises(MalformedError, match=r"it must be an array of \[creator, ser"):
        record.read_as("it", value)


def test_record_without_fields_is_an_empty_array() -> None:
    @dataclass
    class Nothing:
        """It says all by coming."""

    record = RecordSchema(Nothing)
    assert record.write(Nothing()) == []
    assert record.read(["a later field"]) == Nothing()


@pytest.mark.parametrize(
    ("hint", "value", "written"),
    [
        (bool, True, True),
        (None, None, None),
        (list[Point], [Point(1, "a")], [[1, "a"]]),
        (Point | None, Point(1, "a"), [1, "a"]),
        (Point | None, None, None),
        (tuple[str, ...], ("a",), ["a"]),
    ],
)
def test_answers_of_each_kind_survive_the_wire(
    hint: Any, value: object, written: object
) -> None:
    answer = kind_of(hint)
    assert answer.write(value) == written
    assert answer.read(written) == value
    with pytest.raises(UnfitError):
        answer.read(b"something else")


@dataclass
class Led:
    tensors: Leading[list[torch.Tensor]]
    rref: Spread[RRefId]


def test_leading_field_is_written_in_front() -> None:
    record = RecordSchema(Led)
    tensors = [torch.ones(1)]
    written = record.write(Led(tensors, RREF))
    assert written == [tensors, {"fields": [*RREF]}]
    assert record.read(written) == Led(tensors, RREF)
    assert record.read([tensors, {"fields": [*RREF, "later"]}]) == Led(tensors, RREF)
    assert record.shape == '[[*, …], {"fields": [creator, serial]}]'


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (
            [[], {}],
            r"the content must be \[tensors, {\"fields\": \[creator, serial\]}\]",
        ),
        ([[], {"fields": [1]}], "the content must be"),
        ([[], {"fields": {1: 2, 3: 4}}], "the content must be"),
        ([[], [1, 2]], "the content must be"),
        ([[5], {"fields": [1, 2]}], "element 0 of tensors must be a tensor, not 5"),
        ([[], {"fields": [1, "x"]}], "serial must be"),
    ],
)
def test_leading_field_is_checked(value: object, problem: str) -> None:
    with pytest.raises(UnfitError, match=f"^{problem}"):
        RecordSchema(Led).read(value)


def test_refusal_does_not_keep_what_the_peer_has_sent() -> None:
    with pytest.raises(UnfitError) as caught:
        kind_of(Count).read(torch.ones(3))
    error = refusal("b", "counter.lease", caught.value)
    assert "not a tensor of shape" in str(error)
    assert [type(kept) for kept in caught.value.args] == [str]

"""The record of a worker, as it lies in a store that others may write to."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from asyncrpc.core.ids import Incarnation
from asyncrpc.core.members import Member
from asyncrpc.errors import MalformedError

MEMBER = Member("ps", 3, Incarnation(7), ("tcp://h:1", "uds:///x"), "host")
RECORD: list[Any] = ["ps", 3, 7, ["tcp://h:1"], "host"]


def test_record_is_read_as_it_was_published() -> None:
    assert Member.decode(MEMBER.encode()) == MEMBER


@pytest.mark.parametrize(
    "packed", [b"", b"\xc1", b"\x95", b"\xc0", msgpack.packb(7), b"\x90", b"\xff" * 99]
)
def test_bytes_that_are_not_a_record_are_malformed(packed: bytes) -> None:
    with pytest.raises(MalformedError, match=r"at the meeting point.*only this group"):
        Member.decode(packed)


@pytest.mark.parametrize("field", range(len(RECORD)))
@pytest.mark.parametrize(
    "wrong", [None, -2, 1.5, {}, b"\xff", "", [7], "x" * 70_000, [["a"]], 1 << 63]
)
def test_field_with_an_impossible_value_is_malformed(field: int, wrong: Any) -> None:
    is_right = (field, wrong) in ((4, ""), (2, 1 << 63))
    record = [*RECORD[:field], wrong, *RECORD[field + 1 :]]
    if is_right or (field == 3 and wrong in ({}, "")):  # no address at all
        Member.decode(msgpack.packb(record))
        return
    with pytest.raises(MalformedError, match="the record of a worker at the meeting"):
        Member.decode(msgpack.packb(record))


@pytest.mark.parametrize("length", range(5))
def test_record_without_a_field_is_malformed(length: int) -> None:
    with pytest.raises(MalformedError, match="at the meeting point"):
        Member.decode(msgpack.packb(RECORD[:length]))

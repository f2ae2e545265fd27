"""Heads and HELLOs: what was packed is unpacked, and nothing else is believed."""

from __future__ import annotations

from dataclasses import astuple, replace
from typing import Any

import msgpack
import pytest

from asyncrpc.core.wire.frames import HEAD_BYTES_MAX
from asyncrpc.core.wire.messages import PID_END, RANK_END, Hello, pack_head, unpack_head
from asyncrpc.errors import (
    FrameTooLargeError,
    LocalProtocolError,
    MalformedError,
)

HELLO = Hello(
    name="trainer0",
    incarnation=(1 << 64) - 1,
    rank=-1,
    pid=4321,
    expects="ps",
    attempt=2,
    verdict="duplicate",
    addresses=("tcp://[::1]:29500", "uds:///run/a"),
    host_id="boot/net",
    strict=True,
    lane=(1 << 63) + 5,
)


class TestHello:
    def test_hello_arrives_as_it_was_sent(self) -> None:
        assert Hello.decode(HELLO.encode()) == HELLO
        plain = Hello("a", 1, 0, 2)
        assert Hello.decode(plain.encode()) == plain

    def test_hello_fields_of_a_later_version_are_ignored(self) -> None:
        fields = [*astuple(HELLO), {"new": "field"}, 7]
        assert Hello.decode(msgpack.packb(fields)) == HELLO

    @pytest.mark.parametrize("kept", range(4, 11))
    def test_hello_fields_of_a_later_version_have_defaults(self, kept: int) -> None:
        fields = list(astuple(HELLO))[:kept]
        assert Hello.decode(msgpack.packb(fields)) == Hello(
            *fields[:4], **dict(zip(Hello.__slots__[4:], fields[4:], strict=False))
        )

    @pytest.mark.parametrize("field", range(11))
    @pytest.mark.parametrize("wrong", [None, 1.5, {}, [7], [None]])
    def test_hello_field_of_another_type_is_malformed(
        self, field: int, wrong: object
    ) -> None:
        fields: list[object] = [*astuple(HELLO)]
        fields[field] = wrong
        with pytest.raises(MalformedError, match="HELLO"):
            Hello.decode(msgpack.packb(fields))

    @pytest.mark.parametrize(
        ("field", "values"),
        [
            ("name", ["", "x" * 256, "a\nb", "\x1b[2J", "\u202eps", "\x00"]),
            ("rank", [-2, RANK_END, 1 << 63]),
            ("pid", [-1, PID_END]),
            ("incarnation", [0, -1]),
            ("host_id", ["x" * 256]),
            ("addresses", [("tcp://h:1",) * 1_000, ("x" * 8_193,)]),
            ("sidecar", [("x" * 8_193,)]),
        ],
    )
    def test_hello_field_with_an_impossible_value_is_malformed(
        self, field: str, values: list[Any]
    ) -> None:
        for value in values:
            hello = replace(HELLO, **{field: value})
            with pytest.raises(MalformedError, match="a HELLO has"):
                Hello.decode(hello.encode())

    def test_hello_bool_is_not_a_number(self) -> None:
        with pytest.raises(MalformedError, match="wrong fields"):
            Hello.decode(pack_head(["a", True, 0, 1]))

    @pytest.mark.parametrize("kept", range(4))
    def test_hello_without_a_field_is_malformed(self, kept: int) -> None:
        with pytest.raises(MalformedError, match="wrong fields"):
            Hello.decode(pack_head([*astuple(HELLO)][:kept]))

    def test_overlong_hello_is_refused_unread(self) -> None:
        with pytest.raises(FrameTooLargeError, match="65536 bytes"):
            Hello.decode(b"\xc1" * (HEAD_BYTES_MAX + 1))

    def test_overlong_hello_is_not_sent(self) -> None:
        with pytest.raises(LocalProtocolError, match="the limit is 65535"):
            Hello("a" * HEAD_BYTES_MAX, 1, 0, 1).encode()


class TestHead:
    def test_head_arrives_as_it_was_packed(self) -> None:
        record = [[1, "module.function"], {"r": [1, -2], "text": b"bytes"}, None, 0.5]
        assert unpack_head(pack_head(record)) == record

    def test_unpackable_head_leaves_nothing_behind(self) -> None:
        with pytest.raises(TypeError):
            pack_head(["begun", object()])
        assert pack_head([1]) == b"\x91\x01"

    @pytest.mark.parametrize(
        "head",
        [
            b"",
            b"\x92\x01",  # ends early
            b"\x91\x01\x01",  # goes on
            b"\xc1",  # never used
            b"\x91\xa1\xff",  # no UTF-8
            b"\xdd\xff\xff\xff\xff",  # four billion values
            b"\x91" * 2000,  # too deep
            b"\x91\x81\x90\x01",  # an array as a key
            b"\x91\xd5\xff\x00\x00",  # a moment that is none
        ],
    )
    def test_head_that_is_not_msgpack_is_malformed(self, head: bytes) -> None:
        with pytest.raises(MalformedError, match="not msgpack"):
            unpack_head(head)

    @pytest.mark.parametrize("value", [1, None, "text", {}])
    def test_head_that_is_not_an_array_is_malformed(self, value: object) -> None:
        with pytest.raises(MalformedError, match="not an array"):
            unpack_head(msgpack.packb(value))

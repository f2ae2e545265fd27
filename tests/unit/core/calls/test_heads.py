"""Both ends mean the same function by a number, whatever becomes of requests."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrpc.core.calls import heads
from asyncrpc.core.calls.heads import NAME_LENGTH_MAX, ReceivedHeads, SentHeads
from asyncrpc.core.calls.modes import Mode, Target
from asyncrpc.core.wire.messages import pack_head, unpack_head
from asyncrpc.errors import DecodeError, MalformedError


def find(name: str) -> Target:
    if name.endswith("absent"):
        raise DecodeError(f"no {name}")
    return Target(name, len, Mode.THREAD)


def write(sent: SentHeads, target: Any, meta: Any = None, *, late: bool = False) -> Any:
    return sent.known(target, meta) or sent.introduce(target, meta, may_come_late=late)


def name_read(received: ReceivedHeads, head: bytes) -> str:
    target, _ = received.known.get(head) or received.read(head)
    resolved = target if isinstance(target, Target) else received.functions.find(target)
    assert resolved is not None
    return resolved.name


def test_function_name_is_read_as_it_was_written() -> None:
    sent, received = SentHeads(), ReceivedHeads(find)
    for name in ("m:f", "m:g", "m:f", "m:g", "m:f"):
        assert name_read(received, write(sent, name)) == name


def test_head_of_a_number_is_recognized_by_its_bytes() -> None:
    sent, received = SentHeads(), ReceivedHeads(find)
    for _ in range(3):
        name_read(received, write(sent, "m:f"))
    assert len(received.known) == 1


def test_number_travels_with_the_metadata() -> None:
    sent, received = SentHeads(), ReceivedHeads(find)
    write(sent, "m:f")
    head = write(sent, "m:f", {"c": "lz4"})
    assert unpack_head(head) == [1, {"c": "lz4"}]
    assert received.read(head) == (1, {"c": "lz4"})


def test_late_request_assigns_no_number() -> None:
    sent = SentHeads()
    assert unpack_head(write(sent, "m:f", late=True)) == [[0, "m:f"], None]
    assert unpack_head(write(sent, "m:f")) == [[1, "m:f"], None]
    assert unpack_head(write(sent, "m:f", late=True)) == [1]


def test_forgotten_name_gets_another_number() -> None:
    """The request that named it may have been written all the same."""
    sent, received = SentHeads(), ReceivedHeads(find)
    name_read(received, write(sent, "m:f"))
    sent.forget("m:f")
    assert unpack_head(write(sent, "m:f"))[0] == [2, "m:f"]
    sent.forget(None)
    sent.forget(["=", 1])


def test_refused_head_takes_no_number() -> None:
    sent = SentHeads()
    with pytest.raises(Exception, match="object"):
        write(sent, "m:f", {"x": object()})
    assert unpack_head(write(sent, "m:f"))[0] == [1, "m:f"]


def test_names_beyond_the_limit_are_sent_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heads, "NAMES_MAX", 1)
    sent = SentHeads()
    write(sent, "m:f")
    for _ in range(2):
        assert unpack_head(write(sent, "m:g"))[0] == [0, "m:g"]


def test_long_names_are_sent_each_time_and_not_kept() -> None:
    name = "m:" + "f" * NAME_LENGTH_MAX
    sent, received = SentHeads(), ReceivedHeads(find)
    for _ in range(2):
        assert unpack_head(write(sent, name))[0] == [0, name]
    with pytest.raises(MalformedError, match=f"of {len(name)} characters"):
        received.read(pack_head([[1, name], None]))


def test_unknown_function_keeps_its_number() -> None:
    """Asked for each time, until it can be had."""
    sent, received = SentHeads(), ReceivedHeads(find)
    for head in (write(sent, "m:absent"), write(sent, "m:absent")):
        with pytest.raises(DecodeError):
            name_read(received, head)
    assert not received.known


@pytest.mark.parametrize("target", [None, ["=", 1, 2]])
def test_target_without_a_name_travels_unchanged(target: Any) -> None:
    assert unpack_head(SentHeads().known(target, None)) == [target, None]

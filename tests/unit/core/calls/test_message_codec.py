"""References and propagators take part in every message, and in none twice."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import pytest

from asyncrpc.core.calls.common_arguments import CommonArguments
from asyncrpc.core.calls.message_codec import (
    MessageCodec,
    answer_meta,
    may_be_deferred,
    unreadable,
    unsendable,
)
from asyncrpc.core.serde import Codec, Encoded, FunctionTable, Policy
from asyncrpc.core.wire.messages import pack_head
from asyncrpc.errors import DecodeError, EncodeError, Outcome
from tests.unit.core.calls.fakes import FakeHost, LinkParts, Pins


class Ref:
    """What is referred to."""


class FakeReferences:
    """Writes down what it is told of messages."""

    handled: tuple[type, ...] = (Ref,)

    def __init__(self) -> None:
        self.events: list[str] = []
        self.pins = Pins()
        self.lifted = 0

    def lower(self, value: Any) -> Any:
        self.events.append("lower")
        return 1

    def lift(self, tree: Any) -> Any:
        self.events.append("lift")
        self.lifted += 1
        return Ref()

    def begin_encode(self, link: Any) -> None:
        self.events.append("begin encode")

    def end_encode(self, *, sent: bool) -> Any:
        self.events.append("end encode" if sent else "not sent")
        return self.pins if sent else None

    def begin_decode(self, link: Any) -> None:
        self.lifted = 0
        self.events.append("begin decode")

    def end_decode(self) -> Any:
        self.events.append("end decode")
        return "loans"

    def settle_loans(self, link: Any, loans: Any, *, answered: bool) -> list[int]:
        self.events.append(f"settle {loans}")
        return []


class FakePropagator:
    """Adds what is beside a message, and takes it out again."""

    key = "p"

    def __init__(self) -> None:
        self.came: list[Any] = []
        self.variable: ContextVar[Any] = ContextVar("state", default=True)

    def outgoing(self, link: Any, tensors: Any) -> Any:
        return "beside"

    def incoming(self, link: Any, meta: Any) -> Any:
        self.came.append(meta)

    def decoded(self, on_gradient: Any) -> None: ...

    def enter(self, meta: Any) -> None: ...


def with_references() -> tuple[LinkParts, FakeReferences]:
    references, host = FakeReferences(), FakeHost()
    host.references = references
    host.codec = Codec(FunctionTable(Policy.TRUSTED), references)
    return LinkParts(host), references


class TestReferences:
    def test_references_are_counted_when_a_message_is_encoded(self) -> None:
        link, references = with_references()
        _, pins, _ = link.messages.encode([Ref()])
        assert references.events == ["begin encode", "lower", "end encode"]
        assert pins is references.pins

    def test_unencodable_message_counts_no_reference(self) -> None:
        link, references = with_references()
        with pytest.raises(EncodeError):
            link.messages.encode([Ref(), lambda: 1])
        assert references.events[-1] == "not sent"

    def test_decoded_reference_is_lifted_once(self) -> None:
        link, references = with_references()
        encoded, _, _ = link.messages.encode([Ref(), Ref()])
        references.events.clear()
        value, loans = link.messages.decode(encoded.control, encoded.buffers, {})
        assert [type(item) for item in value] == [Ref, Ref]
        assert loans == "loans"
        assert references.events == ["begin decode", "lift", "lift", "end decode"]

    def test_references_of_an_unread_message_are_returned(self) -> None:
        link, references = with_references()
        encoded, _, _ = link.messages.encode([Ref(), Ref()])
        references.events.clear()
        link.messages.give_back(encoded.control)
        assert references.events == ["begin decode", "lift", "lift", "end decode"]
        link.host.loop.run_soon()
        assert references.events[-1] == "settle loans"

    def test_refused_shared_memory_returns_the_references(self) -> None:
        link, references = with_references()

        def refuse(_encoded: Encoded) -> None:
            raise EncodeError("on another host", outcome=Outcome.NOT_EXECUTED)

        link.messages._refer_to = refuse  # noqa: SLF001
        with pytest.raises(EncodeError):
            link.messages._refer(Encoded(b"", [], [], 0), references.pins)  # noqa: SLF001
        assert references.pins.events == ["undone"]


class TestPropagators:
    def test_metadata_of_a_propagator_arrives(self, link: LinkParts) -> None:
        propagator = FakePropagator()
        link.host.propagators.append(propagator)
        encoded, _, meta = link.messages.encode([1])
        assert meta == {"p": "beside"}
        link.messages.decode(encoded.control, encoded.buffers, meta or {})
        link.messages.decode(encoded.control, encoded.buffers, {"q": 1})
        assert propagator.came == ["beside"]


class TestCommonArguments:
    def test_common_arguments_are_encoded_once(self, link: LinkParts) -> None:
        common = CommonArguments(([1, 2], {}))
        first, _, _ = link.messages.encode_common(common, ())
        second, _, _ = link.messages.encode_common(common, ())
        assert second.control is first.control

    def test_common_arguments_with_references_are_encoded_each_time(self) -> None:
        link, references = with_references()
        common = CommonArguments(([Ref()], {}))
        for _ in range(2):
            link.messages.encode_common(common, ())
        assert references.events.count("lower") == 2
        assert common.encodings == {}


def test_shared_blocks_of_peers_are_returned_before_a_message(link: LinkParts) -> None:
    link.host.dead.append("a place")
    link.messages.encode([1])
    assert not link.host.dead


def test_codec_works_without_a_link(link: LinkParts) -> None:
    assert isinstance(link.messages, MessageCodec)
    assert not may_be_deferred(link.messages.encode([1])[0])


@pytest.mark.parametrize(
    "head", [b"", pack_head([]), pack_head([None]), pack_head([5])]
)
def test_answer_without_metadata_has_an_empty_mapping(head: bytes) -> None:
    assert answer_meta(head) == {}


def test_unreadable_content_counts_as_not_executed() -> None:
    error = ValueError("wrong")
    translated = unreadable(error)
    assert isinstance(translated, DecodeError)
    assert translated.outcome is Outcome.NOT_EXECUTED
    assert translated.__cause__ is error
    ours = DecodeError("wrong")
    assert unreadable(ours) is ours


def test_unencodable_result_counts_as_executed() -> None:
    translated = unsendable(ValueError("wrong"))
    assert isinstance(translated, EncodeError)
    assert translated.outcome is Outcome.EXECUTED
    ours = EncodeError("wrong", outcome=Outcome.NOT_EXECUTED)
    assert unsendable(ours) is ours
    assert ours.outcome is Outcome.EXECUTED

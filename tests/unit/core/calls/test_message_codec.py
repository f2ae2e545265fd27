"""Messages, their heads and errors: what travels, and what both ends count."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import pytest

from asyncrpc.core.calls import heads
from asyncrpc.core.calls.common_arguments import CommonArguments
from asyncrpc.core.calls.error_encoder import ErrorEncoder
from asyncrpc.core.calls.heads import NAME_LENGTH_MAX, ReceivedHeads, SentHeads
from asyncrpc.core.calls.message_codec import (
    MessageCodec,
    answer_meta,
    may_be_deferred,
    unreadable,
    unsendable,
)
from asyncrpc.core.calls.modes import Mode, Target
from asyncrpc.core.serde import Codec, Encoded, FunctionTable, Policy, rebuild_exception
from asyncrpc.core.wire.frames import pack_head, unpack_head
from asyncrpc.errors import (
    DecodeError,
    EncodeError,
    MalformedError,
    Outcome,
    RemoteError,
)
from tests.unit.core.calls.fakes import FakeHost, Parts, Pins


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


def with_references() -> tuple[Parts, FakeReferences]:
    references, host = FakeReferences(), FakeHost()
    host.references = references
    host.codec = Codec(FunctionTable(Policy.TRUSTED), references)
    return Parts(host), references


class TestReferences:
    def test_references_are_counted_when_a_message_is_encoded(self) -> None:
        link, references = with_references()
        _, pins, _ = link.messages.encode([Ref()])
        assert references.events == ["begin encode", "lower", "end encode"]
        assert pins is references.pins

    def test_unencodable_message_counts_no_reference(self) -> None:
        link, references = with_references()
        with pytest.raises(EncodeError):
            link.messages.encode([Ref(), threading.Lock()])
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
    def test_metadata_of_a_propagator_arrives(self, link: Parts) -> None:
        propagator = FakePropagator()
        link.host.propagators.append(propagator)
        encoded, _, meta = link.messages.encode([1])
        assert meta == {"p": "beside"}
        link.messages.decode(encoded.control, encoded.buffers, meta or {})
        link.messages.decode(encoded.control, encoded.buffers, {"q": 1})
        assert propagator.came == ["beside"]


class TestCommonArguments:
    def test_common_arguments_are_encoded_once(self, link: Parts) -> None:
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


def test_shared_blocks_of_peers_are_returned_before_a_message(link: Parts) -> None:
    link.host.dead.append("a place")
    link.messages.encode([1])
    assert not link.host.dead


def test_codec_works_without_a_link(link: Parts) -> None:
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


class Starved(Codec):
    """A codec that has memory for so many more messages."""

    left = 1

    def encode(
        self, value: Any, *, labels: Sequence[str] = (), pickles: bool = True
    ) -> Encoded:
        self.left -= 1
        if self.left < 0:
            raise MemoryError
        return super().encode(value, labels=labels, pickles=pickles)


def fetch(_encoded: Encoded) -> None:
    pytest.fail("nothing here is on a device")


@pytest.mark.parametrize(
    ("left", "text"),
    [(2, "what was raised"), (1, "cannot be sent"), (0, "cannot be sent: MemoryError")],
)
def test_error_is_encoded_without_memory(left: int, text: str) -> None:
    """In full; in few words where the full ones fail; then what has been ready."""
    functions = FunctionTable(Policy.TRUSTED)
    codec = Starved(functions)
    errors = ErrorEncoder(codec, worker="b", pid=1)

    def describe() -> Any:
        if left < 2:  # the description itself takes what is left
            raise MemoryError
        return errors.describe(ValueError("what was raised"))

    codec.left = left
    encoded = errors.encode(describe, fetch, takes_code=True)
    tree = Codec(functions).decode(encoded.control, encoded.buffers)
    error = rebuild_exception(tree, functions, function="f", to="b")
    assert isinstance(error, RemoteError)
    assert text in str(error)
    assert error.worker == "b"


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


def test_names_beyond_limit_are_sent_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
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

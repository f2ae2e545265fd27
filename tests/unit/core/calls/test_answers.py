"""Each answer ends the call that it is for, and no other; what is wrong is refused."""

from __future__ import annotations

import asyncio
from typing import Any, TypeAlias

import pytest

from asyncrpc.core.calls.futures import CallFuture
from asyncrpc.core.calls.streams import (
    BYTES_AHEAD_MIN,
    ITEMS_AHEAD_MIN,
    StreamReceiver,
)
from asyncrpc.core.options import PLAIN, LimitOptions
from asyncrpc.core.serde import describe_exception
from asyncrpc.core.wire.frames import Frame, FrameKind, pack_head
from asyncrpc.errors import (
    CallError,
    DecodeError,
    EncodeError,
    MalformedError,
    Outcome,
    RejectedError,
    RemoteError,
)
from tests.unit.core.calls.fakes import Parts, Pins

LIMITS = LimitOptions(stream_items_max=8)
Call: TypeAlias = CallFuture[Any]


@pytest.fixture
def call(link: Parts) -> Call:
    call: CallFuture[Any] = CallFuture(loop=link.host.loop, function="max", to="b")
    link.calls.start(call, "builtins:max", ([1, 2], {}))
    return call


@pytest.fixture
def stream(link: Parts) -> StreamReceiver:
    receiver = StreamReceiver(link, "numbers", "b", limits=LIMITS, began_s=0.0)
    link.calls.start_stream(receiver, "m:numbers", ([], {}), None, options=PLAIN)
    return receiver


def respond(link: Parts, call_id: int, value: Any, head: bytes = b"") -> None:
    link.answers.on_response(0, call_id, 0, head, link.control(value), [])


def fail(
    link: Parts, call_id: int, error: BaseException, head: bytes = b"", aux: int = 0
) -> None:
    tree = describe_exception(error, link.host.codec, worker="b", pid=2)
    link.answers.on_error(0, call_id, aux, head, link.control(tree), [])


def item(link: Parts, serial: Any, value: Any) -> None:
    head = pack_head([serial, None])
    link.answers.on_stream_item(0, 1, 0, head, link.control(value), [])


def end(link: Parts, items: int) -> None:
    link.answers.on_stream_end(Frame(FrameKind.STREAM_END, call_id=1, aux=items))


def run(coroutine: Any) -> Any:
    """Run a coroutine that has nothing to wait for; return its result."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        return ended.value
    raise AssertionError("it waits")


class TestResults:
    def test_result_completes_call(self, link: Parts, call: Call) -> None:
        respond(link, 1, 5)
        assert call.result() == 5
        assert len(link.pending) == 0

    def test_note_of_a_result_is_kept(self, link: Parts, call: Call) -> None:
        respond(link, 1, 5, pack_head([{"n": [1.5, False, 7]}]))
        assert call.note == [1.5, False, 7]

    def test_note_of_an_error_is_kept(self, link: Parts, call: Call) -> None:
        fail(link, 1, ValueError("no"), pack_head([{"n": "anything"}]))
        assert isinstance(call.exception(), ValueError)
        assert call.note == "anything"

    def test_result_releases_pins_of_the_request(self, link: Parts, call: Call) -> None:
        call.pins = Pins()
        respond(link, 1, 5)
        assert call.pins is None

    @pytest.mark.parametrize("call_id", [0, 2, 1 << 63])
    def test_result_of_an_unknown_call_is_refused(
        self, link: Parts, call: Call, call_id: int
    ) -> None:
        with pytest.raises(MalformedError, match="never made"):
            respond(link, call_id, 5)
        assert not call.done()

    def test_second_result_is_dropped(self, link: Parts, call: Call) -> None:
        """For the peer cannot be told from one whose answer crossed a cancel."""
        respond(link, 1, 5)
        respond(link, 1, 6)
        assert call.result() == 5

    def test_unreadable_result_fails_the_call_as_executed(
        self, link: Parts, call: Call
    ) -> None:
        """The function has run; the connection stays."""
        link.answers.on_response(0, 1, 0, b"", b"\xff" * 20, [])
        error = call.exception()
        assert isinstance(error, DecodeError)
        assert error.outcome is Outcome.EXECUTED
        assert (error.function, error.to) == ("max", "b")

    def test_result_for_a_stream_is_refused(
        self, link: Parts, stream: StreamReceiver
    ) -> None:
        with pytest.raises(MalformedError, match="another kind of call"):
            respond(link, 1, 5)


class TestErrors:
    @pytest.mark.parametrize(
        ("raised", "expected"),
        [
            (ValueError("no"), RemoteError),
            (KeyError("key"), KeyError),
            (RejectedError("full"), RejectedError),
            (EncodeError("big"), EncodeError),
            (MalformedError("wrong"), MalformedError),
            (SystemExit(3), RemoteError),
        ],
        ids=lambda case: case.__name__ if isinstance(case, type) else "",
    )
    def test_error_arrives_as_its_type(
        self,
        link: Parts,
        call: Call,
        raised: BaseException,
        expected: type[BaseException],
    ) -> None:
        fail(link, 1, raised)
        error: Any = call.exception()
        assert isinstance(error, expected)
        if isinstance(error, CallError):
            assert error.outcome is Outcome.EXECUTED
            assert (error.function, error.to) == ("max", "b")
        assert len(link.pending) == 0

    def test_callee_tells_whether_function_ran(self, link: Parts, call: Call) -> None:
        fail(link, 1, ValueError("no"), pack_head([{"o": "NOT_EXECUTED"}]))
        error = call.exception()
        assert isinstance(error, RemoteError)
        assert error.outcome is Outcome.NOT_EXECUTED

    @pytest.mark.parametrize("outcome", ["SOMETHING", 7, None])
    def test_unknown_outcome_is_ignored(
        self, link: Parts, call: Call, outcome: Any
    ) -> None:
        fail(link, 1, ValueError("no"), pack_head([{"o": outcome}]))
        assert isinstance(call.exception(), RemoteError)

    def test_unreadable_error_is_a_decode_error(self, link: Parts, call: Call) -> None:
        link.answers.on_error(0, 1, 0, b"", b"\xff" * 20, [])
        assert isinstance(call.exception(), DecodeError)

    def test_error_of_an_unknown_call_is_refused(self, link: Parts) -> None:
        with pytest.raises(MalformedError, match="never made"):
            fail(link, 3, ValueError("no"))

    def test_error_of_cancelled_call_is_ignored(self, link: Parts, call: Call) -> None:
        call.cancel()
        fail(link, 1, ValueError("no"))
        assert call.cancelled()

    def test_error_after_a_negative_number_of_items_is_refused(
        self, link: Parts, call: Call
    ) -> None:
        with pytest.raises(MalformedError, match="at least 0 items, not -1"):
            fail(link, 1, ValueError("no"), aux=-1)


class TestPayloads:
    """What is wanted of an answer is known at its header."""

    def test_payload_of_an_unknown_call_is_refused(self, link: Parts) -> None:
        with pytest.raises(MalformedError, match="never made"):
            link.answers.is_wanted(FrameKind.RESPONSE, 1, 1 << 40)

    def test_payload_of_an_abandoned_call_is_not_wanted(
        self, link: Parts, call: Call
    ) -> None:
        link.pending.take(call.call_id)
        assert not link.answers.is_wanted(FrameKind.RESPONSE, call.call_id, 1 << 40)

    @pytest.mark.parametrize("kind", [FrameKind.RESPONSE, FrameKind.ERROR])
    def test_second_payload_of_a_call_is_refused(
        self, link: Parts, call: Call, kind: FrameKind
    ) -> None:
        assert link.answers.is_wanted(FrameKind.RESPONSE, call.call_id, 1 << 40)
        with pytest.raises(MalformedError, match="answered twice"):
            link.answers.is_wanted(kind, call.call_id, 1 << 40)


class TestStreams:
    def test_stream_items_are_taken_in_order(
        self, link: Parts, stream: StreamReceiver
    ) -> None:
        for serial in (2, 0, 1):
            item(link, serial, serial * 10)
        end(link, 3)
        assert [run(stream.take()) for _ in range(3)] == [0, 10, 20]
        assert len(link.pending) == 0

    def test_stream_producer_gets_credit_for_taken_items(
        self, link: Parts, stream: StreamReceiver
    ) -> None:
        for serial in range(4):
            item(link, serial, serial)
        for _ in range(4):
            run(stream.take())
        acks = [
            frame.aux
            for frame in link.connection.sent
            if frame.kind == FrameKind.STREAM_CREDIT
        ]
        assert acks == [2, 2]  # a quarter of the eight that may be ahead

    @pytest.mark.parametrize("is_arriving", [False, True])
    def test_stream_producer_too_far_ahead_is_refused(
        self, link: Parts, stream: StreamReceiver, *, is_arriving: bool
    ) -> None:
        def send(serial: int) -> None:
            if is_arriving:
                assert link.answers.is_wanted(FrameKind.STREAM_ITEM, 1, 1)
            else:
                item(link, serial, serial)

        for serial in range(ITEMS_AHEAD_MIN + 1):
            send(serial)
        with pytest.raises(MalformedError, match="65 items"):
            send(ITEMS_AHEAD_MIN + 1)

    def test_stream_producer_with_too_large_items_is_refused(
        self, link: Parts, stream: StreamReceiver
    ) -> None:
        assert link.answers.is_wanted(FrameKind.STREAM_ITEM, 1, BYTES_AHEAD_MIN)
        assert link.answers.is_wanted(FrameKind.STREAM_ITEM, 1, 1)
        with pytest.raises(MalformedError, match="ahead of its consumer"):
            link.answers.is_wanted(FrameKind.STREAM_ITEM, 1, 1)

    def test_taken_stream_items_are_not_ahead(
        self, link: Parts, stream: StreamReceiver
    ) -> None:
        for serial in range(4 * ITEMS_AHEAD_MIN):
            assert link.answers.is_wanted(FrameKind.STREAM_ITEM, 1, BYTES_AHEAD_MIN)
            item(link, serial, serial)
            assert run(stream.take()) == serial

    def test_stream_end_may_overtake_items(
        self, link: Parts, stream: StreamReceiver
    ) -> None:
        end(link, 1)
        assert len(link.pending) == 1
        item(link, 0, "last")
        assert run(stream.take()) == "last"
        assert len(link.pending) == 0

    def test_stream_error_comes_after_earlier_items(
        self, link: Parts, stream: StreamReceiver
    ) -> None:
        fail(link, 1, ValueError("no"), aux=1)
        item(link, 0, "first")
        assert run(stream.take()) == "first"
        with pytest.raises(ValueError, match="no"):
            run(stream.take())

    @pytest.mark.parametrize("serial", [-1, 0, "0", None])
    def test_repeated_or_unnumbered_stream_item_is_refused(
        self, link: Parts, stream: StreamReceiver, serial: Any
    ) -> None:
        item(link, 0, "first")
        with pytest.raises(MalformedError, match="an item of a stream"):
            item(link, serial, "again")

    def test_stream_end_before_received_items_is_refused(
        self, link: Parts, stream: StreamReceiver
    ) -> None:
        for serial in range(2):
            item(link, serial, serial)
        with pytest.raises(MalformedError, match="but 2 have come"):
            end(link, 1)

    def test_unreadable_stream_item_ends_the_stream(
        self, link: Parts, stream: StreamReceiver
    ) -> None:
        link.answers.on_stream_item(0, 1, 0, pack_head([0, None]), b"\xff" * 20, [])
        assert link.connection.last.kind == FrameKind.CANCEL
        with pytest.raises(DecodeError):
            run(stream.take())

    @pytest.mark.parametrize("send", [item, end])
    def test_stream_message_of_a_plain_call_is_refused(
        self, link: Parts, call: Call, send: Any
    ) -> None:
        with pytest.raises(MalformedError, match="another kind of call"):
            send(link, 0, 1) if send is item else send(link, 0)

    def test_items_of_a_closed_stream_are_dropped(
        self, link: Parts, stream: StreamReceiver
    ) -> None:
        link.calls.cancel(stream)
        item(link, 0, "late")
        end(link, 1)
        assert stream.received == 0

    def test_lost_link_wakes_the_consumer_of_a_stream(self) -> None:
        async def scenario() -> None:
            link = Parts()
            receiver = StreamReceiver(link, "numbers", "b", limits=LIMITS, began_s=0.0)
            link.calls.start_stream(
                receiver, "m:numbers", ([], {}), None, options=PLAIN
            )
            taking = asyncio.ensure_future(receiver.take())
            await asyncio.sleep(0)
            link.status.on_lost("a cable")
            link.calls.on_lost(set())
            with pytest.raises(Exception, match="a cable"):
                await taking

        asyncio.run(scenario())

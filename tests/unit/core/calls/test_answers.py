"""Each answer ends the call that it is for, and no other; what is wrong is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncrpc.core.calls.futures import CallFuture
from asyncrpc.core.calls.streams import (
    BYTES_AHEAD_MIN,
    ITEMS_AHEAD_MIN,
    StreamReceiver,
)
from asyncrpc.core.options import PLAIN, LimitOptions
from asyncrpc.core.serde import describe_exception
from asyncrpc.core.wire.frames import Frame, FrameKind
from asyncrpc.core.wire.messages import pack_head
from asyncrpc.errors import (
    CallError,
    DecodeError,
    EncodeError,
    MalformedError,
    Outcome,
    RejectedError,
    RemoteError,
)
from tests.unit.core.calls.fakes import LinkParts, Pins

LIMITS = LimitOptions(stream_items_max=8)


@pytest.fixture
def call(link: LinkParts) -> CallFuture[Any]:
    call: CallFuture[Any] = CallFuture(loop=link.host.loop, function="max", to="b")
    link.calls.start(call, "builtins:max", ([1, 2], {}))
    return call


@pytest.fixture
def stream(link: LinkParts) -> StreamReceiver:
    receiver = StreamReceiver(link, "numbers", "b", limits=LIMITS, began_s=0.0)
    link.calls.start_stream(receiver, "m:numbers", ([], {}), None, options=PLAIN)
    return receiver


def respond(link: LinkParts, call_id: int, value: Any, head: bytes = b"") -> None:
    link.answers.on_response(0, call_id, 0, head, link.control(value), [])


def fail(
    link: LinkParts, call_id: int, error: BaseException, head: bytes = b"", aux: int = 0
) -> None:
    tree = describe_exception(error, link.host.codec, worker="b", pid=2)
    link.answers.on_error(0, call_id, aux, head, link.control(tree), [])


def item(link: LinkParts, serial: Any, value: Any) -> None:
    head = pack_head([serial, None])
    link.answers.on_stream_item(0, 1, 0, head, link.control(value), [])


def end(link: LinkParts, items: int) -> None:
    link.answers.on_stream_end(Frame(FrameKind.STREAM_END, call_id=1, aux=items))


def run(coroutine: Any) -> Any:
    """Run a coroutine that has nothing to wait for; return its result."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        return ended.value
    raise AssertionError("it waits")


class TestResults:
    def test_the_call_has_it(self, link: LinkParts, call: CallFuture[Any]) -> None:
        respond(link, 1, 5)
        assert call.result() == 5
        assert len(link.pending) == 0

    def test_what_comes_beside_it_is_kept(
        self, link: LinkParts, call: CallFuture[Any]
    ) -> None:
        respond(link, 1, 5, pack_head([{"n": [1.5, False, 7]}]))
        assert call.note == [1.5, False, 7]

    def test_what_comes_beside_an_error_is_kept(
        self, link: LinkParts, call: CallFuture[Any]
    ) -> None:
        fail(link, 1, ValueError("no"), pack_head([{"n": "anything"}]))
        assert isinstance(call.exception(), ValueError)
        assert call.note == "anything"

    def test_what_the_request_relied_on_is_let_go(
        self, link: LinkParts, call: CallFuture[Any]
    ) -> None:
        call.pins = Pins()
        respond(link, 1, 5)
        assert call.pins is None

    @pytest.mark.parametrize("call_id", [0, 2, 1 << 63])
    def test_to_a_call_that_was_never_made(
        self, link: LinkParts, call: CallFuture[Any], call_id: int
    ) -> None:
        with pytest.raises(MalformedError, match="never made"):
            respond(link, call_id, 5)
        assert not call.done()

    def test_a_second_one_is_dropped(
        self, link: LinkParts, call: CallFuture[Any]
    ) -> None:
        """For the peer cannot be told from one whose answer crossed a cancel."""
        respond(link, 1, 5)
        respond(link, 1, 6)
        assert call.result() == 5

    def test_one_that_cannot_be_read(
        self, link: LinkParts, call: CallFuture[Any]
    ) -> None:
        """The function has run; the connection stays."""
        link.answers.on_response(0, 1, 0, b"", b"\xff" * 20, [])
        error = call.exception()
        assert isinstance(error, DecodeError)
        assert error.outcome is Outcome.EXECUTED
        assert (error.function, error.to) == ("max", "b")

    def test_one_for_a_stream(self, link: LinkParts, stream: StreamReceiver) -> None:
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
        ids=lambda one: one.__name__ if isinstance(one, type) else "",
    )
    def test_each_kind(
        self,
        link: LinkParts,
        call: CallFuture[Any],
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

    def test_the_callee_says_whether_the_function_ran(
        self, link: LinkParts, call: CallFuture[Any]
    ) -> None:
        fail(link, 1, ValueError("no"), pack_head([{"o": "NOT_EXECUTED"}]))
        error = call.exception()
        assert isinstance(error, RemoteError)
        assert error.outcome is Outcome.NOT_EXECUTED

    @pytest.mark.parametrize("said", ["SOMETHING", 7, None])
    def test_words_that_mean_nothing_are_ignored(
        self, link: LinkParts, call: CallFuture[Any], said: Any
    ) -> None:
        fail(link, 1, ValueError("no"), pack_head([{"o": said}]))
        assert isinstance(call.exception(), RemoteError)

    def test_one_that_cannot_be_read(
        self, link: LinkParts, call: CallFuture[Any]
    ) -> None:
        link.answers.on_error(0, 1, 0, b"", b"\xff" * 20, [])
        assert isinstance(call.exception(), DecodeError)

    def test_to_a_call_that_was_never_made(self, link: LinkParts) -> None:
        with pytest.raises(MalformedError, match="never made"):
            fail(link, 3, ValueError("no"))

    def test_to_one_that_was_cancelled(
        self, link: LinkParts, call: CallFuture[Any]
    ) -> None:
        call.cancel()
        fail(link, 1, ValueError("no"))
        assert call.cancelled()

    def test_after_fewer_than_no_items(
        self, link: LinkParts, call: CallFuture[Any]
    ) -> None:
        with pytest.raises(MalformedError, match="at least 0 items, not -1"):
            fail(link, 1, ValueError("no"), aux=-1)


class TestPayloads:
    """What is wanted of an answer is known at its header."""

    def test_of_a_call_that_was_never_made(self, link: LinkParts) -> None:
        with pytest.raises(MalformedError, match="never made"):
            link.answers.is_wanted(FrameKind.RESPONSE, 1, 1 << 40)

    def test_of_a_call_that_was_given_up(
        self, link: LinkParts, call: CallFuture[Any]
    ) -> None:
        link.pending.take(call.call_id)
        assert not link.answers.is_wanted(FrameKind.RESPONSE, call.call_id, 1 << 40)

    @pytest.mark.parametrize("kind", [FrameKind.RESPONSE, FrameKind.ERROR])
    def test_of_a_call_whose_answer_arrives_already(
        self, link: LinkParts, call: CallFuture[Any], kind: FrameKind
    ) -> None:
        assert link.answers.is_wanted(FrameKind.RESPONSE, call.call_id, 1 << 40)
        with pytest.raises(MalformedError, match="answered twice"):
            link.answers.is_wanted(kind, call.call_id, 1 << 40)


class TestStreams:
    def test_items_are_taken_in_order(
        self, link: LinkParts, stream: StreamReceiver
    ) -> None:
        for serial in (2, 0, 1):
            item(link, serial, serial * 10)
        end(link, 3)
        assert [run(stream.take()) for _ in range(3)] == [0, 10, 20]
        assert len(link.pending) == 0

    def test_the_producer_is_told_what_was_taken(
        self, link: LinkParts, stream: StreamReceiver
    ) -> None:
        for serial in range(4):
            item(link, serial, serial)
        for _ in range(4):
            run(stream.take())
        acks = [
            one.aux
            for one in link.connection.sent
            if one.kind == FrameKind.STREAM_CREDIT
        ]
        assert acks == [2, 2]  # a quarter of the eight that may be ahead

    @pytest.mark.parametrize("is_arriving", [False, True])
    def test_a_producer_that_runs_too_far_ahead(
        self, link: LinkParts, stream: StreamReceiver, *, is_arriving: bool
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

    def test_a_producer_whose_items_are_too_large(
        self, link: LinkParts, stream: StreamReceiver
    ) -> None:
        assert link.answers.is_wanted(FrameKind.STREAM_ITEM, 1, BYTES_AHEAD_MIN)
        assert link.answers.is_wanted(FrameKind.STREAM_ITEM, 1, 1)
        with pytest.raises(MalformedError, match="ahead of its consumer"):
            link.answers.is_wanted(FrameKind.STREAM_ITEM, 1, 1)

    def test_items_that_were_taken_are_not_ahead(
        self, link: LinkParts, stream: StreamReceiver
    ) -> None:
        for serial in range(4 * ITEMS_AHEAD_MIN):
            assert link.answers.is_wanted(FrameKind.STREAM_ITEM, 1, BYTES_AHEAD_MIN)
            item(link, serial, serial)
            assert run(stream.take()) == serial

    def test_the_end_may_overtake_items(
        self, link: LinkParts, stream: StreamReceiver
    ) -> None:
        end(link, 1)
        assert len(link.pending) == 1
        item(link, 0, "last")
        assert run(stream.take()) == "last"
        assert len(link.pending) == 0

    def test_an_error_comes_after_the_items_before_it(
        self, link: LinkParts, stream: StreamReceiver
    ) -> None:
        fail(link, 1, ValueError("no"), aux=1)
        item(link, 0, "first")
        assert run(stream.take()) == "first"
        with pytest.raises(ValueError, match="no"):
            run(stream.take())

    @pytest.mark.parametrize("serial", [-1, 0, "0", None])
    def test_an_item_twice_or_with_no_number(
        self, link: LinkParts, stream: StreamReceiver, serial: Any
    ) -> None:
        item(link, 0, "first")
        with pytest.raises(MalformedError, match="an item of a stream"):
            item(link, serial, "again")

    def test_an_end_before_items_that_have_come(
        self, link: LinkParts, stream: StreamReceiver
    ) -> None:
        for serial in range(2):
            item(link, serial, serial)
        with pytest.raises(MalformedError, match="but 2 have come"):
            end(link, 1)

    def test_an_item_that_cannot_be_read_ends_it(
        self, link: LinkParts, stream: StreamReceiver
    ) -> None:
        head = pack_head([0, None])
        link.answers.on_stream_item(0, 1, 0, head, b"\xff" * 20, [])
        assert link.connection.last.kind == FrameKind.CANCEL
        with pytest.raises(DecodeError):
            run(stream.take())

    @pytest.mark.parametrize("given", [item, end])
    def test_of_a_plain_call(
        self, link: LinkParts, call: CallFuture[Any], given: Any
    ) -> None:
        with pytest.raises(MalformedError, match="another kind of call"):
            given(link, 0, 1) if given is item else given(link, 0)

    def test_items_of_one_that_was_closed_are_dropped(
        self, link: LinkParts, stream: StreamReceiver
    ) -> None:
        link.calls.cancel(stream)
        item(link, 0, "late")
        end(link, 1)
        assert stream.received == 0

    def test_who_waits_is_woken_by_the_loss_of_the_link(self) -> None:
        async def scenario() -> None:
            link = LinkParts()
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

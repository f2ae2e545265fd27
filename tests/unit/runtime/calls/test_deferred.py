"""A message that waits is sent once, given up once, or failed once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncrpc.errors import EncodeError, Outcome
from asyncrpc.runtime.calls.deferred import DeferredMessage
from asyncrpc.runtime.calls.futures import CallFuture
from asyncrpc.runtime.calls.inbound import InboundCall
from asyncrpc.runtime.calls.streams import StreamReceiver
from asyncrpc.serde import Encoded
from asyncrpc.wire.frames import FrameKind
from tests.unit.runtime.calls.fakes import LinkParts, Pins


def problem() -> EncodeError:
    return EncodeError("the device is gone", outcome=Outcome.NOT_EXECUTED)


class TestWaiting:
    def kept(self) -> tuple[DeferredMessage, list[str]]:
        events: list[str] = []
        message = DeferredMessage([memoryview(b"x")])
        message.hold(
            (FrameKind.REQUEST, 1),
            lambda: events.append("sent"),
            lambda: events.append("given up"),
        )
        return message, events

    def test_it_is_sent_once_nothing_is_awaited(self) -> None:
        message, events = self.kept()
        message.add_dependency()
        message.release()
        assert events == []
        assert not message.is_released
        message.release()
        assert events == ["sent"]
        assert message.is_released
        assert not message.give_up()

    def test_one_that_was_given_up_is_not_sent(self) -> None:
        message, events = self.kept()
        assert message.give_up()
        assert not message.give_up()
        message.release()
        assert events == ["given up"]

    def test_it_may_be_ready_before_it_is_given_to_a_connection(self) -> None:
        message = DeferredMessage([])
        message.release()
        assert message.is_released

    def test_a_second_dependency_is_of_the_same_message(self, link: LinkParts) -> None:
        encoded = Encoded(b"", [memoryview(b"x")], [], 0)
        first = link.deferred.defer(encoded)
        assert link.deferred.defer(encoded) is first
        first.release()
        assert not first.is_released


class TestFailing:
    def message(self, link: LinkParts, kind: int, call_id: int = 1) -> DeferredMessage:
        message = link.deferred.defer(Encoded(b"", [memoryview(b"x")], [], 0))
        message.hold((kind, call_id), lambda: None, None)
        link.connection.unread.add((kind, call_id))
        return message

    def open_call(self, link: LinkParts) -> CallFuture[Any]:
        call: CallFuture[Any] = CallFuture(loop=link.host.loop, function="max", to="b")
        call.call_id = link.pending.open(call)
        call.pins = Pins()
        return call

    @pytest.mark.parametrize("kind", [FrameKind.REQUEST, FrameKind.SERVICE])
    def test_a_request(self, link: LinkParts, kind: int) -> None:
        call = self.open_call(link)
        self.message(link, kind).fail(problem())
        error = call.exception()
        assert isinstance(error, EncodeError)
        assert (error.function, error.to) == ("max", "b")
        assert call.pins.events == ["undone"]
        assert len(link.pending) == 0
        assert not link.connection.sent

    def test_a_request_gives_back_its_credit(self, link: LinkParts) -> None:
        call = self.open_call(link)
        call.request_bytes = 99
        self.message(link, FrameKind.REQUEST).fail(problem())
        assert (link.connection.last.kind, link.connection.last.aux) == (
            FrameKind.CANCEL,
            99,
        )

    def test_a_request_that_waits_for_credit(self, link: LinkParts) -> None:
        call: CallFuture[Any] = CallFuture(loop=link.host.loop, function="max", to="b")
        array = np.zeros(16 << 10, np.uint8)
        link.calls.start(call, "builtins:max", ([array], {}))
        message = DeferredMessage([], link.deferred._fail)  # noqa: SLF001
        message.key = (FrameKind.REQUEST, 1)
        message.fail(problem())
        assert isinstance(call.exception(), EncodeError)
        assert len(link.credit.waiting) == 0

    def test_a_request_of_a_stream(self, link: LinkParts) -> None:
        stream = StreamReceiver(link, "numbers", "b", items_max=8)
        stream.call_id = link.pending.open(stream)
        self.message(link, FrameKind.REQUEST).fail(problem())
        assert stream.is_whole

    @pytest.mark.parametrize("kind", [FrameKind.RESPONSE, FrameKind.STREAM_ITEM])
    def test_an_answer_becomes_an_error(self, link: LinkParts, kind: int) -> None:
        """A stream that is still served cannot go on without the item."""
        inbound = InboundCall(link.host, link.responder, 1, None, {})
        link.responder.begin(inbound)
        self.message(link, kind).fail(problem())
        sent = link.connection.last
        assert (sent.kind, sent.call_id) == (FrameKind.ERROR, 1)
        assert "the device is gone" in str(link.value_of(sent))
        assert inbound.is_cancelled

    def test_one_that_was_given_up_meanwhile(self, link: LinkParts) -> None:
        call = self.open_call(link)
        message = self.message(link, FrameKind.REQUEST)
        link.connection.unread.clear()
        message.fail(problem())
        assert not call.done()
        assert not link.connection.sent

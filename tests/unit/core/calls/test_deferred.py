"""A message that waits is sent once, given up once, or failed once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncrpc.core.calls.deferred import PendingBuffers
from asyncrpc.core.calls.futures import CallFuture
from asyncrpc.core.calls.inbound import InboundCall
from asyncrpc.core.calls.streams import StreamReceiver
from asyncrpc.core.options import LimitOptions
from asyncrpc.core.serde import Encoded
from asyncrpc.core.wire.frames import FrameKind
from asyncrpc.core.wire.outgoing import OutgoingEvent, OutgoingMessage
from asyncrpc.errors import EncodeError, Outcome
from tests.unit.core.calls.fakes import Parts, Pins

LIMITS = LimitOptions(stream_items_max=8)


def problem() -> EncodeError:
    return EncodeError("the device is gone", outcome=Outcome.NOT_EXECUTED)


class TestWaiting:
    def waiting_message(self) -> tuple[PendingBuffers, list[OutgoingMessage]]:
        submitted: list[OutgoingMessage] = []
        buffers = PendingBuffers([memoryview(b"x")])
        message = OutgoingMessage(FrameKind.REQUEST, 1, buffers=buffers)
        buffers.then(message, submitted.append)
        return buffers, submitted

    def test_message_is_submitted_once_nothing_is_awaited(self) -> None:
        buffers, submitted = self.waiting_message()
        buffers.add_dependency()
        buffers.release()
        assert submitted == []
        assert not buffers.are_ready
        buffers.release()
        assert submitted == [buffers.message]
        assert buffers.are_ready

    def test_abandoned_message_is_not_submitted(self) -> None:
        buffers, submitted = self.waiting_message()
        buffers.forget()
        buffers.release()
        assert submitted == []

    def test_buffers_may_be_ready_before_the_connection(self) -> None:
        buffers = PendingBuffers([])
        buffers.release()
        assert buffers.are_ready

    def test_failed_dependency_without_message_sends_nothing(self, link: Parts) -> None:
        link.deferred.defer(Encoded(b"", [], [], 0)).fail(problem())
        assert not link.connection.sent

    def test_second_dependency_belongs_to_the_same_message(self, link: Parts) -> None:
        encoded = Encoded(b"", [memoryview(b"x")], [], 0)
        first = link.deferred.defer(encoded)
        assert link.deferred.defer(encoded) is first
        first.release()
        assert not first.are_ready


class TestFailing:
    def message(self, link: Parts, kind: int, call_id: int = 1) -> PendingBuffers:
        buffers = link.deferred.defer(Encoded(b"", [memoryview(b"x")], [], 0))
        message = OutgoingMessage(kind, call_id, buffers=buffers)
        buffers.then(message, lambda _: None)
        link.connection.outgoing.wait(message, OutgoingEvent.BLOCK, buffers.forget)
        return buffers

    def open_call(self, link: Parts) -> CallFuture[Any]:
        call: CallFuture[Any] = CallFuture(loop=link.host.loop, function="max", to="b")
        call.call_id = link.pending.open(call)
        call.pins = Pins()
        return call

    @pytest.mark.parametrize("kind", [FrameKind.REQUEST, FrameKind.SERVICE])
    def test_failed_request_fails_its_call(self, link: Parts, kind: int) -> None:
        call = self.open_call(link)
        self.message(link, kind).fail(problem())
        error = call.exception()
        assert isinstance(error, EncodeError)
        assert (error.function, error.to) == ("max", "b")
        assert call.pins.events == ["undone"]
        assert len(link.pending) == 0
        assert not link.connection.sent

    def test_failed_request_returns_its_credit(self, link: Parts) -> None:
        call = self.open_call(link)
        call.request_bytes = 99
        self.message(link, FrameKind.REQUEST).fail(problem())
        assert (link.connection.last.kind, link.connection.last.aux) == (
            FrameKind.CANCEL,
            99,
        )

    def test_failed_request_that_waits_for_credit_fails_its_call(
        self, link: Parts
    ) -> None:
        call: CallFuture[Any] = CallFuture(loop=link.host.loop, function="max", to="b")
        link.calls.start(call, "builtins:max", ([np.zeros(16 << 10, np.uint8)], {}))
        buffers = link.deferred.defer(Encoded(b"", [], [], 0))
        buffers.message = OutgoingMessage(FrameKind.REQUEST, 1)
        buffers.fail(problem())
        assert isinstance(call.exception(), EncodeError)
        assert len(link.credit.waiting) == 0

    def test_failed_stream_request_fails_its_stream(self, link: Parts) -> None:
        stream = StreamReceiver(link, "numbers", "b", limits=LIMITS, began_s=0.0)
        stream.call_id = link.pending.open(stream)
        self.message(link, FrameKind.REQUEST).fail(problem())
        assert stream.is_whole

    @pytest.mark.parametrize("kind", [FrameKind.RESPONSE, FrameKind.STREAM_ITEM])
    def test_failed_answer_becomes_an_error(self, link: Parts, kind: int) -> None:
        """A stream that is still served cannot go on without the item."""
        inbound = InboundCall(link.host, link.responder, 1, 0.0, None, {})
        link.served.begin(inbound.call_id, inbound)
        self.message(link, kind).fail(problem())
        sent = link.connection.last
        assert (sent.kind, sent.call_id) == (FrameKind.ERROR, 1)
        assert "the device is gone" in str(link.value_of(sent))
        assert inbound.is_cancelled

    def test_failure_of_an_abandoned_request_is_ignored(self, link: Parts) -> None:
        call = self.open_call(link)
        message = self.message(link, FrameKind.REQUEST)
        link.connection.drop(FrameKind.REQUEST, 1)
        message.fail(problem())
        assert not call.done()
        assert not link.connection.sent

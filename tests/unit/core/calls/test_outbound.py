"""Calls that this worker makes: before they are sent, on a link, and at their ends."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import numpy as np
import pytest

from asyncrpc import AsyncRpcError, UsageError
from asyncrpc.core.calls.futures import CallFuture
from asyncrpc.core.calls.machine.credit import WINDOW
from asyncrpc.core.calls.outbound import CallEnds
from asyncrpc.core.calls.streams import StreamReceiver
from asyncrpc.core.calls.unsent import UnsentCalls
from asyncrpc.core.ids import Incarnation, WorkerId
from asyncrpc.core.loop.clock import Deadline
from asyncrpc.core.options import PLAIN, LimitOptions
from asyncrpc.core.wire.frames import Flags, Frame, FrameKind, unpack_head
from asyncrpc.core.wire.outgoing import OutgoingMessage
from asyncrpc.errors import (
    DeadlineExceededError,
    EncodeError,
    Outcome,
    RejectedError,
    WorkerLostError,
)
from asyncrpc.trace import CANCELLED, FlightRecorder
from tests.unit.core.calls.fakes import Gone, Hear, Look, Parts, Pins

NAME = "builtins:max"
LARGE = np.zeros(16 << 10, np.uint8)  # more than goes without credit

LIMITS = LimitOptions(stream_items_max=8)


def start(link: Parts, *args: Any, deadline: Deadline | None = None) -> CallFuture[Any]:
    call: CallFuture[Any] = CallFuture(loop=link.host.loop, function="max", to="b")
    link.calls.start(call, NAME, (list(args), {}), deadline=deadline)
    return call


def stream(link: Parts, *args: Any) -> StreamReceiver:
    receiver = StreamReceiver(link, "numbers", "b", limits=LIMITS, began_s=0.0)
    link.calls.start_stream(receiver, NAME, (list(args), {}), None, options=PLAIN)
    return receiver


def after(link: Parts, timeout_s: float) -> Deadline:
    return Deadline.after(timeout_s, link.host.loop.time())


class TestStarting:
    def test_request_contains_function_and_arguments(self, link: Parts) -> None:
        call = start(link, 1, 2)
        sent = link.connection.last
        assert (sent.kind, sent.call_id, sent.aux) == (FrameKind.REQUEST, 1, -1)
        assert unpack_head(sent.head) == [[1, NAME], None]
        assert link.value_of(sent) == [[1, 2], {}]
        assert call.link is link
        assert link.pending.get(1) is call

    def test_function_name_travels_once(self, link: Parts) -> None:
        for _ in range(3):
            start(link)
        heads = [unpack_head(frame.head) for frame in link.connection.sent]
        assert heads == [[[1, NAME], None], [1], [1]]

    def test_remaining_time_travels(self, link: Parts) -> None:
        start(link, deadline=after(link, 2.0))
        assert link.connection.last.aux == pytest.approx(2e9)

    def test_call_past_its_deadline_is_not_sent(self, link: Parts) -> None:
        deadline = after(link, 1.0)
        link.host.loop.now_s += 2.0
        with pytest.raises(DeadlineExceededError) as caught:
            start(link, deadline=deadline)
        assert caught.value.outcome is Outcome.NOT_EXECUTED
        assert not link.connection.sent
        assert len(link.pending) == 0

    def test_unencodable_call_is_not_sent(self, link: Parts) -> None:
        with pytest.raises(EncodeError):
            start(link, threading.Lock())
        assert not link.connection.sent
        assert len(link.pending) == 0

    def test_call_to_a_draining_peer_is_rejected(self, link: Parts) -> None:
        link.status.on_goodbye()
        with pytest.raises(RejectedError, match="shutting down") as caught:
            start(link)
        assert caught.value.outcome is Outcome.NOT_EXECUTED
        assert not link.connection.sent

    def test_call_over_a_lost_link_fails(self, link: Parts) -> None:
        """Nothing would ever end it."""
        link.status.on_lost("a cable")
        with pytest.raises(WorkerLostError, match="a cable") as caught:
            start(link)
        assert caught.value.outcome is Outcome.NOT_EXECUTED
        assert len(link.pending) == 0

    def test_unwritable_request_is_forgotten(self, link: Parts) -> None:
        link.connection.refuses = MemoryError()
        with pytest.raises(MemoryError):
            start(link)
        assert len(link.pending) == 0
        link.connection.refuses = None
        start(link)  # the peer may never have seen the name: another number
        assert unpack_head(link.connection.last.head) == [[2, NAME], None]

    def test_stream_request_has_the_stream_flag(self, link: Parts) -> None:
        stream(link)
        assert link.connection.last.flags == Flags.STREAM


class TestDeadline:
    def test_deadline_ends_call_and_cancels_it_at_the_callee(self, link: Parts) -> None:
        call = start(link, deadline=after(link, 2.0))
        (timer,) = link.host.loop.timers
        assert timer.at_s == 102.0
        timer.act()
        error = call.exception()
        assert isinstance(error, DeadlineExceededError)
        assert error.outcome is Outcome.UNKNOWN
        assert link.connection.last.kind == FrameKind.CANCEL
        assert len(link.pending) == 0

    def test_deadline_after_the_answer_has_no_effect(self, link: Parts) -> None:
        call = start(link, deadline=after(link, 2.0))
        link.answers.on_response(0, 1, 0, b"", link.control(5), [])
        sent = link.connection.last
        link.host.loop.timers[0].act()
        assert call.result() == 5
        assert link.connection.last == sent

    def test_deadline_of_call_without_credit_is_not_executed(self, link: Parts) -> None:
        call = start(link, LARGE, deadline=after(link, 2.0))
        assert link.connection.last.kind == FrameKind.WANT
        link.host.loop.timers[0].act()
        error = call.exception()
        assert isinstance(error, DeadlineExceededError)
        assert error.outcome is Outcome.NOT_EXECUTED
        assert "was waiting for credit from 'b'" in error.__notes__[0]

    def test_deadline_of_method_call_is_watched_by_the_owner(self, link: Parts) -> None:
        call: CallFuture[Any] = CallFuture(loop=link.host.loop, function="f", to="b")
        deadline = after(link, 2.0)
        meta = {"r": [1, 2]}
        link.calls.start(call, NAME, ([], {}), deadline=deadline, meta=meta)
        assert not link.host.loop.timers


class TestCancelling:
    def test_cancel_is_sent_to_the_callee(self, link: Parts) -> None:
        assert start(link).cancel()
        assert (link.connection.last.kind, link.connection.last.aux) == (
            FrameKind.CANCEL,
            0,
        )
        assert len(link.pending) == 0

    def test_cancel_after_the_answer_is_not_sent(self, link: Parts) -> None:
        call = start(link)
        link.answers.on_response(0, 1, 0, b"", link.control(5), [])
        link.calls.cancel(call)
        assert link.connection.last.kind == FrameKind.REQUEST

    def test_answer_to_a_cancelled_call_is_ignored(self, link: Parts) -> None:
        call = start(link)
        call.cancel()
        link.answers.on_response(0, 1, 0, b"", link.control(5), [])
        assert call.cancelled()

    def test_cancel_takes_back_an_unsent_request(self, link: Parts) -> None:
        """What it counted and what it spent of the peer's credit come back."""
        link.credit.on_credit(Frame(FrameKind.CREDIT, 0, WINDOW, 1 << 20))
        call = start(link, LARGE)
        call.pins = pins = Pins()
        link.connection.let_wait(FrameKind.REQUEST, 1)
        call.cancel()
        assert link.connection.last.aux == LARGE.nbytes
        assert pins.events == ["undone"]

    def test_cancelled_call_gives_up_its_wait_for_credit(self, link: Parts) -> None:
        call = start(link, LARGE)
        call.pins = pins = Pins()
        call.cancel()
        kinds = [frame.kind for frame in link.connection.sent]
        assert kinds == [FrameKind.WANT, FrameKind.CANCEL]
        assert pins.events == ["undone"]
        link.credit.on_credit(
            Frame(FrameKind.CREDIT, 0, 1, LARGE.nbytes)
        )  # on its way meanwhile
        assert len(link.connection.sent) == 2


class TestCredit:
    def test_large_request_waits_for_credit(self, link: Parts) -> None:
        start(link, LARGE)
        start(link, 1)  # a small one passes
        kinds = [frame.kind for frame in link.connection.sent]
        assert kinds == [FrameKind.WANT, FrameKind.REQUEST]
        link.credit.on_credit(Frame(FrameKind.CREDIT, 0, 1, LARGE.nbytes))
        assert (link.connection.last.kind, link.connection.last.call_id) == (
            FrameKind.REQUEST,
            1,
        )

    def test_unwritable_request_returns_its_credit(
        self, link: Parts, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        call = start(link, LARGE)

        def submit(message: OutgoingMessage) -> None:
            raise MemoryError(message.kind)

        monkeypatch.setattr(link.connection, "submit", submit)
        link.credit.on_credit(Frame(FrameKind.CREDIT, 0, 1, LARGE.nbytes))
        assert isinstance(call.exception(), MemoryError)
        assert (link.connection.last.kind, link.connection.last.aux) == (
            FrameKind.CANCEL,
            LARGE.nbytes,
        )
        assert len(link.pending) == 0
        assert not len(link.connection.outgoing)


class TestLoss:
    def lose(self, link: Parts) -> None:
        link.status.on_lost("a cable")
        link.calls.on_lost(link.credit.close())

    def outcome_of(self, call: CallFuture[Any]) -> Outcome:
        error = call.exception()
        assert isinstance(error, WorkerLostError)
        return error.outcome

    def test_lost_link_ends_every_call(self, link: Parts) -> None:
        calls = [start(link) for _ in range(3)]
        self.lose(link)
        assert {self.outcome_of(call) for call in calls} == {Outcome.UNKNOWN}
        assert len(link.pending) == 0

    def test_call_without_credit_has_not_run_at_the_loss(self, link: Parts) -> None:
        sent, waiting = start(link), start(link, LARGE)
        self.lose(link)
        assert self.outcome_of(sent) is Outcome.UNKNOWN
        assert self.outcome_of(waiting) is Outcome.NOT_EXECUTED

    def test_call_made_on_a_broken_connection_has_not_run_at_the_loss(
        self, link: Parts
    ) -> None:
        before = start(link)
        link.connection.first_unsent = 2
        after_it = start(link)
        self.lose(link)
        assert self.outcome_of(before) is Outcome.UNKNOWN
        assert self.outcome_of(after_it) is Outcome.NOT_EXECUTED

    def test_lost_link_releases_timers_and_pins(self, link: Parts) -> None:
        call = start(link, deadline=after(link, 2.0))
        call.pins = pins = Pins()
        self.lose(link)
        assert link.host.loop.timers[0].is_cancelled
        assert call.pins is None
        assert pins.events == []  # the peer's death settles them

    def test_lost_link_ends_a_stream(self, link: Parts) -> None:
        receiver = stream(link)
        self.lose(link)
        assert receiver.is_whole

    def test_cancelled_call_stays_cancelled_at_the_loss(self, link: Parts) -> None:
        call = start(link)
        call.cancel()
        self.lose(link)
        assert call.cancelled()


class TestServices:
    def test_service_request_names_service_and_method(self, link: Parts) -> None:
        call = link.calls.ask(Look(5))
        sent = link.connection.last
        assert sent.kind == FrameKind.SERVICE
        assert unpack_head(sent.head) == ["kept", "look"]
        assert link.value_of(sent) == [5]
        link.answers.on_response(0, call.call_id, 0, b"", link.control(6), [])
        assert call.result() == 6

    def test_service_request_over_a_lost_link_fails_at_once(self, link: Parts) -> None:
        link.status.on_lost("a cable")
        call = link.calls.ask(Look(5))
        assert isinstance(call.exception(), WorkerLostError)
        assert not link.connection.sent

    def test_rejected_service_request_leaves_no_pending_call(self, link: Parts) -> None:
        link.status.on_goodbye()
        with pytest.raises(RejectedError):
            link.calls.ask(Look(5))
        assert len(link.pending) == 0

    def test_deferrable_notice_is_deferred(self, link: Parts) -> None:
        link.calls.tell(Gone(1))
        ((_, for_s),) = link.connection.held
        assert for_s == Gone.may_wait_s == 0.5
        link.calls.tell(Gone(1), at_once=True)
        assert len(link.connection.pushed) == 1
        assert not link.connection.joined

    @pytest.mark.parametrize("at_once", [False, True])
    def test_notice_goes_now_or_with_next(self, link: Parts, *, at_once: bool) -> None:
        link.calls.tell(Hear(1), at_once=at_once)
        connection = link.connection
        assert (len(connection.pushed), len(connection.joined)) == (
            int(at_once),
            int(not at_once),
        )
        assert len(link.pending) == 0


PEER = WorkerId("b", Incarnation(7))


@pytest.fixture
def recorder() -> FlightRecorder:
    return FlightRecorder()


async def test_unretrieved_error_is_still_logged(recorder: FlightRecorder) -> None:
    errors: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context))
    call: CallFuture[Any] = CallFuture(loop=loop, function="add", to="b")
    call.set_exception(ValueError("it is not there"))
    CallEnds(PEER, recorder).note_unsent(call)
    del call
    gc.collect()
    assert [str(context["exception"]) for context in errors] == ["it is not there"]
    assert [event.outcome for event in recorder.calls.recent] == ["ValueError"]


async def test_abandoned_unsent_call_is_recorded_as_cancelled(
    recorder: FlightRecorder,
) -> None:
    call: CallFuture[Any] = CallFuture(
        loop=asyncio.get_running_loop(), function="add", to="b", began_s=1.0
    )
    call.cancel()
    CallEnds(PEER, recorder).note_unsent(call)
    (noted,) = recorder.calls.recent
    assert (noted.outcome, noted.began_s, noted.call_id) == (CANCELLED, 1.0, 0)


async def test_recorded_call_is_untracked_by_the_collector(
    recorder: FlightRecorder,
) -> None:
    """Thousands of events that it looks after cost calls a tenth of their rate."""
    noted: list[tuple[Any, ...]] = []
    recorder.calls.add_sink(noted.append)
    call: CallFuture[Any] = CallFuture(
        loop=asyncio.get_running_loop(), function="add", to="b", began_s=1.0
    )
    call.cancel()
    ends = CallEnds(PEER, recorder)
    gc.collect()  # it forgets the worker, which is in each event
    ends.note_unsent(call)
    gc.collect()
    assert [gc.is_tracked(fields) for fields in noted] == [False]
    (event,) = recorder.calls.recent
    assert event.to == PEER
    assert isinstance(event.to, WorkerId)


def call_to_b() -> CallFuture[Any]:
    return CallFuture(loop=asyncio.get_running_loop(), function="add", to="b")


async def test_unsent_call_is_counted_while_it_waits() -> None:
    unsent, call = UnsentCalls(), call_to_b()
    with unsent.waiting(call, None, "it had a connection"):
        assert unsent.count == 1
    assert unsent.count == 0
    assert not call.done()
    call.cancel()


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (EncodeError("no"), EncodeError),
        (UsageError("no"), UsageError),
        (TimeoutError(), DeadlineExceededError),
        (ValueError("no"), ValueError),
    ],
)
async def test_error_before_the_sending_fails_the_call(
    raised: Exception, kind: type[Exception]
) -> None:
    unsent, call = UnsentCalls(), call_to_b()
    with unsent.waiting(call, Deadline.after(2.0, 0.0), "it had a connection"):
        raise raised
    assert unsent.count == 0
    with pytest.raises(kind) as caught:
        await call
    error: Any = caught.value
    if isinstance(error, EncodeError | DeadlineExceededError):
        assert (error.function, error.to) == ("add", "b")
    if isinstance(error, DeadlineExceededError):
        assert error.outcome is Outcome.NOT_EXECUTED
        assert "2 s" in str(error)


async def test_cancelled_wait_fails_the_call_with_what_was_missing() -> None:
    unsent, call = UnsentCalls(), call_to_b()

    async def wait() -> None:
        with unsent.waiting(call, None, "it had a connection"):
            await asyncio.Event().wait()

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    assert unsent.count == 1
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert unsent.count == 0
    with pytest.raises(WorkerLostError, match="before it had a connection") as caught:
        await call
    assert caught.value.outcome is Outcome.NOT_EXECUTED
    assert isinstance(caught.value, AsyncRpcError)

"""Each request is run or refused, and answered once, whatever is wrong with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import asyncrpc
from asyncrpc.core.calls.inbound import CANCELLED_AT_ONCE
from asyncrpc.core.serde import rebuild_exception
from asyncrpc.core.wire.frames import Flags, Frame, FrameKind, pack_head, unpack_head
from asyncrpc.errors import MalformedError, Outcome, RejectedError
from tests.unit.core.calls.fakes import Parts

MODULE = "tests.unit.core.calls.test_requests"
GATE: list[asyncio.Future[None]] = []


def double(number: Any) -> Any:
    return 2 * number


def unsendable() -> Any:
    return (number for number in range(1))


def broken() -> None:
    raise ValueError("broken")


async def hold() -> str:
    await GATE[0]
    return "held"


async def hold_with(_: Any = None) -> None:
    GATE.append(asyncio.Future(loop=GATE[0].get_loop()))
    await GATE[-1]


def numbers() -> Iterator[int]:
    yield 0


@pytest.fixture(autouse=True)
def _gate(link: Parts) -> Iterator[None]:
    GATE[:] = [asyncio.Future(loop=link.host.loop)]
    yield
    GATE.clear()


def ask(
    link: Parts,
    function: Any,
    *args: Any,
    call_id: int = 1,
    flags: int = 0,
    aux: int = -1,
    meta: Any = None,
    control: bytes | None = None,
) -> None:
    name = f"{MODULE}:{function.__name__}" if callable(function) else function
    head = pack_head([[0, name], meta] if type(name) is str else [name, meta])
    control = control or link.control([list(args), {}])
    link.requests.on_request(flags, call_id, aux, head, control, [])


def error_of(link: Parts) -> Any:
    """Return the error that was sent last, as its caller has it."""
    sent = link.connection.last
    assert sent.kind == FrameKind.ERROR
    error: Any = rebuild_exception(
        link.value_of(sent), link.host.functions, function="f", to="a"
    )
    record = unpack_head(sent.head) if sent.head else [None]
    outcome = (record[0] or {}).get("o")
    if outcome:
        error.outcome = Outcome[outcome]
    return error


def cancel(link: Parts, call_id: int = 1, aux: int = 0) -> None:
    link.requests.on_cancel(Frame(FrameKind.CANCEL, 0, call_id, aux))


class TestRunning:
    def test_result_is_sent_back(self, link: Parts) -> None:
        ask(link, double, 4)
        sent = link.connection.last
        assert (sent.kind, sent.call_id) == (FrameKind.RESPONSE, 1)
        assert link.value_of(sent) == 8
        assert (link.host.admission.active, len(link.served)) == (0, 0)

    def test_exception_is_sent_back(self, link: Parts) -> None:
        raised: list[BaseException] = []
        link.host.on_raised = raised.append
        ask(link, broken)
        error = error_of(link)
        assert isinstance(error, ValueError)
        assert error.outcome is Outcome.EXECUTED  # type: ignore[attr-defined]
        assert [str(error) for error in raised] == ["broken"]

    def test_unencodable_result_is_sent_back_as_an_error(self, link: Parts) -> None:
        ask(link, unsendable)
        error = error_of(link)
        assert isinstance(error, asyncrpc.errors.EncodeError)
        assert error.outcome is Outcome.EXECUTED

    def test_waiting_function_is_active_until_it_ends(self, link: Parts) -> None:
        ask(link, hold)
        assert (link.host.admission.active, len(link.served)) == (1, 1)
        assert not link.connection.sent

    def test_number_stands_for_the_function_name(self, link: Parts) -> None:
        name = f"{MODULE}:double"
        control = link.control([[3], {}])
        for call_id, target in enumerate([[5, name], 5, 5], 1):
            link.requests.on_request(0, call_id, -1, pack_head([target]), control, [])
        assert [link.value_of(frame) for frame in link.connection.sent] == [6, 6, 6]
        assert pack_head([5]) in link.heads.known


class TestRefusing:
    def refused(self, link: Parts, kind: type[Exception], match: str) -> None:
        error = error_of(link)
        assert isinstance(error, kind)
        assert match in str(error)
        assert error.outcome is Outcome.NOT_EXECUTED  # type: ignore[attr-defined]
        assert (link.host.admission.active, len(link.served)) == (0, 0)

    def test_draining_worker_refuses_requests(self, link: Parts) -> None:
        link.host.admission.refusal = RejectedError(
            "down", outcome=Outcome.NOT_EXECUTED
        )
        ask(link, double, 4)
        self.refused(link, RejectedError, "down")

    def test_unreadable_arguments_are_refused(self, link: Parts) -> None:
        head = pack_head([[0, f"{MODULE}:double"], None])
        link.requests.on_request(0, 1, -1, head, b"\xff" * 20, [])
        self.refused(link, asyncrpc.errors.DecodeError, "")

    @pytest.mark.parametrize("value", [None, 5, [1], [[], []], [{}, {}]])
    def test_malformed_arguments_are_refused(self, link: Parts, value: Any) -> None:
        head = pack_head([[0, f"{MODULE}:double"], None])
        link.requests.on_request(0, 1, -1, head, link.control(value), [])
        self.refused(link, asyncrpc.errors.DecodeError, "arguments cannot be read")

    def test_unknown_function_is_refused(self, link: Parts) -> None:
        ask(link, f"{MODULE}:nothing_such")
        self.refused(link, asyncrpc.errors.DecodeError, "nothing_such")

    def test_plain_call_of_a_generator_is_refused(self, link: Parts) -> None:
        ask(link, numbers)
        self.refused(link, RejectedError, "use `stream`, not `call`")

    def test_stream_of_a_plain_function_is_refused(self, link: Parts) -> None:
        ask(link, double, 1, flags=Flags.STREAM)
        self.refused(link, RejectedError, "use `call`, not `stream`")

    def test_uncallable_value_is_refused(self, link: Parts) -> None:
        ask(link, None, 5)
        self.refused(link, asyncrpc.errors.DecodeError, "is not callable")

    def test_method_call_without_references_is_refused(self, link: Parts) -> None:
        ask(link, double, 1, meta={"r": [1, 2]})
        self.refused(link, RejectedError, "no remote references")

    @pytest.mark.parametrize("head", [[], [["a"]], [[1]], [[0, 5]], [[0, "n"], [1]]])
    def test_malformed_head_ends_connection(self, link: Parts, head: list[Any]) -> None:
        with pytest.raises(MalformedError):
            link.requests.on_request(
                0, 1, -1, pack_head(head), link.control([[], {}]), []
            )

    def test_unassigned_number_is_refused(self, link: Parts) -> None:
        with pytest.raises(MalformedError, match="has not been named"):
            ask(link, 9)

    def test_id_in_use_is_refused(self, link: Parts) -> None:
        ask(link, hold)
        with pytest.raises(MalformedError, match="made twice"):
            ask(link, double, 1)

    def test_large_request_without_credit_is_refused(self, link: Parts) -> None:
        value = link.host.codec.encode([[np.zeros(16 << 10, np.uint8)], {}])
        head = pack_head([[0, f"{MODULE}:double"], None])
        with pytest.raises(MalformedError, match="with a credit of 0 bytes"):
            link.requests.on_request(0, 1, -1, head, value.control, value.buffers)


class TestCancelling:
    def test_cancel_stops_a_running_function(self, link: Parts) -> None:
        ask(link, hold)
        (serving,) = link.served
        cancel(link)
        assert serving.is_cancelled
        task: Any = serving.task
        assert task.is_cancelled

    def test_cancel_of_an_ended_call_is_ignored(self, link: Parts) -> None:
        ask(link, double, 4)
        cancel(link)
        assert [frame.kind for frame in link.connection.sent] == [FrameKind.RESPONSE]

    def test_cancel_drops_an_arriving_request(self, link: Parts) -> None:
        link.connection.arriving[FrameKind.REQUEST, 1] = link.control([[4], {}])
        cancel(link)
        assert not link.connection.arriving

    def test_cancel_of_an_unknown_call_is_ignored(self, link: Parts) -> None:
        cancel(link)
        assert not link.connection.sent

    def test_ungranted_credit_cannot_be_returned(self, link: Parts) -> None:
        with pytest.raises(MalformedError):
            cancel(link, aux=1 << 30)

    def test_lost_link_cancels_running_functions(self, link: Parts) -> None:
        ask(link, hold)
        (serving,) = link.served
        link.responder.on_lost()
        assert serving.is_cancelled

    def test_lost_link_cancels_many_functions_in_turns(self, link: Parts) -> None:
        for call_id in range(1, 3 * CANCELLED_AT_ONCE):
            ask(link, hold, call_id=call_id)
        serving = list(link.served)
        link.responder.on_lost()
        before, soon = 0, link.host.loop.soon
        while before < len(serving):
            cancelled = sum(call.is_cancelled for call in serving)
            assert cancelled - before <= CANCELLED_AT_ONCE
            before = cancelled
            if soon:
                soon.popleft()()

    def test_answer_of_a_forgotten_call_is_not_sent(self, link: Parts) -> None:
        ask(link, hold)
        (serving,) = link.served
        link.responder.forget(serving)
        link.responder.answer(serving, 5)
        link.responder.answer_error(serving, ValueError("late"))
        link.responder.end_stream(serving, 0)
        assert not link.connection.sent
        assert link.host.admission.active == 0


class TestNotes:
    """What a worker tells of itself beside each answer."""

    @pytest.fixture
    def noted(self, link: Parts) -> Parts:
        link.host.note_of = lambda note: ["note", note]
        return link

    def test_answer_without_notes_has_no_head(self, link: Parts) -> None:
        ask(link, double, 4)
        assert link.connection.last.head == b""

    def test_note_travels_beside_a_result_and_an_error(self, noted: Parts) -> None:
        ask(noted, double, 4)
        assert unpack_head(noted.connection.last.head) == [{"n": ["note", None]}]
        ask(noted, double, object(), call_id=2)
        assert noted.connection.last.kind == FrameKind.ERROR
        assert unpack_head(noted.connection.last.head)[0]["n"] == ["note", None]

    def test_note_travels_beside_a_refusal(self, noted: Parts) -> None:
        noted.host.admission.refusal = asyncrpc.RejectedError("full")
        ask(noted, double, 4)
        meta = unpack_head(noted.connection.last.head)[0]
        assert meta == {"o": "NOT_EXECUTED", "n": ["note", None]}

    def test_note_travels_beside_the_first_item_and_the_end_of_a_stream(
        self, noted: Parts
    ) -> None:
        ask(noted, hold)
        (serving,) = noted.served
        serving.note = 7
        noted.responder.send_item(serving, 0, "first")
        assert unpack_head(noted.connection.last.head) == [0, {"n": ["note", 7]}]
        noted.responder.send_item(serving, 1, "second")
        assert unpack_head(noted.connection.last.head) == [1, None]
        noted.responder.end_stream(serving, 2)
        assert unpack_head(noted.connection.last.head) == [{"n": ["note", 7]}]


class TestDeadline:
    def test_deadline_stops_the_function(self, link: Parts) -> None:
        ask(link, hold, aux=2_000_000_000)
        (serving,) = link.served
        (timer,) = link.host.loop.timers
        assert timer.at_s == pytest.approx(102.0)
        timer.act()
        error = error_of(link)
        assert isinstance(error, asyncrpc.DeadlineExceededError)
        assert error.outcome is Outcome.UNKNOWN
        assert serving.is_cancelled

    def test_function_that_ends_at_once_needs_no_timer(self, link: Parts) -> None:
        ask(link, double, 4, aux=2_000_000_000)
        assert not link.host.loop.timers

    def test_deadline_of_an_ended_function_has_no_effect(self, link: Parts) -> None:
        ask(link, hold, aux=2_000_000_000)
        (serving,) = link.served
        serving.responder.answer(serving, 5)
        sent = link.connection.last
        link.host.loop.timers[0].act()
        assert not serving.is_cancelled
        assert link.connection.last == sent


class TestStreams:
    @pytest.mark.parametrize("items", [0, -1])
    def test_stream_credit_for_no_items_is_refused(
        self, link: Parts, items: int
    ) -> None:
        with pytest.raises(MalformedError, match="a credit must"):
            link.requests.on_stream_credit(Frame(FrameKind.STREAM_CREDIT, 0, 1, items))

    def test_stream_credit_for_an_ended_stream_is_ignored(self, link: Parts) -> None:
        link.requests.on_stream_credit(Frame(FrameKind.STREAM_CREDIT, 0, 1, 4))
        assert not link.connection.sent

    def test_unencodable_stream_item_ends_stream_with_error(self, link: Parts) -> None:
        ask(link, hold)
        (serving,) = link.served
        with pytest.raises(asyncrpc.errors.EncodeError) as caught:
            link.responder.send_item(serving, 0, unsendable())
        assert caught.value.outcome is Outcome.EXECUTED


class TestServices:
    def send(
        self, take: Callable[..., None], link: Parts, head: list[Any], value: Any
    ) -> None:
        take(0, 1, -1, pack_head(head), link.control(value), [])

    def test_service_request_is_answered(self, link: Parts) -> None:
        self.send(link.requests.on_service, link, ["kept", "look"], [5])
        assert link.value_of(link.connection.last) == 5

    def test_unknown_service_is_refused(self, link: Parts) -> None:
        self.send(link.requests.on_service, link, ["lost", "look"], 5)
        error = error_of(link)
        assert "no service 'lost'" in str(error)
        assert (link.host.admission.active, len(link.served)) == (0, 0)

    @pytest.mark.parametrize("head", [[], ["kept"]])
    def test_service_message_without_a_method_is_refused(
        self, link: Parts, head: list[Any]
    ) -> None:
        for take in (link.requests.on_service, link.requests.on_notice):
            with pytest.raises(MalformedError, match="names no service"):
                self.send(take, link, head, 5)

    def test_notice_is_taken(self, link: Parts) -> None:
        self.send(link.requests.on_notice, link, ["kept", "hear"], [5])
        assert link.host.kept.numbers == [5]
        assert not link.connection.sent

    def test_wrong_notice_is_logged_and_dropped(
        self, link: Parts, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING, "asyncrpc"):
            self.send(link.requests.on_notice, link, ["kept", "hear"], [-5])
        assert "a notice of 'b' could not be taken: kept.hear" in caplog.text

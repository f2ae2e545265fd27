"""Which message goes on, when an application is cancelled, and its lifespan."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrpc.serving.asgi.machine.connection import (
    READ_AHEAD_BYTES_MAX,
    READ_AHEAD_MESSAGES_MAX,
    AsgiConnection,
    AsgiState,
)
from asyncrpc.serving.asgi.machine.lifespan import InnerLifespan, LifespanState

LEFT = {"type": "http.disconnect"}
SOCKET_LEFT = {"type": "websocket.disconnect", "code": 1001}


def request(*headers: tuple[bytes, bytes]) -> AsgiConnection:
    return AsgiConnection({"type": "http", "headers": headers})


def websocket() -> AsgiConnection:
    return AsgiConnection({"type": "websocket", "headers": []})


def body(size: int = 0, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": b"x" * size, "more_body": more}


def start(status: int = 200) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status}


def part(*, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": b"x", "more_body": more}


def test_messages_come_in_order_and_the_last_one_repeats() -> None:
    connection = request()
    assert connection.take() is None
    messages = [body(1, more=True), body(2)]
    assert [connection.received(message) for message in messages] == [False, False]
    assert connection.received(LEFT) is True
    assert [connection.take() for _ in range(4)] == [*messages, LEFT, LEFT]


def test_disconnecting_client_cancels_the_application() -> None:
    connection = request()
    connection.received(body())
    connection.asks()  # whether or not it waits
    assert connection.received(LEFT) is True
    assert connection.has_left


def test_client_disconnecting_during_the_response_cancels_it() -> None:
    connection = request()
    connection.sends(start())
    connection.sends(part(more=True))
    assert connection.state is AsgiState.ANSWERING
    assert connection.received(LEFT) is True


@pytest.mark.parametrize(
    "last",
    [
        part(more=False),
        {"type": "http.response.body"},
        {"type": "http.response.pathsend", "path": "/file"},
        {"type": "http.response.zerocopysend", "file": 3},
        {"type": "http.response.zerocopysend", "file": 3, "more_body": False},
    ],
)
def test_work_after_the_response_is_not_cancelled(last: dict[str, Any]) -> None:
    connection = request()
    connection.sends(start(204))
    connection.sends(last)
    assert (connection.state, connection.status) == (AsgiState.ANSWERED, 204)
    assert connection.received(LEFT) is False
    assert not connection.has_left


def test_file_may_be_part_of_a_response() -> None:
    connection = request()
    connection.sends(start())
    connection.sends(
        {"type": "http.response.zerocopysend", "file": 3, "more_body": True}
    )
    assert connection.state is AsgiState.ANSWERING
    assert connection.received(LEFT) is True


def test_read_ahead_is_limited() -> None:
    connection = request()
    assert connection.may_read
    connection.received(body(READ_AHEAD_BYTES_MAX - 1, more=True))
    assert connection.may_read
    connection.received(body(1, more=True))
    assert not connection.may_read
    connection.take()
    assert connection.may_read


def test_empty_messages_are_limited_too() -> None:
    connection = request()
    for _ in range(READ_AHEAD_MESSAGES_MAX):
        assert connection.may_read
        connection.received(body(more=True))
    assert not connection.may_read
    connection.take()
    assert connection.may_read


def test_disconnected_client_is_not_read() -> None:
    connection = request()
    connection.received(LEFT)
    assert not connection.may_read


def test_body_that_expects_continue_is_not_read_ahead() -> None:
    connection = request((b"expect", b"100-Continue"))
    assert not connection.may_read
    assert connection.asks() is True
    assert connection.may_read
    connection.asks_no_more()
    assert connection.asks() is False
    assert connection.may_read


def test_request_without_expect_is_read_unasked() -> None:
    assert request((b"expect", b"nothing")).asks() is False


# --- websockets ----------------------------------------------------------------------


def test_waiting_application_is_informed_and_not_cancelled() -> None:
    connection = websocket()
    connection.asks()
    assert connection.received(SOCKET_LEFT) is False
    assert connection.has_left
    assert connection.take() == SOCKET_LEFT


def test_working_application_is_cancelled() -> None:
    connection = websocket()
    connection.sends({"type": "websocket.accept"})
    assert connection.state is AsgiState.ACCEPTED
    connection.asks()
    connection.asks_no_more()
    assert connection.received(SOCKET_LEFT) is True


@pytest.mark.parametrize(
    "messages",
    [
        [{"type": "websocket.accept"}, {"type": "websocket.close"}],
        [{"type": "websocket.close"}],
        [
            {"type": "websocket.http.response.start", "status": 503},
            {"type": "websocket.http.response.body"},
        ],
    ],
)
def test_disconnect_after_a_closed_websocket_cancels_nothing(
    messages: list[dict[str, Any]],
) -> None:
    connection = websocket()
    for message in messages:
        connection.sends(message)
    assert connection.state is AsgiState.ANSWERED
    assert connection.received(SOCKET_LEFT) is False


@pytest.mark.parametrize(
    ("messages", "status", "code"),
    [
        ([], None, 1001),
        ([{"type": "websocket.accept"}], 101, 1001),
        ([{"type": "websocket.accept"}, {"type": "websocket.close"}], 101, 1000),
        (
            [{"type": "websocket.accept"}, {"type": "websocket.close", "code": 1013}],
            101,
            1013,
        ),
        ([{"type": "websocket.close", "code": 4504}], 403, 4504),
        ([{"type": "websocket.http.response.start", "status": 503}], 503, 1001),
    ],
)
def test_websocket_records_its_status_and_close_code(
    messages: list[dict[str, Any]], status: int | None, code: int
) -> None:
    """The first closure counts."""
    connection = websocket()
    for message in messages:
        connection.sends(message)
    connection.received(SOCKET_LEFT)
    assert (connection.close_code, connection.status) == (code, status)
    connection.sends({"type": "websocket.close", "code": 1002})  # too late
    assert connection.close_code == code


def test_client_close_without_a_code_is_1005() -> None:
    connection = websocket()
    connection.received({"type": "websocket.disconnect"})
    assert (connection.close_code, connection.status) == (1005, None)


def test_http_request_has_no_close_code() -> None:
    connection = AsgiConnection({"type": "http", "headers": []})
    connection.received({"type": "http.disconnect"})
    assert (connection.close_code, connection.status) == (None, None)


def test_websocket_messages_count_by_their_content() -> None:
    connection = websocket()
    connection.received({"type": "websocket.connect"})
    connection.received({"type": "websocket.receive", "text": None, "bytes": b"xx"})
    assert connection.may_read
    long = "x" * READ_AHEAD_BYTES_MAX
    connection.received({"type": "websocket.receive", "text": long, "bytes": None})
    assert not connection.may_read
    for _ in range(3):
        connection.take()
    assert connection.may_read


STARTED = {"type": "lifespan.startup.complete"}
FAILED = {"type": "lifespan.startup.failed", "message": "no"}
ENDED = {"type": "lifespan.shutdown.complete"}
END_FAILED = {"type": "lifespan.shutdown.failed", "message": "no"}


@pytest.mark.parametrize("last", [ENDED, END_FAILED])
def test_shutdown_is_held_back_until_the_worker_has_ended(last: dict[str, Any]) -> None:
    inner = InnerLifespan()
    assert inner.sends(STARTED) is True
    assert inner.sends(last) is False
    assert (inner.state, inner.last) == (LifespanState.ENDED, last)
    assert not inner.returned()


def test_failed_startup_is_reported_after_the_worker_has_ended() -> None:
    inner = InnerLifespan()
    assert inner.sends(FAILED) is False
    assert (inner.state, inner.last) == (LifespanState.FAILED, FAILED)
    assert not inner.returned()


def test_application_that_returns_after_startup_has_ended() -> None:
    inner = InnerLifespan()
    inner.sends(STARTED)
    assert not inner.returned()
    assert (inner.state, inner.last) == (LifespanState.ENDED, ENDED)


def test_application_without_a_lifespan_is_accepted() -> None:
    inner = InnerLifespan()
    assert inner.returned()
    assert inner.returned()  # it is asked again
    assert inner.last == ENDED


@pytest.mark.parametrize("message", [ENDED, {"type": "http.response.start"}])
def test_unexpected_message_is_left_to_the_server(message: dict[str, Any]) -> None:
    inner = InnerLifespan()
    assert inner.sends(message) is True
    assert inner.state is LifespanState.STARTING

"""Who may look: tokens, sessions, and their limits."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from asyncrpc.errors import UsageError
from asyncrpc.serving.dashboard.machine.sessions import (
    ADDRESSES_MAX,
    FAILURES_MAX,
    FAILURES_S,
    SESSION_S,
    SESSIONS_MAX,
    Attempts,
    Gate,
    Sessions,
    token_of,
)

SECRET = b"a secret of this test"
TOKEN = "a-token-of-this-test"


@pytest.fixture
def random_bytes() -> Callable[[int], bytes]:
    return random.Random(3).randbytes


def test_unused_session_expires(random_bytes: Callable[[int], bytes]) -> None:
    sessions = Sessions(random_bytes)
    key = sessions.open(0.0)
    assert sessions.use(key, SESSION_S)
    assert sessions.use(key, 2 * SESSION_S)
    assert not sessions.use(key, 3 * SESSION_S + 1)
    assert not sessions.use("", 0.0)
    assert len(sessions) == 0


def test_closed_session_is_unknown(random_bytes: Callable[[int], bytes]) -> None:
    sessions = Sessions(random_bytes)
    key = sessions.open(0.0)
    sessions.close(key)
    sessions.close(key)
    assert not sessions.use(key, 0.0)


def test_sessions_are_limited_and_the_longest_unused_ends(
    random_bytes: Callable[[int], bytes],
) -> None:
    sessions = Sessions(random_bytes)
    keys = [sessions.open(float(at)) for at in range(SESSIONS_MAX)]
    sessions.use(keys[0], 1000.0)
    sessions.open(1001.0)
    assert len(sessions) == SESSIONS_MAX
    assert sessions.use(keys[0], 1001.0)
    assert not sessions.use(keys[1], 1001.0)


def test_address_that_fails_often_must_wait() -> None:
    attempts = Attempts()
    for at in range(FAILURES_MAX):
        assert not attempts.wait_s("a", float(at))
        attempts.on_failure("a", float(at))
    now_s = float(FAILURES_MAX)
    assert attempts.wait_s("a", now_s) == FAILURES_S - now_s
    assert not attempts.wait_s("b", now_s)
    assert not attempts.wait_s("a", FAILURES_S)


def test_remembered_addresses_are_limited() -> None:
    attempts = Attempts()
    for _ in range(FAILURES_MAX):
        attempts.on_failure("first", 0.0)
    for number in range(ADDRESSES_MAX):
        attempts.on_failure(str(number), 1.0)
    assert not attempts.wait_s("first", 1.0)


@pytest.mark.parametrize(
    ("token", "secret", "takes"),
    [
        (None, None, "nothing"),
        (None, SECRET, "secret"),
        (TOKEN, None, "token"),
        (TOKEN, SECRET, "either"),
    ],
)
def test_gate_opens_for_its_token_and_secret_only(
    token: str | None, secret: bytes | None, takes: str
) -> None:
    gate = Gate(token=token, secret=secret)
    assert gate.takes == takes
    assert gate.is_token(TOKEN) is (token is not None)
    assert gate.is_token(token_of(TOKEN.encode())) is (token is not None)
    assert gate.is_token(token_of(SECRET)) is (secret is not None)
    for wrong in ("", "\ud800", SECRET.decode(), token_of(SECRET).upper()):
        assert not gate.is_token(wrong)


def test_ticket_is_valid_once() -> None:
    gate = Gate(token=None, secret=SECRET, ticket="ticket")
    for wrong in ("", "\ud800", "Ticket", SECRET.decode()):
        assert not gate.take_ticket(wrong)
    assert gate.takes == "secret"
    assert gate.take_ticket("ticket")
    assert not gate.take_ticket("ticket")
    assert not Gate(token=TOKEN, secret=None).take_ticket("")


def test_token_is_not_the_secret() -> None:
    with pytest.raises(UsageError, match="must not be the secret"):
        Gate(token=SECRET.decode(), secret=SECRET)

"""Who may look: proofs, nonces, sessions, and their limits."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from asyncrpc.errors import UsageError
from asyncrpc.serving.dashboard.machine.sessions import (
    ADDRESSES_MAX,
    FAILURES_MAX,
    FAILURES_S,
    NONCE_S,
    SESSION_S,
    SESSIONS_MAX,
    USED_MAX,
    Attempts,
    Gate,
    NonceMint,
    Sessions,
    proof_of,
)

SECRET = b"a secret of this test"
TOKEN = "a-token-of-this-test"


@pytest.fixture
def random_bytes() -> Callable[[int], bytes]:
    return random.Random(3).randbytes


def test_a_nonce_is_good_once_and_for_a_time(
    random_bytes: Callable[[int], bytes],
) -> None:
    mint = NonceMint(random_bytes)
    first, second = mint.make(0.0), mint.make(0.0)
    assert first != second
    assert mint.use(first, NONCE_S - 1)
    assert not mint.use(first, NONCE_S - 1)
    assert not mint.use(second, NONCE_S + 1)


def test_a_nonce_of_another_process_is_none(
    random_bytes: Callable[[int], bytes],
) -> None:
    mint, other = NonceMint(random_bytes), NonceMint(random_bytes)
    nonce = mint.make(0.0)
    assert not other.use(nonce, 0.0)
    for wrong in ("", "zz", nonce[:-2], nonce.upper(), f" {nonce}", "00" * 40):
        assert not mint.use(wrong, 0.0)
    assert mint.use(nonce, 0.0)


def test_used_nonces_are_forgotten_when_they_are_no_longer_good(
    random_bytes: Callable[[int], bytes],
) -> None:
    mint = NonceMint(random_bytes)
    used = [mint.use(mint.make(0.0), 0.0) for _ in range(USED_MAX + 1)]
    assert used == [True] * USED_MAX + [False]
    later_s = NONCE_S + 1
    assert mint.use(mint.make(later_s), later_s)


def test_a_session_ends_when_it_was_not_used_for_long(
    random_bytes: Callable[[int], bytes],
) -> None:
    sessions = Sessions(random_bytes)
    key = sessions.open(0.0)
    assert sessions.use(key, SESSION_S)
    assert sessions.use(key, 2 * SESSION_S)
    assert not sessions.use(key, 3 * SESSION_S + 1)
    assert not sessions.use("", 0.0)
    assert len(sessions) == 0


def test_a_session_that_is_closed_is_none(
    random_bytes: Callable[[int], bytes],
) -> None:
    sessions = Sessions(random_bytes)
    key = sessions.open(0.0)
    sessions.close(key)
    sessions.close(key)
    assert not sessions.use(key, 0.0)


def test_there_are_so_many_sessions_the_one_unused_for_longest_ends(
    random_bytes: Callable[[int], bytes],
) -> None:
    sessions = Sessions(random_bytes)
    keys = [sessions.open(float(at)) for at in range(SESSIONS_MAX)]
    sessions.use(keys[0], 1000.0)
    sessions.open(1001.0)
    assert len(sessions) == SESSIONS_MAX
    assert sessions.use(keys[0], 1001.0)
    assert not sessions.use(keys[1], 1001.0)


def test_an_address_that_fails_often_waits() -> None:
    attempts = Attempts()
    for at in range(FAILURES_MAX):
        assert not attempts.wait_s("a", float(at))
        attempts.on_failure("a", float(at))
    now_s = float(FAILURES_MAX)
    assert attempts.wait_s("a", now_s) == FAILURES_S - now_s
    assert not attempts.wait_s("b", now_s)
    assert not attempts.wait_s("a", FAILURES_S)


def test_addresses_are_remembered_within_a_limit() -> None:
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
def test_what_opens_the_gate(
    token: str | None, secret: bytes | None, takes: str
) -> None:
    gate = Gate(token=token, secret=secret)
    assert gate.takes == takes
    assert gate.is_token(TOKEN) is (token is not None)
    assert gate.is_proof("ab", proof_of(TOKEN.encode(), "ab")) is (token is not None)
    assert gate.is_proof("ab", proof_of(SECRET, "ab")) is (secret is not None)
    assert not gate.is_token(SECRET.decode())
    for wrong in ("", "\ud800", proof_of(SECRET, "cd")):
        assert not gate.is_proof("ab", wrong)
        assert not gate.is_token(wrong)


def test_a_ticket_is_good_once() -> None:
    gate = Gate(token=None, secret=SECRET, ticket="ticket")
    for wrong in ("", "\ud800", "Ticket", SECRET.decode()):
        assert not gate.take_ticket(wrong)
    assert gate.takes == "secret"
    assert gate.take_ticket("ticket")
    assert not gate.take_ticket("ticket")
    assert not Gate(token=TOKEN, secret=None).take_ticket("")


def test_the_token_is_not_the_secret() -> None:
    with pytest.raises(UsageError, match="must not be the secret"):
        Gate(token=SECRET.decode(), secret=SECRET)

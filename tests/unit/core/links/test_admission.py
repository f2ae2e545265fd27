"""Strangers are limited in number and time; a token lets in one worker for a while."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
from typing import Any

import pytest

from asyncrpc.core.counters import Counters
from asyncrpc.core.links.admission import Admission
from asyncrpc.core.links.tokens import TOKENS_MAX, Token, Tokens
from asyncrpc.core.transport.byte_stream import ByteStream
from asyncrpc.core.wire.frames import Hello
from asyncrpc.core.wire.handshake import TICKET_BYTES
from asyncrpc.errors import (
    AsyncRpcError,
    AuthenticationError,
    MalformedError,
    UsageError,
)
from asyncrpc.testing.loop import SimLoop
from asyncrpc.testing.network import Network
from tests.unit.core.links.directories import Host, run

loops = {"sim": SimLoop}  # of the coroutine tests here

HELLO = Hello("z", 1, -1, 1)


class Stranger:
    """A connection that does nothing by itself."""

    where = "somewhere"

    def __init__(self) -> None:
        self.opened: asyncio.Future[Hello] = asyncio.get_running_loop().create_future()
        self.has_proved = False
        self.reads = 0
        self.stream = ByteStream(asyncio.get_running_loop(), None)
        self.failed = ""

    def fail(self, error: AsyncRpcError) -> None:
        self.failed = str(error)
        if not self.opened.done():
            self.opened.set_exception(error)
            self.opened.exception()


def door(*, at_most: int = 2) -> tuple[Any, Counters]:
    host = Host(Network(1), "a", 1)
    identity: Any = host
    admission = Admission(
        identity, host.loop, host.counters, handshakes_max=at_most, timeout_s=5.0
    )
    return admission, host.counters


async def test_slow_stranger_is_dropped() -> None:
    admission, counters = door()
    stranger = Stranger()
    admission.admit(stranger)
    await asyncio.sleep(4.9)
    assert len(admission) == 1
    await asyncio.sleep(0.2)
    assert stranger.failed == "somewhere did not introduce itself in 5 s"
    assert counters.connections_dropped_unauthenticated == 1
    assert not len(admission)


async def test_introduced_stranger_leaves_the_waiting_list() -> None:
    admission, _ = door()
    stranger = Stranger()
    admission.admit(stranger)
    stranger.opened.set_result(HELLO)
    await asyncio.sleep(10.0)
    assert not stranger.failed
    assert not len(admission)


async def test_oldest_unproved_connection_is_dropped_when_too_many_wait() -> None:
    admission, _ = door()
    proved, unproved, newest = Stranger(), Stranger(), Stranger()
    proved.has_proved = True
    for stranger in (proved, unproved, newest):
        admission.admit(stranger)
    assert [bool(stranger.failed) for stranger in (proved, unproved, newest)] == [
        False,
        True,
        False,
    ]
    assert "see LimitOptions.handshakes_max" in unproved.failed


async def test_oldest_silent_connection_is_dropped_first() -> None:
    admission, _ = door(at_most=3)
    speaking, silent, newest = Stranger(), Stranger(), Stranger()
    speaking.reads = 1
    for stranger in (speaking, silent, newest, Stranger()):
        admission.admit(stranger)
    assert [bool(stranger.failed) for stranger in (speaking, silent, newest)] == [
        False,
        True,
        False,
    ]
    assert admission.make_room()
    assert newest.failed
    assert not speaking.failed


async def test_proved_connections_make_no_room() -> None:
    admission, _ = door()
    proved = Stranger()
    proved.has_proved = True
    admission.admit(proved)
    assert not admission.make_room()
    assert not proved.failed


def test_strangers_have_a_quarter_of_the_descriptors(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        admission, _ = door(at_most=256)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (12, hard))
        try:
            for _ in range(9):
                admission.admit(Stranger())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert len(admission) == 12 // 4

    with caplog.at_level(logging.WARNING, "asyncrpc"):
        run(main())
    assert len(caplog.records) == 1  # of six that were closed
    assert "only 3 of the 12 file descriptors" in caplog.text


async def test_newest_connection_is_dropped_if_all_others_have_proved() -> None:
    admission, _ = door(at_most=1)
    proved, newest = Stranger(), Stranger()
    proved.has_proved = True
    admission.admit(proved)
    admission.admit(newest)
    assert not proved.failed
    assert newest.failed


def test_refused_strangers_are_counted_and_logged_rarely(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        admission, counters = door(at_most=99)
        for error in (AuthenticationError("no"), MalformedError("what?")) * 3:
            stranger = Stranger()
            admission.admit(stranger)
            stranger.fail(error)
        await asyncio.sleep(0)
        assert counters.authentications_failed == counters.handshakes_refused == 3
        assert len(caplog.records) == 1
        await asyncio.sleep(2.0)
        stranger = Stranger()
        admission.admit(stranger)
        stranger.fail(AuthenticationError("no"))
        await asyncio.sleep(0)
        assert "(5 more before it)" in caplog.records[-1].getMessage()

    with caplog.at_level(logging.WARNING, "asyncrpc"):
        run(main())


def issued(tokens: Tokens, valid_s: float = 60.0, name: str = "") -> Token:
    return tokens.issue(asyncio.get_running_loop(), valid_s, name)


def test_token_travels_as_text_and_hides_its_key() -> None:
    token = Token(os.urandom(TICKET_BYTES), os.urandom(32))
    assert Token.parse(str(token)) == token
    assert token.key.hex() not in repr(token)
    assert str(token) not in repr(token)


@pytest.mark.parametrize("text", ["", "x", "asyncrpc-token-", "asyncrpc-token-ab!c"])
def test_malformed_token_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(UsageError, match="a token must be the text") as caught:
        Token.parse(text)
    assert text == "" or f"{text!r}" not in str(caught.value)


class TestIssuing:
    loops = {"sim": SimLoop}  # noqa: RUF012  (read once, by the conftest)

    async def test_token_expires_and_reports_it(self) -> None:
        tokens, ended = Tokens(os.urandom), []
        tokens.on_end = lambda ticket, why: ended.append((ticket, why))
        token = issued(tokens, valid_s=5.0)
        assert tokens.key_of(token.ticket) == token.key
        await asyncio.sleep(4.9)
        assert tokens.key_of(token.ticket) == token.key
        await asyncio.sleep(0.2)
        assert tokens.key_of(token.ticket) is None
        assert ended == [(token.ticket, "has expired")]
        assert not tokens.revoke(token)

    async def test_token_can_be_revoked_once(self) -> None:
        tokens = Tokens(os.urandom)
        token = issued(tokens)
        assert tokens.revoke(token)
        assert not tokens.revoke(token)
        assert tokens.key_of(token.ticket) is None
        assert tokens.refusal(token.ticket, "laptop") == "its token has ended"

    async def test_token_without_a_name_belongs_to_its_first_user(self) -> None:
        tokens = Tokens(os.urandom)
        token, named = issued(tokens), issued(tokens, name="laptop")
        assert tokens.refusal(token.ticket, "b") == ""
        assert tokens.refusal(token.ticket, "b") == ""
        assert "that of worker 'b'" in tokens.refusal(token.ticket, "c")
        assert "that of worker 'laptop'" in tokens.refusal(named.ticket, "c")
        tokens.close()

    async def test_tokens_are_limited(self) -> None:
        tokens = Tokens(os.urandom)
        all_of_them = [issued(tokens) for _ in range(TOKENS_MAX)]
        with pytest.raises(UsageError, match="revoke some"):
            issued(tokens)
        tokens.revoke(all_of_them[0])
        issued(tokens)
        tokens.close()

    async def test_guest_issues_no_token_and_knows_its_own(self) -> None:
        own = Token(os.urandom(TICKET_BYTES), os.urandom(32))
        tokens = Tokens(os.urandom, own)
        assert tokens.key_of(own.ticket) == own.key
        with pytest.raises(UsageError, match="cannot issue tokens"):
            issued(tokens)

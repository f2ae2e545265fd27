"""A token lets in one worker, for a while, at the member that issued it."""

from __future__ import annotations

import asyncio
import os

import pytest

from asyncrpc.core.links.tokens import TOKENS_MAX, Token, Tokens
from asyncrpc.core.wire.handshake import TICKET_BYTES
from asyncrpc.errors import UsageError
from asyncrpc.testing.loop import SimLoop


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

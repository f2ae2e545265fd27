"""Tokens: which workers may join from outside without the secret, and how long.

A token is an id and a key, both random, which one member has issued and which only that
member knows: it alone admits a worker that proves to know the key, and other members
need not be told when a token ends.  It ends with its time, when it is revoked, and
with the member.  The key never travels: it takes the place of the secret in the proofs
of the handshake.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from asyncrpc.core.arguments import check_duration, check_name, check_text
from asyncrpc.core.loop.loops import LoopGuard
from asyncrpc.core.wire.handshake import TICKET_BYTES
from asyncrpc.errors import UsageError

KEY_BYTES: Final = 32
TOKENS_MAX: Final = 1024  # that one member has issued and that have not ended
PREFIX: Final = "asyncrpc-token-"


@dataclass(frozen=True, slots=True, repr=False)
class Token:
    """The proof that its holder may join.

    Attributes:
        ticket: names it; sent in the clear.
        key: known to its issuer and its holder.
    """

    ticket: bytes
    key: bytes

    def __str__(self) -> str:
        packed = base64.urlsafe_b64encode(self.ticket + self.key)
        return PREFIX + packed.decode().rstrip("=")

    def __repr__(self) -> str:
        """Name it without its key."""
        return f"<Token {self.ticket.hex()}>"

    @classmethod
    def parse(cls, text: str) -> Token:
        """Read a token."""
        packed = text.removeprefix(PREFIX)
        try:
            raw = base64.b64decode(
                packed + "=" * (-len(packed) % 4), altchars=b"-_", validate=True
            )
        except (binascii.Error, ValueError):
            raw = b""
        if not text.startswith(PREFIX) or len(raw) != TICKET_BYTES + KEY_BYTES:
            raise UsageError(
                "a token must be the text that Worker.tokens.issue() returned on a "
                "member; this one (not shown here) is not"
            )
        return cls(raw[:TICKET_BYTES], raw[TICKET_BYTES:])


@dataclass(slots=True)
class _Issued:
    key: bytes
    name: str  # of the only worker that may use it; empty before its use
    timer: asyncio.TimerHandle


class Tokens:
    """The tokens that one worker has issued.

    Attributes:
        own: the token that this worker joined with; None: it joined without one.
        on_end: called with the ticket of a token that has ended, and why.
    """

    def __init__(
        self, random_bytes: Callable[[int], bytes], own: Token | None = None
    ) -> None:
        self.own = own
        self.on_end: Callable[[bytes, str], None] | None = None
        self._random_bytes = random_bytes
        self._issued: dict[bytes, _Issued] = {}

    def issue(
        self, loop: asyncio.AbstractEventLoop, valid_s: float, name: str
    ) -> Token:
        """Make a token that ends by itself."""
        if self.own is not None:
            raise UsageError(
                "a worker that joined with a token cannot issue tokens; ask a member "
                "inside"
            )
        if len(self._issued) >= TOKENS_MAX:
            raise UsageError(
                f"this worker has issued {TOKENS_MAX} tokens that have not ended; "
                "revoke some with Worker.tokens.revoke()"
            )
        token = Token(self._random_bytes(TICKET_BYTES), self._random_bytes(KEY_BYTES))
        timer = loop.call_later(valid_s, self._end, token.ticket, "has expired")
        self._issued[token.ticket] = _Issued(token.key, name, timer)
        return token

    def revoke(self, token: Token) -> bool:
        """End a token; return whether it was valid here."""
        return self._end(token.ticket, "was revoked")

    def _end(self, ticket: bytes, why: str) -> bool:
        issued = self._issued.pop(ticket, None)
        if issued is None:
            return False
        issued.timer.cancel()
        if self.on_end is not None:
            self.on_end(ticket, why)
        return True

    def key_of(self, ticket: bytes) -> bytes | None:
        """Return the key of a token that is valid; None if it is not."""
        if self.own is not None and ticket == self.own.ticket:
            return self.own.key  # of this worker's connections to itself
        issued = self._issued.get(ticket)
        return None if issued is None else issued.key

    def refusal(self, ticket: bytes, name: str) -> str:
        """Return why a worker may not use a token; empty if it may.

        A token that was issued without a name belongs to the first worker that uses it.
        """
        issued = self._issued.get(ticket)
        if issued is None:
            return "" if self.own is not None else "its token has ended"
        issued.name = issued.name or name
        if issued.name != name:
            return f"its token is that of worker {issued.name!r}"
        return ""

    def close(self) -> None:
        """Stop the timers."""
        for issued in self._issued.values():
            issued.timer.cancel()
        self._issued.clear()


class JoinTokens:
    """Tokens with which workers from outside join by one member; `Worker.tokens`."""

    __slots__ = ("_loop_guard", "_tokens")

    def __init__(self, tokens: Tokens, loop_guard: LoopGuard) -> None:
        self._tokens = tokens
        self._loop_guard = loop_guard

    def issue(self, *, valid_s: float, name: str | None = None) -> str:
        """Return a token with which one worker from outside can join by this member.

        The worker needs no secret: `Options(token=...)` and `join://host:port` of this
        member.  It need not be reachable: its connections go to this member's port
        alone, and this member passes them on.  It can do what any member can, so treat
        the token as you treat the secret.  When the token ends, so do the guest's
        connections; it also ends with this worker.

        Args:
            valid_s: seconds after which the token ends.
            name: of the only worker that may use it; None: the first worker that does.

        Raises:
            UsageError: an argument is of another kind; 1,024 tokens are valid; this
                worker joined with a token itself; or another event loop runs here.
            NotStartedError: this worker does not run.

        Example:
            >>> token = worker.tokens.issue(valid_s=3600, name="laptop")
        """
        self._loop_guard.check_on_loop("Worker.tokens.issue")
        check_duration("valid_s", valid_s)
        if name is not None:
            check_name("name", name)
        loop = asyncio.get_running_loop()
        return str(self._tokens.issue(loop, valid_s, name or ""))

    def revoke(self, token: str) -> bool:
        """End a token that this worker has issued, and the connections of its guest.

        Returns:
            Whether it was valid.

        Raises:
            UsageError: `token` is not a token, or another event loop runs here.
            NotStartedError: this worker does not run.
        """
        self._loop_guard.check_on_loop("Worker.tokens.revoke")
        check_text("token", token)
        return self._tokens.revoke(Token.parse(token))

"""Access to the dashboard: bearer tokens, sessions, and limits on both.

Whoever knows the secret of the group knows a token of it, `token_of(secret)`, from
which the secret cannot be learnt.  So the secret is never sent, neither by a browser
nor by a program.

A right token gives access at any time: wrong ones, whoever sends them from behind the
same proxy, are only counted, and told that they are too many.

Time and random bytes are passed in.
"""

from __future__ import annotations

import hmac
from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256
from typing import Final

from asyncrpc.errors import UsageError

SESSIONS_MAX: Final = 256
SESSION_S: Final = 12 * 3600.0  # since it was last used
FAILURES_MAX: Final = 10  # of one address in `FAILURES_S`
FAILURES_S: Final = 60.0
ADDRESSES_MAX: Final = 1024
PURPOSE: Final = b"asyncrpc dashboard"


def token_of(key: bytes) -> str:
    """Return the token of whoever knows a key: the secret, or the given token."""
    return hmac.new(key, PURPOSE, sha256).hexdigest()


class Attempts:
    """Counts failed attempts by address, within limits."""

    def __init__(self) -> None:
        self._failed: OrderedDict[str, list[float]] = OrderedDict()

    def wait_s(self, address: str, now_s: float) -> float:
        """Return the seconds after which an address may try again; 0: now."""
        recent = self._recent(address, now_s)
        if len(recent) < FAILURES_MAX:
            return 0.0
        return recent[0] + FAILURES_S - now_s

    def on_failure(self, address: str, now_s: float) -> None:
        """Count a failed attempt."""
        self._failed[address] = [*self._recent(address, now_s), now_s][-FAILURES_MAX:]
        self._failed.move_to_end(address)
        while len(self._failed) > ADDRESSES_MAX:
            self._failed.popitem(last=False)

    def _recent(self, address: str, now_s: float) -> list[float]:
        return [at for at in self._failed.get(address, ()) if at > now_s - FAILURES_S]


class Sessions:
    """The sessions of browsers that have signed in."""

    def __init__(self, random_bytes: Callable[[int], bytes]) -> None:
        self._random_bytes = random_bytes
        self._used_s: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of sessions, including expired ones."""
        return len(self._used_s)

    def open(self, now_s: float) -> str:
        """Begin a session; return its key.

        If there are too many, the least recently used one ends.
        """
        key = self._random_bytes(32).hex()
        if len(self._used_s) >= SESSIONS_MAX:
            self._used_s.popitem(last=False)
        self._used_s[key] = now_s
        return key

    def use(self, key: str, now_s: float) -> bool:
        """Return whether a session is open, and note that it is used."""
        used_s = self._used_s.get(key)
        if used_s is None:
            return False
        if used_s < now_s - SESSION_S:
            del self._used_s[key]
            return False
        self._used_s[key] = now_s
        self._used_s.move_to_end(key)
        return True

    def close(self, key: str) -> None:
        """End a session, if it exists."""
        self._used_s.pop(key, None)


class Gate:
    """Decides on access.

    Attributes:
        takes: what gives access: "nothing", "secret", "token" or "either".
    """

    def __init__(
        self, *, token: str | None, secret: bytes | None, ticket: str | None = None
    ) -> None:
        self._ticket = None if ticket is None else ticket.encode()
        token_bytes = None if token is None else token.encode()
        if token_bytes is not None and secret is not None:
            if hmac.compare_digest(token_bytes, secret):
                raise UsageError(
                    "token must not be the secret of the group, because programs send "
                    "it unencrypted; use secrets.token_urlsafe()"
                )
            self.takes = "either"
        elif token_bytes is not None:
            self.takes = "token"
        else:
            self.takes = "nothing" if secret is None else "secret"
        keys = [key for key in (token_bytes, secret) if key is not None]
        self._tokens = [token_of(key).encode() for key in keys]
        if token_bytes is not None:
            self._tokens.append(token_bytes)

    def is_token(self, text: str) -> bool:
        """Return whether this is a token, compared in constant time."""
        sent = text.encode(errors="replace")
        is_right = [hmac.compare_digest(token, sent) for token in self._tokens]
        return any(is_right)

    def take_ticket(self, ticket: str) -> bool:
        """Return whether this is the ticket, and invalidate it if it is."""
        if self._ticket is None:
            return False
        if not hmac.compare_digest(self._ticket, ticket.encode(errors="replace")):
            return False
        self._ticket = None
        return True

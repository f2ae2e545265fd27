"""Access to the dashboard: proofs, sessions, and limits on both.

A browser proves that it knows the secret of the group, or the token, without sending
it: by an HMAC over a nonce.  A nonce consists of its time of expiry, random bytes, and
an HMAC by a key of this process, so that unused nonces need no memory.  It is valid for
one right proof.

A right proof or token gives access at any time: wrong ones, whoever sends them from
behind the same proxy, are only counted, and told that they are too many.

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
NONCE_S: Final = 300.0
USED_MAX: Final = 4096  # nonces of right proofs in `NONCE_S`; then all are refused
FAILURES_MAX: Final = 10  # of one address in `FAILURES_S`
FAILURES_S: Final = 60.0
ADDRESSES_MAX: Final = 1024
PURPOSE: Final = b"asyncrpc dashboard "
_RANDOM_BYTES: Final = 16
_MAC_BYTES: Final = 16
_TIME_BYTES: Final = 8


def proof_of(key: bytes, nonce: str) -> str:
    """Return the proof of knowing a key.

    Args:
        key: the secret or the token.
        nonce: as it was issued, in hexadecimal digits; or any text of a client.
    """
    text = PURPOSE + nonce.encode(errors="replace")
    return hmac.new(key, text, sha256).hexdigest()


class NonceMint:
    """Makes nonces, and recognizes them."""

    def __init__(self, random_bytes: Callable[[int], bytes]) -> None:
        """Begin with a new key."""
        self._random_bytes = random_bytes
        self._key = random_bytes(32)
        self._used: dict[bytes, float] = {}

    def make(self, now_s: float) -> str:
        """Return a nonce that is valid for `NONCE_S`."""
        until_ms = int((now_s + NONCE_S) * 1000)
        body = until_ms.to_bytes(_TIME_BYTES, "big") + self._random_bytes(_RANDOM_BYTES)
        return (body + self._mac(body)).hex()

    def use(self, nonce: str, now_s: float) -> bool:
        """Return whether a nonce is valid, and invalidate it."""
        try:
            given = bytes.fromhex(nonce)
        except ValueError:
            return False
        body, mac = given[:-_MAC_BYTES], given[-_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(body)) or given.hex() != nonce:
            return False
        until_s = int.from_bytes(body[:_TIME_BYTES], "big") / 1000
        self._forget(now_s)
        if until_s < now_s or body in self._used or len(self._used) >= USED_MAX:
            return False
        self._used[body] = until_s
        return True

    def _forget(self, now_s: float) -> None:
        self._used = {body: end for body, end in self._used.items() if end >= now_s}

    def _mac(self, body: bytes) -> bytes:
        return hmac.new(self._key, body, sha256).digest()[:_MAC_BYTES]


class Attempts:
    """Counts failed attempts by address, within limits."""

    def __init__(self) -> None:
        """Begin without attempts."""
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
        """Begin with none."""
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
        """Describe the gate.

        Args:
            token: gives access, if there is one.
            secret: of the group, if it has one.
            ticket: gives access once, if there is one.

        Raises:
            UsageError: the token is the secret.
        """
        self._ticket = None if ticket is None else ticket.encode()
        self._token = None if token is None else token.encode()
        self._secret = secret
        if self._token is not None and secret is not None:
            if hmac.compare_digest(self._token, secret):
                raise UsageError(
                    "token must not be the secret of the group, because programs send "
                    "it unencrypted; use secrets.token_urlsafe()"
                )
            self.takes = "either"
        elif self._token is not None:
            self.takes = "token"
        else:
            self.takes = "nothing" if secret is None else "secret"

    def is_token(self, given: str) -> bool:
        """Return whether this is the token, compared in constant time."""
        if self._token is None:
            return False
        return hmac.compare_digest(self._token, given.encode(errors="replace"))

    def take_ticket(self, given: str) -> bool:
        """Return whether this is the ticket, and invalidate it if it is."""
        if self._ticket is None:
            return False
        if not hmac.compare_digest(self._ticket, given.encode(errors="replace")):
            return False
        self._ticket = None
        return True

    def is_proof(self, nonce: str, proof: str) -> bool:
        """Return whether this proves knowledge of the token or the secret."""
        given = proof.encode(errors="replace")
        keys = [one for one in (self._token, self._secret) if one is not None]
        found = [
            hmac.compare_digest(proof_of(key, nonce).encode(), given) for key in keys
        ]
        return any(found)

"""A token lets in who has it while it is valid, and nothing else does.

Whatever is changed, cut off, repeated or pretended on the way, the acceptor does not
believe the dialer, says so by one of the documented errors, and takes nothing more.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrpc.core.wire.frames import VERSION
from asyncrpc.core.wire.handshake import (
    NONCE_BYTES,
    PREFACE,
    PREFACE_MAGIC,
    PROOF_BYTES,
    REFUSAL,
    TICKET_BYTES,
    TOKEN_MODE,
    Handshake,
    HandshakeState,
    Role,
)
from asyncrpc.errors import (
    AsyncRpcError,
    AuthenticationError,
    MalformedError,
    VersionMismatchError,
)

TICKET: Final = b"t" * TICKET_BYTES
KEY: Final = b"k" * 32
SECRET: Final = b"the secret of the group"
DOCUMENTED: Final = (AuthenticationError, VersionMismatchError, MalformedError)
OPENING_BYTES: Final = PREFACE.size + TICKET_BYTES
Change = Callable[[bytes], bytes]


class End:
    """One end, fed with bytes as they come."""

    def __init__(self, machine: Handshake) -> None:
        self.machine = machine
        self.error: AsyncRpcError | None = None
        self._record = b""

    def take(self, piece: bytes) -> bytes:
        """Take bytes; return what is sent because of them."""
        sent = b""
        while piece and self.machine.wanted and self.error is None:
            missing = self.machine.wanted - len(self._record)
            self._record, piece = self._record + piece[:missing], piece[missing:]
            try:
                self.machine.check_beginning(self._record)
                if len(self._record) == self.machine.wanted:
                    record, self._record = self._record, b""
                    sent += self.machine.receive(record)
            except DOCUMENTED as error:
                self.error = error
                sent += self.machine.farewell
        return sent

    @property
    def has_proved(self) -> bool:
        return self.machine.state is HandshakeState.PROVED


def guest(
    *, ticket: bytes = TICKET, key: bytes | None = KEY, nonce: int = 1
) -> Handshake:
    return Handshake(Role.DIALER, key, bytes([nonce]) * NONCE_BYTES, ticket=ticket)


def gateway(
    valid: Mapping[bytes, bytes] | None = None,
    *,
    secret: bytes | None = SECRET,
    nonce: int = 2,
) -> Handshake:
    known = {TICKET: KEY} if valid is None else valid
    own = bytes([nonce]) * NONCE_BYTES
    return Handshake(Role.ACCEPTOR, secret, own, key_of=known.get)


def meet(
    dialer: Handshake, acceptor: Handshake, there: Change = bytes, back: Change = bytes
) -> tuple[End, End]:
    """Let two ends talk; the bytes of each direction are changed as one stream."""
    near, far = End(dialer), End(acceptor)
    sent = dialer.start()
    passed = {near: b"", far: b""}  # what each has been given
    answers = b""
    for _ in range(4):
        news = there(sent)[len(passed[far]) :]
        passed[far] += news
        answers += far.take(news)
        news = back(answers)[len(passed[near]) :]
        passed[near] += news
        sent += near.take(news)
    return near, far


def refused(end: End) -> None:
    """See that an end believes nothing and takes nothing more."""
    assert not end.has_proved
    if end.error is not None:
        assert end.machine.state is HandshakeState.FAILED
        assert end.machine.wanted == 0
        assert str(end.error)
        assert end.machine.farewell in (
            b"",
            REFUSAL,
            *(
                PREFACE.pack(PREFACE_MAGIC, VERSION, mode, 0, b"\2" * NONCE_BYTES)
                + more
                for mode in (0, 1, TOKEN_MODE)
                for more in (b"", REFUSAL)
            ),
        )


def test_valid_token_admits_a_guest() -> None:
    near, far = meet(guest(), gateway())
    assert near.has_proved
    assert far.has_proved
    assert far.machine.ticket == TICKET
    assert near.machine.token == far.machine.token


def flipped(place: int, bit: int) -> Change:
    def change(sent: bytes) -> bytes:
        changed = bytes(byte ^ bit for byte in sent[place : place + 1])
        return sent[:place] + changed + sent[place + 1 :]

    return change


@pytest.mark.parametrize("place", range(OPENING_BYTES + PROOF_BYTES))
@pytest.mark.parametrize("bit", [1, 0x80])
def test_changed_bit_of_a_guest_is_refused(place: int, bit: int) -> None:
    _near, far = meet(guest(), gateway(), there=flipped(place, bit))
    refused(far)
    assert type(far.error) in DOCUMENTED


@pytest.mark.parametrize("place", range(PREFACE.size + PROOF_BYTES))
@pytest.mark.parametrize("bit", [1, 0x80])
def test_changed_bit_of_a_gateway_is_refused(place: int, bit: int) -> None:
    near, far = meet(guest(), gateway(), back=flipped(place, bit))
    refused(near)
    if place < PREFACE.size:  # else it has rightly believed the guest
        refused(far)
    assert type(near.error) in DOCUMENTED


@pytest.mark.parametrize("length", range(OPENING_BYTES + PROOF_BYTES))
def test_truncated_handshake_admits_no_guest(length: int) -> None:
    _near, far = meet(guest(), gateway(), there=lambda sent: sent[:length])
    refused(far)
    assert far.error is None  # it waits, until its time is over
    assert far.machine.wanted


def test_replayed_handshake_is_refused() -> None:
    """Also at the same acceptor, whose nonce is another one."""
    heard = bytearray()

    def listen(sent: bytes) -> bytes:
        heard[:] = sent
        return sent

    _near, far = meet(guest(), gateway(), there=listen)
    assert far.has_proved
    again = End(gateway(nonce=3))
    again.take(bytes(heard))
    refused(again)
    assert type(again.error) is AuthenticationError
    assert "proof is wrong" in str(again.error)


@pytest.mark.parametrize("end", ["expired or revoked", "of another group"])
def test_invalid_token_is_named(end: str) -> None:
    valid = {} if end.startswith("expired") else {b"u" * TICKET_BYTES: KEY}
    near, far = meet(guest(), gateway(valid))
    refused(near)
    refused(far)
    assert type(near.error) is type(far.error) is AuthenticationError
    assert "the peer refused our token: it has expired, was revoked" in str(near.error)
    assert "the peer's token is not valid here: it has expired" in str(far.error)


def test_ticket_without_its_key_is_refused() -> None:
    near, far = meet(guest(key=b"another key"), gateway())
    refused(near)
    refused(far)
    assert "the peer refused our token" in str(near.error)
    assert "the peer's proof is wrong" in str(far.error)


@pytest.mark.parametrize("secret", [SECRET, None])
def test_mode_of_a_guest_cannot_be_changed(secret: bytes | None) -> None:
    """Neither to that of the secret nor to that of none, by whoever is in between."""
    for mode in (0, 1, 3, 255):

        def there(sent: bytes, mode: int = mode) -> bytes:
            # Without the ticket, too: as if it had never been a guest.
            changed = sent[:5] + bytes([mode]) + sent[6 : PREFACE.size]
            return changed + sent[OPENING_BYTES:]

        near, far = meet(guest(), gateway(secret=secret), there=there)
        refused(near)
        if mode or secret:
            refused(far)
        # Without a secret it believes whoever comes; the guest does not believe it.


@pytest.mark.parametrize("mode", [0, 1])
def test_gateway_cannot_be_made_to_look_tokenless(mode: int) -> None:
    """A guest goes on with nobody that does not know its key."""
    answer = PREFACE.pack(PREFACE_MAGIC, VERSION, mode, 0, b"\2" * NONCE_BYTES)
    for key in (b"", SECRET):
        near = End(guest())
        opening = near.machine.start()
        proof = hmac.digest(key, b"asyncrpc acceptor\0" + opening + answer, "sha256")
        assert near.take(answer + proof) == REFUSAL
        refused(near)
        assert "the peer does not accept tokens" in str(near.error)


def test_dialer_with_a_secret_refuses_a_gateway_that_wants_a_token() -> None:
    answer = PREFACE.pack(PREFACE_MAGIC, VERSION, TOKEN_MODE, 0, b"\2" * NONCE_BYTES)
    for key in (SECRET, None):
        near = End(guest(ticket=b"", key=key))
        near.machine.start()
        near.take(answer + bytes(PROOF_BYTES))
        refused(near)
        assert type(near.error) is AuthenticationError


@given(st.binary(min_size=1, max_size=200), st.integers(0, OPENING_BYTES + PROOF_BYTES))
def test_forged_handshake_is_refused(made_up: bytes, place: int) -> None:
    """Bytes that an attacker writes from some place on, whatever was before."""

    def there(sent: bytes) -> bytes:
        return sent[:place] + made_up if len(sent) >= place else sent

    expected, far_alone = End(guest()), End(gateway())
    opening = expected.machine.start()
    honest = opening + expected.take(far_alone.take(opening))
    _near, far = meet(guest(), gateway(), there=there)
    if not (honest[:place] + made_up).startswith(honest):
        refused(far)

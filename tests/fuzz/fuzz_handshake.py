"""The handshake: nobody gets in without secret or token, whatever they send and repeat.

Two honest ends talk over somebody who changes, drops, repeats and makes up bytes.  If
an end comes to believe that the other has proved itself, then each has received exactly
what the other sent, over the same channel, and they share the secret, or the token that
the dialer came with: one that is valid at the acceptor.
"""

from __future__ import annotations

from collections.abc import Iterator

from asyncrpc.core.wire.handshake import (
    NONCE_BYTES,
    PREFACE,
    PREFACE_MAGIC,
    REFUSAL,
    TICKET_BYTES,
    Handshake,
    HandshakeState,
    Role,
)
from asyncrpc.errors import AuthenticationError, RemoteProtocolError
from tests.fuzz.choices import Choices

SECRETS = (b"secret", b"other secret", None)
TICKETS = (b"1" * TICKET_BYTES, b"2" * TICKET_BYTES)
KEYS = dict(zip(TICKETS, (b"a key", b"another key"), strict=True))
BINDINGS = (b"", b"certificate", b"another certificate")


class End:
    """One honest end, what it received and what it sent."""

    def __init__(self, role: Role, choices: Choices) -> None:
        which = choices.below(len(SECRETS) + len(TICKETS))
        ticket = TICKETS[which - len(SECRETS)] if which >= len(SECRETS) else b""
        self.is_dialer = role is Role.DIALER
        secret: bytes | None
        if self.is_dialer and ticket:
            secret, valid = KEYS[ticket], {}
        else:  # at the acceptor the second one has ended
            secret, valid = (
                SECRETS[which % len(SECRETS)],
                {TICKETS[0]: KEYS[TICKETS[0]]},
            )
            ticket = b""
        self.binding = BINDINGS[choices.below(len(BINDINGS))]
        nonce = bytes([1 + (role is Role.ACCEPTOR)]) * NONCE_BYTES
        self.machine = Handshake(
            role, secret, nonce, self.binding, ticket=ticket, key_of=valid.get
        )
        self.secret = secret
        self.sent = self.machine.start()
        self.received = b""
        self.record = b""
        self.ended = False

    @property
    def shared(self) -> tuple[bytes, bytes | None]:
        """What the other end must have: a token by its ticket, or the secret."""
        ticket = self.machine.ticket
        return ticket, KEYS[ticket] if ticket else self.secret

    def take(self, piece: bytes) -> None:
        """Receive bytes as they come; none of them is more than is wanted."""
        while piece and self.machine.wanted and not self.ended:
            missing = self.machine.wanted - len(self.record)
            now, piece = piece[:missing], piece[missing:]
            self.received += now
            self.record += now
            try:
                self.machine.check_beginning(self.record)
                if len(now) == missing:
                    record, self.record = self.record, b""
                    self.sent += self.machine.receive(record)
            except (AuthenticationError, RemoteProtocolError):
                assert self.machine.state is HandshakeState.FAILED
                farewell = self.machine.farewell
                assert len(farewell) <= PREFACE.size + len(REFUSAL)
                self.sent += farewell
                self.ended = True
        assert len(self.sent) <= PREFACE.size + 2 * len(REFUSAL)


class World:
    """Two ends, and what has been passed on of what each has sent."""

    def __init__(self, choices: Choices) -> None:
        self.ends = [End(Role.DIALER, choices), End(Role.ACCEPTOR, choices)]
        self._passed = [0, 0]

    def step(self, choices: Choices) -> None:
        """Give one of the ends something, made of whatever has been sent."""
        who, how = divmod(choices.below(12), 6)
        end, other = self.ends[who], self.ends[1 - who]
        if how == 0:
            end.take(self._news(who))
        elif how == 1:  # some of it, perhaps once more
            start = choices.below(80)
            end.take(other.sent[start : start + choices.below(80)])
        elif how == 2:  # its own
            end.take(end.sent[choices.below(80) :])
        elif how == 3:  # with one bit changed
            piece = bytearray(self._news(who))
            if piece:
                piece[choices.below(256) % len(piece)] ^= 1 << choices.below(8)
            end.take(bytes(piece))
        elif how == 4:
            end.take(choices.take(1 + choices.below(72)))
        else:
            end.take((PREFACE_MAGIC, REFUSAL, bytes(32))[choices.below(3)])

    def _news(self, who: int) -> bytes:
        sent = self.ends[1 - who].sent
        begin, self._passed[who] = self._passed[who], len(sent)
        return sent[begin:]


def check(data: bytes) -> None:
    """Let two ends talk, over somebody who may do as they like."""
    choices = Choices(data)
    world = World(choices)
    while choices:
        world.step(choices)
    for end, other in (world.ends, world.ends[::-1]):
        if end.machine.state is HandshakeState.PROVED:
            assert (end.shared, end.binding) == (other.shared, other.binding)
            assert end.machine.ticket in (b"", TICKETS[0])  # the other has ended
            if end.shared[1]:
                assert other.sent.startswith(end.received)


def seeds() -> Iterator[bytes]:
    """Give talks that succeed, and one that is refused."""
    for secrets in (
        *(b"\0\0\0\0", b"\2\0\2\0", b"\0\1\0\1", b"\0\0\1\0", b"\0\1\0\2"),
        *(b"\3\0\0\0", b"\4\0\0\0", b"\3\1\2\1"),
    ):
        yield secrets + b"\6\0\6\0\6\0"
        yield secrets + b"\7\0\40\0\7\40\50\6\2\1\3\4\4"
        yield secrets + b"\2\0\10\0\4\20" + bytes(40)

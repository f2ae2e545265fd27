"""The handshake: both ends prove that they know the secret before anything is parsed.

    dialer                                   acceptor
      | -- preface: "ARPC" version mode nonce --> |
      | <------------------------------ preface -- |
      | -- proof of the dialer ------------------> |
      | -- HELLO frame --------------------------> |
      | <-------------- proof of the acceptor ---- |
      | <------------------------- HELLO frame --- |

A preface is 40 bytes, a proof 32: until the proofs have been checked nothing of
variable length is read, and nothing is interpreted.  The dialer proves itself first:
a stranger who dials gets nothing to test guesses of the secret against.  Its HELLO may
follow its proof at once, so a connection takes two round trips.

A proof is HMAC-SHA-256 under the
secret over a label that names the role, both prefaces, and the name of the channel
below (`binding`): it can neither be replayed, since both nonces are fresh, nor
reflected, since the roles differ, nor relayed from one TLS connection to another, since
their bindings differ.  Without a secret (mode 0: a private Unix socket, in-process, or
certificates at both ends) the key is empty, and the proofs only check that both ends
have the same prefaces and channel.

Sans-IO: bytes in, bytes out; nonces are passed in.

Source: RFC 2104 (HMAC); the challenge follows ISO/IEC 9798-4, three-pass mutual; the
binding is of the kind tls-server-end-point, RFC 5929.
"""

from __future__ import annotations

import enum
import hmac
import struct
from collections.abc import Callable
from typing import Final

from asyncrpc.core.wire.frames import VERSION
from asyncrpc.errors import (
    AsyncRpcError,
    AuthenticationError,
    LocalProtocolError,
    MalformedError,
    VersionMismatchError,
)

PREFACE: Final = struct.Struct("<4sBBH32s")
PREFACE_MAGIC: Final = b"ARPC"
NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
TICKET_BYTES: Final = 16
TOKEN_MODE: Final = 2  # of a dialer that has a token in place of the secret
REFUSAL: Final = b"\xff" * PROOF_BYTES  # in place of a proof: "your proof was wrong"
# How a TLS record begins: its type, a handshake or an alert.
_TLS_RECORDS: Final = (b"\x16", b"\x15")


class Role(enum.Enum):
    """Which end of a connection this is."""

    DIALER = "dialer"
    ACCEPTOR = "acceptor"


class HandshakeState(enum.Enum):
    """The state of the handshake."""

    PREFACE = "waits for the preface"
    TICKET = "waits for the dialer's ticket"
    PROOF = "waits for the proof"
    PROVED = "both ends have proved themselves"
    FAILED = "refused"


class Handshake:
    """One end of the handshake.

    Attributes:
        binding: the name of the channel, equal at both ends; empty without TLS.  May
            be set until the first record has been received.
        ticket: names the token that is used in place of the secret; empty without a
            token.
        introduces_at: the state from which on this end may send its HELLO.
    """

    def __init__(
        self,
        role: Role,
        secret: bytes | None,
        nonce: bytes,
        binding: bytes = b"",
        *,
        ticket: bytes = b"",
        key_of: Callable[[bytes], bytes | None] | None = None,
        is_cautious: bool = False,
    ) -> None:
        """Prepare one end.

        Args:
            secret: the cluster's secret; None where the transport vouches for the peer.
            binding: the name of the channel, equal at both ends; empty without TLS.
            key_of: of an acceptor: returns the key of a token by its ticket; None for
                a token that is not valid.
        """
        if len(nonce) != NONCE_BYTES:
            raise LocalProtocolError(f"a nonce must have {NONCE_BYTES} bytes")
        self.state = HandshakeState.PREFACE
        self.binding = binding
        self.role = role
        self._secret = secret or b""
        mode = TOKEN_MODE if ticket else 1 if secret else 0
        self._preface = PREFACE.pack(PREFACE_MAGIC, VERSION, mode, 0, nonce)
        self._key_of = key_of
        self.ticket = ticket
        self._peer_preface = b""
        self._farewell = b""
        is_early = role is Role.DIALER and not is_cautious
        self.introduces_at = HandshakeState.PROOF if is_early else HandshakeState.PROVED

    @property
    def wanted(self) -> int:
        """The number of bytes that the next `receive` takes; 0 after the handshake."""
        if self.state is HandshakeState.PREFACE:
            return PREFACE.size
        if self.state is HandshakeState.TICKET:
            return TICKET_BYTES
        return PROOF_BYTES if self.state is HandshakeState.PROOF else 0

    def start(self) -> bytes:
        """Return the bytes to send at the beginning."""
        return self._preface + self.ticket if self.role is Role.DIALER else b""

    def check_beginning(self, beginning: bytes | bytearray) -> None:
        """Refuse a stranger at the first byte that no worker would send."""
        known = bytes(beginning[: len(PREFACE_MAGIC)])
        if self.state is HandshakeState.PREFACE and not PREFACE_MAGIC.startswith(known):
            raise self._refuse_stranger(known)

    def receive(self, record: bytes) -> bytes:
        """Take `wanted` bytes; return the bytes to send."""
        if not self.wanted or len(record) != self.wanted:
            raise LocalProtocolError(
                f"{len(record)} bytes for a handshake that takes {self.wanted}: "
                f"{self.state.value}"
            )
        state, self.state = (
            self.state,
            HandshakeState.FAILED,
        )  # until the record proves good
        if state is HandshakeState.PREFACE:
            return self._on_preface(record)
        if state is HandshakeState.TICKET:
            return self._on_ticket(record)
        return self._on_proof(record)

    @property
    def token(self) -> int:
        """The number of this connection at both ends, after the proofs."""
        dialer = self._preface if self.role is Role.DIALER else self._peer_preface
        nonce = dialer[-NONCE_BYTES:]
        return int.from_bytes(nonce[:8], "little") | 1 << 63

    @property
    def farewell(self) -> bytes:
        """The bytes to send after an error, before closing, to inform the peer."""
        return self._farewell

    def _on_preface(self, record: bytes) -> bytes:
        magic, version, mode, _, nonce = PREFACE.unpack(record)
        if magic != PREFACE_MAGIC:
            raise self._refuse_stranger(magic)
        # A dialer cannot read a refusal before our preface.  The preface also tells it
        # the problem: the version, or the mode.
        unsent = self._preface if self.role is Role.ACCEPTOR else b""
        self._farewell = unsent + REFUSAL
        if version != VERSION:
            raise VersionMismatchError(
                f"the peer speaks version {version} of the protocol, we {VERSION}; "
                "install the same asyncrpc on every worker"
            )
        takes_ticket = mode == TOKEN_MODE and self.role is Role.ACCEPTOR
        if not takes_ticket:
            self._check_mode(mode)
        if nonce == self._preface[-NONCE_BYTES:]:
            raise AuthenticationError("the peer repeats our own nonce: a reflection")
        self._peer_preface = record
        if takes_ticket:
            self.state = HandshakeState.TICKET
            return b""
        self._farewell = REFUSAL
        self.state = HandshakeState.PROOF
        if self.role is Role.ACCEPTOR:
            return self._preface
        self._farewell = b""  # the peer reads a HELLO next, or has refused us
        return self._proof(Role.DIALER)

    def _on_ticket(self, record: bytes) -> bytes:
        """Go on with the key of a token, as if it were the secret."""
        nonce = self._preface[-NONCE_BYTES:]
        self._preface = PREFACE.pack(PREFACE_MAGIC, VERSION, TOKEN_MODE, 0, nonce)
        self._farewell = self._preface + REFUSAL
        key = None if self._key_of is None else self._key_of(record)
        if key is None:
            raise AuthenticationError(
                "the peer's token is not valid here: it has expired, was revoked, or "
                "another worker has issued it"
            )
        self.ticket, self._secret = record, key
        self._farewell = REFUSAL
        self.state = HandshakeState.PROOF
        return self._preface

    def _refuse_stranger(self, beginning: bytes) -> AsyncRpcError:
        self.state = HandshakeState.FAILED
        if beginning[:1] not in _TLS_RECORDS:
            return MalformedError(
                f"the peer is not an asyncrpc worker: its first bytes are {beginning!r}"
            )
        if self.role is Role.ACCEPTOR:
            self._farewell = self._preface  # TLS takes these bytes for "no TLS here"
        return AuthenticationError(
            "the peer speaks TLS and this worker does not; give both workers "
            "Options(tls=...), or neither"
        )

    def _check_mode(self, mode: int) -> None:
        if bool(mode) == bool(self._secret) and (mode == TOKEN_MODE) == bool(
            self.ticket
        ):
            return
        if self.ticket:
            raise AuthenticationError("the peer does not accept tokens")
        if self._secret:
            raise AuthenticationError(
                "the peer has no secret and this worker demands one; give it the same "
                "ASYNCRPC_SECRET or Options(secret=...)"
            )
        raise AuthenticationError(
            "the peer demands a secret and this worker has none; set ASYNCRPC_SECRET "
            "or Options(secret=...) to the cluster's"
        )

    def _on_proof(self, record: bytes) -> bytes:
        if record == REFUSAL:
            self._farewell = b""  # the peer knows already
            if self.role is Role.ACCEPTOR:
                raise AuthenticationError(
                    "the peer does not prove itself: it has refused our preface"
                )
            if self.ticket:
                raise AuthenticationError(
                    "the peer refused our token: it has expired, was revoked, or "
                    "another worker has issued it; or it was not copied whole: get a "
                    "new one from Worker.tokens.issue() of the worker at this address"
                )
            raise AuthenticationError(
                f"the peer refused our proof: {self._why_wrong()}"
            )
        other = Role.ACCEPTOR if self.role is Role.DIALER else Role.DIALER
        if not hmac.compare_digest(record, self._proof(other)):
            raise AuthenticationError(f"the peer's proof is wrong: {self._why_wrong()}")
        self.state = HandshakeState.PROVED
        return self._proof(Role.ACCEPTOR) if self.role is Role.ACCEPTOR else b""

    def _why_wrong(self) -> str:
        proxy = ""
        if self.binding:
            proxy = ", or a proxy between them terminates TLS with its own certificate"
        if self.ticket:
            return (
                f"the two workers have different keys for one token{proxy}; copy the "
                "token whole, as Worker.tokens.issue() returned it"
            )
        return (
            f"the two workers have different secrets{proxy}; "
            "give both the same ASYNCRPC_SECRET or Options(secret=...)"
        )

    def _proof(self, of: Role) -> bytes:
        dialer_first = (
            (self._preface, self._peer_preface)
            if self.role is Role.DIALER
            else (self._peer_preface, self._preface)
        )
        label = b"asyncrpc " + of.value.encode() + b"\0"
        # The prefaces have a fixed length, so no byte of the binding is taken for them.
        # So has the ticket: the modes in the prefaces say whether there is one.
        transcript = label + b"".join(dialer_first) + self.ticket + self.binding
        return hmac.digest(self._secret, transcript, "sha256")


class HandshakeReader:
    """Reads the records of a handshake from a stream, and answers them.

    Attributes:
        bytes_copied: always 0; a connection expects the attribute of its reader.
        message_bytes_copied: always 0.
    """

    bytes_copied = 0
    message_bytes_copied = 0

    def __init__(
        self,
        handshake: Handshake,
        on_record: Callable[[bytes], None],
    ) -> None:
        self._handshake = handshake
        self._on_record = on_record
        self._record = bytearray()
        self._place = memoryview(bytearray(max(PREFACE.size, PROOF_BYTES)))

    def get_buffer(self) -> memoryview:
        """Return the memory for the next bytes: only those of the present record."""
        return self._place[: self._handshake.wanted - len(self._record)]

    def advance(self, nbytes: int) -> None:
        """Take the bytes that have arrived."""
        self._record += self._place[:nbytes]
        if len(self._record) < self._handshake.wanted:
            self._handshake.check_beginning(self._record)
            return
        record, self._record = bytes(self._record), bytearray()
        self._on_record(self._handshake.receive(record))

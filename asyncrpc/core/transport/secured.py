"""TLS over a stream of bytes: a `Transport` between a handler and another transport.

It decides what is encrypted when, and who is let through.  It does not know sockets:
the transport below moves the bytes, and both end in the same way.

asyncio's own TLS is not used, for three reasons.  It drops the alert that tells a peer
why its certificate was refused, so one end would never know.  A server's handler does
not learn that a handshake failed.  And received bytes cannot be read before the handler
knows of the connection.

*   A refused certificate is an `AuthenticationError` at both ends, with advice.
*   A stream that ends without TLS's close alert was cut off: `ConnectionLostError`.
*   `channel_binding` names the accepting end's certificate.  The proofs of our own
handshake are made over it, and are worthless on another TLS connection.

What is copied.  Received: once into OpenSSL, once out of it, to where the handler wants
it.  Sent: encrypted at once, into a buffer that is then handed on.

Source: RFC 8446 (TLS 1.3).
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import ssl
from collections.abc import Sequence
from typing import Final

from asyncrpc.core.transport.abc import (
    Buffer,
    PeerCredentials,
    StreamHandler,
    Transport,
)
from asyncrpc.core.transport.flow import WaterMarks
from asyncrpc.core.transport.tls import TlsContexts, binding_of
from asyncrpc.errors import (
    AuthenticationError,
    ConnectError,
    ConnectionLostError,
    TransportError,
)

# Up to here buffers are joined into one record: each costs 2 us and 22 bytes.
_JOIN_BYTES_MAX: Final = 16 << 10
_HANDSHAKE_RECORD: Final = 0x16  # the first byte that a TLS peer sends
# A fatal alert, handshake_failure, for a peer that does not.
_ALERT: Final = b"\x15\x03\x03\x00\x02\x02\x28"
_BOTH: Final = "give both workers Options(tls=...), or neither"

# By OpenSSL's codes of verification: what is wrong, and what to do.
_VERIFY: Final = {
    9: ("is not valid yet", "set the clocks, or wait"),
    10: ("has expired", "issue a new one, or set the clocks if they are wrong"),
    62: ("is for another name", "issue one for it, or set Tls(server_hostname=...)"),
    64: ("is for another address", "issue one for it, or set Tls(server_hostname=...)"),
}
_UNKNOWN_ISSUER: Final = frozenset({2, 18, 19, 20, 21, 24, 25})
# By OpenSSL's reasons: what the peer's alert says of us.
_ALERTS: Final = {
    "TLSV1_ALERT_UNKNOWN_CA": "the authority that signed it is not one of the peer's",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "it has expired",
    "SSLV3_ALERT_CERTIFICATE_REVOKED": "it has been revoked",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "the peer does not accept it",
    "SSLV3_ALERT_BAD_CERTIFICATE": "it is for another name or not sound",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "it is of the wrong kind",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it has none",
    "TLSV1_ALERT_ACCESS_DENIED": "access is denied",
}
_NOT_TLS: Final = frozenset(
    {
        *("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST"),
        *("PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE"),
    }
)


class _TlsState(enum.Enum):
    HANDSHAKE = "certificates are exchanged"
    OPEN = "open"
    CLOSING = "this side has said goodbye, or has failed"
    CLOSED = "connection_lost has run"


HANDSHAKE, OPEN, CLOSING, CLOSED = _TlsState


class TlsTransport(Transport):
    """One TLS connection: the transport of `handler`, and the handler of another one.

    The accepting end learns of the connection at once, so that it can give it up while
    certificates are exchanged; the dialing end, when it may trust it (`established`).

    Attributes:
        established: at the dialing end: done when the peer's certificate is good.
    """

    def __init__(
        self, handler: StreamHandler, contexts: TlsContexts, host: str | None
    ) -> None:
        """Prepare one end.

        Args:
            host: the host that this end dials; None: this end accepts.
        """
        self._handler = handler
        self._contexts = contexts
        self._host = host
        self._state = HANDSHAKE
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls: ssl.SSLObject | None = None  # of a silent stranger, none is made
        self._inner: Transport | None = None
        self._early: list[bytes] = []  # sent before there was anything to send it with
        self._is_paused = False
        self._is_reading = False
        self._is_told = False  # the handler, of the connection
        self._failure: TransportError | None = None
        self._binding = contexts.binding if host is None else b""
        self.established: asyncio.Future[None] = (
            asyncio.get_running_loop().create_future()
        )

    # --- Transport -------------------------------------------------------------------

    @property
    def remote(self) -> str:
        """Where the other end is."""
        return self._inner.remote if self._inner is not None else ""

    @property
    def scheme(self) -> str:
        """The scheme of the transport below."""
        return self._inner.scheme if self._inner is not None else ""

    @property
    def credentials(self) -> PeerCredentials | None:
        """Return the credentials of the transport below."""
        return self._inner.credentials if self._inner is not None else None

    @property
    def has_begun(self) -> bool:
        """Return whether the peer has begun to shake hands."""
        return self._tls is not None

    @property
    def channel_binding(self) -> bytes:
        """Return a name of the accepting end's certificate, the same at both ends."""
        return self._binding

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Encrypt buffers and queue them, in order; see `Transport.send`."""
        if self._state is OPEN:
            self._encrypt(buffers)
            self._flush()
        elif self._state is HANDSHAKE:
            self._early.append(b"".join(buffers))

    @property
    def queued_bytes(self) -> int:
        """Bytes, encrypted, that the transport below still has."""
        early = sum(map(len, self._early))
        return early + (self._inner.queued_bytes if self._inner is not None else 0)

    def pause_reading(self) -> None:
        """Stop calling `get_buffer`; idempotent."""
        self._is_paused = True
        if self._inner is not None:
            self._inner.pause_reading()

    def resume_reading(self) -> None:
        """Undo `pause_reading`; idempotent."""
        if not self._is_paused:
            return
        self._is_paused = False
        if self._inner is not None:
            self._inner.resume_reading()
        asyncio.get_running_loop().call_soon(self._decrypt)  # what is here already

    def use_marks(self, marks: WaterMarks) -> None:
        """Hold back at other marks from now on; see `Transport.use_marks`."""
        if self._inner is not None:
            self._inner.use_marks(marks)

    def set_handler(self, handler: StreamHandler) -> None:
        """Give everything to another handler; see `Transport.set_handler`."""
        self._handler = handler

    def close(self) -> None:
        """Write what is queued, then end.  Idempotent."""
        if self._state in (HANDSHAKE, OPEN):
            if self._state is OPEN:
                self._say_goodbye()
            self._end()

    def abort(self) -> None:
        """End now and drop what is queued; the peer sees a reset.  Idempotent."""
        if self._state is not CLOSED and self._inner is not None:
            self._state = CLOSING
            self._inner.abort()

    # --- the handler of the transport below ------------------------------------------

    def connection_made(self, transport: Transport) -> None:
        """Begin the handshake."""
        self._inner = transport
        if self._host is None:
            self._tell()
        else:
            self._tls = self._contexts.dialing(
                self._incoming, self._outgoing, self._host
            )
            self._shake_hands()

    def get_buffer(self, _sizehint: int, /) -> memoryview:
        """Return where the next encrypted bytes land."""
        return self._contexts.landing

    def buffer_updated(self, nbytes: int, /) -> None:
        """Take the bytes that have arrived."""
        landed = self._contexts.landing[:nbytes]
        if self._state is HANDSHAKE:
            if self._tls is None:
                if landed[0] != _HANDSHAKE_RECORD:
                    self._refuse_plain()
                    return
                self._tls = self._contexts.accepting(self._incoming, self._outgoing)
            self._incoming.write(landed)
            self._shake_hands()
        elif self._state is OPEN:
            self._incoming.write(landed)
            self._decrypt()

    def connection_lost(self, error: TransportError | None, /) -> None:
        """Tell the handler, or the coroutine that waits for the handshake."""
        state, self._state = self._state, CLOSED
        failure = self._failure or error
        if failure is None and state in (HANDSHAKE, OPEN):
            failure = self._cut_off(state)
        self._early.clear()
        if self._is_told:
            self._handler.connection_lost(failure)
        elif not self.established.done():
            self.established.set_exception(
                failure or ConnectError(f"{self.remote} closed the connection")
            )
            self.established.exception()  # marks it as read

    def pause_writing(self) -> None:
        """Pass it on."""
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        """Pass it on."""
        self._handler.resume_writing()

    # --- the handshake ---------------------------------------------------------------

    def _shake_hands(self) -> None:
        tls = self._tls
        assert tls is not None
        try:
            tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return
        except ssl.SSLError as error:
            self._flush()  # the alert
            self._fail(_refusal(error, self.remote))
            return
        self._flush()
        self._state = OPEN
        if self._host is not None:
            self._binding = binding_of(tls.getpeercert(binary_form=True) or b"")
            self._tell()
            if not self.established.done():
                self.established.set_result(None)
        early, self._early = self._early, []
        if early:
            self.send(early)
        self._decrypt()

    def _tell(self) -> None:
        self._is_told = True
        self._handler.connection_made(self)

    def _refuse_plain(self) -> None:
        """Tell a stranger that does not speak TLS that this worker does."""
        if self._inner is not None:
            self._inner.send((_ALERT,))
        self._fail(
            AuthenticationError(
                f"{self.remote} does not speak TLS and this worker does; {_BOTH}"
            )
        )

    # --- bytes -----------------------------------------------------------------------

    def _encrypt(self, buffers: Sequence[Buffer]) -> None:
        if sum(map(len, buffers)) <= _JOIN_BYTES_MAX:
            buffers = (b"".join(buffers),)
        tls = self._tls
        assert tls is not None
        for buffer in buffers:
            view = memoryview(buffer)
            while view:
                view = view[tls.write(view) :]

    def _flush(self) -> None:
        if self._outgoing.pending and self._inner is not None:
            self._inner.send((self._outgoing.read(),))

    def _decrypt(self) -> None:
        """Give the handler what has been received, as far as it is whole records."""
        if self._is_reading:  # the handler has resumed reading within itself
            return
        self._is_reading = True
        try:
            while self._state is OPEN and not self._is_paused:
                if not self._decrypt_some():
                    break
        except ssl.SSLError as error:
            self._flush()
            self._fail(_breach(error, self.remote))
        finally:
            self._is_reading = False
        if self._state is OPEN:
            self._flush()  # the answer to a change of keys

    def _decrypt_some(self) -> bool:
        """Fill one buffer of the handler; return whether there may be more."""
        tls = self._tls
        assert tls is not None
        incoming = self._incoming
        if not incoming.pending and not tls.pending():
            return False
        view = memoryview(self._handler.get_buffer(-1))
        filled = 0
        is_ended = False
        try:
            while filled < len(view):
                # Its type says that bytes come back; with a buffer, it is their number.
                nbytes = int(tls.read(len(view) - filled, view[filled:]))
                if not nbytes:
                    is_ended = True
                    break
                filled += nbytes
                if not incoming.pending and not tls.pending():
                    break  # an exception that says so would cost 2 us
        except ssl.SSLWantReadError:
            pass
        if filled:
            self._handler.buffer_updated(filled)
        if is_ended:
            self.close()
        return bool(filled) and not is_ended

    # --- the end ---------------------------------------------------------------------

    def _say_goodbye(self) -> None:
        tls = self._tls
        assert tls is not None
        with contextlib.suppress(ssl.SSLError):  # the peer's own need not be here yet
            tls.unwrap()
        self._flush()

    def _end(self) -> None:
        self._state = CLOSING
        if self._inner is not None:
            self._inner.close()

    def _fail(self, error: TransportError) -> None:
        """End because of `error`, and let the peer read why."""
        self._failure = error
        self._end()

    def _cut_off(self, state: _TlsState) -> TransportError:
        if state is OPEN:
            return ConnectionLostError(
                f"the connection to {self.remote} was cut off: it ended without TLS's "
                "close alert"
            )
        return ConnectError(
            f"{self.remote} closed the connection while certificates were exchanged; "
            f"if it does not speak TLS, {_BOTH}"
        )


# --- errors --------------------------------------------------------------------------


def _refusal(error: ssl.SSLError, remote: str) -> AuthenticationError:
    """Return the error that says why there is no connection, and what to do."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return AuthenticationError(f"{remote}: {_unverified(error)}")
    reason = error.reason or ""
    if reason in _NOT_TLS:
        return AuthenticationError(
            f"{remote} does not speak TLS and this worker does; {_BOTH}"
        )
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return AuthenticationError(
            f"{remote} has no certificate and this worker demands one; give it "
            "Tls(certificate=...) signed by this worker's Tls.ca"
        )
    breach = _breach(error, remote)
    if isinstance(breach, AuthenticationError):
        return breach
    return AuthenticationError(
        f"{remote}: no TLS connection: {reason or error}; workers need TLS 1.3 and "
        "certificates of one authority"
    )


def _unverified(error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code in _UNKNOWN_ISSUER:
        return (
            "the peer's certificate is not signed by an authority of this worker "
            f"({error.verify_message}); give both the same Tls(ca=...)"
        )
    problem, advice = _VERIFY.get(
        error.verify_code,
        (f"is not good: {error.verify_message}", "issue a new one"),
    )
    return f"the peer's certificate {problem} ({error.verify_message}); {advice}"


def _breach(error: ssl.SSLError, remote: str) -> TransportError:
    """Translate an error that ends a connection which this side had accepted."""
    reason = _ALERTS.get(error.reason or "")
    if reason is not None:
        return AuthenticationError(
            f"{remote} refused this worker's certificate: {reason}; give this worker "
            "one of the peer's authority, valid now, for the name it is dialed by: "
            "Tls(certificate=...)"
        )
    return ConnectionLostError(
        f"the connection to {remote} broke: TLS: {error.reason or error}"
    )

"""TLS: which certificate a worker has, and which ones it accepts.

`secured` moves the bytes.  Here files are read, once for a worker, and whatever is
wrong with them is found before it listens.

Source: RFC 8446 (TLS 1.3); the binding is that of RFC 5929, section 4.1, with SHA-256
for every certificate.
"""

from __future__ import annotations

import hashlib
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from asyncrpc.core.arguments import check_flag, check_kind, check_text, wrong
from asyncrpc.errors import UsageError

# What one read takes at most, of all connections of a connector in turn.
LANDING_BYTES: Final = 256 << 10
_BEGIN: Final = "-----BEGIN CERTIFICATE-----"
_END: Final = "-----END CERTIFICATE-----"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """How a worker's TCP connections are encrypted, and which peers they let in.

    All workers that connect to each other need one.  Unix sockets stay as they are:
    the kernel vouches for both their ends.

    Attributes:
        certificate: path of this worker's certificate, PEM, followed by those of the
            authorities between it and `ca`, if any.  It serves at both ends.
        key: path of its private key, PEM; None: in the same file.
        ca: path of the certificates, PEM, of the authorities that must have signed
            peers' certificates.  None, only with `verify_peer=False`: those of the
            system.
        verify_peer: whether the dialing end needs a certificate as well.  If so,
            certificates authenticate both ends and no secret is needed; a secret that
            is set is checked as well.  If not, a worker needs a secret to listen.
        server_hostname: the name that the certificate of every peer must have.  None:
            the host, or IP address, at which it is dialed.
        server_context: used in place of one made from the above, where this worker
            accepts.  `certificate` must still be the one that it presents.
        client_context: the same where this worker dials.
    """

    certificate: str | Path
    key: str | Path | None = None
    ca: str | Path | None = None
    verify_peer: bool = True
    server_hostname: str | None = None
    server_context: ssl.SSLContext | None = None
    client_context: ssl.SSLContext | None = None

    def __post_init__(self) -> None:
        """Refuse arguments that contradict each other, or would let every peer in.

        Raises:
            UsageError: an argument is of another kind; or peers are to be verified, and
                `ca` does not say against which authorities.
        """
        _check_kinds(self)
        if self.verify_peer and self.ca is None and self.server_context is None:
            raise UsageError(
                "Tls(verify_peer=True) needs `ca`: without it a certificate of any "
                "public authority would do; give the path of your own authority's"
            )

    @property
    def vouches_for_peers(self) -> bool:
        """Internal: return whether a dialing end must present a checked certificate."""
        if self.server_context is not None:
            return self.server_context.verify_mode is ssl.CERT_REQUIRED
        return self.verify_peer


class TlsContexts:
    """The contexts that a worker makes from its `Tls`, once.

    Attributes:
        binding: names the certificate that this worker presents.
        landing: where received bytes land.  One for all connections: each has taken
            its bytes before another can read.
    """

    def __init__(self, tls: Tls) -> None:
        self.landing = memoryview(bytearray(LANDING_BYTES))
        self.binding = binding_of(_first_certificate(Path(tls.certificate)))
        self._server_hostname = tls.server_hostname
        self._server = tls.server_context or _server_context(tls)
        self._client = tls.client_context or _client_context(tls)

    def accepting(
        self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO
    ) -> ssl.SSLObject:
        """Return the accepting end of a TLS connection."""
        return self._server.wrap_bio(incoming, outgoing, server_side=True)

    def dialing(
        self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, host: str
    ) -> ssl.SSLObject:
        """Return the dialing end of a TLS connection to `host`."""
        name = self._server_hostname or host.partition("%")[0]
        return self._client.wrap_bio(incoming, outgoing, server_hostname=name)


def _check_kinds(tls: Tls) -> None:
    """Raise UsageError unless every field is of its kind."""
    _check_path("certificate", tls.certificate)
    for name in ("key", "ca"):
        if getattr(tls, name) is not None:
            _check_path(name, getattr(tls, name))
    check_flag("verify_peer", tls.verify_peer)
    if tls.server_hostname is not None:
        check_text("server_hostname", tls.server_hostname)
    kinds = (ssl.SSLContext, type(None))
    for name in ("server_context", "client_context"):
        check_kind(name, getattr(tls, name), kinds, "an ssl.SSLContext, or None")


def _check_path(name: str, path: object) -> None:
    if not isinstance(path, str | Path) or path == "":
        raise wrong(name, "the path of a file, as text or a Path", path)


# --- contexts ------------------------------------------------------------------------


def open_tls(tls: Tls | None) -> TlsContexts | None:
    """Read the files of a `Tls`, if there is one."""
    return None if tls is None else TlsContexts(tls)


def _server_context(tls: Tls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load(context, tls)
    if tls.verify_peer:
        context.verify_mode = ssl.CERT_REQUIRED
    # Sessions are never resumed, and a ticket after the end resets the connection.
    context.num_tickets = 0
    return context


def _client_context(tls: Tls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _load(context, tls)
    return context


def _load(context: ssl.SSLContext, tls: Tls) -> None:
    # Both ends are asyncrpc: no other software need be compatible.
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(tls.certificate, tls.key, password=_no_password)
    except OSError as error:  # SSLError is one
        raise UsageError(
            f"Tls: the certificate {str(tls.certificate)!r} and the key "
            f"{str(tls.key or tls.certificate)!r} cannot be used: {error}"
        ) from error
    if tls.ca is None:
        context.load_default_certs(
            ssl.Purpose.SERVER_AUTH
            if context.check_hostname
            else ssl.Purpose.CLIENT_AUTH
        )
        return
    try:
        context.load_verify_locations(tls.ca)
    except OSError as error:
        raise UsageError(
            f"Tls: the authorities' certificates {str(tls.ca)!r} cannot be used: "
            f"{error}"
        ) from error


def _no_password() -> NoReturn:
    # OpenSSL would ask at the terminal, and stop the loop until it gets an answer.
    raise UsageError(
        "Tls: the private key is encrypted; give the path of one that is not, readable "
        "by this worker's user alone, or contexts of your own"
    )


def _first_certificate(path: Path) -> bytes:
    """Return the certificate that a worker presents, without its armour."""
    try:
        text = path.read_text(encoding="ascii", errors="replace")
        begin = text.index(_BEGIN)
        end = text.index(_END, begin) + len(_END)
        return ssl.PEM_cert_to_DER_cert(text[begin:end])
    except (OSError, ValueError) as error:
        raise UsageError(
            f"Tls: the certificate {str(path)!r} cannot be read: {error}; it is a file "
            f"in PEM form, with {_BEGIN}"
        ) from error


def binding_of(certificate: bytes) -> bytes:
    """Return the name of a TLS connection: its accepting end's certificate."""
    return b"tls-server-end-point:" + hashlib.sha256(certificate).digest()

"""Certificates for tests: an authority, and workers' certificates that it signed."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import trustme

from asyncrpc import Tls

HOSTS = ("127.0.0.1", "::1", "localhost")


class Authority:
    """One authority, whose files lie in a folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._name = name
        self._authority = trustme.CA()
        self._issued = 0
        self.path = folder / f"{name}.pem"
        self._authority.cert_pem.write_to_path(self.path)

    def issue(
        self,
        *hosts: str,
        expired: bool = False,
        begun: dt.datetime | None = None,
        until: dt.datetime | None = None,
    ) -> Path:
        """Issue a certificate for hosts; return the file of it and of its key."""
        if expired:
            begun = dt.datetime(2000, 1, 1, tzinfo=dt.UTC)
            until = dt.datetime(2001, 1, 1, tzinfo=dt.UTC)
        issued = self._authority.issue_cert(
            *(hosts or HOSTS), not_before=begun, not_after=until
        )
        self._issued += 1
        path = self._folder / f"{self._name}-{self._issued}.pem"
        issued.private_key_and_cert_chain_pem.write_to_path(path)
        return path

    def tls(
        self,
        *hosts: str,
        expired: bool = False,
        begun: dt.datetime | None = None,
        until: dt.datetime | None = None,
        **more: object,
    ) -> Tls:
        """Return the options of a worker with a certificate of its own."""
        certificate = self.issue(*hosts, expired=expired, begun=begun, until=until)
        return Tls(certificate=certificate, ca=self.path, **more)  # type: ignore[arg-type]

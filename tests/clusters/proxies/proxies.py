"""A haproxy and an nginx of our own before two web workers: Debian's, on loopback."""

from __future__ import annotations

import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

from tests.clusters.hanging import HANGS_S
from tests.ports import free_port

POLL_S: Final = 0.05

# A worker is checked ten times a second, and gets no request after one answer of 503.
_HAPROXY: Final = """\
global
    log stdout format raw local0
defaults
    mode http
    timeout connect 60s
    timeout client 600s
    timeout server 600s
    timeout check 60s
frontend door
    bind 127.0.0.1:{port}
    stats enable
    stats uri /stats
    default_backend workers
backend workers
    option httpchk GET /readyz
    option redispatch
    retries 3
    default-server check inter 100ms fall 1 rise 1
    server front-0 127.0.0.1:{ports[0]}
    server front-1 127.0.0.1:{ports[1]}
"""

# It checks nothing; a worker that does not listen, or answers 503, is passed over.
_NGINX: Final = """\
daemon off;
master_process off;
pid {top}/pid;
error_log {top}/error.log;
events {{ }}
http {{
    access_log off;
    client_body_temp_path {top}/body;
    proxy_temp_path {top}/proxy;
    fastcgi_temp_path {top}/fastcgi;
    uwsgi_temp_path {top}/uwsgi;
    scgi_temp_path {top}/scgi;
    upstream workers {{
        server 127.0.0.1:{ports[0]} max_fails=0;
        server 127.0.0.1:{ports[1]} max_fails=0;
    }}
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://workers;
            proxy_next_upstream error timeout http_503;
            proxy_read_timeout 600s;
        }}
    }}
}}
"""


def missing_programs(*names: str) -> list[str]:
    """Return what this machine lacks; empty: the tests can run."""
    return [one for one in (*names, "setpriv") if shutil.which(one) is None]


def _read(url: str) -> tuple[int, str] | None:
    """Return a page and its status; None: there is no such page now."""
    try:
        with urllib.request.urlopen(url, timeout=HANGS_S) as found:  # noqa: S310
            return found.status, found.read().decode()
    except (OSError, urllib.error.URLError):
        return None


class FrontProxy:
    """One proxy; a context.

    Attributes:
        url: of it.
        checks: how often a worker that ends must have said so before it may end.
    """

    def __init__(self, kind: str, top: Path, ports: Sequence[int]) -> None:
        """Describe it.

        Args:
            kind: `haproxy` or `nginx`.
            top: a directory of its own.
            ports: of the two workers.
        """
        port = free_port()
        self.kind = kind
        self.url = f"http://127.0.0.1:{port}"
        self._top, self._ports = top, ports
        conf = top / f"{kind}.conf"
        template = _HAPROXY if kind == "haproxy" else _NGINX
        conf.write_text(template.format(top=top, port=port, ports=ports))
        if kind == "haproxy":
            self._command = ["haproxy", "-db", "-f", str(conf)]
            self.checks = 1
        else:
            self._command = ["nginx", "-e", f"{top}/error.log", "-c", str(conf)]
            self.checks = 0

    def __enter__(self) -> Self:
        with (self._top / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [*("setpriv", "--pdeathsig", "KILL"), *self._command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(HANGS_S)

    def wait_both_up(self) -> None:
        """Wait until it sends requests to both workers."""
        end_s = time.monotonic() + HANGS_S
        while not self._are_both_up():
            assert self._process.poll() is None, self.said()
            assert time.monotonic() < end_s, self.said()
            time.sleep(POLL_S)

    def _are_both_up(self) -> bool:
        if not all(_read(f"http://127.0.0.1:{port}/readyz") for port in self._ports):
            return False
        if self.kind != "haproxy":  # it asks whoever is there
            return True
        found = _read(f"{self.url}/stats;csv")
        rows = [line.split(",") for line in found[1].splitlines()] if found else []
        return [row[17] for row in rows if row[1].startswith("front-")] == ["UP", "UP"]

    def said(self) -> str:
        """Return what it has logged."""
        names = ("log", "error.log")
        paths = [self._top / name for name in names]
        return "".join(one.read_text() for one in paths if one.exists())

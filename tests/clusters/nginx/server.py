"""An nginx of our own before a dashboard: Debian's, on loopback, started by hand."""

from __future__ import annotations

import shutil
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Final, Self

from tests.clusters.hanging import HANGS_S
from tests.ports import free_port

PROGRAMS: Final = ("nginx", "setpriv")
POLL_S: Final = 0.05

# Nothing but `proxy_pass`, as somebody writes it who has read how to mount a path: that
# events come at once is the dashboard's doing.
_CONF: Final = """\
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
    server {{
        listen 127.0.0.1:{port};
        location = /up {{ return 204; }}
        # It strips its prefix: the dashboard is at the root there.
        location /stripped/ {{ proxy_pass http://127.0.0.1:{bare}/; }}
        # It adds one: the dashboard is in an application, below its own path.
        location /added/ {{ proxy_pass http://127.0.0.1:{mounted}/deep/inside/; }}
        # It passes on what it gets.
        location /deep/ {{
            proxy_pass http://127.0.0.1:{mounted};
            proxy_http_version 1.1;
            proxy_set_header Host $host;
            proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
            proxy_set_header X-Forwarded-Proto $scheme;
        }}
    }}
}}
"""


def missing_programs() -> list[str]:
    """Return what this machine lacks; empty: the tests can run."""
    return [one for one in PROGRAMS if shutil.which(one) is None]


class Nginx:
    """One server; a context.

    Attributes:
        url: of it.
    """

    def __init__(self, top: Path, *, bare: int, mounted: int) -> None:
        """Describe it.

        Args:
            top: a directory of its own.
            bare: port of a dashboard at the root.
            mounted: port of an application with a dashboard at /deep/inside.
        """
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._top = top
        conf = _CONF.format(top=top, port=port, bare=bare, mounted=mounted)
        (top / "nginx.conf").write_text(conf)

    def __enter__(self) -> Self:
        with (self._top / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "KILL", "nginx"),
                    *("-e", f"{self._top}/error.log", "-c", f"{self._top}/nginx.conf"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        end_s = time.monotonic() + HANGS_S
        while not self._is_up():
            assert self._process.poll() is None, self._said()
            assert time.monotonic() < end_s, self._said()
            time.sleep(POLL_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(HANGS_S)

    def _is_up(self) -> bool:
        try:
            url = f"{self.url}/up"
            with urllib.request.urlopen(url, timeout=HANGS_S) as answer:  # noqa: S310
                return bool(answer.status == 204)
        except (OSError, urllib.error.URLError):
            return False

    def _said(self) -> str:
        names = ("log", "error.log")
        paths = [self._top / name for name in names]
        return "".join(one.read_text() for one in paths if one.exists())

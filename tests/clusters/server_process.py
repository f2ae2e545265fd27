"""A server as a process of our own: Debian's, on loopback, started by hand."""

from __future__ import annotations

import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Self

from tests.clusters.hanging import HANGS_S

POLL_S: Final = 0.05

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
{http}}}
"""


def missing_programs(*names: str) -> list[str]:
    """Return what this machine lacks; empty: the tests can run."""
    return [program for program in (*names, "setpriv") if shutil.which(program) is None]


def nginx_command(top: Path, http: str) -> list[str]:
    """Return what starts an nginx."""
    conf = top / "nginx.conf"
    conf.write_text(_NGINX.format(top=top, http=http))
    return ["nginx", "-e", f"{top}/error.log", "-c", str(conf)]


def page_of(url: str) -> tuple[int, str] | None:
    """Return the status and the text of a page; None: there is no such page now."""
    try:
        with urllib.request.urlopen(url, timeout=HANGS_S) as answer:  # noqa: S310
            return answer.status, answer.read().decode()
    except (OSError, urllib.error.URLError):
        return None


class ServerProcess:
    """The process of one server; a context."""

    def __init__(self, command: Sequence[str], top: Path) -> None:
        self._command, self._top = command, top

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

    def wait_until(self, condition: Callable[[], Any], what: str = "") -> Any:
        """Look until a condition holds, and return what it has returned."""
        end_s = time.monotonic() + HANGS_S
        while not (value := condition()):
            assert self._process.poll() is None, self.said()
            late = f"not within {HANGS_S} s: {what}\n{self.said()}"
            assert time.monotonic() < end_s, late
            time.sleep(POLL_S)
        return value

    def said(self) -> str:
        """Return the end of what it has logged."""
        paths = [self._top / name for name in ("log", "error.log")]
        return "".join(path.read_text()[-4000:] for path in paths if path.exists())

"""A Prometheus of our own, that scrapes workers on loopback: real, started by hand."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Self

from tests.clusters.hanging import HANGS_S
from tests.ports import free_port

PROGRAMS: Final = ("prometheus", "promtool", "setpriv")
POLL_S: Final = 0.1  # it tells nobody when it has scraped

_CONF: Final = """\
global:
  scrape_interval: 250ms
  scrape_timeout: 250ms
scrape_configs:
  - job_name: workers
    static_configs:
      - targets: {targets}
"""


def missing_programs() -> list[str]:
    """Return what this machine lacks; empty: the tests can run."""
    return [one for one in PROGRAMS if shutil.which(one) is None]


class Prometheus:
    """One server; a context.  What it keeps is in a directory of the test."""

    def __init__(self, top: Path, ports: Sequence[int]) -> None:
        self._top = top
        self._port = free_port()
        self._ports = ports
        targets = json.dumps([f"127.0.0.1:{port}" for port in ports])
        (top / "prometheus.yml").write_text(_CONF.format(targets=targets))

    def __enter__(self) -> Self:
        with (self._top / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "KILL", "prometheus"),
                    f"--config.file={self._top / 'prometheus.yml'}",
                    f"--storage.tsdb.path={self._top / 'kept'}",
                    f"--web.listen-address=127.0.0.1:{self._port}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(HANGS_S)

    def asked(self, path: str, **query: str) -> Any:
        """Return what its API answers; None while it does not answer."""
        words = f"?{urllib.parse.urlencode(query)}" if query else ""
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}{words}"
        try:
            with urllib.request.urlopen(url, timeout=HANGS_S) as answer:
                found = json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code == 503:  # it starts
                return None
            raise AssertionError(f"{path} {query}: {error.read()!r}") from error
        except OSError:
            return None
        assert found["status"] == "success", found
        return found["data"]

    def wait_for(self, condition: Callable[[], Any], what: str) -> Any:
        """Wait until a condition holds, and return what it has returned."""
        end_s = time.monotonic() + HANGS_S
        while not (found := condition()):
            assert self._process.poll() is None, self.log()
            if time.monotonic() > end_s:
                raise AssertionError(f"not within {HANGS_S} s: {what}\n{self.log()}")
            time.sleep(POLL_S)
        return found

    def wait_scraped(self) -> None:
        """Wait until all targets are up."""

        def are_up() -> bool:
            found = (self.asked("targets") or {}).get("activeTargets", [])
            return [one["health"] for one in found] == ["up"] * len(self._ports)

        self.wait_for(are_up, "all targets are up")

    def query(self, words: str) -> list[Any]:
        """Return the result of a query now."""
        found: list[Any] = (self.asked("query", query=words) or {"result": []})[
            "result"
        ]
        return found

    def log(self) -> str:
        """Return the end of its log."""
        return (self._top / "log").read_text()[-4000:]

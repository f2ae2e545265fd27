"""A Prometheus of our own, that scrapes workers on loopback: real, started by hand."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

from tests.clusters.hanging import HANGS_S
from tests.clusters.server_process import ServerProcess
from tests.ports import free_port

PROGRAMS: Final = ("prometheus", "promtool")

_CONF: Final = """\
global:
  scrape_interval: 250ms
  scrape_timeout: 250ms
scrape_configs:
  - job_name: workers
    static_configs:
      - targets: {targets}
"""


class Prometheus:
    """One server; a context.  What it keeps is in a directory of the test."""

    def __init__(self, top: Path, ports: Sequence[int]) -> None:
        self._port = free_port()
        self._ports = ports
        targets = json.dumps([f"127.0.0.1:{port}" for port in ports])
        (top / "prometheus.yml").write_text(_CONF.format(targets=targets))
        command = [
            "prometheus",
            f"--config.file={top / 'prometheus.yml'}",
            f"--storage.tsdb.path={top / 'kept'}",
            f"--web.listen-address=127.0.0.1:{self._port}",
        ]
        self._process = ServerProcess(command, top)
        self.wait_until = self._process.wait_until

    def __enter__(self) -> Self:
        self._process.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.__exit__()

    def asked(self, path: str, **query: str) -> Any:
        """Return what its API answers; None while it does not answer."""
        words = f"?{urllib.parse.urlencode(query)}" if query else ""
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}{words}"
        try:
            with urllib.request.urlopen(url, timeout=HANGS_S) as answer:
                reply = json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code == 503:  # it starts
                return None
            raise AssertionError(f"{path} {query}: {error.read()!r}") from error
        except OSError:
            return None
        assert reply["status"] == "success", reply
        return reply["data"]

    def wait_scraped(self) -> None:
        """Wait until all targets are up."""

        def are_up() -> bool:
            value = (self.asked("targets") or {}).get("activeTargets", [])
            return [target["health"] for target in value] == ["up"] * len(self._ports)

        self.wait_until(are_up, "all targets are up")

    def query(self, words: str) -> list[Any]:
        """Return the result of a query now."""
        result: list[Any] = (self.asked("query", query=words) or {"result": []})[
            "result"
        ]
        return result

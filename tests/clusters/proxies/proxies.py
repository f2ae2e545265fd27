"""A haproxy and an nginx before two web workers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

from tests.clusters.server_process import ServerProcess, nginx_command, page_of
from tests.ports import free_port

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
"""


class FrontProxy:
    """One proxy; a context."""

    def __init__(self, kind: str, top: Path, ports: Sequence[int]) -> None:
        """Describe it.

        Args:
            kind: `haproxy` or `nginx`.
        """
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"  # of it
        self._kind, self._ports = kind, ports
        # How often a worker that ends must have said so before it may end.
        self.checks = 1 if kind == "haproxy" else 0
        if kind == "haproxy":
            conf = top / "haproxy.conf"
            conf.write_text(_HAPROXY.format(port=port, ports=ports))
            command = ["haproxy", "-db", "-f", str(conf)]
        else:
            command = nginx_command(top, _NGINX.format(port=port, ports=ports))
        self._process = ServerProcess(command, top)
        self.said = self._process.said

    def __enter__(self) -> Self:
        self._process.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.__exit__()

    def wait_both_up(self) -> None:
        self._process.wait_until(self._are_both_up)

    def _are_both_up(self) -> bool:
        if not all(page_of(f"http://127.0.0.1:{port}/readyz") for port in self._ports):
            return False
        if self._kind != "haproxy":  # it asks whoever is there
            return True
        page = page_of(f"{self.url}/stats;csv")
        rows = [line.split(",") for line in page[1].splitlines()] if page else []
        return [row[17] for row in rows if row[1].startswith("front-")] == ["UP", "UP"]

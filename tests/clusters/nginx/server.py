"""An nginx before a dashboard."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Self

from tests.clusters.server_process import ServerProcess, nginx_command, page_of
from tests.ports import free_port

# Nothing but `proxy_pass`, as somebody writes it who has read how to mount a path: that
# events come at once is the dashboard's doing.
_HTTP: Final = """\
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
"""


class Nginx:
    """One server; a context."""

    def __init__(self, top: Path, *, bare: int, mounted: int) -> None:
        """Describe it."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"  # of it
        http = _HTTP.format(port=port, bare=bare, mounted=mounted)
        self._process = ServerProcess(nginx_command(top, http), top)

    def __enter__(self) -> Self:
        self._process.__enter__()
        self._process.wait_until(lambda: page_of(f"{self.url}/up") == (204, ""))
        return self

    def __exit__(self, *_: object) -> None:
        self._process.__exit__()

"""Servers as they are started by hand: their web workers share, launch and end.

Some start web workers that are daemonic, some fork them after the import of torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

from tests.integration.serving.doors.test_granian import listens
from tests.ports import free_port

APP: Final = "tests.integration.serving.doors.server_app"
TWO: Final = ("--workers", "2")
GUNICORN: Final = ("gunicorn", "-w", "2", "--timeout", "120", "-b", "127.0.0.1:{port}")
UVICORN_WORKER: Final = (*GUNICORN, "-k", "uvicorn_worker.UvicornWorker")
HYPERCORN: Final = ("hypercorn", f"{APP}:app", *TWO, "-b", "127.0.0.1:{port}")
GRANIAN: Final = (
    *("granian", f"{APP}:app", "--interface", "asgi", "--port", "{port}"),
    *("--workers-kill-timeout", "60"),
)
COMMANDS: Final = {
    "uvicorn": ("uvicorn", f"{APP}:app", "--port", "{port}"),
    "uvicorn, two": (
        *("uvicorn", f"{APP}:app", "--port", "{port}", *TWO),
        *("--timeout-worker-healthcheck", "120"),
    ),
    "gunicorn": (*UVICORN_WORKER, f"{APP}:app"),
    "gunicorn, preloaded": (*UVICORN_WORKER, "--preload", f"{APP}:app"),
    "gunicorn, aiohttp": (
        *(*GUNICORN, "-k", "aiohttp.GunicornWebWorker"),
        f"{APP}:make_for_gunicorn",
    ),
    "hypercorn": HYPERCORN,
    "hypercorn, uvloop": (*HYPERCORN, "--worker-class", "uvloop"),
    "granian": (*GRANIAN, *TWO),
    "granian, threads": (*GRANIAN, "--runtime-mode", "mt", "--runtime-threads", "2"),
    "aiohttp": ("aiohttp.web", "-P", "{port}", f"{APP}:make_aiohttp"),
}


async def ask(port: int, server: subprocess.Popen[bytes]) -> dict[str, Any]:
    await listens(port, lambda: server.poll() is None)
    async with (
        aiohttp.ClientSession() as client,
        client.get(f"http://127.0.0.1:{port}/work") as response,
    ):
        report: dict[str, Any] = await response.json()
    return report


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_web_worker_shares_launches_and_cleans_up(name: str, tmp_path: Path) -> None:
    port = free_port()
    command = [part.format(port=port) for part in COMMANDS[name]]
    written = tmp_path / "written"
    with written.open("w") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=Path(__file__).parents[4],
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
    try:
        report = asyncio.run(ask(port, server))
        assert report["shared"] == [1.0, 2.0]
        assert len(set(report["pids"])) == 3
        server.terminate()
        status = server.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    text = written.read_text()
    assert status in (0, -signal.SIGTERM), text
    assert "Traceback" not in text
    assert not [pid for pid in report["pids"] if is_there(pid)], text

"""Web workers of real servers, killed and reloaded, that share one model.

uvicorn starts a new interpreter for each; `gunicorn --preload` forks them from a
process that has imported the application, and torch with it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.integration.serving.model_host.conftest import end_all, lines_of
from tests.integration.serving.model_host.models import COUNTS, FOLDER
from tests.ports import free_port

WORKERS: Final = 2
ANSWER_S: Final = 300.0  # only a hang takes it
READY: Final = "Application startup complete."
APP: Final = "tests.integration.serving.model_host.asgi_app:app"


def _uvicorn(port: int) -> list[str]:
    options = ["--port", str(port), "--timeout-worker-healthcheck", "120"]
    return ["uvicorn", APP, "--workers", str(WORKERS), *options]


def _gunicorn(port: int) -> list[str]:
    worker = ["-k", "uvicorn_worker.UvicornWorker", "--preload", "--timeout", "120"]
    return ["gunicorn", APP, "-w", str(WORKERS), "-b", f"127.0.0.1:{port}", *worker]


class Server:
    """A server that runs, and what it writes."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process = process
        self.port = port

    def until(self, text: str, count: int) -> None:
        """Return once the server has written a text so often since the last call."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            count -= text in line
            if not count:
                return
        raise AssertionError(f"the server ended and did not write {text!r}")

    def get(self) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.port}/"
        with urllib.request.urlopen(url, timeout=ANSWER_S) as answer:
            reply: dict[str, Any] = json.load(answer)
        return reply

    def get_until(self, attached: int, webs: int) -> list[dict[str, Any]]:
        """Ask until so many are attached, and so many web workers have answered."""
        answers: dict[int, dict[str, Any]] = {}
        while True:
            answer = self.get()
            if answer["inside"]["attached"] == attached:
                answers[answer["web"]] = answer
            if len(answers) >= webs:
                return list(answers.values())


@pytest.fixture(params=[_uvicorn, _gunicorn], ids=["uvicorn", "gunicorn"])
def server(folder: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    port = free_port()
    environ = os.environ | {
        "ASYNCRPC_RUN_DIR": str(folder / "runs"),
        FOLDER: str(folder),
        "PYTHONUNBUFFERED": "1",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", *request.param(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environ,
        cwd=Path(__file__).parents[4],
        start_new_session=True,
    )
    with process:
        running = Server(process, port)
        try:
            running.until(READY, WORKERS)
            yield running
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait(ANSWER_S)  # else a web worker starts the model again
            end_all(folder)
            assert process.stdout is not None
            process.stdout.read()  # until the model's process has ended, too


def _counts_of(answer: dict[str, Any]) -> list[int]:
    """Return what the model's process holds, but for memory."""
    return [answer["inside"][name] for name in COUNTS]


@pytest.mark.slow
def test_web_workers_share_a_model_and_come_and_go(
    folder: Path, server: Server
) -> None:
    """They are killed, then all reloaded; the model stays, and nothing is left of them.

    At the end the port is free: the model's process has not inherited it.
    """
    before = server.get_until(WORKERS, WORKERS)
    (model,) = {answer["model"] for answer in before}
    assert model not in {answer["web"] for answer in before}
    for answer in before:
        os.kill(answer["web"], signal.SIGKILL)
    server.until(READY, WORKERS)  # the server has started others
    after = server.get_until(WORKERS, WORKERS)
    assert {answer["model"] for answer in after} == {model}
    assert not {answer["web"] for answer in after} & {
        answer["web"] for answer in before
    }
    server.process.send_signal(signal.SIGHUP)
    server.until(READY, WORKERS)
    reloaded = server.get_until(WORKERS, WORKERS)
    assert {answer["model"] for answer in reloaded} == {model}
    assert lines_of(folder / "made") == [str(model)]
    most = [max(counts) for counts in zip(*map(_counts_of, before), strict=True)]
    # What the old ones had ends by itself.
    end_s = time.monotonic() + ANSWER_S
    while any(
        now > then for now, then in zip(_counts_of(server.get()), most, strict=True)
    ):
        assert time.monotonic() < end_s
    server.process.terminate()
    server.process.wait(ANSWER_S)
    assert lines_of(folder / "made") == [str(model)]
    os.kill(model, 0)  # it waits for others, and has the port no more
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", server.port))

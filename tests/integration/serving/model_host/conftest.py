"""Web workers that share a model, and a directory of their own to find it by."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.serving.model_host.models import FOLDER
from tests.integration.serving.model_host.web import WebWorker


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory for the files of a test; all model processes end before it goes."""
    path = Path(tempfile.mkdtemp(prefix="mh-"))
    yield path
    end_all(path)
    until_all_have_ended(path)
    shutil.rmtree(path)


@pytest.fixture
def new_web(folder: Path) -> Iterator[Callable[[], WebWorker]]:
    """Make web workers; whatever happens, they end."""
    web_workers: list[WebWorker] = []
    environ = {"ASYNCRPC_RUN_DIR": str(folder / "runs"), FOLDER: str(folder)}

    def make() -> WebWorker:
        web_workers.append(WebWorker(**environ))
        return web_workers[-1]

    yield make
    for web_worker in web_workers:
        if not web_worker.is_over:
            web_worker.end()


def end_all(folder: Path) -> None:
    """Let all model processes end that would wait for web workers."""
    for path in folder.glob("runs/models/*/note.json"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(json.loads(path.read_bytes())["pid"], signal.SIGTERM)


def until_all_have_ended(folder: Path) -> None:
    """Wait until no process has a slot: the kernel says so by its lock."""
    for path in folder.glob("runs/models/*/lock"):
        with path.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)


def lines_of(path: Path) -> list[str]:
    """Return what was noted, one line each time."""
    return path.read_text(encoding="ascii").splitlines() if path.exists() else []

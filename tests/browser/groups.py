"""Groups of `tests.browser.programs` for as long as a test needs them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.browser.programs import SECRET, TOKEN

HANGS_S: Final = 300.0  # to start processes that import torch, on a busy machine
LOOK_AGAIN_S: Final = 0.05


@dataclass(frozen=True)
class ShownGroup:
    """A group whose dashboard is served."""

    url: str  # of the dashboard
    address: str  # of the worker that serves it
    pids: Mapping[str, int]  # processes of its workers, by name


@contextlib.contextmanager
def running(kind: str, folder: Path) -> Iterator[ShownGroup]:
    """Start a group, and end it."""
    command = [sys.executable, "-m", "tests.browser.programs", kind, str(folder)]
    with started(command) as process:
        path = folder / "told.json"
        while_it_runs(process, path.exists)
        report = json.loads(path.read_text(encoding="utf-8"))
        yield ShownGroup(report["url"], report["address"], report["pids"])


@contextlib.contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program that ends when its input does, and end it."""
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, env={**os.environ, "ASYNCRPC_SECRET": SECRET}
    ) as process:
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(HANGS_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


def while_it_runs(
    process: subprocess.Popen[bytes], is_done: Callable[[], bool]
) -> None:
    """Look until something is so; fail if the program ends before."""
    until = time.monotonic() + HANGS_S
    while not is_done():
        assert process.poll() is None, f"the program has ended: {process.returncode}"
        assert time.monotonic() < until, "the program does not come up"
        time.sleep(LOOK_AGAIN_S)


@contextlib.contextmanager
def served_from_outside(
    group: ShownGroup, port: int = 0
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `asyncrpc dashboard`; yield its process and the address of its page."""
    command = [sys.executable, "-m", "asyncrpc", "dashboard", group.address]
    with subprocess.Popen(
        [*command, "--port", str(port), "--every", "0.5"],
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "ASYNCRPC_SECRET": SECRET,
            "ASYNCRPC_DASHBOARD_TOKEN": TOKEN,
        },
    ) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            assert url, "the program has ended"
            yield process, url
        finally:
            process.terminate()


@contextlib.contextmanager
def served_on_terminal(group: ShownGroup) -> Iterator[str]:
    """Run `asyncrpc dashboard` on a terminal; yield the link that it prints."""
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "asyncrpc", "dashboard", group.address]
    with (
        os.fdopen(ours, encoding="utf-8") as terminal,
        subprocess.Popen(
            [*command, "--port", "0", "--every", "0.5"],
            stdout=theirs,
            env={**os.environ, "ASYNCRPC_SECRET": SECRET},
        ) as process,
    ):
        os.close(theirs)
        try:
            link = terminal.readline().strip()
            assert "#ticket=" in link, link
            yield link
        finally:
            process.terminate()

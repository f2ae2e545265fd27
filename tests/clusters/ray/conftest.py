"""The session of all tests here: a Ray cluster in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
Play = Callable[[str], None]


@pytest.fixture(scope="session")
def play() -> Iterator[Play]:
    """Return what plays a scenario by its name, and fails as it does."""
    session = subprocess.Popen(
        [sys.executable, "-m", "tests.clusters.ray.session"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert session.stdin is not None
    assert session.stdout is not None
    stdin, stdout = session.stdin, session.stdout
    assert stdout.readline().strip() == "null", "the cluster did not start"

    def play_one(name: str) -> None:
        stdin.write(f"{name}\n")
        stdin.flush()
        answer = stdout.readline()
        failure = json.loads(answer) if answer else "the session has died"
        if failure is not None:
            pytest.fail(failure, pytrace=False)

    yield play_one
    stdin.close()
    session.wait()
    stdout.close()

"""The session of all tests here: a Ray cluster in a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.hanging import HANGS_S

ROOT = Path(__file__).resolve().parents[3]


class Session:
    """A cluster, and the driver that plays scenarios on it.

    Attributes:
        address: of the cluster, for other drivers.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.clusters.ray.session"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # it is ended in order, after a Ctrl-C as well
        )
        self._plays = False
        try:
            self.address: str = self._answer()
        except BaseException:
            self.close()
            raise

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the session has died"
        answer: str = json.loads(line)
        return answer

    def play(self, name: str) -> None:
        """Play a scenario; fail as it does."""
        self._plays = True
        assert self._process.stdin is not None
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()
        failure = self._answer()
        self._plays = False
        if failure is not None:
            pytest.fail(failure, pytrace=False)

    def close(self) -> None:
        """End the cluster, in the midst of a scenario as well."""
        if self._plays:  # a test was interrupted
            self._process.send_signal(signal.SIGINT)
        try:
            self._process.communicate(timeout=HANGS_S)
        finally:
            self._process.kill()
            self._process.communicate()


@pytest.fixture(scope="session")
def session() -> Iterator[Session]:
    created = Session()
    yield created
    created.close()

"""Of a worker that is alone on its host, and does not answer, its sidecar tells why."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.network.hosts import Network, network, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces work")

SERVE = """
import sys
from tests.clusters.network.programs import serve
serve(*sys.argv[1:])
"""
LOOK = """
import sys
from asyncrpc.tools.cli.main import main
print("exit", main(sys.argv[1:]))
"""
MEET = "tcp://10.1.0.1:29500"
NEAR = "tcp://10.1.0.1:7000"
# Never lost; and watched from the start: these hosts have one kernel, by which workers
# see each other, and would start no sidecar.
HOW = ("3600", "on")


class Pair:
    """A worker on a host of its own, seen from the host of another."""

    def __init__(self, net: Network) -> None:
        self.host = net.host("near", inside="10.1.0.1")
        self.net = net
        far = net.host("far", inside="10.1.0.2")
        self.near = self.host.start(SERVE, "near", "0", "2", MEET, *HOW)
        self.far = far.start(SERVE, "far", "1", "2", MEET, *HOW)
        for program in (self.near, self.far):
            program.hears("ready")
        self.near.say("call far")
        self.near.hears("done far")

    def look(self, command: str, *options: str) -> str:
        return self.host.start(LOOK, command, NEAR, *options).ends()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with network(tmp_path) as net:
        yield Pair(net)


def test_stopped_worker_is_named_by_its_sidecar(pair: Pair) -> None:
    os.kill(pair.far.process.pid, signal.SIGSTOP)
    try:
        assert "its process is stopped" in pair.look("status")
        report = pair.look("why")
        assert (
            "far is stuck: its process is stopped, according to its liveness sidecar: "
            "SIGCONT resumes it" in report
        )
        assert "exit 1" in report
    finally:
        os.kill(pair.far.process.pid, signal.SIGCONT)


def test_blocked_worker_is_named_by_its_sidecar(pair: Pair) -> None:
    pair.far.say("block 3600")
    report = ""
    while "liveness sidecar" not in report:  # it runs for the first seconds still
        report = pair.look("why")
    assert "far is stuck: its event loop is blocked, or its interpreter" in report
    assert "its event loop is blocked" in pair.look("status")


def test_cut_off_worker_is_named_as_silent(pair: Pair) -> None:
    pair.net.cut("inside")
    report = pair.look("why")
    assert "far is stuck: it does not answer, its liveness sidecar does not" in report

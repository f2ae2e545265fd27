"""A host that is lost, or whose server is wrong: only its own workers suffer."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import pytest

from asyncrpc import Cluster, RestartLimits
from asyncrpc.clusters.hosts import WorkerOutput
from asyncrpc.clusters.remote.boot import ServerSettings, settings_for
from asyncrpc.clusters.remote.command import CommandStream, open_command
from asyncrpc.clusters.remote.frames import MARKER, Begun, HostHello, encode
from asyncrpc.clusters.remote.host import RemoteHost, RemotePlace
from asyncrpc.clusters.threads import in_thread
from asyncrpc.errors import ClusterError
from tests.cluster_grounds import BEGINS_S
from tests.integration.clusters.test_cluster import next_of

PATIENT_S: Final = 300.0


class Hosts:
    """Host servers behind commands, whose streams the test can reach."""

    is_here: Final = False
    waits_for: Final = "starting hosts"
    not_kept: str = ""
    start_timeout_s: float = 60.0

    def __init__(self, **commands: Sequence[str] | None) -> None:
        """Name the hosts, with a command each; None: that of a host server."""
        self._commands = commands
        self.streams: dict[str, CommandStream] = {}
        self.settings = dict[str, Any]()

    async def open(self, output: WorkerOutput) -> list[RemoteHost]:
        settings = await in_thread(settings_for, None, None, {})
        return [
            RemoteHost(
                RemotePlace(
                    name, partial(self._connect, name, settings), settings, BEGINS_S
                ),
                output,
            )
            for name in self._commands
        ]

    async def _connect(self, name: str, settings: ServerSettings) -> CommandStream:
        words = self._commands[name] or settings.words
        self.streams[name] = await open_command(words)
        return self.streams[name]

    async def close(self) -> None:
        """There is nothing to give back."""


def on(hosts: Hosts, count: int, **settings: Any) -> Cluster:
    cluster = Cluster(count, start_timeout_s=PATIENT_S, **settings)
    cluster._plan.ground = hosts  # noqa: SLF001  (not public)
    return cluster


async def test_workers_of_a_lost_host_are_lost_and_start_again() -> None:
    hosts = Hosts(one=None, other=None)
    limits = RestartLimits(restarts_max=1, backoff_s=0.01)
    async with on(hosts, 2, restart=limits) as cluster:
        changes = cluster.changes()
        pids = [await peer.call(os.getpid) for peer in cluster.peers]
        hosts.streams["other"].abort()
        lost = await next_of(changes, "lost")
        assert lost.worker == "w1"
        assert lost.why.startswith("its host 'other' was lost: ")
        assert await cluster["w0"].call(os.getpid) == pids[0]
        assert (await next_of(changes, "ready")).worker == "w1"
        assert await cluster["w1"].call(os.getpid) not in pids


def saying(data: bytes, *, code: int = 0) -> list[str]:
    """Return the command of a false host server."""
    said = f"import os, sys; sys.stdin.readline(); os.write(1, {data!r})"
    return [sys.executable, "-c", f"{said}; sys.stdin.read(); sys.exit({code})"]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (MARKER + encode(HostHello("0.0.0", "1")), "'x' has asyncrpc 0.0.0, and the"),
        (MARKER + encode(Begun(1, 2)), "'x' did not begin: it exited with code 4"),
        (MARKER + b"\xff" * 8, "'x' did not begin: it exited with code 4"),
        (b"no such program", "'x' did not begin: it exited with code 4"),
    ],
)
async def test_server_that_begins_wrongly_is_an_error(
    data: bytes, problem: str
) -> None:
    command = saying(data, code=4)
    if data == b"no such program":
        command = [sys.executable, "-c", "import sys; sys.exit(4)"]
    with pytest.raises(ClusterError) as caught:
        await on(Hosts(x=command), 1).__aenter__()
    assert problem in str(caught.value)


async def test_every_host_that_cannot_be_used_is_named() -> None:
    hosts = Hosts(a=["/no/program"], b=[sys.executable, "-c", "raise SystemExit('b!')"])
    with pytest.raises(ClusterError) as caught:
        await on(hosts, 2).__aenter__()
    assert "'/no/program' cannot be started" in str(caught.value)
    assert "host server on 'b' did not begin: it exited with code 1: b!" in str(
        caught.value
    )


async def test_silent_program_is_an_ended_one() -> None:
    source = "from asyncrpc.clusters.remote.server import main; main(1, silence_s=0.1)"
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", source),
        stdin=asyncio.subprocess.PIPE,  # and it stays open
        stdout=asyncio.subprocess.DEVNULL,
    )
    assert await asyncio.wait_for(server.wait(), PATIENT_S) == 0


async def test_host_hears_of_its_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrpc.clusters.remote.host.ALIVE_S", 0.001)
    async with on(Hosts(one=None), 1) as cluster:
        for _ in range(20):
            assert await cluster["w0"].call(len, "abc") == 3

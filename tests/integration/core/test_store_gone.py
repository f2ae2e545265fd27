"""The process that hosts the store is killed, or stopped: the group goes on, and grows.

Real processes.  Rank 0 hosts the store that the workers met at, and is no other rank in
anything else.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Awaitable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

import asyncrpc
from asyncrpc import LivenessOptions, MemberChanges, Options, Worker, WorkerInfo
from asyncrpc.errors import RendezvousTimeoutError
from tests.integration.core import remote
from tests.integration.core.groups import program
from tests.ports import free_port

LIMIT_S = 60.0  # for one wait; only a failure reaches it
OPTIONS = Options(
    liveness=LivenessOptions(heartbeat_s=0.3, lost_after_s=2.0), drain_timeout_s=1.0
)
SERVE = """
import asyncio, asyncrpc, json, sys
name, rank, size, where = json.loads(sys.argv[1])
LIVENESS = asyncrpc.LivenessOptions(heartbeat_s=0.3, lost_after_s=2.0)
OPTIONS = asyncrpc.Options(liveness=LIVENESS, drain_timeout_s=1.0)
async def main():
    async with asyncrpc.Worker(
        name, rank=rank, world_size=size, rendezvous=where, options=OPTIONS
    ) as worker:
        print(worker.addresses[0], flush=True)
        await asyncio.Event().wait()
asyncrpc.run(main())
"""


def pid_by_way_of(worker: Worker, through: str, to: str) -> Awaitable[int]:
    """Return the process of a worker, as another one is told by it."""
    return worker.peer(through).call(remote.forward, [to], os.getpid)


class Group:
    """Processes by the names of their workers."""

    def __init__(self, size: int, where: str, stack: ExitStack) -> None:
        self.size = size
        self.where = where
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self._stack = stack

    def start(self, name: str, rank: int, where: str = "") -> None:
        seat = [name, rank, self.size, where or self.where]
        self.processes[name] = self._stack.enter_context(
            program("-c", SERVE, json.dumps(seat), OMP_NUM_THREADS="1")
        )

    async def address(self, name: str) -> str:
        """Return where a worker listens, once it does."""
        process = self.processes[name]
        assert process.stdout is not None
        return (await asyncio.to_thread(process.stdout.readline)).strip()

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()


async def until(changes: MemberChanges, kind: str, name: str) -> list[str]:
    """Take changes up to one; return the kinds of all that are about its member."""
    kinds: list[str] = []
    async with asyncio.timeout(LIMIT_S):
        async for change in changes:
            if change.member.name == name:
                kinds.append(change.kind.value)
                if change.kind.value == kind:
                    return kinds
    return kinds


@pytest.mark.slow
async def test_killed_host_of_the_store_returns() -> None:
    where = f"tcp://127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        group = Group(4, where, stack)
        for rank in range(3):
            group.start(f"w{rank}", rank)
        driver = Worker(
            "driver", rank=3, world_size=4, rendezvous=where, options=OPTIONS
        )
        async with driver:
            changes = driver.members_changed()
            pids = {name: process.pid for name, process in group.processes.items()}
            contact = [await group.address(f"w{rank}") for rank in range(3)][2]
            assert await pid_by_way_of(driver, "w1", "w2") == pids["w2"]

            group.kill("w0")
            assert await pid_by_way_of(driver, "w2", "w1") == pids["w1"]
            assert await until(changes, "lost", "w0") == ["lost"]
            assert WorkerInfo("w0", 0) not in driver.known_members

            late = asyncrpc.JoinRendezvous([contact])
            async with Worker("late", rendezvous=late, options=OPTIONS) as newcomer:
                assert await until(changes, "joined", "late") == ["joined"]
                assert await pid_by_way_of(newcomer, "w1", "late") == os.getpid()
                assert await pid_by_way_of(driver, "w1", "late") == os.getpid()

            group.start("w0", 0, f"join://{contact.removeprefix('uds://')}")
            await until(changes, "restarted", "w0")
            again = group.processes["w0"].pid
            assert again != pids["w0"]
            assert await driver.peer(0).call(os.getpid) == again
            assert await pid_by_way_of(driver, "w1", "w0") == again
            await group.address("w0")
            assert await pid_by_way_of(driver, "w0", "w2") == pids["w2"]


@pytest.mark.slow
async def test_killed_worker_returns_by_the_same_store() -> None:
    """The process is started again with the same environment."""
    where = f"tcp://127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        group = Group(3, where, stack)
        host = Worker("host", rank=0, world_size=3, rendezvous=where, options=OPTIONS)
        for rank in (1, 2):
            group.start(f"w{rank}", rank)
        async with host:
            changes = host.members_changed()
            assert await pid_by_way_of(host, "w1", "w2") > 0
            for _ in range(2):
                group.kill("w2")
                group.start("w2", 2)
                await until(changes, "restarted", "w2")
                again = group.processes["w2"].pid
                assert await host.peer(2).call(os.getpid) == again
                assert await pid_by_way_of(host, "w1", "w2") == again


@pytest.mark.slow
async def test_stopped_host_of_the_store_continues() -> None:
    """The others go on; who wants to come in meanwhile waits, or is told for what."""
    where = f"tcp://127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        group = Group(4, where, stack)
        for rank in range(3):
            group.start(f"w{rank}", rank)
        seat: dict[str, Any] = {"world_size": 4, "rendezvous": where}
        async with Worker("driver", rank=3, options=OPTIONS, **seat) as driver:
            changes = driver.members_changed()
            for rank in range(3):
                await group.address(f"w{rank}")
            pid = group.processes["w0"].pid
            group.processes["w0"].send_signal(signal.SIGSTOP)
            assert await until(changes, "lost", "w0") == ["lost"]
            assert await pid_by_way_of(driver, "w2", "w1") == group.processes["w1"].pid
            group.kill("w2")
            assert await until(changes, "lost", "w2") == ["lost"]
            hasty = replace(OPTIONS, rendezvous_timeout_s=1.0)
            for _ in range(2):
                with pytest.raises(RendezvousTimeoutError, match="no answer in time"):
                    async with Worker("w2", rank=2, options=hasty, **seat):
                        pass
            group.start("w2", 2)
            group.processes["w0"].send_signal(signal.SIGCONT)
            assert await until(changes, "back", "w0") == ["back"]
            assert await driver.peer(0).call(os.getpid) == pid
            await group.address("w2")  # it is in
            assert await pid_by_way_of(driver, "w0", "w2") == group.processes["w2"].pid

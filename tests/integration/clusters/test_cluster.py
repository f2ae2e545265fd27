"""A program that starts its workers: all on this host, in real processes."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch

import asyncrpc
from asyncrpc import Cluster, ClusterChange, NetworkOptions, Options, RestartLimits
from asyncrpc.errors import (
    AlreadyStartedError,
    ClusterError,
    NotStartedError,
    UsageError,
    WorkerLostError,
    WorkerStartError,
)
from tests.ports import free_port

QUICKLY: Final = RestartLimits(restarts_max=1, backoff_s=0.01)


def report() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "threads": torch.get_num_threads(),
        "numbers": (random.random(), float(np.random.rand())),  # noqa: NPY002
        "variable": os.environ.get("OF_THE_PROGRAM"),
        "rank": os.environ.get("RANK"),
        "directory": os.getcwd(),  # noqa: PTH109
    }


def say(text: str) -> None:
    print(text)  # noqa: T201
    print(text, "badly", file=sys.stderr)  # noqa: T201


async def ask_other(name: str) -> int:
    worker = asyncrpc.current_worker()
    peer = await worker.find(name)
    return await peer.call(os.getpid)


async def next_of(changes: AsyncIterator[ClusterChange], kind: str) -> ClusterChange:
    async for change in changes:
        if change.kind == kind:
            return change
    raise AssertionError(f"no change was {kind!r}")


async def test_workers_are_processes_like_the_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OF_THE_PROGRAM", "1")
    monkeypatch.setenv("RANK", "7")
    monkeypatch.chdir(tmp_path)
    async with Cluster(2, threads=1) as cluster:
        assert cluster.names == ["w0", "w1"]
        reports = [await peer.call(report) for peer in cluster.peers]
        assert {said["threads"] for said in reports} == {1}
        assert {said["variable"] for said in reports} == {"1"}
        assert {said["rank"] for said in reports} == {None}
        assert {said["directory"] for said in reports} == {str(tmp_path)}
        assert len({said["pid"] for said in reports} | {os.getpid()}) == 3
        assert len({said["numbers"] for said in reports}) == 2
        assert await cluster["w0"].call(ask_other, "w1") == reports[1]["pid"]
        rref = asyncrpc.remote("w1", torch.ones, args=(3,))
        assert torch.equal(await rref, torch.ones(3))


async def test_workers_listen_on_no_port() -> None:
    async with Cluster(1) as cluster:
        addresses = [
            *cluster.worker.addresses,
            *await cluster["w0"].call(own_addresses),
        ]
        assert {address.partition("://")[0] for address in addresses} == {"uds"}


def own_addresses() -> list[str]:
    return list(asyncrpc.current_worker().addresses)


async def test_cluster_grows_and_shrinks() -> None:
    async with Cluster(1) as cluster:
        peers = await cluster.start(2)
        assert [peer.name for peer in peers] == ["w1", "w2"]
        await cluster.resize(1)
        assert cluster.names == ["w0"]
        await cluster.resize(2)
        assert cluster.names == ["w0", "w1"]
        await cluster.start(names=["extra"])
        await cluster.stop("w0", "w0")
        assert cluster.names == ["w1", "extra"]
        with pytest.raises(ClusterError, match="'w0' does not run"):
            _ = cluster["w0"]
        await cluster.restart("w0")
        assert await cluster["w0"].call(os.getpid)


async def test_lost_worker_starts_again_within_its_limits() -> None:
    async with Cluster(1, restart=QUICKLY) as cluster:
        changes = cluster.changes()
        pid = await cluster["w0"].call(os.getpid)
        os.kill(pid, signal.SIGKILL)
        lost = await next_of(changes, "lost")
        assert lost.why == "its process was killed by SIGKILL"
        assert (await next_of(changes, "ready")).life == 2
        assert await cluster["w0"].call(os.getpid) != pid
        with pytest.raises(WorkerLostError):
            await cluster["w0"].call(os._exit, 3)
        failed = await next_of(changes, "failed")
        assert failed == ClusterChange(
            "failed", "w0", 2, "its process exited with code 3"
        )
        assert cluster.state("w0") == "ended"


async def test_workers_lost_at_once_cost_one_restart_together() -> None:
    limits = RestartLimits(restarts_max=1, backoff_s=0.01, together=True)
    async with Cluster(3, restart=limits) as cluster:
        changes = cluster.changes()
        pids = [await peer.call(os.getpid) for peer in cluster.peers]
        for pid in pids[:2]:
            os.kill(pid, signal.SIGKILL)
        lost = sorted([(await next_of(changes, "lost")).worker for _ in pids])
        assert lost == ["w0", "w1", "w2"]
        await cluster.ready()
        again = [await peer.call(os.getpid) for peer in cluster.peers]
        assert len({*pids, *again}) == 6


async def test_ready_waits_for_no_worker_that_was_stopped() -> None:
    async with Cluster(2) as cluster:
        await cluster.stop("w0")
        await cluster.ready()
        assert cluster.names == ["w1"]
        with pytest.raises(WorkerLostError):
            await cluster["w1"].call(os._exit, 3)
        for _ in range(2):
            with pytest.raises(ClusterError, match="'w1' does not run: its process"):
                await cluster.ready()


async def test_stopped_worker_that_does_not_end_is_killed() -> None:
    async with Cluster(1) as cluster:
        os.kill(await cluster["w0"].call(os.getpid), signal.SIGSTOP)
        await cluster.stop("w0")
        assert cluster.names == []


async def test_output_has_the_names_of_workers(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async with Cluster(2) as cluster:
        for peer in cluster.peers:
            await peer.call(say, f"I am {peer.name}")
    output, errors = capfd.readouterr()
    assert sorted(output.splitlines()) == ["[w0] I am w0", "[w1] I am w1"]
    assert sorted(errors.splitlines()) == [
        "[w0] I am w0 badly",
        "[w1] I am w1 badly",
    ]


async def test_process_that_outlives_its_worker_does_not_hold_the_end_up() -> None:
    async with Cluster(1) as cluster:
        pid = await cluster["w0"].call(start_another)
        await cluster.stop("w0")
    os.kill(pid, signal.SIGKILL)  # it ran to here, with the pipes of the worker


def start_another() -> int:
    return subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]).pid


async def test_worker_that_does_not_start_in_time_is_ended() -> None:
    async with Cluster(1) as cluster:
        cluster.start_timeout_s = 0.0
        with pytest.raises(WorkerStartError, match="not ready within 0 s") as caught:
            await cluster.start()
        assert caught.value.worker == "w1"
        assert cluster.names == ["w0"]
        assert await cluster["w0"].call(os.getpid)


async def test_wrong_use_is_refused() -> None:
    cluster = Cluster(1)
    with pytest.raises(NotStartedError, match="must be entered first"):
        _ = cluster["w0"]
    with pytest.raises(UsageError, match="2 different names"):
        Cluster(2, names=["a", "a"])
    with pytest.raises(UsageError, match="none of them 'cluster'"):
        Cluster(1, names=["cluster"])
    async with cluster:
        with pytest.raises(UsageError, match=r"a worker of the cluster \('w0'\)"):
            _ = cluster["w7"]
        with pytest.raises(UsageError, match="'w0' runs already"):
            await cluster.start(names=["w0"])
        with pytest.raises(UsageError, match="was started on"):
            await asyncio.to_thread(lambda: asyncio.run(cluster.stop("w0")))
        with pytest.raises(AlreadyStartedError):
            await cluster.__aenter__()
    with pytest.raises(NotStartedError, match="has ended"):
        await cluster.start()


async def pid_of(name: str) -> int:
    pid: int = await asyncrpc.rpc_async(name, os.getpid)
    return pid


async def test_workers_know_one_another_from_the_start() -> None:
    async with Cluster(3) as cluster:
        for more in (0, 2):
            await cluster.start(more)
            calls = [
                peer.call(pid_of, name)
                for peer in cluster.peers
                for name in cluster.names
            ]
            assert len(set(await asyncio.gather(*calls))) == len(cluster)


async def test_forked_child_has_no_cluster() -> None:
    async with Cluster(1) as cluster:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                with pytest.raises(NotStartedError, match="was forked from; make"):
                    _ = cluster["w0"]
                os.write(writer, b"refused")
            finally:
                os._exit(0)
        os.close(writer)
        assert await asyncio.to_thread(os.read, reader, 100) == b"refused"
        os.close(reader)
        await asyncio.to_thread(os.waitpid, pid, 0)
        assert await cluster["w0"].call(len, "abc") == 3


async def test_wrong_arguments_cost_their_own_call_only() -> None:
    async with Cluster(1) as cluster:
        wrong: list[Any] = [None, -1, 1.5, "x", [], object(), 2**70]
        for value in wrong:
            with pytest.raises(UsageError, match=r"\bcount\b"):
                await cluster.start(value)
            with pytest.raises(UsageError, match=r"\bcount\b"):
                await cluster.resize(value)
            for use in (cluster.stop, cluster.restart):
                with pytest.raises(UsageError, match=r"\bname\b"):
                    await use(value)
            for look in (cluster.state, cluster.__getitem__):
                with pytest.raises(UsageError, match=r"\bname\b"):
                    look(value)
            if value is not None:
                with pytest.raises(UsageError, match=r"\bnames\b"):
                    await cluster.start(2, names=value)
        assert cluster.names == ["w0"]
        assert await cluster["w0"].call(os.getpid)


async def test_changes_of_another_loop_are_refused() -> None:
    async with Cluster(1) as cluster:
        changes = cluster.changes()
        with pytest.raises(UsageError, match="was started on"):
            await asyncio.to_thread(lambda: asyncio.run(anext(changes)))
    assert [change.kind async for change in changes] == ["stopped"]
    with pytest.raises(NotStartedError):
        Cluster(1).changes()


async def test_two_clusters_at_once_inside_a_worker() -> None:
    where = asyncrpc.LocalRendezvous(1)
    async with (
        asyncrpc.Worker("outer", rendezvous=where) as outer,
        Cluster(1) as one,
        Cluster(1) as other,
    ):
        pids = [await cluster["w0"].call(os.getpid) for cluster in (one, other)]
        assert len(set(pids)) == 2
        assert outer.peer("outer").name == "outer"


async def test_call_to_a_starting_worker_waits_for_it() -> None:
    async with Cluster(1) as cluster:
        starting = asyncio.create_task(cluster.start(1, names=["later"]))
        await asyncio.sleep(0)
        assert cluster.state("later") == "starting"
        assert await cluster["later"].call(lambda text: text * 2, "ab") == "abab"
        await starting


async def test_call_to_a_lost_worker_waits_for_its_next_life() -> None:
    async with Cluster(1, restart=QUICKLY) as cluster:
        changes = cluster.changes()
        pid = await cluster["w0"].call(os.getpid)
        os.kill(pid, signal.SIGKILL)
        assert (await anext(changes)).kind == "lost"
        assert await cluster["w0"].call(os.getpid) != pid


async def test_call_to_a_worker_that_does_not_start_says_why() -> None:
    async with Cluster(1) as cluster:
        starting = asyncio.create_task(cluster.start(1, names=["later"]))
        await asyncio.sleep(0)
        call = asyncio.create_task(cluster["later"].call(len, "abc"))
        await asyncio.sleep(0)
        await cluster.stop("later")
        with pytest.raises(ClusterError, match="'later' did not start"):
            await call
        with pytest.raises(WorkerStartError):
            await starting


async def test_cancelled_start_leaves_nothing() -> None:
    async with Cluster(1) as cluster:
        starting = asyncio.create_task(cluster.start(2))
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert cluster.names == ["w0"]


async def test_start_that_fails_shows_the_traceback_of_its_worker() -> None:
    """The program's own worker has the port."""
    network = NetworkOptions(listen=(f"tcp://127.0.0.1:{free_port()}",))
    options = Options(network=network)
    with pytest.raises(
        WorkerStartError, match=r"'w0' did not start: .*in use"
    ) as caught:
        async with Cluster(1, options=options):
            pass
    assert caught.value.worker == "w0"
    assert "in _serve" in caught.value.remote_traceback


UNGUARDED: Final = """
import asyncrpc

print("started")
SCALE = 2


class Counter:
    def __init__(self, count):
        self.count = count

    def add(self, step):
        self.count += step
        return self.count


class WrongError(Exception):
    pass


def scaled(value):
    return value * SCALE


def fail():
    raise WrongError("no")


async def main():
    global SCALE
    async with asyncrpc.Cluster(1) as cluster:
        first = await cluster["w0"].call(scaled, 4)
        SCALE = 4
        print(first, await cluster["w0"].call(scaled, 4))
        counter = cluster["w0"].remote(Counter, 5)
        await counter.rpc_async().add(2)
        arrived = await counter
        print(type(arrived) is Counter, arrived.count)
        try:
            await cluster["w0"].call(fail)
        except WrongError as error:
            print("caught", *error.args)


asyncrpc.run(main())
"""


def test_program_needs_no_guard(tmp_path: Path) -> None:
    """Its functions and classes go by value; its workers do not run it."""
    script = tmp_path / "program.py"
    script.write_text(UNGUARDED)
    ended = subprocess.run(
        [sys.executable, str(script)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["started", "8 16", "True 7", "caught no"]

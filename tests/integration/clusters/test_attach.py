"""Programs that attach themselves, and workers that outlive their program."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

import asyncrpc
from asyncrpc import Cluster, Options, Worker
from asyncrpc.clusters import kept
from asyncrpc.errors import ClusterError, UsageError
from tests.integration.clusters.test_cluster import next_of


@pytest.fixture(autouse=True)
def run_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "runs"
    monkeypatch.setenv("ASYNCRPC_RUN_DIR", str(path))
    return path


async def test_program_attaches_itself_to_workers_that_something_else_started() -> None:
    secret = Options(secret="of these workers")
    alone = asyncrpc.LocalRendezvous(1)
    async with Worker("a", rank=0, rendezvous=alone, options=secret) as first:
        where = asyncrpc.JoinRendezvous(first.addresses)
        second = Worker("b", rendezvous=where, options=secret)
        await second.__aenter__()
        async with Cluster.attach(first.addresses, options=secret) as cluster:
            changes = cluster.changes()
            assert sorted(cluster.names) == ["a", "b"]
            assert await cluster["b"].call(os.getpid) == os.getpid()
            for use in (cluster.start(), cluster.resize(1), cluster.stop("a")):
                with pytest.raises(UsageError, match="attached itself"):
                    await use
            with pytest.raises(ClusterError, match="'b'"):
                await cluster.end()
            async with Cluster.attach(second.addresses[0], options=secret) as other:
                # Programs are no workers.
                assert sorted(other.names) == ["a", "b"]
                assert sorted(cluster.names) == ["a", "b"]
            await second.shutdown()
            assert (await next_of(changes, "stopped")).worker == "b"
            assert cluster.names == ["a"]


def test_record_that_cannot_be_written_names_its_file() -> None:
    kept.claim("kept")
    path = kept.directory_of("kept") / "record.json"
    path.mkdir()
    for _ in range(2):
        with pytest.raises(ClusterError, match=f"written to {path}: Is a directory"):
            kept.write_record(kept.KeptCluster("kept", {}, "00"))


KEEPING: Final = """
import os, signal, sys
import asyncrpc

async def main():
    async with asyncrpc.Cluster(2, name="kept", keep=True, threads=1) as cluster:
        print(*[await peer.call(os.getpid) for peer in cluster.peers], flush=True)
        if sys.argv[1] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    asyncrpc.run(main())
"""


@pytest.mark.parametrize("way", ["kill", "leave"])
async def test_kept_workers_outlive_their_program(
    way: str, tmp_path: Path, run_directory: Path
) -> None:
    script = tmp_path / "program.py"
    script.write_text(KEEPING)
    ended = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, str(script), way],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == (-signal.SIGKILL if way == "kill" else 0), ended.stderr
    pids = [int(pid) for pid in ended.stdout.split()]
    ends = [os.pidfd_open(pid) for pid in pids]
    record = run_directory / "clusters" / "kept" / "record.json"
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    with pytest.raises(ClusterError, match="has been kept"):
        await Cluster(1, name="kept", keep=True).__aenter__()
    async with Cluster.attach("kept") as cluster:
        assert sorted(cluster.names) == ["w0", "w1"]
        assert await cluster["w0"].call(os.getpid) == pids[0]
        await cluster["w1"].call(lambda: sys.stdout.write("nobody listens\n"))
    async with Cluster.attach("kept") as cluster:
        assert (record.parent / "w1.log").read_text() == "nobody listens\n"
        await cluster.end()
        assert cluster.names == []
    for end in ends:
        select.select([end], [], [])
        os.close(end)
    assert not record.parent.exists()
    with pytest.raises(ClusterError, match="no cluster 'kept'"):
        await Cluster.attach("kept").__aenter__()


async def test_kept_cluster_that_is_ended_leaves_nothing(run_directory: Path) -> None:
    async with Cluster(1, name="short", keep=True) as cluster:
        end = os.pidfd_open(await cluster["w0"].call(os.getpid))
        assert (run_directory / "clusters" / "short" / "record.json").exists()
        await cluster.end()
    select.select([end], [], [])
    os.close(end)
    assert not (run_directory / "clusters" / "short").exists()

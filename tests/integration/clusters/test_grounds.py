"""What a cluster does is the same wherever its workers run: one suite, each ground.

tests/clusters runs it on a real sshd, and on a real Slurm.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

import asyncrpc
from asyncrpc import RestartLimits
from asyncrpc.errors import ClusterError, WorkerLostError
from tests.cluster_grounds import GROUNDS
from tests.integration.clusters.test_cluster import ask_other, next_of, say

QUICKLY: Final = RestartLimits(restarts_max=1, backoff_s=0.01)
PATIENT_S: Final = 300.0


@pytest.fixture(params=["here", "command"])
def ground(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


async def test_cluster_starts_calls_grows_and_shrinks(
    ground: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async with GROUNDS[ground](2, start_timeout_s=PATIENT_S) as cluster:
        assert cluster.names == ["w0", "w1"]
        pids = [await peer.call(os.getpid) for peer in cluster.peers]
        assert await cluster["w0"].call(ask_other, "w1") == pids[1]
        for peer in cluster.peers:
            await peer.call(say, f"I am {peer.name}")
        await cluster.resize(3)
        assert await cluster["w2"].call(ask_other, "w0") == pids[0]
        await cluster.stop("w0", "w2")
        assert cluster.names == ["w1"]
        await cluster.restart("w0")
        assert await cluster["w0"].call(os.getpid) not in pids
    output, errors = capfd.readouterr()
    assert sorted(output.splitlines()) == ["[w0] I am w0", "[w1] I am w1"]
    assert sorted(errors.splitlines()) == [
        "[w0] I am w0 badly",
        "[w1] I am w1 badly",
    ]


async def test_lost_worker_starts_again(ground: str) -> None:
    timeout_s = PATIENT_S
    async with GROUNDS[ground](
        1, restart=QUICKLY, start_timeout_s=timeout_s
    ) as cluster:
        changes = cluster.changes()
        with pytest.raises(WorkerLostError):
            await cluster["w0"].call(kill_yourself)
        lost = await next_of(changes, "lost")
        assert lost.why == "its process was killed by SIGKILL"
        assert (await next_of(changes, "ready")).life == 2
        with pytest.raises(WorkerLostError):
            await cluster["w0"].call(os._exit, 3)
        failed = await next_of(changes, "failed")
        assert failed.why == "its process exited with code 3"


async def test_loss_of_one_restarts_all_together(ground: str) -> None:
    limits = RestartLimits(restarts_max=1, backoff_s=0.01, together=True)
    async with GROUNDS[ground](3, restart=limits, start_timeout_s=PATIENT_S) as cluster:
        await cluster.ready()  # it is
        pids = [await peer.call(os.getpid) for peer in cluster.peers]
        with pytest.raises(WorkerLostError):
            await cluster["w1"].call(kill_yourself)
        await cluster.ready()
        again = [await peer.call(os.getpid) for peer in cluster.peers]
        assert len({*pids, *again}) == 6
        assert await cluster["w0"].call(ask_at_once, "w2") == again[2]
        with pytest.raises(WorkerLostError):
            await cluster["w2"].call(kill_yourself)
        with pytest.raises(ClusterError, match="worker 'w2' does not run: "):
            await cluster.ready()
        assert await cluster["w0"].call(os.getpid) == again[0]


async def ask_at_once(name: str) -> int:
    return await asyncrpc.current_worker().peer(name).call(os.getpid)


def kill_yourself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


PROGRAM: Final = """
import os, signal, sys
import asyncrpc
from tests.cluster_grounds import GROUNDS

async def main():
    async with GROUNDS[sys.argv[1]](2, start_timeout_s=300.0) as cluster:
        print(*[await peer.call(os.getpid) for peer in cluster.peers], flush=True)
        if sys.argv[2] == "fork" and not os.fork():
            os.read(int(sys.argv[3]), 1)
            os._exit(0)
        if sys.argv[2] == "raise":
            raise ValueError("of the block")
        sys.stdin.read(1)
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    asyncrpc.run(main())
"""


@pytest.mark.parametrize("way", ["kill", "fork", "raise"])
def test_no_process_outlives_the_program(ground: str, tmp_path: Path, way: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    held, release = os.pipe()
    program = subprocess.Popen(
        [sys.executable, str(script), ground, way, str(held)],
        pass_fds=[held],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    os.close(held)
    assert program.stdin is not None
    assert program.stdout is not None
    pids = [int(pid) for pid in program.stdout.readline().split()]
    assert len(pids) == 2, program.communicate()[1]
    ends = [os.pidfd_open(pid) for pid in pids]
    program.stdin.write("x")
    program.stdin.flush()
    for end in ends:
        select.select([end], [], [])  # until that process has ended
        os.close(end)
    os.close(release)  # only now a forked child of the program ends
    _, errors = program.communicate()
    assert program.returncode == (1 if way == "raise" else -signal.SIGKILL)
    assert ("ValueError: of the block" in errors) == (way == "raise")

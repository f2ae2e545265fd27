"""However the workers meet, they find all others, or learn who is missing."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

import asyncrpc
from asyncrpc import LocalRendezvous, Options, RendezvousTimeoutError, UsageError, Worker
from tests.integration.runtime import remote

ROOT = Path(__file__).parents[3]
QUICK = Options(rendezvous_timeout_s=0.3, drain_timeout_s=1.0)
SLOW = Options(rendezvous_timeout_s=10.0, drain_timeout_s=1.0)


async def all_meet(workers: list[Worker]) -> None:
    """Start all, call from each to each, and end all."""
    async with asyncio.TaskGroup() as starting:
        for worker in workers:
            starting.create_task(worker.__aenter__())
    for one in workers:
        for other in workers:
            found = await one.peer(other.name).call(remote.where_async)
            assert found[0] == other.name
            assert one.directory.find(other.rank).member.name == other.name
    await asyncio.gather(*(worker.shutdown() for worker in workers))


def group(where: Any, count: int = 3, options: Options = SLOW) -> list[Worker]:
    return [
        Worker(f"w{i}", rank=i, world_size=count, rendezvous=where, options=options)
        for i in range(count)
    ]


async def test_in_a_file(tmp_path: Path) -> None:
    await all_meet(group(f"file://{tmp_path}/store"))


async def test_at_a_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    await all_meet(group(f"tcp://127.0.0.1:{port}"))


async def test_by_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }.items():
        monkeypatch.setenv(name, value)
    workers = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        workers.append(Worker(f"w{rank}", options=SLOW))
    assert [(one.rank, one.world_size) for one in workers] == [(0, 2), (1, 2)]
    await all_meet(workers)
    del store


async def test_by_a_list(tmp_path: Path) -> None:
    where: Mapping[str, str] = {name: f"uds://{tmp_path}/{name}" for name in "ab"}
    workers = [
        Worker(
            name,
            rank=rank,
            rendezvous=where,
            options=Options(listen=(address,), drain_timeout_s=1.0),
        )
        for rank, (name, address) in enumerate(where.items())
    ]
    await all_meet(workers)


async def test_a_name_that_is_not_on_the_list_is_refused() -> None:
    worker = Worker("x", rendezvous={"a": "tcp://127.0.0.1:9"})
    with pytest.raises(UsageError, match="'x' is not in the static list; it has: 'a'"):
        await worker.__aenter__()


async def test_who_is_missing_is_named(tmp_path: Path) -> None:
    for where in (LocalRendezvous(4), f"file://{tmp_path}/store"):
        present = group(where, 4, QUICK)[:2]
        found = await asyncio.gather(
            *(one.__aenter__() for one in present), return_exceptions=True
        )
        for error in found:
            assert isinstance(error, RendezvousTimeoutError)
            assert error.missing == (2, 3)
            assert "2 of 4 workers appeared" in str(error)
            assert "missing: rank 2, 3" in str(error)


async def test_a_store_that_is_not_there_is_said_so() -> None:
    worker = Worker(
        "w", rank=1, world_size=2, rendezvous="tcp://127.0.0.1:9", options=QUICK
    )
    with pytest.raises(RendezvousTimeoutError, match="cannot be reached"):
        await worker.__aenter__()


async def test_names_and_ranks_are_unique(tmp_path: Path) -> None:
    for number, where in enumerate((LocalRendezvous, None)):
        for name, rank, text in (("w0", 1, "'w0' is not unique"), ("w1", 0, "rank 0")):
            at: Any = where(2) if where else f"file://{tmp_path}/{number}{name}"
            first = Worker("w0", rank=0, world_size=2, rendezvous=at, options=QUICK)
            second = Worker(name, rank=rank, world_size=2, rendezvous=at, options=QUICK)
            found = await asyncio.gather(
                first.__aenter__(), second.__aenter__(), return_exceptions=True
            )
            errors = [str(one) for one in found if isinstance(one, UsageError)]
            assert len(errors) == 1
            assert text in errors[0]


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("nowhere", "is no rendezvous"),
        ("env://", "RANK"),
        ("tcp://127.0.0.1:1?rank=3&world_size=2", "rank 3 is not in a world of 2"),
        ("tcp://127.0.0.1:1?rank=x&world_size=2", "no number"),
    ],
)
async def test_what_is_missing_or_wrong_is_said_at_once(
    where: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    given = {} if "?" in where or where == "env://" else {"rank": 0, "world_size": 1}
    with pytest.raises(UsageError, match=text):
        Worker("w", rendezvous=where, **given)  # type: ignore[arg-type]


async def test_a_start_that_is_cancelled_leaves_nothing() -> None:
    worker = Worker("w", rank=0, rendezvous=LocalRendezvous(2))
    task = asyncio.create_task(worker.__aenter__())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert worker.is_closed


async def test_init_rpc_and_shutdown() -> None:
    where = LocalRendezvous(1)
    worker = await asyncrpc.init_rpc("w", rank=0, rendezvous=where)
    assert asyncrpc.current_worker() is worker
    with pytest.raises(asyncrpc.AlreadyStartedError):
        asyncrpc.init_rpc("x", rank=0, rendezvous=where)
    assert await asyncrpc.rpc_async("w", remote.add, (1,)) == 2
    await asyncrpc.shutdown()
    with pytest.raises(asyncrpc.NotStartedError):
        asyncrpc.current_worker()


SCRIPT = """
import asyncio, os, asyncrpc
from tests.integration.runtime import remote

async def main():
    rank = int(os.environ["RANK"])
    async with asyncrpc.init_rpc(f"w{rank}") as worker:
        found = await worker.peer(1 - rank).call(remote.add, rank, 10)
        said = f"rank {rank} of {worker.world_size}: {found}\\n"
        os.write(1, said.encode())  # whole: both write to one pipe
        await asyncrpc.shutdown()

asyncrpc.run(main())
"""


def test_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(script)]
    ended = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        timeout=18,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
    )
    assert ended.returncode == 0, ended.stderr
    said = sorted(ended.stdout.splitlines())
    assert said == ["rank 0 of 2: 10", "rank 1 of 2: 11"]

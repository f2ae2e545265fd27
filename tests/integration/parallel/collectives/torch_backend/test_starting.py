"""How the ranks find each other, and who is let in."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # unlisted
    PrefixStore,
    TCPStore,
)

from asyncrpc import LimitOptions, NetworkOptions, Options, UsageError
from asyncrpc.core.ids import Incarnation
from asyncrpc.core.members import Member
from asyncrpc.errors import RendezvousTimeoutError
from asyncrpc.multiprocessing import launch
from asyncrpc.parallel.collectives.torch_backend.rank_runtime import check_reach
from asyncrpc.torch_backend import AsyncRpcProcessGroup
from tests.integration.parallel.collectives.torch_backend.processes import (
    run_ranks,
    start,
)

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # unlisted
    PrefixStore,
    TCPStore,
)
import asyncrpc.torch_backend

for turn in range(3):
    dist.init_process_group("asyncrpc")
    mine = torch.ones(2) * (dist.get_rank() + 1)
    dist.all_reduce(mine)
    assert mine.tolist() == [3.0, 3.0]
    if turn < 2 or "--leave" in sys.argv:
        dist.destroy_process_group()
if dist.is_initialized():
    dist.barrier()
"""


def adds_up() -> bool:
    """Whether the ranks can talk."""
    mine = torch.ones(2)
    dist.all_reduce(mine)
    return bool((mine == dist.get_world_size()).all())


@pytest.mark.parametrize("leave", [True, False], ids=["destroyed", "just ended"])
def test_groups_of_torchrun_start_and_end_cleanly(
    tmp_path: Path, *, leave: bool
) -> None:
    """The store is the launcher's, and sees three groups, one after the other."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", str(script), *["--leave"] * leave),
        ],
        env={**os.environ, "PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300.0,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "did not end" not in done.stderr


def by_every_way(rank: int) -> None:
    """At a store that the program makes, by the environment, with options."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=False, wait_for_workers=False)
    for turn in range(2):
        prefixed = PrefixStore(f"own{turn}", store)
        dist.init_process_group("asyncrpc", store=prefixed, rank=rank, world_size=2)
        assert adds_up()
        assert dist.get_backend() == "asyncrpc"
        assert dist.group.WORLD is not None
        assert dist.group.WORLD.name() == "asyncrpc"
        dist.destroy_process_group()
    os.environ["ASYNCRPC_SECRET"] = ""
    options: Any = Options(
        secret="known to all of this test", limits=LimitOptions(shared_memory_bytes=0)
    )
    dist.init_process_group("asyncrpc", pg_options=options)
    assert adds_up()
    with pytest.raises(TypeError, match="give them to init_process_group"):
        dist.new_group(pg_options=options)
    dist.destroy_process_group()
    with pytest.raises(TypeError, match=r"takes asyncrpc\.Options"):
        dist.init_process_group("asyncrpc", pg_options="fast")
    dist.init_process_group("asyncrpc")  # without a secret: one host, one user
    assert adds_up()
    dist.destroy_process_group()


def test_ranks_meet_at_the_store_of_torch() -> None:
    launch(by_every_way, nprocs=2, method="forkserver", timeout_s=60.0)


def beside_gloo(rank: int) -> None:
    """The default group is another backend's: each group of ours has a worker."""
    dist.init_process_group("gloo")
    groups: list[Any] = [dist.new_group([2, 0], backend="asyncrpc") for _ in range(2)]
    if rank != 1:
        first, second = groups
        assert isinstance(first, AsyncRpcProcessGroup)
        assert first.participant is not second.participant
        assert first.participant.names == ("rank0", "rank2")
        tensor = torch.full((2,), float(rank))
        dist.broadcast(tensor, 2, group=first)
        assert tensor.tolist() == [2.0, 2.0]
        dist.all_reduce(tensor, group=second)
        assert tensor.tolist() == [4.0, 4.0]
    dist.barrier()
    dist.destroy_process_group()


def test_group_works_beside_another_default_group() -> None:
    launch(beside_gloo, nprocs=3, method="forkserver", timeout_s=60.0)


def test_import_keeps_the_default_backend() -> None:
    """What `init_process_group()` takes for a device is what it took before."""
    defaults = dist.Backend.default_device_backend_map
    assert defaults["cpu"] == "gloo"
    assert "asyncrpc" not in defaults.values()
    assert "asyncrpc" in dist.Backend.backend_list


def wait_alone(rank: int, size: int, url: str) -> str:
    if rank:
        return "stays away"
    with pytest.raises(dist.DistBackendError) as caught:
        start(rank, size, url, timeout=timedelta(seconds=1))
    cause = caught.value.__cause__
    assert isinstance(cause, RendezvousTimeoutError)
    assert not dist.is_initialized()
    return str(caught.value)


def test_missing_rank_is_named(tmp_path: Path) -> None:
    first, _second = run_ranks(wait_alone, tmp_path / "store", size=2)
    assert not first.problem
    assert "1 of 2 workers appeared within 1 s; missing: rank 1" in first.value


def know_another_secret(rank: int, size: int, url: str) -> str:
    options: Any = Options(
        secret=f"the secret of rank {rank}",
        network=NetworkOptions(connect_timeout_s=1.0),
    )
    start(rank, size, url, timeout=timedelta(seconds=8), pg_options=options)
    with pytest.raises(dist.DistBackendError) as caught:
        dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    return str(caught.value)


def test_rank_with_another_secret_is_refused(tmp_path: Path) -> None:
    ranks = run_ranks(know_another_secret, tmp_path / "store", size=2)
    assert not any(rank.problem for rank in ranks)
    assert any("secret" in rank.value for rank in ranks), ranks


def test_group_across_hosts_needs_a_secret() -> None:
    def member(name: str, host: str, *addresses: str) -> Member:
        return Member(name, 0, Incarnation(1), addresses, host)

    near = member("rank0", "here", "uds:///tmp/a")
    open_ = member("rank1", "there", "uds:///tmp/b", "tcp://10.0.0.2:7000")
    check_reach([near, open_], "here")
    closed = member("rank2", "there", "uds:///tmp/c", "tcp://127.0.0.1:7000")
    with pytest.raises(
        UsageError,
        match=r"^rank2 run on other hosts .*own host only; .*ASYNCRPC_SECRET",
    ):
        check_reach([near, open_, closed], "here")

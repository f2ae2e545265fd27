"""A rank that dies or leaves is named to the others, and hangs none of them."""

from __future__ import annotations

import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from asyncrpc.errors import GroupChangedError, RankLostError
from tests.integration.parallel.collectives.torch_backend.processes import (
    die,
    run_ranks,
    start,
)

LONG = timedelta(seconds=50)  # more than a test waits: nothing may depend on it


def lose_in(rank: int, size: int, url: str, numel: int) -> tuple[str, tuple[str, ...]]:
    """Rank 2 dies while the others are in a collective with it."""
    start(rank, size, url, timeout=LONG)
    dist.all_reduce(torch.ones(numel))
    if rank == 2:
        dist.recv(torch.zeros(1), 0)  # rank 0 has begun the next one
        die()
    work: Any = dist.all_reduce(torch.ones(numel), async_op=True)
    if rank == 0:
        dist.isend(torch.zeros(1), 2)  # who takes it may die before it says so
    with pytest.raises(dist.DistBackendError) as caught:
        work.wait()
    with pytest.raises(dist.DistBackendError, match="rank 2"):
        dist.barrier()
    if rank == 1:
        with pytest.raises(dist.DistBackendError, match="rank 2"):
            dist.recv(torch.ones(1), 2)
    pair = dist.new_group([0, 1], use_local_synchronization=True)
    left = torch.ones(1)
    dist.all_reduce(left, group=pair)  # those who are left go on
    assert left.item() == 2.0
    dist.destroy_process_group()
    cause = caught.value.__cause__
    assert isinstance(cause, RankLostError)
    return str(caught.value), cause.ranks


@pytest.mark.parametrize("numel", [10, 3_000_000])
def test_a_killed_rank_is_named(tmp_path: Path, numel: int) -> None:
    *others, dead = run_ranks(lose_in, tmp_path / "store", numel)
    assert dead.exit_code == -signal.SIGKILL
    for other in others:
        assert not other.problem
        text, ranks = other.value
        assert "RankLostError: rank 2 ('rank2')" in text
        assert ranks == ("rank2",)


def lose_in_backward(rank: int, size: int, url: str) -> str:
    """Rank 1 dies in its backward pass; torch's C++ code has to learn of it."""
    start(rank, size, url, timeout=LONG)
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    ddp(torch.ones(1, 4)).sum().backward()
    if rank == 1:
        ddp.module.weight.register_hook(lambda _: die())
    with pytest.raises(RuntimeError) as caught:
        ddp(torch.ones(1, 4)).sum().backward()
    dist.destroy_process_group()
    return str(caught.value)


def test_ddp_of_torch_raises_when_a_rank_is_lost(tmp_path: Path) -> None:
    first, dead = run_ranks(lose_in_backward, tmp_path / "store", size=2)
    assert dead.exit_code == -signal.SIGKILL
    assert not first.problem
    assert "RankLostError: rank 1 ('rank1')" in first.value


def leave(rank: int, size: int, url: str) -> str:
    """Rank 0 ends after a collective that the others may still be in."""
    for _ in range(20):
        dist.broadcast(torch.ones(50_000), 0)
    if rank == 0:
        return "left"
    with pytest.raises(dist.DistBackendError) as caught:
        dist.barrier()
    assert isinstance(caught.value.__cause__, GroupChangedError)
    # Else the second one to leave might be the first one that the third hears of.
    dist.barrier(dist.new_group([1, 2], use_local_synchronization=True))
    return str(caught.value)


def leave_orderly(rank: int, size: int, url: str) -> str:
    start(rank, size, url, timeout=LONG)
    try:
        return leave(rank, size, url)
    finally:
        dist.destroy_process_group()


def leave_unsaid(rank: int, size: int, url: str) -> str:
    start(rank, size, url, timeout=LONG)
    return leave(rank, size, url)


@pytest.mark.parametrize("way", [leave_orderly, leave_unsaid])
def test_departure_keeps_finished_operations_intact(
    tmp_path: Path, way: Callable[[int, int, str], str]
) -> None:
    first, *others = run_ranks(way, tmp_path / "store")
    assert (first.value, first.problem, first.exit_code) == ("left", "", 0)
    assert [rank.problem for rank in others] == ["", ""]
    for rank in others:
        assert "rank 0 ('rank0') has closed" in rank.value


def end_with_work(rank: int, size: int, url: str) -> str:
    """A process ends, with work that nobody else has begun, and a future of it."""
    start(rank, size, url, timeout=LONG)
    dist.barrier()
    if rank == 0:
        work: Any = dist.all_reduce(torch.ones(1), async_op=True)
        work.get_future().then(lambda future: future.value())
    dist.send(torch.ones(1), 1) if rank == 0 else dist.recv(torch.ones(1), 0)
    return "done"


def test_pending_work_does_not_keep_a_process_alive(tmp_path: Path) -> None:
    for rank in run_ranks(end_with_work, tmp_path / "store", size=2):
        assert (rank.value, rank.problem, rank.exit_code) == ("done", "", 0)

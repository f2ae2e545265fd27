"""Hooks of a process group are called around each operation, as by torch 2.14."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from asyncrpc.multiprocessing import launch
from asyncrpc.parallel.collectives.torch_backend import registration
from asyncrpc.tools.cli.main import main
from asyncrpc.torch_backend import AsyncRpcProcessGroup
from tests.forked import forked
from tests.integration.parallel.collectives.torch_backend.playing import world
from tests.integration.parallel.collectives.torch_backend.processes import (
    run_ranks,
    start,
)


def operations() -> dict[str, tuple[Any, int, int]]:
    """Return what to call by the name that hooks get, with counts of tensors."""
    size, rank = dist.get_world_size(), dist.get_rank()
    peers = range(size)

    def pair() -> None:
        if rank == 0:
            dist.send(torch.ones(2), 1)
        else:
            dist.recv(torch.ones(2), 0)

    lists = [torch.ones(2) for _ in peers]
    return {
        "ALLREDUCE": (lambda: dist.all_reduce(torch.ones(2)), 1, 1),
        "REDUCE": (lambda: dist.reduce(torch.ones(2), 0), 1, 1),
        "BROADCAST": (lambda: dist.broadcast(torch.ones(2), 1), 1, 1),
        "REDUCE_SCATTER": (lambda: dist.reduce_scatter(torch.ones(2), lists), size, 1),
        "REDUCE_SCATTER_BASE": (
            lambda: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(2 * size)),
            1,
            1,
        ),
        "ALLGATHER": (lambda: dist.all_gather(lists, torch.ones(2)), 1, size),
        "ALLGATHER_BASE": (
            lambda: dist.all_gather_into_tensor(torch.ones(2 * size), torch.ones(2)),
            1,
            1,
        ),
        "ALLTOALL_BASE": (
            lambda: dist.all_to_all_single(torch.ones(size), torch.ones(size)),
            1,
            1,
        ),
        "BARRIER": (dist.barrier, 0, 0),
        "RECV" if rank else "SEND": (pair, not rank, 1),
    }


def check_hooks(_rank: int) -> None:
    dist.init_process_group("asyncrpc", timeout=timedelta(seconds=60))
    before: list[Any] = []
    after: list[Any] = []
    group = world()
    group.register_pre_hook(5, before.append)
    group.register_post_hook(5, after.append)
    for name, (call, inputs, outputs) in operations().items():
        before.clear()
        after.clear()
        call()
        assert [getattr(info.name, "name", info.name) for info in before] == [name]
        assert len(before[0].input_tensors) == inputs, name
        assert len(before[0].output_tensors) == outputs, name
        assert before[0].root == (1 if name == "BROADCAST" else before[0].root)
        assert [info.op_id for info in after] == [before[0].op_id]
        assert after[0].work.is_completed()
    group.unregister_pre_hook(5)
    group.unregister_post_hook(5)
    before.clear()
    dist.all_reduce(torch.ones(2))
    assert not before
    dist.destroy_process_group()


def test_hooks_run_before_and_after_each_operation() -> None:
    launch(check_hooks, nprocs=2, method="forkserver", timeout_s=60.0)


def check_nan(rank: int) -> None:
    dist.init_process_group("asyncrpc", timeout=timedelta(seconds=60))
    spoilt = torch.tensor([1.0, torch.nan])
    refusals: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(spoilt),
        lambda: dist.all_gather([torch.ones(2), torch.ones(2)], spoilt),
        lambda: dist.all_to_all_single(torch.ones(2), spoilt),
    ]
    for refused in refusals:
        with pytest.raises(RuntimeError, match=f"rank {rank} gives .* NaN"):
            refused()
    # What is filled may hold anything, and so may what has no NaN.
    dist.broadcast(spoilt if rank else torch.ones(2), 0)
    dist.all_reduce(torch.tensor([1, 2]))
    dist.destroy_process_group()


def test_nan_check_of_the_environment_refuses_nan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_DIST_NAN_CHECK", "1")
    launch(check_nan, nprocs=2, method="spawn", timeout_s=100.0)


def test_options_the_backend_lacks_are_refused_by_name() -> None:
    class Given:
        enable_reconfigure = True

    options: Any = Given()
    with pytest.raises(ValueError, match="leave out enable_reconfigure=True"):
        registration._create(options, None)  # noqa: SLF001
    kind = AsyncRpcProcessGroup
    assert not kind.supports_reconfigure
    assert not kind.supports_window


ANALYSE = """
from torch.distributed.flight_recorder.fr_trace import main
main([{!r}])
"""


def miss(rank: int, size: int, url: str, folder: str) -> list[int]:
    """Rank 2 is late in a collective, and rank 0 looks at all meanwhile."""
    start(rank, size, url)
    group: Any = dist.group.WORLD
    store = group.get_group_store()
    dist.all_reduce(torch.ones(4))
    statuses = []
    if rank == 2:
        store.wait(["looked"])
    work: Any = dist.all_reduce(torch.ones(8), async_op=True)
    if rank == 1:
        store.set("begun", "")
    if rank == 0:
        store.wait(["begun"])
        address = group.addresses[0]
        statuses.append(main(["torch-dump", address, "--to", folder]))
        statuses.append(main(["why", address, "--after", "0.1"]))
        statuses.append(main(["status", address]))
        store.set("looked", "")
    work.wait()
    dist.destroy_process_group()
    return statuses


def test_torchfrtrace_names_a_rank_that_is_late(tmp_path: Path) -> None:
    folder = str(tmp_path / "dumps")
    first, *others = run_ranks(miss, tmp_path / "store", folder)
    assert not any(outcome.problem for outcome in (first, *others))
    assert first.value == [0, 1, 0]
    with forked(ANALYSE.format(folder)) as program:
        said = program.output.read()
    assert "missing ranks: {2}" in said
    assert "collective: gloo:all_reduce" in said
    assert "input sizes: [[8]]" in said

"""What trains over torch.distributed: the same over asyncrpc as over gloo."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from asyncrpc.multiprocessing import launch
from tests.integration.parallel.collectives.torch_backend.playing import (
    Scenario,
    play,
    same,
    world,
)

Register = Callable[[DistributedDataParallel, dist.ProcessGroup], None]
checkpoint: Any = torch.distributed.checkpoint  # its types say less than it has
STEPS = 4
ROWS = 24


def plain(_ddp: DistributedDataParallel, _group: dist.ProcessGroup) -> None:
    """No hook."""


def allreduce(ddp: DistributedDataParallel, group: dist.ProcessGroup) -> None:
    ddp.register_comm_hook(group, default_hooks.allreduce_hook)


def fp16(ddp: DistributedDataParallel, group: dist.ProcessGroup) -> None:
    ddp.register_comm_hook(group, default_hooks.fp16_compress_hook)


def bf16(ddp: DistributedDataParallel, group: dist.ProcessGroup) -> None:
    """Under another name: by its own, DDP takes it for NCCL only."""
    half = default_hooks.bf16_compress_hook
    ddp.register_comm_hook(group, lambda state, bucket: half(state, bucket))  # noqa: PLW0108  has no name


def power_sgd(ddp: DistributedDataParallel, group: dist.ProcessGroup) -> None:
    state = powerSGD_hook.PowerSGDState(
        group, matrix_approximation_rank=2, start_powerSGD_iter=2
    )
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def model() -> nn.Module:
    torch.manual_seed(7 + dist.get_rank())  # DDP brings that of rank 0 to all
    return nn.Sequential(
        nn.Linear(20, 300), nn.ReLU(), nn.BatchNorm1d(300), nn.Linear(300, 5)
    )


def examples() -> TensorDataset:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, 20, generator=draw)
    return TensorDataset(x, x[:, :5].sin())


def trained(group: dist.ProcessGroup, register: Register) -> list[torch.Tensor]:
    """Train with torch's DDP, of several buckets, on this rank's share of examples."""
    ddp = DistributedDataParallel(
        model(), process_group=group, bucket_cap_mb=0.01, gradient_as_bucket_view=True
    )
    register(ddp, group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    data = examples()
    sampler: DistributedSampler[Any] = DistributedSampler(
        data, dist.get_world_size(group), dist.get_rank(group), seed=5
    )
    for epoch in range(STEPS // 2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=6, sampler=sampler):
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.mse_loss(ddp(x), y))
            optimizer.step()
    return [tensor.detach().clone() for tensor in ddp.module.state_dict().values()]


def check_hook(gloo: dist.ProcessGroup, register: Register) -> None:
    """Two ranks: no sum depends on an order, so it is the same to the last bit."""
    ours = trained(world(), register)
    same(ours, trained(gloo, register))
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, ours)
    same(gathered[0][0], gathered[1][0])  # the weights; of BatchNorm each has its own


def check_unused_and_uneven(gloo: dist.ProcessGroup) -> None:
    """Parameters that a rank does not use, steps without a sum, a rank with less."""

    def run(group: dist.ProcessGroup) -> list[torch.Tensor]:
        torch.manual_seed(1)
        parts = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})

        class Either(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.parts = parts

            def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
                output: torch.Tensor = self.parts[which](x)
                return output

        ddp = DistributedDataParallel(
            Either(), process_group=group, find_unused_parameters=True
        )
        rank = dist.get_rank()
        for which in ("a", "b", "ab"[rank]):
            ddp(torch.ones(2, 4) * rank, which).sum().backward()
        with ddp.no_sync():
            ddp(torch.ones(2, 4), "a").sum().backward()
        ddp(torch.ones(2, 4), "b").sum().backward()
        even = DistributedDataParallel(nn.Linear(4, 1), process_group=group)
        with Join([even]):
            for _ in range(2 + rank):
                even(torch.ones(2, 4) * (rank + 1)).sum().backward()
        grads = [
            parameter.grad for parameter in (*ddp.parameters(), *even.parameters())
        ]
        return [grad for grad in grads if grad is not None]

    same(run(world()), run(gloo))


def check_sparse_gradients(gloo: dist.ProcessGroup) -> None:
    """Of an embedding: DDP reduces sparse tensors."""

    def run(group: dist.ProcessGroup) -> torch.Tensor:
        torch.manual_seed(1)
        ddp = DistributedDataParallel(
            nn.Embedding(30, 4, sparse=True), process_group=group
        )
        ddp(torch.tensor([dist.get_rank(), 7, 7])).sum().backward()
        grad = next(ddp.parameters()).grad
        assert grad is not None
        return grad.to_dense()

    same(run(world()), run(gloo))


def check_fully_sharded(_gloo: dist.ProcessGroup) -> None:
    """FSDP2 trains as the whole model would, and is saved and loaded by its shards."""
    torch.manual_seed(11)
    whole = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
    sharded = copy.deepcopy(whole)
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (sharded[0], sharded[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    steps = [
        (
            trained_module,
            torch.optim.SGD(trained_module.parameters(), lr=0.05, momentum=0.9),
        )
        for trained_module in (whole, sharded)
    ]
    size, rank = dist.get_world_size(), dist.get_rank()
    for step in range(STEPS):
        x = torch.randn(4 * size, 16, generator=torch.Generator().manual_seed(step))
        for module, optimizer in steps:
            mine = x if module is whole else x[4 * rank : 4 * rank + 4]
            optimizer.zero_grad()
            module(mine).square().mean().backward()
            optimizer.step()
    for parameter, shard in zip(whole.parameters(), sharded.parameters(), strict=True):
        assert shard.to_local().numel() < parameter.numel()  # type: ignore[attr-defined]  # a DTensor
        full = shard.full_tensor()  # type: ignore[attr-defined]  # likewise
        torch.testing.assert_close(full, parameter, rtol=1e-5, atol=1e-6)
    check_saving(sharded)


def check_saving(sharded: nn.Module) -> None:
    """torch.distributed.checkpoint writes the shards, and reads them again."""
    where: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(where, src=0)
    state: dict[str, Any] = get_model_state_dict(sharded)
    kept = {name: tensor.full_tensor().clone() for name, tensor in state.items()}
    checkpoint.save({"model": state}, checkpoint_id=where[0])
    with torch.no_grad():
        for parameter in sharded.parameters():
            parameter.zero_()
    fresh: dict[str, Any] = {"model": get_model_state_dict(sharded)}
    checkpoint.load(fresh, checkpoint_id=where[0])
    set_model_state_dict(sharded, fresh["model"])
    for name, wanted in kept.items():
        same(fresh["model"][name].full_tensor(), wanted)
    for name, loaded in sharded.named_parameters():
        same(loaded.full_tensor(), kept[name])  # type: ignore[attr-defined]  # a DTensor
    future = checkpoint.async_save({"model": state}, checkpoint_id=where[0] + "/later")
    future.result()
    dist.barrier()
    assert len(list(Path(where[0]).glob("*.distcp"))) == dist.get_world_size()
    assert len(list(Path(where[0], "later").glob("*.distcp"))) == dist.get_world_size()


HOOKS = [
    plain,
    allreduce,
    fp16,
    bf16,
    power_sgd,
]


@pytest.mark.slow
@pytest.mark.parametrize("hook", HOOKS, ids=lambda scenario: scenario.__name__)
def test_ddp_trains_as_over_gloo(hook: Register) -> None:
    launch(
        play,
        args=(check_hook, hook),
        nprocs=2,
        method="forkserver",
        timeout_s=120.0,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenario",
    [
        check_unused_and_uneven,
        check_sparse_gradients,
        check_fully_sharded,
    ],
    ids=lambda scenario: scenario.__name__,
)
def test_trainer_of_torch_trains(scenario: Scenario) -> None:
    launch(play, args=(scenario,), nprocs=2, method="forkserver", timeout_s=120.0)

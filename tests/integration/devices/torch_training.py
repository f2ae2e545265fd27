"""Torch's own DDP on devices, over asyncrpc: its numbers are those of the host."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from asyncrpc import Options
from tests.integration.devices.accelerators import IS_FAKE, TYPE, set_up
from tests.integration.devices.torch_ranks import HOME, begin, check_hands_off
from tests.integration.parallel.collectives.torch_backend.playing import same

STEPS = 3
CANNOT_FIND_UNUSED = {
    "fake": "torch wants pinned memory for it, which needs a device written in C++",
    "tpu": "torch wants pinned memory for it, which the plugin for the CPU has not",
}
Register = Callable[[DistributedDataParallel], None]


def plain(_: DistributedDataParallel) -> None:
    """No hook."""


def allreduce(model: DistributedDataParallel) -> None:
    model.register_comm_hook(None, default_hooks.allreduce_hook)


def fp16(model: DistributedDataParallel) -> None:
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)


def twice(model: DistributedDataParallel) -> None:
    """What is chained to a future may begin another collective, and use the device."""

    def hook(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        mine = bucket.buffer().div_(2 * dist.get_world_size())
        first: Any = dist.all_reduce(mine, async_op=True)

        def add(future: Any) -> torch.Tensor:
            (reduced,) = future.value()
            doubled: torch.Tensor = reduced + reduced
            return doubled

        chained: torch.futures.Future[torch.Tensor] = first.get_future().then(add)
        return chained

    model.register_comm_hook(None, lambda _state, bucket: hook(bucket))


HOOKS: list[Register] = [plain, allreduce, fp16, twice]


# --- numbers without any rounding ----------------------------------------------------


def coarse(seed: int, *shape: int) -> torch.Tensor:
    """Multiples of a quarter, below 1: sums of their products are exact for a while."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=draw).float() / 4


class Exact(nn.Module):
    """A model whose training needs fewer digits than a float has."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.first = nn.Parameter(coarse(seed, 6, 8))
        self.second = nn.Parameter(coarse(seed + 1, 8, 2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = torch.relu(inputs @ self.first) @ self.second
        return output


def exact_loss(
    model: nn.Module, device: str, dtype: torch.dtype, rank: int, step: int
) -> torch.Tensor:
    inputs, weights = coarse(90 * step + rank, 4, 6), coarse(40 * step + rank, 4, 2)
    moved = inputs.to(dtype).to(device)
    loss: torch.Tensor = (model(moved) * weights.to(dtype).to(device)).sum()
    return loss


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)


def exact_alone(dtype: torch.dtype, size: int) -> list[torch.Tensor]:
    """Train in this process alone, on the host, with the batches of all ranks."""
    model = Exact(1).to(dtype)
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(size):
            torch.autograd.backward(exact_loss(model, "cpu", dtype, rank, step) / size)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def exact_together(dtype: torch.dtype, register: Register, **how: Any) -> Any:
    """Train on the device, each rank with its batches."""
    rank = dist.get_rank()
    model = DistributedDataParallel(
        Exact(rank + 1).to(dtype).to(HOME), bucket_cap_mb=1e-4, **how
    )
    register(model)
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        torch.autograd.backward(exact_loss(model, HOME, dtype, rank, step))
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def digit_for_digit(rank: int, size: int, url: str, options: Options | None) -> str:
    """Two processes on a device train as one does on the host, to the last digit."""
    ledger = begin(rank, size, url, pg_options=options)
    check_digits(size)
    is_exclusive = options is not None and options.devices.exclusive
    check_hands_off(ledger if is_exclusive else None)
    dist.destroy_process_group()
    return "equal"


def check_digits(size: int) -> None:
    wanted = exact_alone(torch.float32, size)
    assert all(
        torch.equal(grad.double(), other)
        for grad, other in zip(wanted, exact_alone(torch.float64, size), strict=True)
    )  # there was nothing to round
    for dtype in (torch.float32, torch.float64):
        for views in (True, False):
            for register in (plain, allreduce, twice):
                grads = exact_together(dtype, register, gradient_as_bucket_view=views)
                same(grads, [grad.to(dtype) for grad in wanted])


# --- a model like others -------------------------------------------------------------


class Averages(nn.Module):
    """A layer with a buffer that training changes; accelerators differ in BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(inputs.mean(0))
        return inputs - self.mean


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), Averages(), nn.Linear(64, 5))


def trained(device: str, register: Register, **how: Any) -> list[torch.Tensor]:
    """Train some steps; return everything of the model."""
    rank = dist.get_rank()
    model = DistributedDataParallel(
        net(rank).to(device), bucket_cap_mb=0.001, gradient_as_bucket_view=True, **how
    )
    register(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(6, 20, generator=draw).to(device)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if step == 1:
            with model.no_sync():
                torch.autograd.backward(loss)
            loss = model(x).square().mean()
        torch.autograd.backward(loss)
        optimizer.step()
    return [tensor.detach().cpu() for tensor in model.module.state_dict().values()]


def as_on_the_host(rank: int, size: int, url: str, options: Options | None) -> str:
    """A model with buffers, hooks, steps without a sum; the ranks have the same."""
    begin(rank, size, url, pg_options=options)
    cases: list[tuple[Register, dict[str, Any]]] = [(hook, {}) for hook in HOOKS]
    if TYPE not in CANNOT_FIND_UNUSED:
        cases.append((plain, {"find_unused_parameters": True}))
        cases.append((plain, {"static_graph": True}))
    for register, how in cases:
        wanted = trained("cpu", register, **how)
        state = trained(HOME, register, **how)
        for tensor, other in zip(state, wanted, strict=True):
            if IS_FAKE:
                same(tensor, other)
            else:
                tolerance = 1e-2 if register is fp16 else 1e-4
                torch.testing.assert_close(
                    tensor, other, rtol=tolerance, atol=tolerance
                )
        all_: list[Any] = [None] * size
        dist.all_gather_object(all_, state[:2])
        same(all_[0], all_[1])
    dist.destroy_process_group()
    return "equal"


def unused(rank: int, size: int, url: str) -> str:
    """A parameter that one rank does not use: torch sums who has used what, there."""
    begin(rank, size, url)

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})

        def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
            output: torch.Tensor = self.parts[which](x)
            return output

    def run(device: str) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = DistributedDataParallel(
            Either().to(device), find_unused_parameters=True
        )
        x = torch.ones(2, 4).to(device) * (rank + 1)
        torch.autograd.backward(model(x, "ab"[rank]).sum())
        grads = [parameter.grad for parameter in model.parameters()]
        return [grad.cpu() for grad in grads if grad is not None]

    actual, wanted = run(HOME), run("cpu")
    assert len(actual) == 4
    same(actual, wanted)
    dist.destroy_process_group()
    return "equal"


def lose(rank: int, size: int, url: str) -> str:
    """Rank 1 dies; the other learns of it where it waits, and keeps its tensors."""
    begin(rank, size, url)
    tensor = torch.ones(3).to(HOME)
    dist.all_reduce(tensor)
    if rank == 1:
        dist.recv(torch.zeros(1), 0)
        os.kill(os.getpid(), signal.SIGKILL)
    outs = [torch.full((3,), 7.0).to(HOME) for _ in range(size)]
    work: Any = dist.all_gather(outs, tensor, async_op=True)
    dist.isend(torch.zeros(1), 1)
    with pytest.raises(RuntimeError, match="RankLostError: rank 1"):
        work.get_future().wait()
    with pytest.raises(dist.DistBackendError, match="RankLostError: rank 1") as caught:
        work.wait()
    assert all(bool((each == 7.0).all()) for each in outs)
    dist.destroy_process_group()
    return str(caught.value)


def main() -> None:
    """Run under torchrun."""
    set_up()
    torch.ones(1).to(HOME)
    dist.init_process_group("asyncrpc")
    check_digits(dist.get_world_size())
    sys.stdout.write(f"rank {dist.get_rank()}: digit for digit\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

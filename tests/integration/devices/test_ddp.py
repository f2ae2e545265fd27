"""Data parallel training of modules on devices: as of modules in host memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
import torch
from torch import nn

import asyncrpc
from asyncrpc import Group, UsageError, Worker, ddp
from asyncrpc.ddp import DistributedDataParallel
from asyncrpc.testing import ProcessCluster, acting_as
from tests.integration.devices.accelerators import IS_FAKE, TYPE, Hands, set_up

HOME = f"{TYPE}:0"
STEPS = 3
Pair = tuple[Worker, Worker]


class Net(nn.Module):
    """Layers, and a buffer that training changes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator))

        self.first, self.second = parameter(6, 8), parameter(8, 8)
        self.third = parameter(8, 2)
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, inputs: torch.Tensor, *, skips: bool = False) -> torch.Tensor:
        hidden = torch.tanh(inputs @ self.first)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(hidden.mean(0))
        if not skips:
            hidden = torch.tanh(hidden @ self.second)
        output: torch.Tensor = hidden @ self.third
        return output


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, 6, generator=generator)


Register = Callable[[DistributedDataParallel], None]


async def train(
    worker: Worker,
    device: str,
    name: str,
    register: Register | None,
    options: dict[str, Any],
) -> list[torch.Tensor]:
    """Train for some steps at one rank; return everything of the model."""
    hands = Hands(worker)
    async with Group(worker, ["a", "b"], name=name) as group:
        module = await hands.do(lambda: Net(group.rank).to(device))
        model = await DistributedDataParallel(
            module, group, first_bucket_cap_mb=1e-4, bucket_cap_mb=2e-4, **options
        )
        if register is not None:
            register(model)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for step in range(STEPS):
            x = batch(group.rank, step)
            skips = bool(options.get("find_unused_parameters")) and step == 1

            def forward(x: torch.Tensor = x, skips: bool = skips) -> torch.Tensor:  # noqa: FBT001
                loss: torch.Tensor = model(x.to(device), skips=skips).square().mean()
                return loss

            await hands.do(lambda: optimizer.zero_grad(set_to_none=True))
            if step == 2:
                with model.no_sync():
                    await model.backward(await hands.do(forward))
            await model.backward(await hands.do(forward))
            await hands.do(optimizer.step)
        values = await hands.do(
            lambda: [tensor.detach().cpu() for tensor in module.state_dict().values()]
        )
        model.close()
        return values


async def at_both(pair: Pair, run: Callable[[Worker], Awaitable[Any]]) -> list[Any]:
    return list(await asyncio.gather(*map(run, pair)))


def _hook(name: str) -> Register:
    def register(model: DistributedDataParallel) -> None:
        if name == "powerSGD":
            state = ddp.PowerSGDState(None, matrix_approximation_rank=1)
            model.register_comm_hook(state, ddp.powerSGD_hook)
        else:
            model.register_comm_hook(None, getattr(ddp, name))

    return register


CASES: dict[str, tuple[Register | None, dict[str, Any]]] = {
    "plain": (None, {}),
    "own memory": (None, {"gradient_as_bucket_view": False}),
    "unused": (None, {"find_unused_parameters": True}),
    "fp16": (_hook("fp16_compress_hook"), {}),
    "powerSGD": (_hook("powerSGD"), {}),
}


@pytest.mark.parametrize("case", list(CASES))
async def test_training_matches_the_host(pair: Pair, case: str) -> None:
    register, options = CASES[case]
    results = await at_both(pair, lambda w: train(w, HOME, "dev", register, options))
    plain = await at_both(pair, lambda w: train(w, "cpu", "cpu", register, options))
    for mine, theirs, wanted in zip(*results, plain[0], strict=True):
        assert torch.equal(mine, theirs)
        if IS_FAKE:
            assert torch.equal(mine, wanted)
        else:
            assert torch.allclose(mine, wanted, rtol=1e-4, atol=1e-5)


async def test_gradients_are_on_the_device(pair: Pair) -> None:
    async def run(worker: Worker) -> set[str]:
        hands = Hands(worker)
        async with Group(worker, ["a", "b"], name="where") as group:
            module = await hands.do(lambda: Net(1).to(HOME))
            model = await DistributedDataParallel(module, group)
            x = await hands.put(batch(group.rank, 0))
            loss = await hands.do(lambda: model(x).square().mean())
            await model.backward(loss)
            gradients = [parameter.grad for parameter in module.parameters()]
            device_names = {
                str(gradient.device) for gradient in gradients if gradient is not None
            }
            model.close()
            return device_names

    assert await at_both(pair, run) == [{HOME}, {HOME}]


async def test_module_on_two_devices_gets_the_mean(pair: Pair) -> None:
    """Parameters of the host and of a device have buckets of their own."""

    async def run(worker: Worker) -> list[torch.Tensor]:
        hands = Hands(worker)
        async with Group(worker, ["a", "b"], name="two") as group:
            module = nn.ParameterList([torch.ones(3), torch.ones(3)])
            module[1] = await hands.do(lambda: nn.Parameter(torch.ones(3, device=HOME)))
            model = await DistributedDataParallel(module, group)
            scale = float(group.rank + 1)

            def forward() -> torch.Tensor:
                first, second = ((each * scale).sum().cpu() for each in module)
                loss: torch.Tensor = first + second
                return loss

            await model.backward(await hands.do(forward))
            gradients = [parameter.grad for parameter in module]
            model.close()
            return await hands.do(lambda: [grad.cpu() for grad in gradients])

    for result in await at_both(pair, run):
        assert [grad.tolist() for grad in result] == [[1.5] * 3, [1.5] * 3]


async def plainly(worker: Worker, *, is_refused: bool = False) -> torch.Tensor | None:
    """Run a plain backward pass in a thread, at one rank."""
    hands = Hands(worker)
    async with Group(worker, ["a", "b"], name="plainly") as group:
        module = await hands.do(lambda: Net(1).to(HOME))
        model = await DistributedDataParallel(module, group)
        x = await hands.put(batch(group.rank, 0))

        def step() -> torch.Tensor:
            model(x).square().mean().backward()
            assert module.first.grad is not None
            return module.first.grad.cpu()

        gradient = None
        if is_refused:
            with pytest.raises(UsageError, match=r"await module\.backward"):
                await hands.do(step)
        else:
            gradient = await hands.do(step)
        model.close()
        return gradient


async def plainly_there() -> torch.Tensor | None:
    """Do so in a process that has not used a device before."""
    set_up()
    return await plainly(cast("Worker", asyncrpc.current_worker()))


@pytest.mark.skipif(
    TYPE in {"xla", "tpu"},
    reason="XLA: see the next test; TorchTPU takes two processes for a pod",
)
async def test_plain_backward_gives_equal_gradients() -> None:
    """Each rank in a process: torch has one thread for a device, which then waits."""
    set_up()
    async with ProcessCluster(["b"]) as worker:
        with acting_as(worker):
            there = worker.peer("b").call(plainly_there)
            ours, theirs = await asyncio.gather(plainly(worker), there)
    assert ours is not None
    assert theirs is not None
    assert torch.equal(ours, theirs)


@pytest.mark.skipif(TYPE != "xla", reason="these devices are not exclusive")
async def test_plain_backward_on_exclusive_devices_is_refused(pair: Pair) -> None:
    """A pass would hold the device while it waits."""

    async def run(worker: Worker) -> None:
        await plainly(worker, is_refused=True)

    await at_both(pair, run)

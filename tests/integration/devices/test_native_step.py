"""The native step: gradients reduced all at once, between backward pass and step."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from asyncrpc import DeviceOptions, Group, Options, UsageError, Worker, xla
from asyncrpc.ddp import DistributedDataParallel
from asyncrpc.errors import CollectiveError
from asyncrpc.testing import Cluster
from tests.integration.devices.accelerators import IS_FAKE, TYPE, Hands

HOME = f"{TYPE}:0"
STEPS = 3
Pair = tuple[Worker, Worker]


def net() -> nn.Module:
    """Make a module; its parameters are of two dtypes."""
    torch.manual_seed(1)
    half = nn.Linear(2, 2).to(torch.bfloat16)
    return nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 2), half])


def loss_of(module: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    assert isinstance(module, nn.ModuleList)
    first, second, half = module
    hidden = second(torch.tanh(first(inputs)))
    loss: torch.Tensor = half(hidden.to(torch.bfloat16)).float().square().mean()
    return loss


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(5, 6, generator=xla.generator(step, replica=rank))


async def at_both(pair: Pair, run: Callable[[Worker], Awaitable[Any]]) -> list[Any]:
    return list(await asyncio.gather(*map(run, pair)))


async def train(
    worker: Worker, device: str, *, by_ddp: bool, members: Sequence[str] = ("a", "b")
) -> list[torch.Tensor]:
    """Train for some steps at one rank; return the parameters."""
    hands = Hands(worker)
    name = f"{device}-{by_ddp}"
    async with Group(worker, members, name=name) as group:
        module = await hands.do(lambda: xla.with_rng_lock(lambda: net().to(device)))
        model = None
        if by_ddp:
            model = await DistributedDataParallel(module, group)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for step in range(STEPS):

            def forward(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                inputs = batch(group.rank, step).to(device)
                return loss_of(module, inputs)

            def passes(forward: Callable[[], torch.Tensor] = forward) -> None:
                forward().backward()  # type: ignore[no-untyped-call]

            if model is None:
                await hands.do(passes)
                await xla.reduce_gradients(optimizer, group)
            else:
                await model.backward(await hands.do(forward))
            await hands.do(optimizer.step)
        if model is not None:
            model.close()
        parameters = list(module.parameters())
        return await hands.do(
            lambda: [parameter.detach().cpu() for parameter in parameters]
        )


def assert_same(actual: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for tensor, other in zip(actual, wanted, strict=True):
        if IS_FAKE:
            assert torch.equal(tensor, other)
        else:
            # XLA fuses what one graph has, and rounds bfloat16 elsewhere then.
            near = 0.02 if tensor.dtype == torch.bfloat16 else 1e-3
            assert torch.allclose(tensor, other, rtol=near, atol=near)


async def test_training_matches_ddp_and_the_host(pair: Pair) -> None:
    native, other = await at_both(pair, lambda w: train(w, HOME, by_ddp=False))
    ddp, _ = await at_both(pair, lambda w: train(w, HOME, by_ddp=True))
    host, _ = await at_both(pair, lambda w: train(w, "cpu", by_ddp=False))
    assert all(map(torch.equal, native, other))
    assert not any(map(torch.equal, native, net().parameters()))
    assert_same(native, ddp)
    assert_same(native, host)


async def test_training_alone_matches_ddp_and_the_host(pair: Pair) -> None:
    """Nothing is reduced, and DDP leaves gradients on the device."""
    native, ddp, host = [
        await train(pair[0], device, by_ddp=by_ddp, members=["a"])
        for device, by_ddp in ((HOME, False), (HOME, True), ("cpu", False))
    ]
    assert_same(native, ddp)
    assert_same(native, host)


async def test_ddp_alone_accumulates_gradients_without_a_copy(pair: Pair) -> None:
    """Over passes that add to it, and for a parameter that one leaves out."""
    hands = Hands(pair[0])
    async with Group(pair[0], ["a"], name="gathers") as group:
        used, unused = await hands.do(
            lambda: [nn.Parameter(torch.ones(2, device=HOME)) for _ in range(2)]
        )
        model = await DistributedDataParallel(
            nn.ParameterList([used, unused]), group, find_unused_parameters=True
        )

        def loss(times: float) -> torch.Tensor:
            return (used * times).sum()

        await model.backward(await hands.do(partial(loss, 3.0)))
        first = used.grad
        await model.backward(await hands.do(partial(loss, 4.0)))
        assert used.grad is first
        assert first is not None
        assert await hands.do(first.tolist) == [7.0, 7.0]
        assert unused.grad is None
        model.close()


async def with_gradients(
    worker: Worker, name: str, gradients: Callable[[int], list[list[float] | None]]
) -> list[list[float] | None]:
    """Reduce gradients of parameters on the device; return what they are then."""
    hands = Hands(worker)
    async with Group(worker, ["a", "b"], name=name) as group:

        def make() -> list[nn.Parameter]:
            created = []
            for values in gradients(group.rank):
                parameter = nn.Parameter(torch.zeros(2, device=HOME))
                if values is not None:
                    parameter.grad = torch.tensor(values).to(HOME)
                created.append(parameter)
            return created

        parameters = await hands.do(make)
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        await xla.reduce_gradients(optimizer, group)

        def read() -> list[list[float] | None]:
            return [
                None if parameter.grad is None else parameter.grad.tolist()
                for parameter in parameters
            ]

        return await hands.do(read)


async def test_gradients_become_their_mean_over_ranks(pair: Pair) -> None:
    """A parameter without a gradient on any rank still has none."""

    def gradients(rank: int) -> list[list[float] | None]:
        return [[1.0, rank], None, [4.0 * rank, -2.0]]

    results = await at_both(pair, lambda w: with_gradients(w, "mean", gradients))
    assert results == [[[1.0, 0.5], None, [2.0, -2.0]]] * 2


async def test_memory_is_kept_for_the_next_step(pair: Pair) -> None:
    """Where all ranks have it; for gradients that come later, too."""

    async def run(worker: Worker) -> None:
        hands = Hands(worker)
        group = Group(worker, ["a", "b"], name="kept")
        parameters = await hands.do(
            lambda: [nn.Parameter(torch.zeros(2, device=HOME)) for _ in range(2)]
        )
        optimizer = torch.optim.SGD(parameters, lr=0.1)

        async def step(*values: float | None) -> torch.Tensor:
            for parameter, value in zip(parameters, values, strict=True):
                gradient = (
                    None if value is None else torch.full((2,), value + group.rank)
                )
                parameter.grad = None if gradient is None else await hands.put(gradient)
            await xla.reduce_gradients(optimizer, group)
            for parameter, value in zip(parameters, values, strict=True):
                if parameter.grad is not None:
                    assert value is not None
                    assert await hands.do(parameter.grad.tolist) == [value + 0.5] * 2
            memory: torch.Tensor = group.kept[optimizer][torch.float32]
            return memory

        first = await step(1.0, None)
        assert await step(2.0, 3.0) is first
        assert await step(None, 4.0) is first
        if group.rank == 1:
            group.kept.clear()
        second = await step(5.0, 6.0)
        assert second is not first
        with pytest.raises(UsageError, match="compute a backward pass"):
            await step(None, None)
        if group.rank == 1:
            group.refuse("wants to see it fail")
        else:
            with pytest.raises(CollectiveError, match="wants to see it fail"):
                await step(7.0, 8.0)
        assert await step(9.0, 10.0) is second  # nothing of it had been written to
        group.close()
        assert not group.kept

    await at_both(pair, run)


async def test_memory_is_freed_when_a_rank_fails_midway(pair: Pair) -> None:
    async def run(worker: Worker) -> None:
        group = Group(worker, ["a", "b"], name="midway")
        parameter = nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        async def step() -> None:
            parameter.grad = torch.ones(2)
            await xla.reduce_gradients(optimizer, group)

        await step()
        if group.rank == 1:
            await group.all_reduce(torch.tensor([1, 1]))  # what a step begins with
            group.refuse("goes no further")
        else:
            with pytest.raises(CollectiveError, match="goes no further"):
                await step()
            assert optimizer not in group.kept
        await step()
        assert parameter.grad is not None
        assert parameter.grad.tolist() == [1.0, 1.0]
        group.close()

    await at_both(pair, run)


async def test_ranks_with_different_gradients_are_refused(pair: Pair) -> None:
    """Both have two numbers to send, which do not belong together."""

    def gradients(rank: int) -> list[list[float] | None]:
        return [[1.0, 1.0], None] if rank else [None, [1.0, 1.0]]

    async def run(worker: Worker) -> None:
        with pytest.raises(UsageError, match=r"parameter 0 .* at 1 of 2 ranks"):
            await with_gradients(worker, "others", gradients)

    await at_both(pair, run)


@pytest.mark.parametrize(
    ("of_b", "why"),
    [
        ([None], "compute a backward pass"),
        ([[1.0, 1.0]], r"at 1 of 2 ranks"),
        ([None, None], "all_reduce"),
    ],
    ids=["none", "one", "more parameters"],
)
async def test_rank_without_gradients_is_named_to_both(
    pair: Pair, of_b: list[list[float] | None], why: str
) -> None:
    """Both ranks are told, whoever it is that has none."""

    async def run(worker: Worker) -> None:
        with pytest.raises((UsageError, CollectiveError), match=why):
            await with_gradients(worker, "lack", lambda rank: of_b if rank else [None])

    await at_both(pair, run)


async def test_sparse_gradients_are_refused(pair: Pair) -> None:
    async def run(worker: Worker) -> None:
        async with Group(worker, ["a", "b"], name="sparse") as group:
            table = nn.Embedding(4, 2, sparse=True)
            table(torch.tensor([1])).sum().backward()
            optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
            with pytest.raises(UsageError, match=r"sparse=False, or asyncrpc\.ddp"):
                await xla.reduce_gradients(optimizer, group)

    await at_both(pair, run)


async def test_group_of_one_reduces_nothing(pair: Pair) -> None:
    worker = pair[0]
    hands = Hands(worker)
    async with Group(worker, ["a"], name="alone") as group:
        parameter = await hands.do(lambda: nn.Parameter(torch.zeros(2, device=HOME)))
        parameter.grad = await hands.put(torch.tensor([1.0, 2.0]))
        before = parameter.grad
        await xla.reduce_gradients(torch.optim.SGD([parameter], lr=0.1), group)
        assert parameter.grad is before
        assert (await hands.do(before.tolist)) == [1.0, 2.0]


@pytest.mark.skipif(not IS_FAKE, reason="the process has no second device")
async def test_device_outside_the_options_is_refused() -> None:
    async with Cluster(
        2, options=Options(devices=DeviceOptions(names=("fake:1",)))
    ) as pair:

        async def run(worker: Worker) -> None:
            with pytest.raises(UsageError, match="no device fake:0"):
                await with_gradients(worker, "undeclared", lambda _: [[1.0, 2.0]])

        await at_both((pair[0], pair[1]), run)

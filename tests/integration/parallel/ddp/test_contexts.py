"""A module within a distributed context, whose backward pass goes through a peer."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

from asyncrpc import Group, Worker, autograd
from asyncrpc.ddp import (
    DistributedDataParallel,
    PowerSGDState,
    allreduce_hook,
    fp16_compress_hook,
    powerSGD_hook,
)
from asyncrpc.errors import AutogradError, CollectiveError
from asyncrpc.testing import Cluster, acting_as
from tests.integration.parallel.ddp.ranks import Grads, loss_of, same

STEPS = 3
T = TypeVar("T")
Ranks = Callable[[Worker, Group], Awaitable[T]]


class Sides(nn.Module):
    """An encoder before a remote call, a head behind it, and a scale on both sides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.encoder = nn.Linear(3, 3)
        self.head = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, rows: torch.Tensor, side: str) -> torch.Tensor:
        """Map `(batch, 3)` by one side."""
        result: torch.Tensor = self.get_submodule(side)(rows) * self.scale
        return result


def doubled(rows: torch.Tensor) -> torch.Tensor:
    return rows * 2


def rows_of(rank: int, step: int) -> torch.Tensor:
    return torch.arange(6.0).view(2, 3).sin() + rank + step


async def at_ranks(rank: Ranks[T], size: int = 2) -> Sequence[T]:
    """Run something at ranks "a" and "b", beside a peer "c" that is no rank."""
    async with Cluster(3) as workers:
        names = [worker.name for worker in workers[:size]]
        groups = [Group(worker, names, timeout_s=60.0) for worker in workers[:size]]

        async def run(worker: Worker, group: Group) -> T:
            with acting_as(worker):
                return await rank(worker, group)

        pairs = zip(workers[:size], groups, strict=True)
        return await asyncio.gather(
            *(asyncio.create_task(run(*pair)) for pair in pairs)
        )


async def outputs(
    worker: Worker, model: Callable[..., torch.Tensor], rows: torch.Tensor, way: str
) -> torch.Tensor:
    """Run a model around, before or behind a remote call, or without one."""
    call = worker.peer("c").call
    if way == "both sides":
        return model(await call(doubled, model(rows, "encoder")), "head")
    if way == "before":
        return await call(doubled, model(rows, "encoder"))
    if way == "behind":
        return model(await call(doubled, rows), "head")
    hidden = model(rows, "encoder")
    if way == "beside":  # what is sent takes no part
        await call(doubled, hidden)
    return model(hidden, "head")


def outputs_alone(model: nn.Module, rows: torch.Tensor, way: str) -> torch.Tensor:
    hidden: torch.Tensor = rows
    if way != "behind":
        hidden = model(hidden, "encoder")
    if way not in {"without", "beside"}:
        hidden = doubled(hidden)
    result: torch.Tensor = hidden if way == "before" else model(hidden, "head")
    return result


def alone(way: str, step: int, ranks: int = 2) -> Grads:
    """Return the mean of what all ranks compute."""
    module = Sides()
    for rank in range(ranks):
        output = outputs_alone(module, rows_of(rank, step), way)
        torch.autograd.backward(loss_of(output) / ranks)
    return [parameter.grad for parameter in module.parameters()]


def gradients(context: autograd.Context, module: nn.Module) -> Grads:
    by_parameter = autograd.get_gradients(context)
    return [by_parameter.get(parameter) for parameter in module.parameters()]


OPTIONS: dict[str, dict[str, bool]] = {
    "views": {},
    "own memory": {"gradient_as_bucket_view": False},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}
WHOLE = ("both sides", "without", "beside")
IN_PART = ("before", "behind")  # parameters are left out, which only two options allow
CASES = [
    *itertools.product(WHOLE, OPTIONS, ["smart"]),
    *itertools.product(IN_PART, ["unused", "static"], ["smart"]),
    *itertools.product(["both sides", "without"], OPTIONS, ["fast"]),
]


@pytest.mark.parametrize(("way", "options", "mode"), CASES)
async def test_module_around_a_call_is_reduced(
    way: str, options: str, mode: Any
) -> None:
    """Each context keeps its gradients while later passes go on."""

    async def rank(worker: Worker, group: Group) -> list[Grads]:
        module = Sides()
        model = await DistributedDataParallel(module, group, **OPTIONS[options])  # type: ignore[arg-type]  # bools alone
        results = []
        for step in range(STEPS):
            async with autograd.context() as context:
                output = await outputs(worker, model, rows_of(group.rank, step), way)
                await autograd.backward(context, [loss_of(output)], mode=mode)
                results.append(gradients(context, module))
        assert all(parameter.grad is None for parameter in module.parameters())
        assert model.statistics().passes == STEPS
        return results

    for steps in await at_ranks(rank):
        for step, grads in enumerate(steps):
            assert same(grads, alone(way, step))


def of_all_steps(way: str) -> Grads:
    """Return the sums of the gradients of one rank's steps."""
    each = [alone(way, step) for step in range(STEPS)]
    return [
        torch.stack([grad for grad in grads if grad is not None]).sum(0)
        for grads in zip(*each, strict=True)
    ]


async def test_passes_of_one_context_add_up() -> None:
    async def rank(worker: Worker, group: Group) -> Grads:
        module = Sides()
        model = await DistributedDataParallel(module, group)
        async with autograd.context() as context:
            for step in range(STEPS):
                rows = rows_of(group.rank, step)
                output = await outputs(worker, model, rows, "both sides")
                await autograd.backward(context, [loss_of(output)], retain_graph=True)
            return gradients(context, module)

    for grads in await at_ranks(rank):
        assert same(grads, of_all_steps("both sides"))


async def test_gradients_of_a_plain_pass_outlive_passes_of_contexts() -> None:
    async def rank(worker: Worker, group: Group) -> Grads:
        module = Sides()
        model = await DistributedDataParallel(module, group)
        for step in range(STEPS):
            local = outputs_alone(model, rows_of(group.rank, step), "without")
            await model.backward(loss_of(local))
            async with autograd.context() as context:
                rows = rows_of(group.rank, 7)
                output = await outputs(worker, model, rows, "both sides")
                await autograd.backward(context, [loss_of(output)])
                assert same(gradients(context, module), alone("both sides", 7))
        return [parameter.grad for parameter in module.parameters()]

    for grads in await at_ranks(rank):
        assert same(grads, of_all_steps("without"))


HOOKS: dict[str, Any] = {
    "allreduce": allreduce_hook,
    "fp16": fp16_compress_hook,
    "powersgd": powerSGD_hook,
}


@pytest.mark.parametrize("way", ["both sides", "without"])
@pytest.mark.parametrize("name", HOOKS)
async def test_a_hook_is_called_once_for_each_bucket_of_a_distributed_pass(
    name: str, way: str
) -> None:
    calls: list[int] = []

    async def counted(state: Any, bucket: Any) -> torch.Tensor:
        calls.append(bucket.index())
        result: torch.Tensor = await HOOKS[name](state, bucket)
        return result

    async def rank(worker: Worker, group: Group) -> Grads:
        module = Sides()
        model = await DistributedDataParallel(module, group)
        state = (
            PowerSGDState(None, 4, start_powerSGD_iter=2)
            if name == "powersgd"
            else None
        )
        model.register_comm_hook(state, counted)
        for step in range(STEPS):
            async with autograd.context() as context:
                output = await outputs(worker, model, rows_of(group.rank, step), way)
                await autograd.backward(context, [loss_of(output)])
                grads = gradients(context, module)
        return grads

    first, second = await at_ranks(rank)
    assert len(calls) == 2 * STEPS
    for grad, other, exact in zip(first, second, alone(way, STEPS - 1), strict=True):
        assert grad is not None
        assert other is not None
        assert exact is not None
        assert torch.equal(grad, other)
        assert torch.allclose(grad, exact, rtol=1e-2, atol=1e-2)


async def test_a_parameter_that_some_ranks_use_has_its_gradient_in_all_contexts() -> (
    None
):
    async def rank(worker: Worker, group: Group) -> Grads:
        module = Sides()
        model = await DistributedDataParallel(
            module, group, find_unused_parameters=True
        )
        async with autograd.context() as context:
            way = ("both sides", "before")[group.rank]
            output = await outputs(worker, model, rows_of(group.rank, 0), way)
            await autograd.backward(context, [loss_of(output)])
            return gradients(context, module)

    module = Sides()
    for number, way in enumerate(("both sides", "before")):
        output = outputs_alone(module, rows_of(number, 0), way)
        torch.autograd.backward(loss_of(output) / 2)
    for grads in await at_ranks(rank):
        assert same(grads, [parameter.grad for parameter in module.parameters()])


@pytest.mark.parametrize("way", ["before", "behind"])
async def test_a_parameter_left_out_of_a_distributed_pass_is_named(way: str) -> None:
    async def rank(worker: Worker, group: Group) -> str:
        model = await DistributedDataParallel(Sides(), group)
        async with autograd.context() as context:
            output = await outputs(worker, model, rows_of(group.rank, 0), way)
            with pytest.raises(AutogradError) as raised:
                await autograd.backward(context, [loss_of(output)])
        async with autograd.context() as context:  # and the next goes well
            output = await outputs(worker, model, rows_of(group.rank, 0), "both sides")
            await autograd.backward(context, [loss_of(output)])
            assert same(gradients(context, model.module), alone("both sides", 0))
        return str(raised.value)

    unused = "head.weight" if way == "before" else "encoder.weight"
    texts = await at_ranks(rank)
    assert any(f"does not depend on '{unused}'" in text for text in texts)


def failed(_rows: torch.Tensor) -> torch.Tensor:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, rows: torch.Tensor) -> torch.Tensor:
            return rows.clone()

        @staticmethod
        def backward(_ctx: Any, _gradient: torch.Tensor) -> torch.Tensor:
            raise OSError("no such gradient")

    result: torch.Tensor = Fails.apply(_rows)  # type: ignore[no-untyped-call]
    return result


async def test_pass_failing_between_its_segments_fails_on_all_ranks() -> None:
    async def rank(worker: Worker, group: Group) -> Exception:
        module = Sides()
        model = await DistributedDataParallel(module, group)
        function = (failed, doubled)[group.rank]
        async with autograd.context() as context:
            hidden = model(rows_of(group.rank, 0), "encoder")
            hidden = await worker.peer("c").call(function, hidden)
            with pytest.raises(AutogradError) as raised:
                await autograd.backward(context, [loss_of(model(hidden, "head"))])
        async with autograd.context() as context:
            output = await outputs(worker, model, rows_of(group.rank, 0), "both sides")
            await autograd.backward(context, [loss_of(output)])
            assert same(gradients(context, module), alone("both sides", 0))
        return raised.value

    first, second = await at_ranks(rank)
    assert "no such gradient" in str(first)
    assert isinstance(second.__cause__, CollectiveError)


async def test_concurrent_passes_of_two_contexts_are_refused_or_right() -> None:
    """They share buckets: a pass that meets another between its segments fails."""

    async def rank(worker: Worker, group: Group) -> list[Any]:
        module = Sides()
        model = await DistributedDataParallel(module, group)

        async def step(number: int) -> Grads:
            async with autograd.context() as context:
                rows = rows_of(group.rank, number)
                output = await outputs(worker, model, rows, "both sides")
                await autograd.backward(context, [loss_of(output)])
                return gradients(context, module)

        return list(await asyncio.gather(step(0), step(1), return_exceptions=True))

    (outcomes,) = await at_ranks(rank, 1)
    assert any(not isinstance(result, BaseException) for result in outcomes), outcomes
    for number, outcome in enumerate(outcomes):
        if isinstance(outcome, BaseException):
            assert isinstance(outcome, AutogradError)
            assert "another context" in str(outcome)
        else:
            assert same(outcome, alone("both sides", number, 1))


REPLICAS: dict[str, DistributedDataParallel] = {}


def forward_at(name: str, rows: torch.Tensor, side: str) -> torch.Tensor:
    result: torch.Tensor = REPLICAS[name](rows, side)
    return result


@pytest.mark.parametrize("way", ["one call", "two calls"])
async def test_replicas_that_a_third_worker_drives_are_reduced_in_its_pass(
    way: str,
) -> None:
    async with Cluster(3) as workers:
        groups = [Group(worker, ["a", "b"], timeout_s=60.0) for worker in workers[:2]]
        modules = [Sides(), Sides()]
        models = await asyncio.gather(
            *(
                DistributedDataParallel(module, group, find_unused_parameters=True)
                for module, group in zip(modules, groups, strict=True)
            )
        )
        REPLICAS.update(zip("ab", models, strict=True))
        driver = workers[2]
        with acting_as(driver):
            async with autograd.context() as context:
                losses = []
                for number, name in enumerate("ab"):
                    call = driver.peer(name).call
                    out = await call(forward_at, name, rows_of(number, 0), "encoder")
                    if way == "two calls":
                        out = await call(forward_at, name, doubled(out), "head")
                    losses.append(loss_of(out))
                await autograd.backward(context, losses)
                for name in "ab":  # one at a time: both draw from torch's generator
                    await driver.peer(name).call(check_replica, name, way)


def check_replica(name: str, way: str) -> None:
    module = Sides()
    for rank in range(2):
        hidden = module(rows_of(rank, 0), "encoder")
        if way == "two calls":
            hidden = module(doubled(hidden), "head")
        torch.autograd.backward(loss_of(hidden) / 2)
    grads = gradients(autograd.current_context(), REPLICAS[name].module)
    assert same(grads, [parameter.grad for parameter in module.parameters()])


async def test_a_pass_that_ends_at_a_received_tensor_is_refused() -> None:
    """It would send nothing to the peer, whose gradients would be lost."""
    async with Cluster(2) as workers:

        async def run() -> None:
            model = await DistributedDataParallel(Sides(), Group(workers[0], ["a"]))
            async with autograd.context():
                hidden = model(rows_of(0, 0), "encoder")
                hidden = await workers[0].peer("b").call(doubled, hidden)
                await model.backward(loss_of(model(hidden, "head")))

        with acting_as(workers[0]), pytest.raises(AutogradError, match="worker 'b'"):
            await run()

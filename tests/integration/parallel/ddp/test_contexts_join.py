"""Ranks with fewer inputs, whose passes are of distributed contexts."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import torch
from torch import nn

from asyncrpc import Group, Worker, autograd
from asyncrpc.ddp import (
    DistributedDataParallel,
    Join,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    PowerSGDState,
    ZeroRedundancyOptimizer,
    fp16_compress_hook,
    powerSGD_hook,
)
from asyncrpc.errors import CollectiveError
from tests.integration.parallel.ddp.ranks import loss_of
from tests.integration.parallel.ddp.test_contexts import (
    OPTIONS,
    Sides,
    at_ranks,
    outputs,
    outputs_alone,
    rows_of,
)

INPUTS = (1, 3)  # of each rank
RATE = 0.1
Parts = list[Any]


class Local:
    """A step of this rank alone."""

    def __init__(self, module: nn.Module, _group: Group) -> None:
        self.optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
        self.joinables: Parts = []

    async def step(self) -> None:
        self.optimizer.step()


class Sharded:
    """A step that the ranks share out."""

    def __init__(self, module: nn.Module, group: Group) -> None:
        self.optimizer = ZeroRedundancyOptimizer(
            module.parameters(), torch.optim.SGD, group, lr=RATE
        )
        self.joinables: Parts = [self.optimizer]

    async def step(self) -> None:
        await self.optimizer.step()


class Averaged:
    """A step of this rank, after which parameters are averaged."""

    def __init__(self, module: nn.Module, group: Group) -> None:
        inner = torch.optim.SGD(module.parameters(), lr=RATE)
        self.optimizer = PostLocalSGDOptimizer(inner, PeriodicModelAverager(group, 2))
        self.joinables: Parts = [self.optimizer]

    async def step(self) -> None:
        await self.optimizer.step()


STEPPERS: dict[str, Callable[[nn.Module, Group], Any]] = {
    "local": Local,
    "sharded": Sharded,
    "averaged": Averaged,
}
HOOKS: dict[str, Any] = {
    "no hook": None,
    "fp16": (lambda: None, fp16_compress_hook),
    "powersgd": (lambda: PowerSGDState(None, 4, start_powerSGD_iter=2), powerSGD_hook),
}


@asynccontextmanager
async def entered(join: Join, *, is_inside: bool) -> AsyncIterator[Any]:
    """Enter a join; around each context, or within one for all passes."""
    async with AsyncExitStack() as stack:
        outer = None
        if is_inside:
            outer = await stack.enter_async_context(autograd.context())
        await stack.enter_async_context(join)
        yield outer


async def train(
    worker: Worker,
    group: Group,
    case: tuple[str, str, str, str],
    *,
    is_inside: bool,
    **options: Any,
) -> list[torch.Tensor]:
    way, kind, stepper, hook = case
    module = Sides()
    model = await DistributedDataParallel(module, group, **OPTIONS[kind])  # type: ignore[arg-type]  # bools alone
    if HOOKS[hook] is not None:
        make_state, reduce = HOOKS[hook]
        model.register_comm_hook(make_state(), reduce)
    optimizer = STEPPERS[stepper](module, group)
    join = Join([model, *optimizer.joinables], **options)
    async with entered(join, is_inside=is_inside) as outer:
        seen: dict[nn.Parameter, torch.Tensor] = {}
        for step in range(INPUTS[group.rank]):
            async with AsyncExitStack() as stack:
                context = outer
                if context is None:
                    context = await stack.enter_async_context(autograd.context())
                output = await outputs(worker, model, rows_of(group.rank, step), way)
                await autograd.backward(context, [loss_of(output)])
                gathered = autograd.get_gradients(context)
                for parameter in module.parameters():
                    parameter.grad = gathered[parameter].clone()
                    if is_inside:  # the context adds them up
                        parameter.grad -= seen.get(parameter, 0.0)
                        seen[parameter] = gathered[parameter].clone()
            await optimizer.step()
    return [parameter.detach().clone() for parameter in module.parameters()]


def trained_alone(way: str, *, divides_by_all: bool = True) -> list[torch.Tensor]:
    """Train in one process as the ranks should together."""
    module = Sides()
    for step in range(max(INPUTS)):
        there = [rank for rank, count in enumerate(INPUTS) if step < count]
        module.zero_grad()
        for rank in there:
            count = len(INPUTS) if divides_by_all else len(there)
            output = outputs_alone(module, rows_of(rank, step), way)
            torch.autograd.backward(loss_of(output) / count)
        with torch.no_grad():
            for parameter in module.parameters():
                assert parameter.grad is not None
                parameter.sub_(RATE * parameter.grad)
    return [parameter.detach() for parameter in module.parameters()]


WAYS = ("both sides", "without")
CASES = [
    *itertools.product(WAYS, OPTIONS, ["local"], ["no hook"]),
    *itertools.product(WAYS, ["views"], STEPPERS, HOOKS),
    *itertools.product(["both sides"], ["static", "unused"], STEPPERS, ["powersgd"]),
]


@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("case", CASES, ids="-".join)
async def test_uneven_ranks_join_in_contexts(
    case: tuple[str, str, str, str], *, is_inside: bool
) -> None:
    async def rank(worker: Worker, group: Group) -> list[torch.Tensor]:
        return await train(worker, group, case, is_inside=is_inside)

    first, second = await at_ranks(rank)
    exact = case[3] == "no hook" and case[2] != "averaged"
    limit = 1e-5 if exact else 3e-2
    for mine, other, wanted in zip(first, second, trained_alone(case[0]), strict=True):
        assert torch.equal(mine, other)
        assert torch.allclose(mine, wanted, rtol=limit, atol=limit)


async def test_the_mean_may_be_over_the_ranks_with_inputs() -> None:
    case = ("both sides", "views", "local", "no hook")

    async def rank(worker: Worker, group: Group) -> list[torch.Tensor]:
        by_those = {"divide_by_initial_world_size": False}
        return await train(worker, group, case, is_inside=False, **by_those)

    wanted = trained_alone("both sides", divides_by_all=False)
    for mine in await at_ranks(rank):
        for grad, other in zip(mine, wanted, strict=True):
            assert torch.allclose(grad, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", OPTIONS)
async def test_a_rank_that_had_no_input_at_all_trains_on_after_the_join(
    kind: str,
) -> None:
    """Its first pass of its own is the second of the module."""

    async def rank(worker: Worker, group: Group) -> list[torch.Tensor]:
        module = Sides()
        used = list(module.parameters())
        if kind in {"static", "unused"}:
            module.register_parameter("never", nn.Parameter(torch.ones(2)))
        model = await DistributedDataParallel(module, group, **OPTIONS[kind])  # type: ignore[arg-type]  # bools alone
        async with model.join():
            for step in range(2 * group.rank):
                async with autograd.context() as context:
                    rows = rows_of(group.rank, step)
                    output = await outputs(worker, model, rows, "both sides")
                    await autograd.backward(context, [loss_of(output)])
        async with autograd.context() as context:
            output = await outputs(worker, model, rows_of(group.rank, 5), "both sides")
            await autograd.backward(context, [loss_of(output)])
            gathered = autograd.get_gradients(context)
            return [gathered[parameter] for parameter in used]

    first, second = await at_ranks(rank)
    for mine, other in zip(first, second, strict=True):
        assert torch.equal(mine, other)


async def test_the_first_rank_without_inputs_may_end_the_loop_in_contexts() -> None:
    case = ("both sides", "views", "local", "no hook")

    async def rank(worker: Worker, group: Group) -> BaseException:
        with pytest.raises(Exception, match="no more inputs") as raised:
            await train(
                worker, group, case, is_inside=False, throw_on_early_termination=True
            )
        return raised.value

    for error in await at_ranks(rank):
        assert not isinstance(error.__cause__, CollectiveError)

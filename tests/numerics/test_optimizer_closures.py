"""Steps with closures: LBFGS over two owners equals LBFGS in one process, bitwise."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
from torch import nn

import asyncrpc
from asyncrpc import UsageError
from asyncrpc.autograd import Context, backward, context
from asyncrpc.errors import OptimizerError
from asyncrpc.optim import DistributedOptimizer
from tests.numerics.groups import (
    Group,
    assert_same,
    group_of,
    inputs,
    layers,
    one_process,
    step_on_ones,
    turns_in,
)
from tests.numerics.optimizers import Lookahead

TARGET = torch.linspace(-0.75, 0.75, 7, dtype=torch.float64)
Closure = Callable[[Context], Awaitable[torch.Tensor]]


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return (out - TARGET[: out.shape[1]]).square().mean()


def closure_of(
    group: Group, x: torch.Tensor, seen: list[float] | None = None
) -> Closure:
    async def closure(ctx: Context) -> torch.Tensor:
        loss = loss_of(await group.forward(x))
        await backward(ctx, [loss])
        if seen is not None:
            seen.append(loss.item())
        return loss

    return closure


def local_closure(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: torch.Tensor,
    seen: list[float],
) -> Callable[[], Any]:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(x))
        loss.backward()  # type: ignore[no-untyped-call]
        seen.append(loss.item())
        return loss

    return closure


@pytest.mark.parametrize("on", ["b", "bc", "bca"])
@pytest.mark.parametrize(
    "options",
    [
        {"lr": 0.5, "max_iter": 4},
        {"lr": 1.0, "max_iter": 6, "line_search_fn": "strong_wolfe"},
        {"lr": 0.1, "max_iter": 3, "history_size": 2},
    ],
)
async def test_lbfgs_equals_one_process(on: str, options: dict[str, Any]) -> None:
    """For several steps and batches, with each loss and the state."""
    model, local = one_process(
        len(on), lambda it: torch.optim.LBFGS(it.parameters(), **options)
    )
    async with layers(on) as group:
        optimizer = DistributedOptimizer("LBFGS", group.parameters, **options)
        for step in range(3):
            wanted: list[float] = []
            losses: list[float] = []
            x = inputs(step)
            local.step(local_closure(model, local, x, wanted))
            result = await optimizer.step(closure=closure_of(group, x, losses))
            assert losses == wanted
            assert len(losses) > 1
            assert result.is_applied
            assert result.loss.item() == wanted[0]
            assert result.gradients == len(group.parameters)
            assert_same(await group.weights(), model)
        assert str(await optimizer.state_dict()) == str(local.state_dict())
        assert turns_in(group.workers) == [0, 0, 0]


async def test_lbfgs_continues_from_its_state_and_schedule() -> None:
    options: dict[str, Any] = {"max_iter": 3, "lr": 0.5}
    model, local = one_process(
        2, lambda it: torch.optim.LBFGS(it.parameters(), **options)
    )
    wanted = torch.optim.lr_scheduler.ExponentialLR(local, gamma=0.5)
    async with layers("bc") as group:
        optimizer = await DistributedOptimizer("LBFGS", group.parameters, **options)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer.options, gamma=0.5)
        for step in range(4):
            if step == 2:
                saved = await optimizer.state_dict(), schedule.state_dict()
                optimizer = await DistributedOptimizer("LBFGS", group.parameters)
                schedule = torch.optim.lr_scheduler.ExponentialLR(
                    optimizer.options, gamma=0.5
                )
                await optimizer.load_state_dict(saved[0])
                schedule.load_state_dict(saved[1])
            x = inputs(step)
            local.step(local_closure(model, local, x, []))
            await optimizer.step(closure=closure_of(group, x))
            wanted.step()
            schedule.step()
        assert_same(await group.weights(), model)


async def test_lbfgs_continues_from_parameters_changed_by_others() -> None:
    model, local = one_process(2, lambda it: torch.optim.LBFGS(it.parameters()))
    between = torch.optim.SGD(model.parameters(), lr=0.1)
    async with layers("bc") as group:
        optimizer = DistributedOptimizer("LBFGS", group.parameters)
        other = DistributedOptimizer("SGD", group.parameters, lr=0.1)
        for step in range(2):
            x = inputs(step)
            local.step(local_closure(model, local, x, []))
            await optimizer.step(closure=closure_of(group, x))
            between.step(local_closure(model, between, x, []))
            await other.step(closure=closure_of(group, x))
        assert_same(await group.weights(), model)


async def test_an_optimizer_of_the_users_may_need_a_closure() -> None:
    model, local = one_process(2, lambda it: Lookahead(it.parameters(), lr=0.1))
    async with layers("bc") as group:
        optimizer = DistributedOptimizer(Lookahead, group.parameters, lr=0.1)
        for step in range(3):
            x = inputs(step)
            local.step(local_closure(model, local, x, []))
            await optimizer.step(closure=closure_of(group, x))
        assert_same(await group.weights(), model)


@pytest.mark.parametrize("name", ["SGD", "Adam"])
async def test_plain_optimizers_call_the_closure_once(name: str) -> None:
    cls = getattr(torch.optim, name)
    model, local = one_process(2, lambda it: cls(it.parameters(), lr=0.1))
    async with layers("bc") as group:
        optimizer = DistributedOptimizer(name, group.parameters, lr=0.1)
        for step in range(3):
            wanted: list[float] = []
            losses: list[float] = []
            local.step(local_closure(model, local, inputs(step), wanted))
            result = await optimizer.step(
                closure=closure_of(group, inputs(step), losses)
            )
            assert losses == wanted == [result.loss.item()]
        assert_same(await group.weights(), model)


@pytest.mark.parametrize("clip", [0.05, 1e6])
async def test_gradients_are_clipped_at_each_evaluation(clip: float) -> None:
    options: dict[str, Any] = {"max_iter": 4, "lr": 0.5}
    model, local = one_process(
        2, lambda it: torch.optim.LBFGS(it.parameters(), **options)
    )
    norms: list[float] = []

    def clipped() -> Any:
        loss = local_closure(model, local, inputs(0), [])()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        return loss

    async with layers("bc") as group:
        optimizer = DistributedOptimizer("LBFGS", group.parameters, **options)
        local.step(clipped)
        result = await optimizer.step(
            closure=closure_of(group, inputs(0)), clip_grad_norm=clip
        )
        assert result.grad_norm == pytest.approx(norms[0], rel=1e-12)
        torch.testing.assert_close(
            await group.weights(), list(model.parameters()), rtol=1e-9, atol=1e-12
        )


# --- all or nothing ------------------------------------------------------------------


async def broken_off(group: Group, at: int, how: Callable[[], Any]) -> Any:
    """Return a closure that does `how()` at its evaluation `at`."""
    calls = 0
    well = closure_of(group, inputs(0))

    async def closure(ctx: Context) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == at:
            await asyncio.gather(how())
        return await well(ctx)

    return closure


@pytest.mark.parametrize("at", [1, 3])
async def test_closure_that_raises_changes_nothing(at: int) -> None:
    async def fail() -> None:
        raise ArithmeticError("no loss today")

    async with layers("bc") as group:
        optimizer = DistributedOptimizer("LBFGS", group.parameters, max_iter=4)
        await optimizer.step(closure=closure_of(group, inputs(0)))
        before = await group.weights(), await optimizer.state_dict()
        with pytest.raises(ArithmeticError, match="no loss today"):
            await optimizer.step(closure=await broken_off(group, at, fail))
        after = await group.weights(), await optimizer.state_dict()
        assert str(after) == str(before)
        assert turns_in(group.workers) == [0, 0, 0]
        await optimizer.step(closure=closure_of(group, inputs(1)))


@pytest.mark.parametrize("at", [1, 3])
async def test_cancelled_step_changes_nothing(at: int) -> None:
    reached = asyncio.Event()

    async def wait() -> None:
        reached.set()
        await asyncio.Event().wait()

    async with layers("bc") as group:
        optimizer = await DistributedOptimizer("LBFGS", group.parameters, max_iter=4)
        before = await group.weights(), await optimizer.state_dict()
        closure = await broken_off(group, at, wait)
        stepping = asyncio.create_task(optimizer.step(closure=closure))
        await reached.wait()
        stepping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stepping
        # The next step waits until the parameters have been put back.
        await optimizer.step(closure=closure_of(group, inputs(0)))
        again = await DistributedOptimizer("LBFGS", group.parameters, max_iter=4)
        model, local = one_process(
            2, lambda it: torch.optim.LBFGS(it.parameters(), max_iter=4)
        )
        local.step(local_closure(model, local, inputs(0), []))
        assert_same(await group.weights(), model)
        del again, before


async def test_expired_step_changes_nothing() -> None:
    async with layers("bc") as group:
        optimizer = await DistributedOptimizer("LBFGS", group.parameters, max_iter=4)
        before = await group.weights()
        closure = await broken_off(group, 2, asyncio.Event().wait)
        with pytest.raises(TimeoutError):
            async with asyncrpc.deadline(0.3):
                await optimizer.step(closure=closure)
        # The turn of this one, which changes nothing, comes when all has been put back.
        still = DistributedOptimizer("LBFGS", group.parameters, lr=0.0)
        assert (await still.step(closure=closure_of(group, inputs(0)))).is_applied
        for now, then in zip(await group.weights(), before, strict=True):
            assert torch.equal(now, then)


async def test_gradients_that_are_not_finite_skip_the_step() -> None:
    async with layers("bc") as group:
        optimizer = DistributedOptimizer("LBFGS", group.parameters, max_iter=4)
        before = await group.weights()
        x = torch.full((2, 5), torch.nan, dtype=torch.float64)
        result = await optimizer.step(closure=closure_of(group, x), skip_nonfinite=True)
        assert not result.is_applied
        for weight, other in zip(await group.weights(), before, strict=True):
            assert torch.equal(weight, other)


async def test_step_with_a_closure_delays_other_trainers() -> None:
    """The other step begins in the middle and is applied afterwards."""
    begun: list[asyncio.Task[Any]] = []
    async with group_of("bc") as group:
        sgd = await DistributedOptimizer("SGD", group.parameters, lr=1.0)

        async def closure(ctx: Context) -> torch.Tensor:
            if not begun:
                begun.append(asyncio.create_task(step_on_ones(group, sgd)))
            outs = [
                await module.rpc_async()(torch.ones(3).double())
                for module in group.modules
            ]
            loss = (torch.cat(outs) - 3.0).square().sum()
            await backward(ctx, [loss])
            return loss

        optimizer = DistributedOptimizer("LBFGS", group.parameters, max_iter=10)
        await optimizer.step(closure=closure, allow_stale=True)
        await begun[0]
        for weights in await group.weights():  # at 3, by LBFGS; then one less
            torch.testing.assert_close(weights, torch.full_like(weights, 2.0))


# --- what is refused -----------------------------------------------------------------


async def test_a_step_takes_a_context_or_a_closure() -> None:
    async with group_of("b") as group:
        lbfgs = DistributedOptimizer("LBFGS", group.parameters)
        sgd = DistributedOptimizer("SGD", group.parameters, lr=0.1)
        closure = closure_of(group, inputs(0))
        async with context() as ctx:
            for optimizer in (lbfgs, sgd):
                with pytest.raises(UsageError, match="a closure"):
                    await optimizer.step()
                with pytest.raises(UsageError, match="a closure"):
                    await optimizer.step(ctx, closure)
            with pytest.raises(UsageError, match="LBFGS evaluates the model several"):
                await lbfgs.step(ctx)


async def test_lbfgs_has_one_group_and_one_state() -> None:
    async with group_of("bc") as group:
        first, second = group.parameters
        with pytest.raises(OptimizerError, match="doesn't support per-parameter"):
            await DistributedOptimizer(
                "LBFGS", [{"params": [first]}, {"params": [second]}]
            )
        optimizer = await DistributedOptimizer("LBFGS", [first])
        with pytest.raises(UsageError, match="make a new one"):
            await optimizer.add_param_group({"params": [second]})
        with pytest.raises(UsageError, match="leave per_owner out"):
            await optimizer.state_dict(per_owner=True)
        with pytest.raises(UsageError, match=r"groups of \[1\]"):
            await optimizer.load_state_dict({"state": {}, "param_groups": []})
        del first, second

"""Passes with options: FAST, differentiable gradients, a limit of time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import torch

import asyncrpc
from asyncrpc.autograd import backward, context, get_gradients
from tests.numerics.stateful_objects import (
    Gate,
    Keepers,
    all_released,
    ask,
    assert_equal,
    group_of,
    in_one_process,
    leaf,
    reports,
)


async def there_and_back(k: Keepers, x: torch.Tensor) -> list[torch.Tensor]:
    """Pass through every worker more than once, and use all that comes."""
    y = await ask(k["b"], "relay", k["c"], "times", x)
    left, right = await ask(k["c"], "both", y)
    z = await ask(k["b"], "join", left, right)
    return [await ask(k["c"], "join", z, y)]


# --- FAST ----------------------------------------------------------------------------


async def test_fast_equals_smart_when_all_tensors_are_used() -> None:
    wanted = await in_one_process(there_and_back, "abc")
    async with group_of(3) as (workers, keepers):
        async with context() as ctx:
            x = leaf()
            roots = await there_and_back(keepers, x)
            ones = [torch.ones_like(root) for root in roots]
            await backward(ctx, roots, gradients=ones, mode="fast")
            assert_equal(await reports(keepers, ctx, x), wanted)
        await all_released(workers)


async def test_fast_names_the_missing_gradients() -> None:
    """Torch's would wait for ever."""
    async with group_of(2) as (_, keepers), context() as ctx:
        x = leaf()
        used, _ = await ask(keepers["b"], "both", x)
        with pytest.raises(asyncrpc.errors.AutogradError) as caught:
            await backward(ctx, used.sum(), mode="fast")
        words = str(caught.value)
        assert "worker 'b' waits for the gradient of tensor 1 of message" in words
        assert "to 'a'" in words
        assert "mode='smart'" in words
        assert get_gradients(ctx) == {}
        assert (await ask(keepers["b"], "report")).gradients == [None, None]


async def test_mode_must_be_smart_or_fast() -> None:
    async with group_of(1), context() as ctx:
        with pytest.raises(asyncrpc.UsageError, match="'smart' or 'fast', not 'slow'"):
            await backward(ctx, leaf().sum(), mode="slow")  # type: ignore[arg-type]


# --- gradients that can be differentiated --------------------------------------------

Penalized = Callable[[Keepers, torch.Tensor], Awaitable[torch.Tensor]]


async def by_b(k: Keepers, x: torch.Tensor) -> torch.Tensor:
    y = await ask(k["b"], "times", x.sin())
    root: torch.Tensor = (y * y).sum()
    return root


async def by_b_and_c(k: Keepers, x: torch.Tensor) -> torch.Tensor:
    y = await ask(k["b"], "relay", k["c"], "times", x * x)
    left, right = await ask(k["c"], "both", y)
    root: torch.Tensor = (left * right * x).sum()
    return root


async def there(k: Keepers, x: torch.Tensor) -> torch.Tensor:
    return (await there_and_back(k, x))[0].sum()


@pytest.mark.parametrize("program", [by_b, by_b_and_c, there])
async def test_a_gradient_can_be_differentiated(program: Penalized) -> None:
    """A gradient penalty: the square of the first pass's gradient, over workers."""

    async def twice_here(k: Keepers, x: torch.Tensor) -> list[torch.Tensor]:
        root = await program(k, x)
        (gradient,) = torch.autograd.grad(root, x, create_graph=True)
        return [gradient.square().sum() + root.detach()]

    wanted = await in_one_process(twice_here, "abc")
    async with group_of(3) as (workers, keepers):
        async with context() as ctx:
            x = leaf()
            root = await program(keepers, x)
            await backward(ctx, root, create_graph=True)
            first = get_gradients(ctx)[x]
            assert first.requires_grad
            before = await reports(keepers, ctx, x)
            await backward(ctx, first.square().sum())
            after = await reports(keepers, ctx, x)
        await all_released(workers)
    for name, report in wanted.items():
        for at, gradient in enumerate(report.gradients):
            earlier, later = before[name].gradients[at], after[name].gradients[at]
            if gradient is None:
                assert later is earlier is None or torch.equal(later, earlier)  # type: ignore[arg-type]
                continue
            assert later is not None
            # Both passes of the context add up.
            added = later if earlier is None else later - earlier
            torch.testing.assert_close(added, gradient, rtol=1e-10, atol=1e-10)


# --- limits --------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["a", "b"])
async def test_expired_pass_names_its_position(where: str) -> None:
    async with group_of(2) as (_, keepers), context() as ctx:
        x = leaf()
        y = await ask(keepers["b"], "slowly", x, "gate")
        if where == "a":
            y = await ask(keepers["b"], "times", x)
            y.register_hook(lambda _gradient: Gate.open_ones["gate"].pass_through())
        with Gate("gate"):
            with pytest.raises(asyncrpc.errors.BackwardTimeoutError) as caught:
                await backward(ctx, y.sum(), timeout_s=0.3)
            words = str(caught.value)
            assert "took more than 0.3 s" in words
            assert f"worker '{where}' runs its part of the graph" in words
            assert isinstance(caught.value.__cause__, TimeoutError)
        assert get_gradients(ctx) == {}
        assert (await ask(keepers["b"], "report")).gradients == [None, None]


async def test_enclosing_deadline_limits_the_pass() -> None:
    async with group_of(2) as (_, keepers), context() as ctx:
        y = await ask(keepers["b"], "slowly", leaf(), "gate")
        async with asyncio.timeout(60.0):
            with Gate("gate"), pytest.raises(TimeoutError):
                async with asyncrpc.deadline(0.2):
                    await backward(ctx, y.sum(), timeout_s=None)
        assert (await ask(keepers["b"], "report")).gradients == [None, None]

"""A step is all or nothing: what is refused or skipped leaves every owner as it was.

Also: steps of many trainers, passes started elsewhere, and what owners keep how long.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
from typing import Any

import pytest
import torch

import asyncrpc
from asyncrpc import RRef, UsageError, WorkerLostError, autograd, current_worker
from asyncrpc.autograd import Context, backward, context
from asyncrpc.errors import BackwardFailedError, InvalidContextError, OptimizerError
from asyncrpc.optim import DistributedOptimizer
from asyncrpc.testing import Cluster, acting_as
from tests.inner_state import optimizers_here
from tests.numerics.groups import (
    group_of,
    loss_of_a_peer,
    make,
    optimizers_of,
    step_on_ones,
    turns_in,
)
from tests.numerics.optimizers import Crowded, Failing, Gated, train
from tests.numerics.remote import Scale, gathered, parameters_there

# --- all or nothing ------------------------------------------------------------------


@pytest.mark.parametrize("on", ["b", "bc"])
@pytest.mark.parametrize("factor", [math.inf, math.nan])
async def test_a_gradient_that_is_not_finite_skips_the_step_everywhere(
    on: str, factor: float
) -> None:
    async with group_of(on) as group:
        optimizer = DistributedOptimizer(torch.optim.Adam, group.parameters, lr=0.1)
        result = await step_on_ones(group, optimizer, factor, skip_nonfinite=True)
        assert not result.is_applied
        assert not math.isfinite(result.grad_norm)
        assert all(bool((weight == 1).all()) for weight in await group.weights())
        assert (await optimizer.state_dict())["state"] == {}  # Adam counted no step
        assert (await step_on_ones(group, optimizer, skip_nonfinite=True)).is_applied
        assert not any(bool((weight == 1).any()) for weight in await group.weights())


async def test_refusing_owner_prevents_the_step_everywhere() -> None:
    async with group_of("bc") as group:
        optimizer = await DistributedOptimizer("SGD", group.parameters, lr=0.1)
        optimizers_of(group.workers[2]).on_peer_lost(group.workers[0].id, "a test")
        with pytest.raises(
            OptimizerError, match=r"nothing was applied.*worker 'c'.*no"
        ):
            await step_on_ones(group, optimizer)
        assert all(bool((weight == 1).all()) for weight in await group.weights())


async def test_other_owner_steps_first_when_the_maker_is_sure() -> None:
    """The owner does not vote; its refusal leaves the maker's parameters unchanged."""
    async with group_of("ac") as group:
        optimizer = await DistributedOptimizer("SGD", group.parameters, lr=0.1)
        result = await step_on_ones(group, optimizer)
        assert (result.is_applied, result.gradients) == (True, len(group.parameters))
        stepped = [weight.tolist() for weight in await group.weights()]
        assert all(1.0 not in weight for weight in stepped)
        optimizers_of(group.workers[2]).on_peer_lost(group.workers[0].id, "a test")
        with pytest.raises(
            OptimizerError, match=r"worker 'c', and nothing was applied anywhere.*no"
        ):
            await step_on_ones(group, optimizer)
        assert [weight.tolist() for weight in await group.weights()] == stepped


async def test_lost_owner_prevents_the_step_everywhere() -> None:
    async with group_of("bc") as group:
        optimizer = await DistributedOptimizer("SGD", group.parameters, lr=0.1)
        async with context() as ctx:
            out = await group.modules[0].rpc_async()(torch.ones(3, dtype=torch.float64))
            await backward(ctx, [out.sum()])
            await group.workers[2].shutdown()
            with pytest.raises(OptimizerError, match="applied anywhere: worker 'c'"):
                await optimizer.step(ctx)
        left = await group.modules[0].rpc_async().weights()
        assert left[0].tolist() == [1.0] * 3


@pytest.mark.parametrize("on", ["b", "bc", "ba", "bca"])
@pytest.mark.parametrize("at", [0, 2])
async def test_a_step_that_fails_on_one_owner_is_applied_nowhere(
    on: str, at: int
) -> None:
    """It fails on each in turn: whoever stepped before, and that one, is put back."""
    for failing in on:
        async with group_of(on) as group:
            options = {"on": failing, "at": at}
            optimizer = DistributedOptimizer(Failing, group.parameters, **options)
            for _ in range(at):
                assert (await step_on_ones(group, optimizer)).is_applied
            before = await group.weights(), str(await optimizer.state_dict())
            with pytest.raises(
                OptimizerError,
                match=rf"worker '{failing}'.* nothing was applied.*fails here",
            ) as caught:
                await step_on_ones(group, optimizer)
            assert isinstance(caught.value.__cause__, ArithmeticError)
            after = await group.weights(), str(await optimizer.state_dict())
            assert str(after) == str(before)
            assert turns_in(group.workers) == [0, 0, 0]


async def test_step_refused_by_torch_is_applied_nowhere() -> None:
    """Adam takes no sparse gradients; its step has run on the other owner by then."""
    async with group_of("b") as group:
        table = (
            group.workers[0]
            .peer("c")
            .remote(torch.nn.Embedding, 4, 2, sparse=True, dtype=torch.float64)
        )
        rows = await parameters_there(table)
        optimizer = DistributedOptimizer("Adam", [*group.parameters, *rows], lr=0.1)
        async with context() as ctx:
            row = await table.rpc_async()(torch.tensor([1]))
            out = await group.modules[0].rpc_async()(torch.ones(3, dtype=torch.float64))
            await backward(ctx, [row.sum() + out.sum()])
            with pytest.raises(OptimizerError, match=r"'c', and nothing.*sparse"):
                await optimizer.step(ctx)
        assert (await group.weights())[0].tolist() == [1.0] * 3
        assert (await optimizer.state_dict())["state"] == {}
        del table, rows


async def test_steps_never_wait_for_each_other_in_a_cycle() -> None:
    """Two that keep what undoes them, begun on the owners in opposite orders."""
    async with group_of("bc") as group:

        async def begin(order: int, at: int) -> int:
            listed = group.parameters[::order]
            options = {"lr": 1.0, "on": "c", "at": at}
            optimizer = DistributedOptimizer(Failing, listed, **options)
            applied = 0
            for _ in range(8):
                with contextlib.suppress(OptimizerError):
                    await step_on_ones(group, optimizer)
                    applied += 1
            return applied

        # The second fails from its fourth step on, in between the first one's.
        counts = await asyncio.gather(begin(1, -1), begin(-1, 3))
        assert list(counts) == [8, 3]
        first, second = await group.weights()
        assert torch.equal(first, second)
        assert turns_in(group.workers) == [0, 0, 0]


async def test_a_step_that_has_begun_is_completed_after_its_deadline() -> None:
    async with group_of("bc") as group:
        optimizer = await DistributedOptimizer(Gated, group.parameters, on="c")
        Gated.gate.clear()
        with pytest.raises(TimeoutError):
            async with asyncrpc.deadline(2):
                await step_on_ones(group, optimizer)
        Gated.gate.set()
        assert (await step_on_ones(group, optimizer)).is_applied  # after the first
        assert [weight.tolist() for weight in await group.weights()] == [[-1.0] * 3] * 2


async def test_slow_owner_rolls_its_step_back() -> None:
    """The step runs in a thread, which cannot be interrupted."""
    async with Cluster(3, options=asyncrpc.Options(rpc_timeout_s=4.0)) as workers:
        with acting_as(workers[0]):
            group = await make(workers, "bc", Scale)
            optimizer = await DistributedOptimizer(Gated, group.parameters, on="c")
            Gated.gate.clear()
            with pytest.raises(OptimizerError, match=r"'c', and nothing.* no response"):
                await step_on_ones(group, optimizer)
            Gated.gate.set()
            # This one has its turn when the first has been undone: it is the only one.
            assert (await step_on_ones(group, optimizer)).is_applied
            assert [weight.tolist() for weight in await group.weights()] == [
                [0.0] * 3
            ] * 2
            assert turns_in(workers) == [0, 0, 0]
            group.modules.clear()
            group.parameters.clear()


async def test_a_step_cancelled_while_it_asks_is_applied_nowhere() -> None:
    async with group_of("bc") as group:
        optimizer = await DistributedOptimizer("SGD", group.parameters, lr=0.1)
        async with context() as ctx:
            x = torch.ones(3, dtype=torch.float64)
            outs = [await module.rpc_async()(x) for module in group.modules]
            await backward(ctx, [torch.stack(outs).sum()])
            stepping = asyncio.create_task(optimizer.step(ctx))
            await asyncio.sleep(0)  # it has begun, and no answer can be there
            stepping.cancel()
            with pytest.raises(asyncio.CancelledError):
                await stepping
            assert all(bool((weight == 1).all()) for weight in await group.weights())
            assert (await optimizer.step(ctx)).is_applied


# --- many trainers -------------------------------------------------------------------


async def test_trainers_with_opposite_owner_orders_all_complete() -> None:
    steps = 20
    async with group_of("bc") as group:

        async def train(order: int) -> None:
            listed = group.parameters[::order]
            optimizer = DistributedOptimizer(torch.optim.SGD, listed, lr=0.01)
            for _ in range(steps):
                assert (await step_on_ones(group, optimizer)).is_applied

        await asyncio.gather(train(1), train(-1), train(1), train(-1))
        for weights in await group.weights():
            wanted = torch.full((3,), 1 - 4 * steps * 0.01, dtype=torch.float64)
            torch.testing.assert_close(weights, wanted, rtol=1e-12, atol=1e-12)


async def test_an_owner_takes_the_steps_of_many_trainers_one_at_a_time() -> None:
    steps = 25
    async with group_of("b") as group:
        arguments = group.modules, group.parameters, Crowded, steps
        own = train(*arguments)
        others = [group.workers[0].peer(name).call(train, *arguments) for name in "abc"]
        assert await asyncio.gather(own, *others) == [steps] * 4
        assert (await group.weights())[0].tolist() == [1.0 - 4 * steps] * 3


async def test_a_pass_ends_on_workers_that_its_start_is_not_connected_to() -> None:
    async with Cluster(3) as (a, b, c):
        with acting_as(a):
            async with context() as ctx:
                x = torch.ones(3, dtype=torch.float64)
                between = a.peer("b").remote(Between)
                out = await between.rpc_async().forward(x)
                await backward(ctx, [out.sum()])
                assert a.parts.directory.link_of(c.incarnation) is None
                assert await between.rpc_async().gathered() == [[1.0] * 3]
        assert b.parts.directory.link_of(c.incarnation) is not None
        del between


class Between:
    """A worker in the middle: it has a module elsewhere, which its caller never met."""

    def __init__(self) -> None:
        self.module = asyncrpc.remote("c", Scale)

    async def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = await self.module.rpc_async()(x)
        return result

    async def gathered(self) -> list[list[float]]:
        gradients = await asyncrpc.rpc_async("c", gathered, (self.module,))
        return [gradient.tolist() for gradient in gradients]


# --- lifetime, and what is refused ---------------------------------------------------


async def test_owners_free_a_collected_optimizer() -> None:
    async with group_of("bca") as group:
        optimizer: DistributedOptimizer | None = await DistributedOptimizer(
            "SGD", group.parameters, lr=0.1
        )
        services = [optimizers_of(worker) for worker in group.workers]
        assert [optimizers_here(service) for service in services] == [1, 1, 1]
        del optimizer
        gc.collect()
        for name in "bca":  # behind the notes, on the same links
            await group.workers[0].peer(name).call(max, 1, 2)
        assert [optimizers_here(service) for service in services] == [0, 0, 0]


async def test_owners_free_optimizers_of_an_ended_worker() -> None:
    async with Cluster(3) as workers:
        with acting_as(workers[0]):
            module = workers[0].peer("b").remote(Scale)
            parameters = await parameters_there(module)
        with acting_as(workers[2]):
            there = workers[2].peer("b").remote(Scale)
            own = await parameters_there(there)
            optimizer = await DistributedOptimizer(torch.optim.SGD, own, lr=0.1)
        assert optimizers_here(optimizers_of(workers[1])) == 1
        lost = loss_of_a_peer(workers[1])
        del there, own
        await workers[2].shutdown()
        await lost.wait()
        assert optimizers_here(optimizers_of(workers[1])) == 0
        del optimizer, parameters, module


async def test_invalid_optimizer_arguments_are_refused() -> None:
    async with group_of("bc") as group:
        with pytest.raises(UsageError, match="at least one parameter"):
            DistributedOptimizer(torch.optim.SGD, [])
        with pytest.raises(
            UsageError, match=r"params_rref\[0\] must be an RRef.*a tensor"
        ):
            DistributedOptimizer(torch.optim.SGD, [torch.ones(1)])  # type: ignore[arg-type]
        wrong = RRef(torch.ones(2, requires_grad=True) * 2)
        with pytest.raises(OptimizerError, match=r"'a': parameter 0 of shape \(2,\)"):
            await DistributedOptimizer(torch.optim.SGD, [wrong], lr=0.1)
        text = RRef("no tensor")
        with pytest.raises(OptimizerError, match="parameter 0 is a str"):
            await DistributedOptimizer(torch.optim.SGD, [text], lr=0.1)
        with pytest.raises(OptimizerError, match=r"'b'.*unexpected keyword.*'speed'"):
            await DistributedOptimizer(torch.optim.SGD, group.parameters, speed=1)
        del wrong, text


async def test_a_failed_start_may_be_tried_again() -> None:
    async with group_of("b") as group:
        optimizer = DistributedOptimizer(torch.optim.SGD, group.parameters, lr=-1.0)
        for _ in range(2):
            with pytest.raises(OptimizerError, match="Invalid learning rate"):
                await optimizer


async def test_a_context_that_has_ended_is_refused() -> None:
    async with group_of("bc") as group:
        optimizer = DistributedOptimizer(torch.optim.SGD, group.parameters, lr=0.1)
        ended: Context
        async with context() as ended:
            pass
        with pytest.raises(InvalidContextError):
            await optimizer.step(ended)
        async with context() as ctx:
            with pytest.raises(
                UsageError, match="clip_grad_norm must be a number above 0"
            ):
                await optimizer.step(ctx, clip_grad_norm=0.0)


async def test_optimizer_of_an_ended_worker_is_explained() -> None:
    async with group_of("b") as group:
        optimizer = DistributedOptimizer(torch.optim.SGD, group.parameters, lr=0.1)
        async with context() as ctx:
            await group.workers[1].shutdown()
            with pytest.raises(OptimizerError, match="worker 'b'") as caught:
                await optimizer.step(ctx)
            assert isinstance(caught.value.__cause__, WorkerLostError)


# y = w * w * x: its gradient 2 w x needs the value of w at the time of the backward.
WEIGHT = 3.0


class Square:
    def __init__(self) -> None:
        self.weight = torch.tensor(WEIGHT, dtype=torch.double, requires_grad=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * self.weight * x

    def parameters(self) -> list[RRef[torch.Tensor]]:
        return [RRef(self.weight)]

    def value(self) -> float:
        return self.weight.item()


async def crossed_passes(*, allow_stale: bool) -> float:
    """Go forward twice, then backward and step twice; return the weight."""
    async with Cluster(names=["trainer", "owner"]) as (trainer, _):
        with acting_as(trainer):
            module = current_worker().peer("owner").remote(Square)
            parameters = await module.rpc_async().parameters()
            optimizer = await DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
            x = torch.ones((), dtype=torch.double)
            both_forward = asyncio.Barrier(2)
            first_stepped = asyncio.Event()

            async def train(*, is_first: bool) -> None:
                async with autograd.context() as ctx:
                    y = await module.rpc_async().forward(x)
                    await both_forward.wait()
                    if not is_first:
                        await first_stepped.wait()
                    await autograd.backward(ctx, [y])
                    await optimizer.step(ctx, allow_stale=allow_stale)
                    first_stepped.set()

            await asyncio.gather(train(is_first=True), train(is_first=False))
            value: float = await module.rpc_async().value()
            return value


async def test_stale_backward_uses_the_new_values_when_allowed() -> None:
    once = WEIGHT - 0.1 * 2 * WEIGHT
    assert await crossed_passes(allow_stale=True) == pytest.approx(once - 0.2 * once)


async def test_stale_backward_is_refused_by_default() -> None:
    said = r"modified by an inplace operation.*allow_stale=True"
    with pytest.raises(BackwardFailedError, match=f"(?s){said}"):
        await crossed_passes(allow_stale=False)


WEIGHTS: list[torch.Tensor] = []  # of the owner, which is in this process
PRODUCTS: list[torch.Tensor] = []


class Interrupted(torch.optim.SGD):
    """Runs a trainer's forward pass when it has changed the parameters, in its step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        with torch.enable_grad():
            PRODUCTS.append(WEIGHTS[0] * WEIGHTS[0])


async def test_a_forward_pass_during_a_stale_step_can_go_backward() -> None:
    weight = torch.tensor(WEIGHT, requires_grad=True)
    WEIGHTS[:], PRODUCTS[:] = [weight], []
    async with Cluster(names=["owner"]) as (owner,):
        with acting_as(owner):
            optimizer = await DistributedOptimizer(Interrupted, [RRef(weight)], lr=0.1)
            async with autograd.context() as ctx:
                await autograd.backward(ctx, [weight * weight])
                await optimizer.step(ctx, allow_stale=True)
    PRODUCTS[0].backward()  # type: ignore[no-untyped-call]
    once = WEIGHT - 0.1 * 2 * WEIGHT
    assert weight.grad is not None
    assert weight.grad.item() == pytest.approx(2 * once)

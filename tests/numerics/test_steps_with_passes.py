"""A step that goes with a backward pass: equal to one after it, in fewer messages."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
import torch

import asyncrpc
from asyncrpc import RRef, UsageError
from asyncrpc.autograd import backward, context, get_gradients
from asyncrpc.core.services.ports import PeerLink
from asyncrpc.core.services.router import Route
from asyncrpc.errors import BackwardFailedError, OptimizerError, WorkerLostError
from asyncrpc.optim import DistributedOptimizer
from asyncrpc.testing import Cluster, acting_as
from tests.inner_state import routes_of, turns_of
from tests.integration.core.groups import until
from tests.numerics.groups import (
    STEPS,
    Group,
    assert_same,
    group_of,
    inputs,
    layers,
    local_step,
    loss_of,
    make,
    one_process,
    optimizers_of,
)
from tests.numerics.optimizers import Failing, Gated
from tests.numerics.remote import Scale, Tensors, gathered, parameters_there

ONES = torch.ones(3, dtype=torch.float64)


async def step(
    group: Group, optimizer: DistributedOptimizer, number: int, **how: Any
) -> Any:
    async with context() as ctx:
        loss = loss_of(await group.forward(inputs(number)))
        return await optimizer.backward_and_step(ctx, loss, **how)


async def step_on_ones(group: Group, optimizer: DistributedOptimizer) -> Any:
    async with context() as ctx:
        loss = (await group.forward(ONES)).sum()
        return await optimizer.backward_and_step(ctx, loss)


def count_messages(group: Group) -> Counter[str]:
    """Count the messages of passes and steps that come to workers `b` and `c`."""
    counts: Counter[str] = Counter()
    for worker in group.workers[1:]:
        for service in ("autograd", "optim"):
            worker.parts.service(service)  # which loads it
            for route in routes_of(worker.parts.router, service):
                _count(route, counts)
    return counts


def _count(route: Route, counts: Counter[str]) -> None:
    handle = route.handle

    def count(link: PeerLink, value: Any) -> Any:
        counts[route.name] += 1
        return handle(link, value)

    route.handle = count


# --- equal to a pass and a step ------------------------------------------------------


@pytest.mark.parametrize("cls", ["SGD", "Adam"])
@pytest.mark.parametrize("on", ["a", "b", "bc", "bca", "ab", "bb"])
async def test_backward_and_step_equals_a_pass_then_a_step(on: str, cls: str) -> None:
    kind = getattr(torch.optim, cls)
    model, local = one_process(len(on), lambda it: kind(it.parameters(), lr=0.1))
    async with layers(on) as group:
        optimizer = DistributedOptimizer(cls, group.parameters, lr=0.1)
        for number in range(STEPS):
            local_step(model, local, number)
            result = await step(group, optimizer, number)
            assert (result.is_applied, result.gradients) == (True, len(on) * 2)
        assert_same(await group.weights(), model)


async def test_backward_and_step_takes_norm_rate_and_root_gradients() -> None:
    model, local = one_process(1, lambda it: torch.optim.SGD(it.parameters(), lr=0.1))
    schedule = torch.optim.lr_scheduler.StepLR(local, step_size=1, gamma=0.5)
    async with layers("b") as group:
        optimizer = await DistributedOptimizer("SGD", group.parameters, lr=0.1)
        remote = torch.optim.lr_scheduler.StepLR(
            optimizer.options, step_size=1, gamma=0.5
        )
        for number in range(STEPS):
            local.zero_grad()
            out = model(inputs(number))
            out.backward(torch.full_like(out, 2.0))
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            local.step()
            schedule.step()
            async with context() as ctx:
                root = await group.forward(inputs(number))
                result = await optimizer.backward_and_step(
                    ctx,
                    [root],
                    gradients=[torch.full_like(root, 2.0)],
                    clip_grad_norm=0.5,
                )
            remote.step()
            assert result.grad_norm == pytest.approx(norm.item(), rel=1e-12)
        torch.testing.assert_close(
            await group.weights(), list(model.parameters()), rtol=1e-12, atol=1e-12
        )


async def test_gradients_of_a_second_pass_add_up() -> None:
    async with group_of("b") as group:
        optimizer = DistributedOptimizer("SGD", group.parameters, lr=1.0)
        async with context() as ctx:
            loss = (await group.forward(ONES)).sum()
            await optimizer.backward_and_step(ctx, loss, retain_graph=True)
            assert (await group.weights())[0].tolist() == [0.0] * 3
            await optimizer.backward_and_step(ctx, loss)
            assert (await group.weights())[0].tolist() == [-2.0] * 3


async def test_gradients_that_are_not_finite_skip_the_step() -> None:
    async with group_of("b") as group:
        optimizer = DistributedOptimizer("SGD", group.parameters, lr=1.0)
        async with context() as ctx:
            loss = (await group.forward(ONES * float("inf"))).sum()
            result = await optimizer.backward_and_step(ctx, loss, skip_nonfinite=True)
        assert not result.is_applied
        assert (await group.weights())[0].tolist() == [1.0] * 3


async def test_gradients_are_in_the_context_at_both_ends() -> None:
    async with group_of("b") as group:
        optimizer = DistributedOptimizer("SGD", group.parameters, lr=1.0)
        leaf = ONES.clone().requires_grad_()
        async with context() as ctx:
            loss = (await group.forward(leaf * 1.0)).sum()
            await optimizer.backward_and_step(ctx, loss)
            # The gradient of the leaf comes back with the answer, so the step follows.
            assert get_gradients(ctx)[leaf].tolist() == [1.0] * 3
            gradients = await asyncrpc.rpc_async("b", gathered, (group.modules[0],))
            assert [gradient.tolist() for gradient in gradients] == [[1.0] * 3]


# --- messages ------------------------------------------------------------------------


async def sent_for(group: Group, optimizer: DistributedOptimizer) -> Counter[str]:
    """Return the messages of a step on ones, without that of the context's end."""
    await step_on_ones(group, optimizer)
    await group.weights()  # notices that may wait go with its calls
    counts = count_messages(group)
    assert (await step_on_ones(group, optimizer)).is_applied
    await group.weights()
    del counts["autograd.release"]
    return counts


MESSAGES: dict[str, tuple[str, slice, dict[str, int]]] = {  # workers, parameters, sent
    "one owner": ("b", slice(9), {"autograd.advance": 1}),
    "several, which vote with the pass": (
        *("bc", slice(9)),
        {"autograd.advance": 2, "autograd.commit": 2, "optim.commit": 2},
    ),
    "the maker and another": (
        *("ab", slice(9)),
        {"autograd.advance": 1, "autograd.commit": 1, "optim.commit": 1},
    ),
    "the last of many, which is asked once": (
        *("bc", slice(1)),
        {"autograd.advance": 2, "autograd.commit": 1},
    ),
    "not the last, which is asked afterwards": (
        *("bc", slice(1, 9)),
        {"autograd.advance": 2, "autograd.commit": 2, "optim.step": 1},
    ),
}


@pytest.mark.parametrize("owners", MESSAGES)
async def test_step_sends_the_expected_messages(owners: str) -> None:
    on, which, wanted = MESSAGES[owners]
    async with group_of(on) as group:
        optimizer = DistributedOptimizer("SGD", group.parameters[which], lr=0.1)
        assert await sent_for(group, optimizer) == wanted


class Through(torch.nn.Module):
    """Has a weight of its own, and calls on."""

    def __init__(self, module: RRef[torch.nn.Module]) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(ONES.clone())
        self.module = module

    async def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = await self.module.rpc_async()(x)
        return self.w * out

    async def weights(self) -> Tensors:
        return [self.w.detach(), *await self.module.rpc_async().weights()]


async def test_owner_with_nested_calls_is_asked_afterwards() -> None:
    async with group_of("c") as group:
        through = group.workers[0].peer("b").remote(Through, group.modules[0])
        group.modules[:] = [through]
        optimizer = DistributedOptimizer(
            "SGD", (await parameters_there(through))[:1], lr=0.1
        )
        counts = await sent_for(group, optimizer)
        assert counts["optim.step"] == 1


# --- votes that come with the pass ---------------------------------------------------


async def test_owners_vote_to_the_worker_that_asked() -> None:
    async with group_of("c") as group:
        through = group.workers[0].peer("b").remote(Through, group.modules[0])
        group.modules[:] = [through]
        parameters = [*await parameters_there(through), *group.parameters]
        optimizer = DistributedOptimizer("SGD", parameters, lr=0.1)
        counts = await sent_for(group, optimizer)
        assert not counts["optim.prepare"]
        assert counts["optim.commit"] == 2


async def test_an_owner_without_a_part_in_the_pass_is_asked() -> None:
    async with group_of("bc") as group:
        optimizer = DistributedOptimizer("SGD", group.parameters, lr=1.0)
        unused = group.modules.pop()
        counts = await sent_for(group, optimizer)
        assert (counts["optim.prepare"], counts["optim.commit"]) == (1, 2)
        assert (await unused.rpc_async().weights())[0].tolist() == [1.0] * 3


async def test_owners_are_asked_when_the_norm_is_needed() -> None:
    async with group_of("bc") as group:
        optimizer = DistributedOptimizer("SGD", group.parameters, lr=1.0)
        counts = count_messages(group)
        async with context() as ctx:
            loss = (await group.forward(ONES)).sum()
            result = await optimizer.backward_and_step(ctx, loss, clip_grad_norm=0.5)
        assert result.grad_norm is not None
        assert counts["optim.prepare"] == 2


async def test_owners_are_asked_when_gradients_of_passes_add_up() -> None:
    async with group_of("bc") as group:
        optimizer = DistributedOptimizer("SGD", group.parameters, lr=1.0)
        counts = count_messages(group)
        async with context() as ctx:
            loss = (await group.forward(ONES)).sum()
            await backward(ctx, loss, retain_graph=True)
            result = await optimizer.backward_and_step(ctx, loss)
        assert result.gradients == 2
        assert counts["optim.prepare"] == 2
        assert [weight.tolist() for weight in await group.weights()] == [[-1.0] * 3] * 2


class Looked(torch.nn.Module):
    """Its gradient is sparse, which Adam refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(3, 1, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.nn.functional.embedding(torch.arange(3), self.w, sparse=True)
        return x * rows.squeeze(1)

    def weights(self) -> Tensors:
        return [self.w.detach().clone()]


async def test_the_last_vote_of_an_owner_counts() -> None:
    """It reports twice: of a gradient that its optimizer knows, and of one it refuses.

    Had its first vote counted, the other owner would step beside it.
    """
    async with group_of("bc") as group:
        looked = await make(group.workers, "b", Looked)
        group.parameters += looked.parameters
        optimizer = await DistributedOptimizer("Adam", group.parameters, lr=1.0)
        assert (await step_on_ones(group, optimizer)).is_applied
        before = await group.weights()
        order = [looked.modules[0], group.modules[1], group.modules[0]]
        counts = count_messages(group)
        async with context() as ctx:
            x = ONES
            for module in order:
                x = await module.rpc_async()(x)
            with pytest.raises(OptimizerError, match=r"'b'.*nothing.*sparse"):
                await optimizer.backward_and_step(ctx, x.sum())
        assert counts["optim.commit"] == 1
        assert not counts["optim.prepare"]
        for weight, wanted in zip(await group.weights(), before, strict=True):
            assert torch.equal(weight, wanted)
        group.modules.append(looked.modules.pop())


# --- what fails ----------------------------------------------------------------------


async def test_a_step_that_fails_is_applied_nowhere_and_the_pass_has_succeeded() -> (
    None
):
    async with group_of("b") as group:
        optimizer = await DistributedOptimizer(Failing, group.parameters, on="b")
        async with context() as ctx:
            loss = (await group.forward(ONES)).sum()
            with pytest.raises(OptimizerError, match=r"'b'.*applied.*fails here"):
                await optimizer.backward_and_step(ctx, loss)
            gradients = await asyncrpc.rpc_async("b", gathered, (group.modules[0],))
            assert [gradient.tolist() for gradient in gradients] == [[1.0] * 3]
            assert (await group.weights())[0].tolist() == [1.0] * 3
            other = DistributedOptimizer("SGD", group.parameters, lr=1.0)
            assert (await other.step(ctx)).is_applied
        assert (await group.weights())[0].tolist() == [0.0] * 3


class Refusing(Scale):
    """Its gradient fails as long as it is told to."""

    refuses = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        out.register_hook(self._look)  # type: ignore[no-untyped-call]
        return out

    def _look(self, _gradient: torch.Tensor) -> None:
        if type(self).refuses:
            raise ArithmeticError("no gradient here")


async def test_failed_pass_takes_no_step() -> None:
    async with group_of("b", Refusing) as group:
        optimizer = await DistributedOptimizer("SGD", group.parameters, lr=1.0)
        Refusing.refuses = True
        for _ in range(2):
            with pytest.raises(BackwardFailedError, match="no gradient here") as caught:
                await step_on_ones(group, optimizer)
            assert not getattr(caught.value, "__notes__", [])
        assert (await group.weights())[0].tolist() == [1.0] * 3
        Refusing.refuses = False
        assert (await step_on_ones(group, optimizer)).is_applied


async def test_an_owner_that_is_lost_may_have_taken_the_step() -> None:
    options = asyncrpc.Options(drain_timeout_s=0.0)
    async with Cluster(2, options=options) as workers:
        with acting_as(workers[0]):
            group = await make(workers, "b", Scale)
            optimizer = await DistributedOptimizer(Gated, group.parameters, on="b")
            Gated.gate.clear()
            async with context() as ctx:
                loss = (await group.forward(ONES)).sum()
                stepping = asyncio.create_task(optimizer.backward_and_step(ctx, loss))
                service = optimizers_of(workers[1])
                await until(lambda: turns_of(service) > 0)
                ending = asyncio.create_task(workers[1].shutdown())
                with pytest.raises(BackwardFailedError) as caught:
                    await stepping
            Gated.gate.set()
            await ending
            assert isinstance(caught.value.__cause__, WorkerLostError)
            (note,) = caught.value.__notes__
            assert "to worker 'b'" in note
            assert "may have been applied" in note
            group.modules.clear()
            group.parameters.clear()


async def test_cancelled_step_ends_everywhere() -> None:
    async with group_of("b") as group:
        optimizer = await DistributedOptimizer("SGD", group.parameters, lr=1.0)
        async with context() as ctx:
            loss = (await group.forward(ONES)).sum()
            stepping = asyncio.create_task(optimizer.backward_and_step(ctx, loss))
            await asyncio.sleep(0)  # it has begun, and no answer can be there
            stepping.cancel()
            with pytest.raises(asyncio.CancelledError):
                await stepping
        before = (await group.weights())[0][0].item()
        assert before in {0.0, 1.0}
        assert (await step_on_ones(group, optimizer)).is_applied
        assert (await group.weights())[0].tolist() == [before - 1.0] * 3


async def test_wrong_arguments_are_refused_before_anything_runs() -> None:
    async with group_of("b") as group:
        optimizer = await DistributedOptimizer("SGD", group.parameters, lr=1.0)
        several = await DistributedOptimizer("LBFGS", group.parameters)
        async with context() as ctx:
            loss = (await group.forward(ONES)).sum()
            counts = count_messages(group)
            wrong: Any = "a loss"
            for _ in range(2):
                with pytest.raises(UsageError, match="roots must be"):
                    await optimizer.backward_and_step(ctx, wrong)
                with pytest.raises(UsageError, match="clip_grad_norm must be"):
                    await optimizer.backward_and_step(ctx, loss, clip_grad_norm=-1.0)
                with pytest.raises(UsageError, match="several times in a step"):
                    await several.backward_and_step(ctx, loss)
            assert not counts
            assert (await optimizer.backward_and_step(ctx, loss)).is_applied

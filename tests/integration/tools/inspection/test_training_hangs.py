"""Training that hangs is named exactly, down to the thread and its line."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import pytest
import pytest_asyncio
import torch
from torch import nn

import asyncrpc
from asyncrpc import Group, RRef, Worker
from asyncrpc.autograd import backward, context
from asyncrpc.ddp import DistributedDataParallel
from asyncrpc.optim import DistributedOptimizer
from asyncrpc.testing import ProcessCluster
from tests.integration.tools.inspection.looks import OPTIONS, TRAINER, until_said

_kept: set[asyncio.Task[None]] = set()
let_go, held = threading.Event(), threading.Event()


def free() -> None:
    let_go.set()


def until_held() -> None:
    """Wait until a step has begun here that does not end."""
    held.wait()


def hold(gradient: torch.Tensor) -> torch.Tensor:
    """Wait in a backward pass."""
    let_go.wait()
    return gradient


class Scale(nn.Module):
    """`w * x`, and a second parameter that may be left out."""

    def __init__(self, hook: Callable[[torch.Tensor], Any] | None = None) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))
        self.b = nn.Parameter(torch.zeros(3))
        if hook is not None:
            self.w.register_hook(hook)  # type: ignore[no-untyped-call]

    def forward(self, x: torch.Tensor, *, plain: bool = False) -> torch.Tensor:
        return self.w * x if plain else self.w * x + self.b


class Waiting(torch.optim.Optimizer):
    """An optimizer whose step does not end; torch has no functional twin of it."""

    def __init__(self, params: Any, holds: tuple[str, ...] = ()) -> None:
        super().__init__(params, {})
        self.holds = asyncrpc.current_worker().name in holds

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        if self.holds:
            held.set()
            let_go.wait()


async def holding() -> RRef[Scale]:
    return RRef(Scale(hold))


async def weights(module: RRef[Scale]) -> list[RRef[nn.Parameter]]:
    return [RRef(parameter) for parameter in (await module.to_here()).parameters()]


async def forward(module: RRef[Scale], x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = (await module)(x)
    return result


async def forward_over(
    first: RRef[Scale], second: RRef[Scale], x: torch.Tensor
) -> torch.Tensor:
    """Go through a module that is elsewhere, and then through one that is here."""
    there = asyncrpc.current_worker().peer(first.owner_name())
    result: torch.Tensor = (await second)(await there.call(forward, first, x))
    return result


async def module_on(worker: Worker, name: str, *, holds: bool = False) -> RRef[Scale]:
    if holds:
        reference: RRef[Scale] = await worker.peer(name).call(holding)
        return reference
    created: RRef[Scale] = worker.peer(name).remote(Scale)
    return created


# --- backward passes -----------------------------------------------------------------


async def a_backward_pass_that_waits_on_the_owner(worker: Worker) -> None:
    module = await module_on(worker, "ps", holds=True)
    async with context() as ctx:
        y = await worker.peer("ps").call(forward, module, torch.ones(3))
        await backward(ctx, [y.sum()])


async def a_backward_pass_over_three_workers(worker: Worker) -> None:
    last = await module_on(worker, "cache", holds=True)
    first = await module_on(worker, "ps")
    async with context() as ctx:
        z = await worker.peer("ps").call(forward_over, last, first, torch.ones(3))
        await backward(ctx, [z.sum()])


async def a_backward_pass_that_waits_for_a_step(worker: Worker) -> None:
    module = await module_on(worker, "ps")
    optimizer = await stepping(worker, module, holds=("ps",))
    x = torch.ones(3)
    async with context() as stuck:
        y = await worker.peer("ps").call(forward, module, x)
        await backward(stuck, [y.sum()])
        step = asyncio.create_task(optimizer.step(stuck), name="step")
        try:
            await worker.peer("ps").call(until_held)
            async with context() as ctx:
                y = await worker.peer("ps").call(forward, module, x)
                await backward(ctx, [y.sum()])
        finally:
            step.cancel()


async def stepping(
    worker: Worker, *modules: RRef[Scale], holds: tuple[str, ...] = ()
) -> DistributedOptimizer:
    parameters = []
    for module in modules:
        owner = worker.peer(module.owner_name())
        parameters += await owner.call(weights, module)
    return await DistributedOptimizer(Waiting, parameters, holds=holds)


# --- optimizers ----------------------------------------------------------------------


async def a_turn_that_another_step_has(worker: Worker) -> None:
    """The step of two owners is kept on `cache`, while `ps` does not end its part."""
    ours, other = await module_on(worker, "ps"), await module_on(worker, "cache")
    both = await stepping(worker, other, ours, holds=("ps",))
    single = await stepping(worker, other)
    x = torch.ones(3)
    async with context() as stuck:
        y = await worker.peer("ps").call(forward, ours, x)
        z = await worker.peer("cache").call(forward, other, y)
        await backward(stuck, [z.sum()])
        step = asyncio.create_task(both.step(stuck), name="step")
        try:
            await worker.peer("ps").call(until_held)
            await second_step(worker, single, other)
        finally:
            step.cancel()


async def second_step(
    worker: Worker, optimizer: DistributedOptimizer, module: RRef[Scale]
) -> None:
    async with context() as ctx:
        z = await worker.peer("cache").call(forward, module, torch.ones(3))
        await backward(ctx, [z.sum()])
        await optimizer.step(ctx)


# --- data parallel -------------------------------------------------------------------


async def ddp_pass(name: str, *, holds: bool = False, comes: bool = True) -> None:
    worker = asyncrpc.current_worker()
    async with Group(worker, ["trainer", "ps"], name=name, timeout_s=None) as group:
        model = await DistributedDataParallel(Scale(hold if holds else None), group)
        if not comes:
            never = asyncio.Event()
            await never.wait()
        loss = model(torch.ones(3)).sum()
        await model.backward(loss)


async def begin_ddp_pass(name: str, **how: bool) -> None:
    """Begin one in a task that outlives this call."""
    _kept.add(asyncio.create_task(ddp_pass(name, **how), name="other"))


async def ddp_on_both(worker: Worker, name: str, **there: bool) -> None:
    await worker.peer("ps").call(begin_ddp_pass, name, **there)
    await ddp_pass(name)


async def a_ddp_rank_whose_backward_pass_waits(worker: Worker) -> None:
    await ddp_on_both(worker, "waits", holds=True)


async def a_ddp_rank_that_has_no_backward_pass(worker: Worker) -> None:
    await ddp_on_both(worker, "absent", comes=False)


REDUCTION: Final = (
    r"a function in a thread: trainer thread `asyncrpc-\S+`, which waits for the "
    r"reduction of its gradients: trainer task `Exchange.run`, which waits "
)
Program = Callable[[Worker], Awaitable[None]]

HELD: Final = (
    r"which runs `let_go.wait\(\)` \(test_training_hangs.py:\d+ in (hold|Wait)"
)
THREAD: Final = r"a function in a thread: (ps|cache) thread `asyncrpc-\S+`, "

HANGS: Final[dict[Program, str]] = {
    a_backward_pass_that_waits_on_the_owner: (
        rf"the backward pass on ps, which waits for {THREAD}{HELD}"
    ),
    a_backward_pass_over_three_workers: (
        rf"the backward pass on ps, which waits for the backward pass on cache, which "
        rf"waits for {THREAD}{HELD}"
    ),
    a_backward_pass_that_waits_for_a_step: (
        rf"the backward pass on ps, which waits for {THREAD}which waits for the lock "
        rf"over gradients held by ps thread `asyncrpc-\S+`, {HELD}"
    ),
    a_turn_that_another_step_has: (
        rf"an optimizer step on cache, which waits for its turn to change parameters "
        rf"held by trainer task `PerOwnerOptimizer._commit`, which waits for an "
        rf"optimizer step on ps, which waits for {THREAD}{HELD}"
    ),
    a_ddp_rank_whose_backward_pass_waits: (
        rf"{REDUCTION}for all_reduce \d+ of group \S+ of 2, to which ps has not come: "
        r"ps task `Exchange.run`, which waits for bucket 1 of 1 of a backward pass: ps "
        rf"thread `asyncrpc-\S+`, {HELD}"
    ),
    a_ddp_rank_that_has_no_backward_pass: (
        rf"{REDUCTION}for all_reduce \d+ of group \S+ of 2, to which ps has not come: "
        r"ps task `other`, which waits for Event `never`"
    ),
}


@pytest_asyncio.fixture
async def trainer() -> AsyncIterator[Worker]:
    cluster = ProcessCluster(
        ["ps", "cache"], name="trainer", method="forkserver", options=OPTIONS
    )
    async with cluster as worker:
        yield worker


@pytest.mark.parametrize("hang", HANGS, ids=lambda hang: hang.__name__)
async def test_training_hang_is_named_exactly(trainer: Worker, hang: Program) -> None:
    async def train() -> None:
        await hang(trainer)

    task = asyncio.create_task(train(), name="train")
    try:
        await until_said(trainer, TRAINER + f"({HANGS[hang]})")
    finally:
        for name in ("ps", "cache"):
            await trainer.peer(name).call(free)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

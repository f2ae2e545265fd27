"""Training that hangs is named exactly, down to the thread and its line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

import pytest
import pytest_asyncio

from asyncrpc import Worker
from asyncrpc.testing import ProcessCluster
from tests.integration.tools.inspection import hanging_training as hanging
from tests.integration.tools.inspection.looks import OPTIONS, TRAINER, until_said

REDUCTION: Final = (
    r"a function in a thread: trainer thread `asyncrpc-\S+`, which waits for the "
    r"reduction of its gradients: trainer task `Exchange.run`, which waits "
)
Program = Callable[[Worker], Awaitable[None]]

HELD: Final = r"which runs `let_go.wait\(\)` \(hanging_training.py:\d+ in (hold|Wait)"
THREAD: Final = r"a function in a thread: (ps|cache) thread `asyncrpc-\S+`, "

HANGS: Final[dict[Program, str]] = {
    hanging.a_backward_pass_that_waits_on_the_owner: (
        rf"the backward pass on ps, which waits for {THREAD}{HELD}"
    ),
    hanging.a_backward_pass_over_three_workers: (
        rf"the backward pass on ps, which waits for the backward pass on cache, which "
        rf"waits for {THREAD}{HELD}"
    ),
    hanging.a_backward_pass_that_waits_for_a_step: (
        rf"the backward pass on ps, which waits for {THREAD}which waits for the lock "
        rf"over gradients held by ps thread `asyncrpc-\S+`, {HELD}"
    ),
    hanging.a_turn_that_another_step_has: (
        rf"an optimizer step on cache, which waits for its turn to change parameters "
        rf"held by trainer task `PerOwnerOptimizer._commit`, which waits for an "
        rf"optimizer step on ps, which waits for {THREAD}{HELD}"
    ),
    hanging.a_ddp_rank_whose_backward_pass_waits: (
        rf"{REDUCTION}for all_reduce \d+ of group \S+ of 2, to which ps has not come: "
        r"ps task `Exchange.run`, which waits for bucket 1 of 1 of a backward pass: ps "
        rf"thread `asyncrpc-\S+`, {HELD}"
    ),
    hanging.a_ddp_rank_that_has_no_backward_pass: (
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
            await trainer.peer(name).call(hanging.free)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

"""User's code that runs inside of ours: a module's forward, a batcher's function.

What it raises ends the call that it is in, and nothing else.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from torch import nn

from asyncrpc import AsyncRpcError, Options, Worker
from asyncrpc.nn import RemoteModule
from asyncrpc.serving import Batcher
from asyncrpc.testing import Cluster, acting_as
from tests.integration.core.company import LIMIT_S, PATIENT, company
from tests.integration.core.misbehaving import BAD, give

OPTIONS = Options(drain_timeout_s=2.0, liveness=PATIENT)
RAISED = ["value", "memory", "recursion", "stop", "timeout", "remote", "protocol"]
ENDS = ["exit", "interrupt", "generator exit", "base", "cancelled", "pretending"]


class Forward(nn.Module):
    """Its forward gives, or raises, whatever it is asked for."""

    def forward(self, kind: str) -> Any:
        return give(kind)


async def hears(attempt: Any) -> None:
    """The attempt fails, each time, with one of our errors."""
    for _ in range(2):
        with pytest.raises(AsyncRpcError):
            await asyncio.wait_for(attempt(), LIMIT_S)


async def forward(worker: Worker, kind: str) -> None:
    with acting_as(worker):
        module = await RemoteModule("b", Forward)
        await module.forward_async(kind)


@pytest.mark.parametrize("kind", [*RAISED, *ENDS, *list(BAD)[::5]])
async def test_wrong_forward_of_a_remote_module_fails_its_call(kind: str) -> None:
    async with Cluster(2, options=OPTIONS) as (a, _), company(a):
        await hears(lambda: forward(a, kind))


batcher: Batcher[str, Any]


async def run_batch(kinds: list[str]) -> Any:
    return [give(kind) for kind in kinds]


async def batched(kind: str) -> Any:
    return await batcher(kind)


@pytest.mark.parametrize("kind", [*RAISED, *ENDS])
async def test_wrong_batch_function_fails_its_batch_alone(kind: str) -> None:
    """All members of the batch get the error."""
    global batcher
    async with (
        Cluster(2, options=OPTIONS) as (a, _),
        Batcher(run_batch, 1, 0.0) as batcher,
    ):
        await hears(lambda: a.peer("b").call(batched, kind))
        assert await a.peer("b").call(batched, "number") == 5

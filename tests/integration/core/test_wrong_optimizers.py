"""An optimizer of the user's that raises at an owner of its parameters.

Its maker hears which owner it was, and what was raised.  A step that failed on one
owner is applied on none, and the next one goes well; the workers live, other work
between them goes on, and nothing is left.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import Any, Final

import pytest
import torch

from asyncrpc import AsyncRpcError, Options, RRef, Worker
from asyncrpc.autograd import backward, context
from asyncrpc.errors import OptimizerError
from asyncrpc.optim import DistributedOptimizer
from asyncrpc.testing import Cluster, acting_as
from tests.integration.core import misbehaving
from tests.integration.core import wrong_optimizers as wrong
from tests.integration.core.company import LIMIT_S, PATIENT, company, work
from tests.integration.core.groups import processes
from tests.integration.core.wrong_optimizers import Wrong

OPTIONS: Final = Options(drain_timeout_s=2.0, liveness=PATIENT)
NAMES: Final = {"sys.exit": "SystemExit", "endless recursion": "RecursionError"}
# Its thread has no call, and so no worker that it could ask for.
RAISED: Final = [kind for kind in misbehaving.RAISED if kind != "worker inside"]
FEW: Final = ["value", "exit", "generator exit", "cancelled", "stop", "exiting"]
STEPS: Final = ["step", "step's end", "zero_grad", "group"]
OWNERS: Final = [("b", "b"), ("a", "a"), ("ab", "a"), ("ab", "b"), ("abc", "c")]
X: Final = torch.tensor([1.0, 2.0, 3.0])


class Trainer:
    """What one worker trains: a parameter on each owner."""

    def __init__(self, a: Worker, owners: str) -> None:
        self.a = a
        self.owners = owners
        self.rrefs: list[RRef[Any]] = [
            a.peer(owner).remote(wrong.make) for owner in owners
        ]
        self.optimizer = DistributedOptimizer(Wrong, self.rrefs, lr=0.5, momentum=0.5)

    async def values(self) -> list[torch.Tensor]:
        pairs = zip(self.owners, self.rrefs, strict=True)
        return [await self.a.peer(name).call(wrong.value, rref) for name, rref in pairs]

    async def step(self, **how: Any) -> bool:
        async with asyncio.timeout(LIMIT_S), context() as ctx:
            pairs = zip(self.owners, self.rrefs, strict=True)
            losses = [
                await self.a.peer(name).call(wrong.product, rref, X)
                for name, rref in pairs
            ]
            await backward(ctx, losses)
            return (await self.optimizer.step(ctx, **how)).is_applied

    async def hears(self, attempt: Any, where: str, at: str, kind: str) -> None:
        """The attempt fails twice in the same way, and says where and why."""
        await self.a.peer(at).call(wrong.go_wrong, where, kind)
        for _ in range(2):
            with pytest.raises(OptimizerError) as caught:
                await attempt()
            message = str(caught.value)
            assert f"worker {at!r}" in message, (kind, message)
            is_told(message, kind)
        await self.a.peer(at).call(wrong.go_wrong)


def is_told(text: str, kind: str) -> None:
    """The text has the name of what was raised, or all that it says itself."""
    if kind not in RAISED:
        return
    name, said = NAMES.get(kind, "ValueError"), "nothing"
    if kind in misbehaving.ERRORS and "inside" not in kind:
        error = misbehaving.ERRORS[kind]()
        name = type(error).__name__
        said = "short" if issubclass(type(error), AsyncRpcError) else said
    assert name in text or said in text, (kind, text)


def same(values: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(
        torch.equal(value, other) for value, other in zip(values, wanted, strict=True)
    )


async def misuse(
    a: Worker, owners: str, at: str, kinds: Sequence[str], **how: Any
) -> None:
    """Have the optimizer of one owner raise in each step, at each place."""
    with acting_as(a):
        trainer = Trainer(a, owners)
        assert await trainer.step(**how)
        wanted, velocity = await trainer.values(), X.clone()
        for where in STEPS if len(kinds) < len(RAISED) else STEPS[1:2]:
            for kind in kinds:
                state = await trainer.optimizer.state_dict()
                await trainer.hears(lambda: trainer.step(**how), where, at, kind)
                assert same(await trainer.values(), wanted), (where, kind)
                again = await trainer.optimizer.state_dict()
                assert repr(again) == repr(state), (where, kind)
                assert await trainer.step(**how)
                velocity = velocity * 0.5 + X
                wanted = [value - 0.5 * velocity for value in wanted]
                assert same(await trainer.values(), wanted), (where, kind)


@pytest.mark.parametrize(("owners", "at"), OWNERS)
async def test_failed_step_is_applied_nowhere(owners: str, at: str) -> None:
    async with Cluster(3, options=OPTIONS) as (a, *_), company(a):
        await misuse(a, owners, at, FEW)


async def test_step_error_of_any_kind_is_applied_nowhere() -> None:
    async with Cluster(2, options=OPTIONS) as (a, _), company(a):
        for owners in ("b", "ab"):
            await misuse(a, owners, owners[0], RAISED)


async def test_failed_stale_step_is_applied_nowhere() -> None:
    async with Cluster(2, options=OPTIONS) as (a, _), company(a):
        await misuse(a, "ab", "b", FEW, allow_stale=True)


async def never_made(a: Worker, where: str, owners: str, at: str, kind: str) -> None:
    """Neither can it be awaited, nor take a step; the next use goes well."""
    trainer = Trainer(a, owners)

    async def make() -> None:
        await trainer.optimizer

    await trainer.hears(make, where, at, kind)
    await trainer.hears(trainer.step, where, at, kind)
    assert same(await trainer.values(), [torch.ones(3)] * len(owners))
    assert await trainer.step()
    assert same(await trainer.values(), [torch.ones(3) - 0.5 * X] * len(owners))


@pytest.mark.parametrize(("owners", "at"), OWNERS)
@pytest.mark.parametrize("where", ["constructor", "constructor's end"])
async def test_raising_constructor_makes_no_optimizer(
    where: str, owners: str, at: str
) -> None:
    async with Cluster(3, options=OPTIONS) as (a, *_), company(a):
        with acting_as(a):
            for kind in RAISED if owners == "b" else FEW:
                await never_made(a, where, owners, at, kind)


async def state_is_kept(a: Worker, owners: str, at: str) -> None:
    """What raises while a state is had, or taken, changes nothing."""
    trainer = Trainer(a, owners)
    assert await trainer.step()
    optimizer = trainer.optimizer
    state = await optimizer.state_dict()
    for kind in [*FEW, "text", "lock", "bad class", "exiting class"]:
        await trainer.hears(optimizer.state_dict, "state_dict", at, kind)
    for kind in FEW:
        take = functools.partial(optimizer.load_state_dict, state)
        await trainer.hears(take, "load_state_dict", at, kind)
    assert repr(await optimizer.state_dict()) == repr(state)
    assert await trainer.step()


@pytest.mark.parametrize(("owners", "at"), OWNERS)
async def test_failed_state_call_keeps_the_state(owners: str, at: str) -> None:
    async with Cluster(3, options=OPTIONS) as (a, *_), company(a):
        with acting_as(a):
            await state_is_kept(a, owners, at)


async def test_failed_step_is_applied_nowhere_across_processes() -> None:
    async with processes("b", options=OPTIONS) as a, company(a), work(a):
        for owners in ("b", "ab"):
            await misuse(a, owners, "b", FEW)

"""Optimizers over processes: checkpoints, trainers at once, one that is killed.

Each test starts processes, so they run on one kind of loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
import torch
import uvloop
from torch import nn

from asyncrpc import Worker, WorkerLostError
from asyncrpc.autograd import backward, context
from asyncrpc.nn import RemoteModule
from asyncrpc.optim import DistributedOptimizer
from asyncrpc.testing import Cluster, ProcessCluster, acting_as
from tests.numerics.groups import SHAPES, inputs, loss_of, one_process
from tests.numerics.optimizers import evaluations, same, step_and_wait, train
from tests.numerics.remote import Layer, Scale, parameters_there


def processes(names: Sequence[str]) -> ProcessCluster:
    return ProcessCluster(sorted(set(names)), name="a", method="forkserver")


@asynccontextmanager
async def here(_: Sequence[str]) -> AsyncIterator[Worker]:
    async with Cluster(3) as workers:
        yield workers[0]


class Training:
    """A model that is split over workers, its optimizer and its schedule."""

    def __init__(self, where: Sequence[str]) -> None:
        placed = zip(where, SHAPES, strict=False)
        self.stages = [RemoteModule(to, Layer, shape) for to, shape in placed]

    async def prepare(self) -> None:
        by_stage = [await stage.remote_parameters() for stage in self.stages]
        flat = [reference for stage in by_stage for reference in stage]
        self.optimizer = await DistributedOptimizer("AdamW", flat, lr=0.1)
        self.schedule = schedule_of(self.optimizer.options)

    async def steps(self, which: Sequence[int]) -> None:
        for step in which:
            async with context() as ctx:
                x = inputs(step)
                for stage in self.stages:
                    x = await stage.forward_async(x)
                await backward(ctx, [loss_of(x)])
                await self.optimizer.step(ctx, clip_grad_norm=10.0)
            self.schedule.step()

    async def save(self, path: Path) -> None:
        saved = {
            "model": [await stage.state_dict() for stage in self.stages],
            "optimizer": await self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
        }
        torch.save(saved, path)

    async def load(self, path: Path) -> None:
        saved = torch.load(path)
        for stage, state in zip(self.stages, saved["model"], strict=True):
            await stage.load_state_dict(state)
        await self.optimizer.load_state_dict(saved["optimizer"])
        self.schedule.load_state_dict(saved["schedule"])


def schedule_of(
    optimizer: torch.optim.Optimizer,
) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=10)


async def train_with(
    group: Callable[[Sequence[str]], AbstractAsyncContextManager[Worker]],
    where: Sequence[str],
    which: Sequence[int],
    files: tuple[Path | None, Path],
) -> None:
    """Train on new workers, from a checkpoint if there is one, to another."""
    begin, end = files
    async with group(where) as worker:
        with acting_as(worker):
            training = Training(where)
            await training.prepare()
            if begin is not None:
                await training.load(begin)
            await training.steps(which)
            await training.save(end)
            del training


class TestProcesses:
    """Workers that share nothing but messages, and files."""

    loops = {"uvloop": uvloop.new_event_loop}  # noqa: RUF012  (read once; processes are slow)

    @pytest.mark.parametrize("again", ["bc", "cb"])
    async def test_split_model_continues_bitwise(
        self, again: str, tmp_path: Path
    ) -> None:
        half, end, whole = (tmp_path / name for name in ("half", "end", "whole"))
        await train_with(processes, "bc", range(3), (None, half))
        await train_with(processes, again, range(3, 6), (half, end))
        await train_with(here, "bc", range(6), (None, whole))
        result, wanted = torch.load(end), torch.load(whole)
        assert same(result, wanted)
        assert not same(torch.load(half)["model"], wanted["model"])

    async def test_trainers_that_step_at_once_lose_no_step(self) -> None:
        """Three trainers and two owners: whole numbers, so that a lost one shows."""
        steps = 20
        async with processes("bct") as worker:
            with acting_as(worker):
                modules = [worker.peer(name).remote(Scale) for name in "bc"]
                by_module = [await parameters_there(module) for module in modules]
                flat = [reference for group in by_module for reference in group]
                arguments = modules, flat, "SGD", steps
                others = [worker.peer(name).call(train, *arguments) for name in "tb"]
                assert await asyncio.gather(train(*arguments), *others) == [steps] * 3
                for module in modules:
                    (weights,) = await module.rpc_async().weights()
                    assert weights.tolist() == [1.0 - 3 * steps] * 3
                del modules, module, by_module, flat, arguments

    async def test_step_of_a_killed_trainer_is_undone(self) -> None:
        cluster = ProcessCluster(["b", "t"], method="forkserver")
        async with cluster as worker:
            with acting_as(worker):
                module = worker.peer("b").remote(Scale)
                parameters = await parameters_there(module)
                call = worker.peer("t").call(step_and_wait, parameters, module)
                stepping = asyncio.create_task(call)
                while await evaluations.get() < 2:
                    pass
                (value,) = await module.rpc_async().weights()
                assert value.tolist() != [1.0] * 3  # a trial of the dead trainer's
                cluster.kill("t")
                with pytest.raises(WorkerLostError):
                    await stepping
                # Its turn is over, so this one's comes.
                optimizer = DistributedOptimizer("SGD", parameters, lr=0.5)
                async with context() as ctx:
                    out = await module.rpc_async()(torch.ones(3).double())
                    await backward(ctx, [out.sum()])
                    assert (await optimizer.step(ctx, allow_stale=True)).is_applied
                (value,) = await module.rpc_async().weights()
                assert value.tolist() == [0.5] * 3
                del module, parameters, optimizer


async def test_split_model_trains_as_one_process(tmp_path: Path) -> None:
    await train_with(here, "bc", range(6), (None, tmp_path / "found"))
    result = torch.load(tmp_path / "found")
    model, local = one_process(2, lambda it: torch.optim.AdamW(it.parameters(), lr=0.1))
    schedule = schedule_of(local)
    for step in range(6):
        local.zero_grad()
        loss_of(model(inputs(step))).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        local.step()
        schedule.step()
    flat = [value for stage in result["model"] for value in stage.values()]
    wanted = [parameter.detach() for parameter in model.parameters()]
    torch.testing.assert_close(flat, wanted, rtol=1e-12, atol=1e-12)

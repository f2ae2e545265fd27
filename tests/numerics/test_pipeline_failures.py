"""A step of a pipeline that fails leaves nothing: no gradient, no graph, no hang.

A stage or the loss raises, a worker is lost, a deadline passes, the driver is cancelled
or dies: whichever it is, the context is as it was, every stage has let go of the step,
and the next step of the same pipeline is as good as any.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import asyncrpc
from asyncrpc import Options, Policy, RRef, Worker
from asyncrpc.autograd import context, get_gradients
from asyncrpc.nn import Pipeline
from asyncrpc.parallel.pipeline.schedules import TRAINING
from asyncrpc.testing import Cluster, ProcessCluster, acting_as
from tests.numerics.remote import Layer, gathered
from tests.numerics.stages import (
    SHAPES,
    Failing,
    Graph,
    StageError,
    Tracked,
    batch,
    call_from,
    failing_loss,
    held,
    in_one_process,
    model,
    squared,
    waiting,
)
from tests.numerics.stateful_objects import Gate, all_released

WORKERS = "bcd"
CHUNKS, ROWS = 6, 12


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """Graphs are freed at once, and not when the collector comes."""
    gc.disable()
    yield
    gc.enable()


class Group:
    """A pipeline of three stages on `b`, `c` and `d`, one of which is special."""

    def __init__(
        self, workers: list[Worker], schedule: str, special: int, *args: Any
    ) -> None:
        self.workers = workers
        self.modules: list[RRef[Any]] = []
        for index, (name, shape) in enumerate(zip(WORKERS, SHAPES, strict=True)):
            arguments = (*shape, name)
            if index == special:
                module = asyncrpc.remote(name, Failing, (arguments, *args))
            else:
                module = asyncrpc.remote(name, Tracked, arguments)
            self.modules.append(module)
        self.pipe = Pipeline(self.modules, schedule=schedule, chunks=CHUNKS)

    async def step(self, loss_fn: Any = squared) -> torch.Tensor:
        return (await self.pipe.forward_backward(*batch(ROWS), loss_fn=loss_fn)).loss

    async def gradients(self, but: str = "") -> list[Any]:
        """Return what there is in the current context."""
        by_stage = [
            await asyncrpc.rpc_async(module.owner_name(), gathered, (module,))
            for module in self.modules
            if module.owner_name() != but
        ]
        return [
            gradient for stage in by_stage for gradient in stage if gradient is not None
        ]

    async def nothing_is_held(self, but: str = "") -> None:
        """Wait until no stage has anything of a step, nor a thread runs for one."""
        async with asyncio.timeout(30):
            for stage in self.pipe._stages:  # noqa: SLF001
                if stage.owner_name() != but:
                    to = stage.owner_name()
                    while await asyncrpc.rpc_async(to, held, (stage,)):
                        pass
            while Graph.alive:
                await asyncrpc.rpc_async("a", int)


@asynccontextmanager
async def group_of(
    *args: Any, schedule: str = "1f1b", special: int = 1, options: Any = None
) -> AsyncIterator[Group]:
    Graph.most.clear()
    async with Cluster(4, options=options) as workers:
        with acting_as(workers[0]):
            yield Group(workers, schedule, special, *args)


def wanted_loss() -> torch.Tensor:
    return in_one_process(model(), *batch(ROWS), squared)[0]


ERRORS = [ValueError("no way"), StageError("no way")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("at", [1, 4])
@pytest.mark.parametrize("special", [0, 1, 2])
@pytest.mark.parametrize("schedule", TRAINING)
async def test_a_stage_that_raises_is_named_and_nothing_is_kept(
    schedule: str, special: int, at: int, where: str, error: Exception
) -> None:
    async with (
        group_of(error, where, at, schedule=schedule, special=special) as group,
        context(),
    ):
        with pytest.raises(type(error), match="no way") as caught:
            await group.step()
        assert isinstance(caught.value, asyncrpc.RemoteError)
        assert caught.value.worker == WORKERS[special]
        notes = "\n".join(caught.value.__notes__)
        assert (
            f"in the {where} pass of micro-batch {at - 1} at stage {special} of 3 of a "
            f"pipeline, on worker '{WORKERS[special]}'"
        ) in notes
        assert await group.gradients() == []
        del caught
        await group.nothing_is_held()
        torch.testing.assert_close(await group.step(), wanted_loss())
        assert len(await group.gradients()) == 6
    await all_released(group.workers)


async def test_loss_that_raises_is_named_and_nothing_is_kept() -> None:
    async with group_of(None, "", 0) as group, context():
        with pytest.raises(StageError, match="no loss") as caught:
            await group.step(failing_loss)
        assert getattr(caught.value, "worker", "") == "d"
        assert await group.gradients() == []
        del caught
        await group.nothing_is_held()
        torch.testing.assert_close(await group.step(), wanted_loss())


async def test_a_stage_that_raises_fails_an_inference_too() -> None:
    async with group_of(StageError("no way"), "forward", 3) as group:
        with pytest.raises(StageError, match="no way") as caught:
            await group.pipe.forward(batch(ROWS)[0])
        assert getattr(caught.value, "worker", "") == "c"
        del caught
        await group.nothing_is_held()
        assert (await group.pipe.forward(batch(ROWS)[0])).shape == (12, 2)


@pytest.mark.parametrize("schedule", TRAINING)
@pytest.mark.parametrize("special", [0, 1, 2])
async def test_a_cancelled_step_is_dropped_by_all_stages(
    special: int, schedule: str
) -> None:
    async with (
        group_of(None, "gate", 2, schedule=schedule, special=special) as group,
        context(),
    ):
        with Gate("gate") as gate:
            running = asyncio.create_task(group.step())
            await gate.reached.wait()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        await group.nothing_is_held()
        assert await group.gradients() == []
        torch.testing.assert_close(await group.step(), wanted_loss())


@pytest.mark.parametrize("schedule", TRAINING)
async def test_a_slow_stage_has_no_more_than_two_inputs_waiting(schedule: str) -> None:
    """Stage 0 runs ahead of it as far as its schedule lets it, and keeps the rest."""
    ahead = {"gpipe": CHUNKS, "1f1b": 3}[schedule]
    async with group_of(None, "gate", 1, schedule=schedule) as group, context():
        with Gate("gate") as gate:
            running = asyncio.create_task(group.step())
            await gate.reached.wait()
            first, slow, _ = group.pipe._stages  # noqa: SLF001
            async with asyncio.timeout(30):
                while await asyncrpc.rpc_async("b", held, (first,)) < ahead:
                    pass
                while await asyncrpc.rpc_async("c", waiting, (slow,)) < 2:
                    pass
            # What it has sent comes before the answer to this.
            await asyncrpc.rpc_async("b", call_from, ("c", waiting, slow))
            assert await asyncrpc.rpc_async("c", waiting, (slow,)) == 2
        torch.testing.assert_close(await running, wanted_loss())


@pytest.mark.parametrize("special", [0, 2])
async def test_a_deadline_ends_a_step_everywhere(special: int) -> None:
    async with group_of(None, "gate", 2, special=special) as group, context():
        with Gate("gate") as gate:
            with pytest.raises(TimeoutError):  # of a call, or of the block
                async with asyncrpc.deadline(3):
                    await group.step()
            assert gate.reached.is_set()
        await group.nothing_is_held()
        assert await group.gradients() == []
        torch.testing.assert_close(await group.step(), wanted_loss())


@pytest.mark.parametrize("special", [0, 1, 2])
async def test_worker_that_ends_during_a_step_fails_it(special: int) -> None:
    lost = WORKERS[special]
    async with group_of(None, "gate", 3, special=special) as group, context():
        with Gate("gate") as gate:
            running = asyncio.create_task(group.step())
            await gate.reached.wait()
            ending = asyncio.create_task(
                group.workers[special + 1].shutdown(drain_timeout_s=0)
            )
            # A stage may hear that it takes no more calls before it is gone.
            ended = (asyncrpc.WorkerLostError, asyncrpc.RejectedError)
            with pytest.raises(ended, match=lost):
                await running
            gate.let_go()
            await ending
        await group.nothing_is_held(but=lost)
        assert await group.gradients(but=lost) == []
        with pytest.raises((asyncrpc.OwnerLostError, asyncrpc.WorkerLostError)):
            await group.step()


async def test_process_killed_during_a_step_fails_it() -> None:
    cluster = ProcessCluster(["b", "c"], method="forkserver")
    async with cluster as worker:
        with acting_as(worker):
            modules: list[Any] = [
                asyncrpc.remote("b", Layer, SHAPES[0]),
                asyncrpc.remote("c", Layer, SHAPES[1]),
                Failing((*SHAPES[2], "a"), None, "gate", 3),
            ]
            pipe = await Pipeline(modules, chunks=CHUNKS)
            async with context() as ctx:
                with Gate("gate") as gate:
                    x, y = batch(ROWS)
                    running = asyncio.create_task(
                        pipe.forward_backward(x, y, loss_fn=squared)
                    )
                    await gate.reached.wait()
                    cluster.kill("c")
                    with pytest.raises(asyncrpc.WorkerLostError, match="'c'"):
                        await running
                assert get_gradients(ctx) == {}
                where = modules[0].owner_name()
                for stage in pipe._stages[::2]:  # noqa: SLF001
                    to = stage.owner_name()
                    assert await asyncrpc.rpc_async(to, held, (stage,)) == 0
                gradients = await asyncrpc.rpc_async(where, gathered, (modules[0],))
                assert gradients == [None, None]
            del modules, pipe


async def test_driver_that_ends_during_a_step_leaves_nothing() -> None:
    """The stages are on workers that live on; nobody refers to them any more."""
    async with group_of(None, "gate", 3) as group:
        with Gate("gate") as gate:

            async def drive() -> None:
                async with context():
                    await group.step()

            running = asyncio.create_task(drive())
            await gate.reached.wait()
            stages = [stage.rref_id for stage in group.pipe._stages]  # noqa: SLF001
            await group.workers[0].shutdown(drain_timeout_s=0)
            with pytest.raises(asyncrpc.AsyncRpcError):
                await running
        async with asyncio.timeout(30):
            while Graph.alive or any(
                record.rref_id in stages
                for worker in group.workers[1:]
                for record in worker.rrefs()
            ):
                gc.collect()
                await group.workers[1].peer("c").call(int)


async def test_driver_cancelled_while_committing_commits_everywhere() -> None:
    """Once all have computed, and one has been told, all are told."""
    async with group_of(None, "", 0) as group, context():
        step = asyncio.create_task(group.step())
        sent = asyncio.Event()
        link = await group.workers[0].parts.link_to("b")
        original = link.start

        def start(call: Any, *args: Any, **kwargs: Any) -> None:
            original(call, *args, **kwargs)
            if call.function == "commit":
                sent.set()

        link.start = start
        await sent.wait()
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        await group.nothing_is_held()
        assert len(await group.gradients()) == 6


async def test_waiter_for_a_stage_learns_that_its_step_is_over() -> None:
    """Before the end of the step and after it; its driver is out of reach."""
    x, _ = batch(2)
    async with group_of(None, "", 0) as group, context():
        stage = group.pipe._stages[1].rpc_async()  # noqa: SLF001
        run = stage.run([7, "1f1b", 2, True])
        asking = stage.gradients(7, 0)
        taking = stage.take(7, 1, x, [True])
        await group.workers[0].peer("c").call(int)  # they have come
        with pytest.raises(asyncrpc.errors.LocalProtocolError, match="no gradients"):
            await stage.commit(7)
        run.cancel()
        for call in (asking, taking):
            with pytest.raises(asyncrpc.errors.AutogradError, match="step 7 is over"):
                await call
        for late in (stage.computed, stage.commit, partial(stage.gradients, chunk=0)):
            with pytest.raises(asyncrpc.errors.AutogradError, match="step 7 is over"):
                await late(step=7)
        assert await group.gradients() == []


STRICT = (
    *(
        "asyncrpc.parallel.pipeline.stage:*",
        "asyncrpc.core.nn.owner:*",
        "tests.numerics.*",
    ),
    "builtins:int",
)


async def test_strict_pipeline_trains_with_allowed_functions_only() -> None:
    options = Options(policy=Policy.STRICT, allow=STRICT)
    async with group_of(None, "", 0, options=options) as group, context():
        torch.testing.assert_close(await group.step(), wanted_loss())
        assert len(await group.gradients()) == 6
        with pytest.raises(asyncrpc.RejectedError, match="mse_loss"):
            await group.step(nn.functional.mse_loss)
        with pytest.raises(asyncrpc.errors.EncodeError):
            await group.step(nn.MSELoss())

"""A pipeline trains as its modules would in one process, by whatever schedule.

Gradients, losses and weights are those of one process on the whole batch, to 1e-12 in
double precision; with several stages on a worker, micro-batches of different sizes,
and values that are no single tensor.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import asyncrpc
from asyncrpc import RRef, Worker
from asyncrpc.autograd import backward, context, get_gradients
from asyncrpc.nn import Pipeline, PipelineResult, RemoteModule
from asyncrpc.optim import DistributedOptimizer
from asyncrpc.parallel.pipeline.schedules import TRAINING
from asyncrpc.testing import Cluster, ProcessCluster, acting_as
from tests.numerics.remote import Layer, Tensors, gathered
from tests.numerics.stages import (
    SHAPES,
    Back,
    Calling,
    Endless,
    Front,
    Graph,
    Middle,
    Napping,
    Recomputing,
    Tracked,
    a_number,
    batch,
    in_one_process,
    model,
    of_pairs,
    per_row,
    settled,
    squared,
    squared_sum,
    stages_on,
)

ROWS = 10


@asynccontextmanager
async def four_workers() -> AsyncIterator[list[Worker]]:
    async with Cluster(4) as workers:
        with acting_as(workers[0]):
            yield workers


async def gradients_of(
    modules: Sequence[RRef[Any]], read: Callable[..., Any] = gathered
) -> Tensors:
    """Return the gradients of the current context, in the order of the parameters."""
    by_stage = [
        await asyncrpc.rpc_async(module.owner_name(), read, (module,))
        for module in modules
    ]
    return [gradient for stage in by_stage for gradient in stage]


def assert_close(actual: Any, wanted: Any) -> None:
    torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


async def check_step(
    pipe: Pipeline,
    stages: list[Any],
    arguments: tuple[Any, Any],
    wanted: Any,
    **how: Any,
) -> PipelineResult:
    """Take a step in a context of its own; compare its loss and gradients."""
    async with context():
        result = await pipe.forward_backward(*arguments, **{"loss_fn": squared, **how})
        assert_close((result.loss, await gradients_of(stages)), wanted)
        return result


# --- the same numbers ----------------------------------------------------------------


@pytest.mark.parametrize("chunks", [1, 3, 4, 16])
@pytest.mark.parametrize("schedule", TRAINING)
@pytest.mark.parametrize("on", ["bcd", "bbb", "abc", "aaa", "bcb"])
async def test_gradients_equal_one_process(on: str, schedule: str, chunks: int) -> None:
    """On workers of their own, on one, partly here; also with more parts than rows."""
    x, y = batch()
    wanted = in_one_process(model(), x, y, squared)
    async with four_workers():
        stages = stages_on(on)
        pipe = await Pipeline(stages, schedule=schedule, chunks=chunks)
        result = await check_step(pipe, stages, (x, y), wanted)
        assert result.report.chunks == min(chunks, ROWS)
        assert pipe.workers == list(on)


@pytest.mark.parametrize("schedule", TRAINING)
async def test_pipeline_trains_as_one_process(schedule: str) -> None:
    same = model()
    local = torch.optim.SGD(same.parameters(), lr=0.1, momentum=0.9)
    wanted = []
    for step in range(5):
        local.zero_grad()
        wanted.append(in_one_process(same, *batch(seed=step), squared)[0])
        local.step()
    async with four_workers():
        stages = stages_on("bcd")
        pipe = Pipeline(stages, schedule=schedule, chunks=4)
        optimizer = DistributedOptimizer(
            torch.optim.SGD, await pipe.remote_parameters(), lr=0.1, momentum=0.9
        )
        losses = [
            (await pipe.train_step(*batch(seed=step), squared, optimizer)).loss
            for step in range(5)
        ]
        weights = [await stage.rpc_async().weights() for stage in stages]
    assert_close(losses, wanted)
    assert_close(
        [parameter for stage in weights for parameter in stage],
        [parameter.detach() for parameter in same.parameters()],
    )
    assert losses[-1] < losses[0]


async def test_pipeline_trains_over_processes() -> None:
    x, y = batch()
    wanted = in_one_process(model(), x, y, squared)
    async with ProcessCluster(["b", "c"], method="forkserver") as worker:
        with acting_as(worker):
            stages = stages_on("bcb")
            pipe = Pipeline(stages, chunks=4)
            await check_step(pipe, stages, (x, y), wanted)
            assert_close(await pipe.forward(x), model()(x).detach())
            del stages, pipe


async def test_a_stage_may_be_given_as_a_module_of_any_kind() -> None:
    x, y = batch()
    wanted = in_one_process(model(), x, y, squared)
    async with four_workers():
        here, there = Layer(*SHAPES[0]), RemoteModule("b", Layer, SHAPES[1])
        rref = asyncrpc.remote("c", Layer, SHAPES[2])
        pipe = Pipeline([here, there, rref], chunks=4)
        async with context() as ctx:
            result = await pipe.forward_backward(x, y, loss_fn=squared)
            gradients = get_gradients(ctx)
            assert_close(
                [gradients[parameter] for parameter in here.parameters()], wanted[1][:2]
            )
            assert_close(await gradients_of([there.module_rref, rref]), wanted[1][2:])
        assert_close(result.loss, wanted[0])
        assert all(parameter.grad is None for parameter in here.parameters())
        assert repr(pipe) == "<Pipeline a -> b -> c, '1f1b', 4 micro-batches>"


@pytest.mark.parametrize("schedule", TRAINING)
async def test_values_between_stages_may_be_in_containers(schedule: str) -> None:
    """Arguments, dictionaries, lists, tensors that need no gradient, plain numbers."""

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([Front(), Middle(), Back()])

        def forward(self, words: torch.Tensor, options: Any) -> Any:
            front, middle, back = self.parts
            return back(middle(*front(words, options)))

    generator = torch.Generator().manual_seed(1)
    words = torch.randint(9, (ROWS,), generator=generator)
    mask = torch.rand(ROWS, generator=generator, dtype=torch.float64) < 0.7
    x = (words, {"mask": mask, "scale": 0.5})
    target = (torch.ones(ROWS, 3, dtype=torch.float64), 4)
    wanted = in_one_process(Whole(), x, target, of_pairs)
    async with four_workers():
        kinds = zip("bcd", (Front, Middle, Back), strict=True)
        stages = [asyncrpc.remote(to, kind) for to, kind in kinds]
        pipe = Pipeline(stages, schedule=schedule, chunks=3)
        await check_step(pipe, stages, (x, target), wanted, loss_fn=of_pairs)
        assert_close(await pipe.forward(x), Whole()(*x).detach())


@pytest.mark.parametrize(
    ("loss_fn", "reduction"),
    [
        (squared_sum, "sum"),
        (nn.MSELoss(), "mean"),
        (nn.MSELoss(reduction="sum"), "sum"),
    ],
)
async def test_reduction_of_the_loss_is_declared(loss_fn: Any, reduction: str) -> None:
    x, y = batch()
    wanted = in_one_process(model(), x, y, loss_fn)
    async with four_workers():
        stages = stages_on("bcd")
        pipe = Pipeline(stages, chunks=4)
        await check_step(
            pipe, stages, (x, y), wanted, loss_fn=loss_fn, reduction=reduction
        )


async def test_gradients_of_several_steps_add_up_in_their_context() -> None:
    """Of two pipelines that share modules, at the same time; not in another context."""
    (x1, y1), (x2, y2) = batch(7, seed=1), batch(5, seed=2)
    first, second = (
        in_one_process(model(), *b, squared)[1] for b in ((x1, y1), (x2, y2))
    )
    async with four_workers():
        stages = stages_on("bcd")
        pipes = [Pipeline(stages, chunks=3), Pipeline(stages, chunks=2)]

        async def alone() -> Tensors:
            async with context():
                await pipes[0].forward_backward(x1, y1, loss_fn=squared)
                return await gradients_of(stages)

        async def both() -> Tensors:
            async with context():
                batches = zip(pipes, ((x1, y1), (x2, y2)), strict=True)
                await asyncio.gather(
                    *(pipe.forward_backward(*b, loss_fn=squared) for pipe, b in batches)
                )
                return await gradients_of(stages)

        results = await asyncio.gather(alone(), both())
    assert_close(results[0], first)
    assert_close(results[1], [a + b for a, b in zip(first, second, strict=True)])


# --- what is held --------------------------------------------------------------------


@pytest.mark.parametrize("schedule", TRAINING)
async def test_a_stage_holds_no_more_graphs_than_its_schedule_says(
    schedule: str,
) -> None:
    x, y = batch(16)
    Graph.most.clear()
    async with four_workers():
        placed = zip("bcd", SHAPES, strict=True)
        stages = [asyncrpc.remote(to, Tracked, (*shape, to)) for to, shape in placed]
        pipe = Pipeline(stages, schedule=schedule, chunks=8)
        async with context():
            result = await pipe.forward_backward(x, y, loss_fn=squared)
            # The context is open: what is committed holds no graph.
            assert not Graph.alive
    wanted = {"gpipe": [8, 8, 8], "1f1b": [3, 2, 1]}[schedule]
    assert [Graph.most[name] for name in "bcd"] == wanted
    assert [stage.held_max for stage in result.report.stages] == wanted


async def test_an_inference_records_nothing() -> None:
    x, _ = batch(16)
    Graph.most.clear()
    async with four_workers():
        placed = zip("bcd", SHAPES, strict=True)
        stages = [asyncrpc.remote(to, Tracked, (*shape, to)) for to, shape in placed]
        pipe = Pipeline(stages, chunks=8)
        out = await pipe.forward(x)
        assert not out.requires_grad
        assert not Graph.alive
        async with context():
            with torch.no_grad():
                assert not (await pipe.forward(x)).requires_grad
            assert not Graph.alive
    assert_close(out, model()(x).detach())


async def test_an_inference_inside_a_context_is_differentiable() -> None:
    x, y = batch()
    here = x.clone().requires_grad_()
    wanted_x = x.clone().requires_grad_()
    wanted = in_one_process(model(), wanted_x, y, squared)
    async with four_workers():
        stages = stages_on("bcd")
        pipe = Pipeline(stages, chunks=4)
        async with context() as ctx:
            loss = squared(await pipe.forward(here), y)
            await backward(ctx, loss)
            gradients = await gradients_of(stages, settled)
            assert_close((loss.detach(), gradients), wanted)
            assert_close(get_gradients(ctx)[here], wanted_x.grad)


@pytest.mark.parametrize("schedule", TRAINING)
async def test_inputs_in_use_do_not_count_as_incoming_requests(schedule: str) -> None:
    """All activations of a stage together are more than a worker takes in at once."""
    options = asyncrpc.Options(
        limits=asyncrpc.LimitOptions(inbound_bytes_max=640 << 10)
    )
    x = torch.randn(16, 8 << 10, dtype=torch.float64)  # 128 KiB a micro-batch
    async with Cluster(4, options=options) as workers:
        with acting_as(workers[0]):
            stages = [asyncrpc.remote(name, Napping, (0.0,)) for name in "bcd"]
            pipe = await Pipeline(stages, schedule=schedule, chunks=8)
            # Waiting for a call to end would take a second for each.
            async with asyncrpc.deadline(5.0), context():
                await pipe.forward_backward(x, x + 1, loss_fn=squared)
                assert len(await gradients_of(stages)) == 3


async def test_many_inferences_run_at_once() -> None:
    async with four_workers():
        pipe = Pipeline(stages_on("bcd"), chunks=3)
        inputs = [batch(seed=seed)[0] for seed in range(8)]
        outputs = await asyncio.gather(*(pipe.forward(x) for x in inputs))
    assert_close(list(outputs), [model()(x).detach() for x in inputs])


# --- modules of all sorts ------------------------------------------------------------


async def test_stages_without_gradients_are_skipped() -> None:
    """A frozen first stage needs none; a frozen one in the middle lets them through."""
    x, y = batch()
    same = model()
    for frozen in (0, 1):
        wanted_model = model()
        wanted_model[frozen].requires_grad_(requires_grad=False)
        wanted = in_one_process(wanted_model, x, y, squared)
        async with four_workers():
            modules = [Layer(*shape) for shape in SHAPES]
            modules[frozen].requires_grad_(requires_grad=False)
            pipe = Pipeline([RRef(module) for module in modules], chunks=4)
            async with context() as ctx:
                result = await pipe.forward_backward(x, y, loss_fn=squared)
                gradients = get_gradients(ctx)
                assert_close(result.loss, wanted[0])
                trained = [
                    p
                    for module in modules
                    for p in module.parameters()
                    if p in gradients
                ]
                assert_close([gradients[parameter] for parameter in trained], wanted[1])
    assert len(list(same.parameters())) == len(trained) + 2


async def test_hooks_run_and_grad_is_unchanged() -> None:
    x, y = batch()
    async with four_workers():
        module = Layer(*SHAPES[0])
        seen: list[Any] = []
        kept = module.weight.grad = torch.full_like(module.weight, 7.0)
        module.weight.register_hook(seen.append)  # type: ignore[no-untyped-call]
        module.weight.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda parameter: seen.append(parameter.grad)
        )
        stages: list[Any] = [module, *stages_on("abc")[1:]]
        pipe = Pipeline(stages, chunks=5)
        async with context():
            await pipe.forward_backward(x, y, loss_fn=squared)
        assert len(seen) == 2 * 5  # each micro-batch has a backward pass
        assert module.weight.grad is kept
        assert kept.eq(7.0).all()


async def test_a_module_may_compute_its_activations_again() -> None:
    x, y = batch()
    wanted = in_one_process(model(), x, y, squared)
    async with four_workers():
        stages = stages_on("bcd", Recomputing)
        pipe = Pipeline(stages, chunks=4)
        await check_step(pipe, stages, (x, y), wanted)


async def test_autocast_around_a_step_holds_for_its_forward_passes() -> None:
    x, y = torch.randn(8, 5), torch.randn(8, 2)
    async with four_workers():
        modules = [nn.Linear(5, 7), nn.Linear(7, 2)]
        pipe = Pipeline([RRef(module) for module in modules], chunks=4)
        with torch.autocast("cpu", torch.bfloat16):
            assert (await pipe.forward(x)).dtype is torch.bfloat16
            async with context() as ctx:
                await pipe.forward_backward(x, y, loss_fn=squared)
                gradients = get_gradients(ctx)
                whole = squared(modules[1](modules[0](x)), y)
        wanted = torch.autograd.grad(whole, modules[0].weight)[0]
        assert gradients[modules[0].weight].dtype is torch.float32
        # Half precision has 8 bits; sums of a few products of it.
        torch.testing.assert_close(
            gradients[modules[0].weight], wanted, rtol=0.05, atol=0.05
        )
        assert (await pipe.forward(x)).dtype is torch.float32


async def test_modes_are_set_on_all_stages() -> None:
    async with four_workers():
        modules = [nn.Dropout(0.5), nn.Dropout(0.5)]
        pipe = Pipeline([RRef(module) for module in modules], chunks=2)
        await pipe.eval()
        assert not any(module.training for module in modules)
        x, _ = batch()
        assert torch.equal(await pipe.forward(x), x)
        await pipe.train()
        assert all(module.training for module in modules)


async def test_gradient_through_calls_of_a_module_is_refused() -> None:
    x, y = batch()
    async with four_workers():
        stages = stages_on("bcd")
        stages.insert(1, asyncrpc.remote("c", Calling, ("d",)))
        pipe = Pipeline(stages, chunks=2)
        async with context():
            with pytest.raises(asyncrpc.UsageError, match="made a call") as caught:
                await pipe.forward_backward(x, y, loss_fn=squared)
        assert isinstance(caught.value, asyncrpc.RemoteError)
        assert caught.value.worker == "c"


# --- what it says --------------------------------------------------------------------


async def report_of(schedule: str) -> PipelineResult:
    x, y = batch(8)
    async with four_workers():
        pipe = Pipeline(stages_on("bcd"), schedule=schedule, chunks=8)
        async with context():
            return await pipe.forward_backward(x, y, loss_fn=squared)


@pytest.mark.parametrize("schedule", TRAINING)
async def test_a_report_says_what_each_stage_did(schedule: str) -> None:
    report = (await report_of(schedule)).report
    assert [stage.worker for stage in report.stages] == ["b", "c", "d"]
    assert report.formula == 2 / 10
    for stage, idle in zip(report.stages, report.idle, strict=True):
        assert len(stage.spans) == 16
        assert all(span.duration_s > 0 for span in stage.spans)
        assert idle == pytest.approx(1 - stage.busy_s / report.duration_s)
    assert 0 < report.balance < 1
    assert 0 < report.bubble < 1


@pytest.mark.parametrize("schedule", TRAINING)
async def test_stages_work_at_the_same_time(schedule: str) -> None:
    """Each nap of a stage needs time and no processor, so those of two overlap."""
    x, _ = batch(8)
    async with four_workers():
        stages = [asyncrpc.remote(name, Napping, (0.01,)) for name in "bcd"]
        pipe = await Pipeline(stages, schedule=schedule, chunks=8)
        async with context():
            result = await pipe.forward_backward(x, x, loss_fn=squared)
    assert result.report.formula == 0.2
    for stage, following in pairwise(result.report.stages):
        assert any(
            span.start_s < other.end_s and other.start_s < span.end_s
            for span in stage.spans
            for other in following.spans
        )


# --- what is refused -----------------------------------------------------------------


async def test_invalid_arguments_are_refused_before_anything_runs() -> None:
    x, y = batch()
    async with four_workers():
        stages = stages_on("bcd")
        with pytest.raises(asyncrpc.UsageError, match="at least one stage"):
            Pipeline([], chunks=2)
        with pytest.raises(
            asyncrpc.UsageError, match=r"stages\[0\] must be .* of type str"
        ):
            Pipeline(["b"], chunks=2)  # type: ignore[list-item]
        with pytest.raises(
            asyncrpc.UsageError, match=r"schedule must be .* not '1F1B'"
        ):
            Pipeline(stages, chunks=2, schedule="1F1B")
        pipe = Pipeline(stages, chunks=2)
        with pytest.raises(asyncrpc.errors.InvalidContextError):
            await pipe.forward_backward(x, y, loss_fn=squared)
        refused: list[tuple[Any, Any, dict[str, Any], str]] = [
            (x[:0], y[:0], {}, "at least one row"),
            (x, y[1:], {}, "as many rows as x, 10, not 9"),
            ((x, x[1:]), y, {}, "not 10 and 9"),
            ((x, x.sum()), y, {}, "without dimensions"),
            ([1.0], y, {}, "at least one tensor"),
            (x.clone().requires_grad_(), y, {}, "requires a gradient"),
            (x, y, {"reduction": "none"}, "'mean' or 'sum', not 'none'"),
        ]
        async with context():
            for wrong_batch, target, more, words in refused:
                with pytest.raises(asyncrpc.UsageError, match=words):
                    await pipe.forward_backward(
                        wrong_batch, target, loss_fn=squared, **more
                    )
            lock: Any = threading.Lock()
            with pytest.raises(asyncrpc.errors.EncodeError, match="variable 'lock'"):
                await pipe.forward_backward(x, y, loss_fn=lambda *_: lock)
            for loss_fn, words in (
                (per_row, r"a Tensor of shape \(5, ?\)"),
                (a_number, "a float"),
            ):
                with pytest.raises(asyncrpc.UsageError, match=words):
                    await pipe.forward_backward(x, y, loss_fn=loss_fn)  # type: ignore[arg-type]
            assert await gradients_of(stages) == [None] * 6


async def test_invalid_or_failed_stage_is_named() -> None:
    x, _ = batch()
    async with four_workers():
        good = stages_on("bcd")
        with pytest.raises(asyncrpc.UsageError, match=r"stage 1 of 2 .* not a float"):
            await Pipeline([good[0], asyncrpc.remote("c", float, (1,))], chunks=2)
        broken = Pipeline([good[0], RemoteModule("c", Layer, ("no", 1, 2))], chunks=2)
        for use in (broken._ready, lambda: broken.forward(x)):  # noqa: SLF001
            with pytest.raises(TypeError):
                await use()
        endless = Pipeline([good[0], RemoteModule("c", Endless)], chunks=2)
        with pytest.raises(RuntimeError, match="raised StopIteration"):
            await endless.forward(x)

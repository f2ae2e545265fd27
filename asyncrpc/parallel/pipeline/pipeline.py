"""A model in stages on several workers, which work on micro-batches at the same time.

    pipe = asyncrpc.nn.Pipeline(
        [RemoteModule("a", Front), RemoteModule("b", Back)], chunks=8
    )
    optimizer = DistributedOptimizer(Adam, await pipe.remote_parameters(), lr=0.001)
    result = await pipe.train_step(x, target, cross_entropy, optimizer)

The driver here starts a step, hands out the micro-batches and commits the gradients.
The stages do the rest among themselves: see `stage`.

Cutting a batch into micro-batches, and joining their outputs.

A value may be a tensor, or tuples, lists and dictionaries of tensors.  Every tensor is
cut along its first dimension, its rows; any other value goes unchanged to each
micro-batch.  The parts differ by one row at most.

Source: torch.distributed.pipelining (schedules), and torch.distributed.pipeline.sync's
Pipe (`chunks`, and stages that are modules).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, TypeAlias

import torch
from torch import nn
from torch.utils import _pytree as pytree

from asyncrpc.autograd import context, current_context
from asyncrpc.core.arguments import (
    check_callable,
    check_choice,
    check_flag,
    check_kind,
    check_sequence,
    shown,
    wrong,
)
from asyncrpc.core.autograd.contexts import current_context_var
from asyncrpc.core.nn import owner
from asyncrpc.core.nn.remote_module import RemoteModule
from asyncrpc.core.optim.options import check_clipping
from asyncrpc.core.rref.handle import RRef
from asyncrpc.core.worker import current_worker
from asyncrpc.errors import UsageError
from asyncrpc.optim import DistributedOptimizer
from asyncrpc.parallel.pipeline.pipeline_report import PipelineReport, StageReport
from asyncrpc.parallel.pipeline.pipeline_step import PipelineStep, together
from asyncrpc.parallel.pipeline.schedules import (
    INFERENCE,
    ActionKind,
    ActionSpan,
    StageAction,
    check_schedule,
)
from asyncrpc.parallel.pipeline.stage import Stage
from asyncrpc.parallel.pipeline.stage_run import StageAnswer

DIMS_MAX: Final = 64  # that can travel


def rows_of(value: Any, name: str) -> int:
    """Return how many rows the tensors in a value have."""
    rows: int | None = None
    for leaf in _leaves(value, name):
        if not isinstance(leaf, torch.Tensor):
            continue
        if not leaf.dim():
            raise UsageError(
                f"{name} has a tensor without dimensions, which cannot be cut into "
                "micro-batches; pass a number instead"
            )
        if leaf.layout is not torch.strided or leaf.is_meta or leaf.dim() > DIMS_MAX:
            raise UsageError(
                f"{name} must hold dense tensors with values, of at most {DIMS_MAX} "
                f"dimensions, not {shown(leaf)} {leaf.layout}, on {leaf.device}"
            )
        if rows not in (None, leaf.shape[0]):
            raise UsageError(
                f"the tensors of {name} must have the same size in the first "
                f"dimension, along which they are cut, not {rows} and {leaf.shape[0]}"
            )
        rows = leaf.shape[0]
    if rows is None:
        raise UsageError(f"{name} must have at least one tensor to cut")
    return rows


def _leaves(value: Any, name: str) -> list[Any]:
    try:
        leaves: list[Any] = pytree.tree_leaves(value)
    except RecursionError:
        raise UsageError(
            f"{name} is nested too deep, or contains itself: pass lists of tensors"
        ) from None
    return leaves


def split(value: Any, parts: int) -> list[Any]:
    """Cut a value into micro-batches: views of its tensors."""
    leaves, form = pytree.tree_flatten(value)
    columns = [
        torch.tensor_split(leaf, parts)
        if isinstance(leaf, torch.Tensor)
        else [leaf] * parts
        for leaf in leaves
    ]
    return [
        pytree.tree_unflatten([column[index] for column in columns], form)
        for index in range(parts)
    ]


def sizes(rows: int, parts: int) -> list[int]:
    """Return how many rows each part of `split` has."""
    small, larger = divmod(rows, parts)
    return [small + (index < larger) for index in range(parts)]


def join(parts: Sequence[Any]) -> Any:
    """Join the outputs of micro-batches: tensors along the first dimension.

    Of other values, that of the first part is kept.
    """
    flattened = [pytree.tree_flatten(part) for part in parts]
    first, form = flattened[0]
    if any(other != form for _, other in flattened):
        raise UsageError("the outputs of micro-batches have different forms")
    joined = [
        _join_leaf([leaves[i] for leaves, _ in flattened]) for i in range(len(first))
    ]
    return pytree.tree_unflatten(joined, form)


def _join_leaf(parts: Sequence[Any]) -> Any:
    if not isinstance(parts[0], torch.Tensor):
        return parts[0]
    if not parts[0].dim():
        raise UsageError(
            "the last stage returned a tensor without dimensions for each "
            "micro-batch, which cannot be joined; return at least one row each"
        )
    return torch.cat(list(parts))


StageModule: TypeAlias = RemoteModule | RRef[Any] | nn.Module
LossFunction: TypeAlias = Callable[[Any, Any], torch.Tensor]

REDUCTIONS: Final = ("mean", "sum")
_RECURSE: Final = True  # also the parameters of modules inside


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """The result of a training step of a pipeline.

    Attributes:
        loss: of the whole batch: a tensor without dimensions or history, on the CPU.
        report: the actions of each stage, with times.
    """

    loss: torch.Tensor
    report: PipelineReport


class Pipeline:
    """Stages that process a batch in micro-batches, many of them at once.

    While one stage works on a micro-batch, the next stage works on the micro-batch
    before it.  The output of a stage goes to the next stage directly, from worker to
    worker.

    The gradients equal those of the same modules in one process on the whole batch, up
    to the order of sums, if each row of a batch is computed by itself.  BatchNorm in
    training mode is not: it takes its statistics from each micro-batch, and moves its
    running averages once for each.  Dropout draws anew for each micro-batch, from the
    generator of its worker's process.

    Several steps may run at once, also of pipelines that share modules: each has its
    own activations and gradients.  The stages are freed with this object.

    Example:
        >>> pipe = asyncrpc.nn.Pipeline([front, back], schedule="1f1b", chunks=8)
        >>> async with asyncrpc.autograd.context() as ctx:
        ...     result = await pipe.forward_backward(x, y, loss_fn=cross_entropy)
        ...     await optimizer.step(ctx)

    Source: torch.distributed.pipelining.
    """

    def __init__(
        self,
        stages: Sequence[StageModule],
        *,
        chunks: int,
        schedule: str = "1f1b",
    ) -> None:
        """Describe a pipeline; return at once.

        Args:
            stages: in the order of the forward pass: remote modules, references to
                modules on any workers, or modules of this worker.  Several may be on
                one worker.  The result of a stage is the argument of the next; a tuple
                is its arguments.  Tensors may be in tuples, lists and dictionaries.
            chunks: the number of micro-batches that a batch is cut into, along the
                first dimension of its tensors.  Sizes differ by one row at most.  If a
                batch has fewer rows, each row is a micro-batch.
            schedule: `"1f1b"` or `"gpipe"`.  Both are equally fast; under `"gpipe"` a
                stage holds the activations of all micro-batches at once, under
                `"1f1b"` those of as many as there are stages from it to the last.

        Raises:
            NotStartedError: there is no running worker here.
            UsageError: `stages` is empty, or has an element that is not a stage; or
                `chunks` or `schedule` is invalid.
        """
        check_schedule(schedule, chunks)
        self._worker = current_worker().parts
        check_sequence("stages", stages, "a list of modules")
        self._modules = [_placed(at, stage) for at, stage in enumerate(stages)]
        if not self._modules:
            raise UsageError("stages must have at least one stage")
        self.chunks: Final = chunks
        self.schedule: Final = schedule
        self._stages: list[RRef[Stage]] = []
        following: RRef[Stage] | None = None
        count = len(self._modules)
        for index, (module, device) in reversed([*enumerate(self._modules)]):
            following = self._worker.start_remote(
                module.owner_name(), Stage, (module, device, [index, count], following)
            )
            self._stages.insert(0, following)
        self._steps = 0

    def __await__(self) -> Generator[Any, None, Self]:
        """Wait until every stage has been made; return this object.

        Raises:
            Exception: the error of a module's constructor.
        """
        return self._ready().__await__()

    async def _ready(self) -> Self:
        self._worker.check_on_loop("a Pipeline")
        await together([stage.rpc_async().ready() for stage in self._stages])
        return self

    @property
    def workers(self) -> list[str]:
        """The name of each stage's worker, in order."""
        return [module.owner_name() for module, _ in self._modules]

    # --- the modules -----------------------------------------------------------------

    async def remote_parameters(self) -> list[RRef[nn.Parameter]]:
        """Return references to the parameters of all stages, in order.

        Raises:
            OwnerLostError: the worker of a stage is gone.
            Exception: the error of a module's constructor.

        Cancellation:
            Nothing changes.
        """
        by_stage = await self._on_owners(owner.parameters, _RECURSE)
        return [parameter for stage in by_stage for parameter in stage]

    async def train(self, mode: bool = True) -> Self:  # noqa: FBT001, FBT002  (torch's)
        """Set the mode of all stages, for all users of the modules.

        Args:
            mode: training, or evaluation.

        Raises:
            OwnerLostError: the worker of a stage is gone.

        Cancellation:
            Some stages may have been set.
        """
        check_flag("mode", mode)
        await self._on_owners(owner.train, mode)
        return self

    async def eval(self) -> Self:
        """Set the mode of all stages to evaluation; as `train(False)`.

        Raises:
            OwnerLostError: the worker of a stage is gone.

        Cancellation:
            Some stages may have been set.
        """
        return await self.train(mode=False)

    async def _on_owners(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call a function on each stage's worker, with the reference to its module."""
        self._worker.check_on_loop("a Pipeline")
        return await together(
            [
                self._worker.start_call(module.owner_name(), function, (module, *args))
                for module, _ in self._modules
            ]
        )

    # --- inference -------------------------------------------------------------------

    async def forward(self, x: Any) -> Any:
        """Run a batch through the stages; return the output of the last stage.

        Inside an autograd context the result is differentiable, by
        `asyncrpc.autograd.backward`; the stages then keep the activations of all
        micro-batches until the context ends.  Outside of a context, or under
        `torch.no_grad()`, they keep none.

        Args:
            x: a tensor `(rows, ...)`, or tuples, lists and dictionaries of them; a
                tuple is the arguments of the first stage.

        Returns:
            The outputs of all micro-batches, joined along their first dimension.

        Raises:
            RemoteError: a stage raised; also an instance of the original class.  Its
                `worker` and a note say where.
            WorkerLostError: the worker of a stage is lost.
            OwnerLostError: the worker of a stage had been lost before.
            RejectedError: the worker of a stage is shutting down.
            DeadlineExceededError: the enclosing deadline passed.
            UsageError: `x` cannot be cut into micro-batches, or this is not the event
                loop of the worker.

        Cancellation:
            All stages are told, and drop their part of the batch.
        """
        self._worker.check_on_loop("Pipeline.forward")
        chunks = self._count(x, rows_of(x, "x"))
        with_graph = current_context_var.get() is not None and torch.is_grad_enabled()
        number = self._number()
        step = PipelineStep(self._stages, number, split(x, chunks))
        plan = (number, INFERENCE, chunks, with_graph)
        answers = await step.run([plan] * len(self._stages))
        return join(answers[-1].result)

    # --- training --------------------------------------------------------------------

    async def forward_backward(
        self, x: Any, target: Any, *, loss_fn: LossFunction, reduction: str = "mean"
    ) -> PipelineResult:
        """Run a batch forward and backward; its gradients enter the current context.

        On the worker of the last stage `loss_fn` is applied to the stage's output of
        each micro-batch, and to its target.  The gradients are those of the loss of the
        whole batch.  They gather in the autograd context, like those of
        `asyncrpc.autograd.backward`, for `DistributedOptimizer.step`; `.grad` is
        untouched.  All of them enter the context, or none.

        Args:
            x: as for `forward`; its tensors do not require gradients.
            target: a tensor `(rows, ...)`, or tuples, lists and dictionaries of them.
            loss_fn: maps an output and a target to a tensor of one element; travels by
                name, or, if it is an object such as `nn.CrossEntropyLoss()`, as a copy.
            reduction: how `loss_fn` combines rows: `"mean"`, their average, so that
                each micro-batch counts by its rows; or `"sum"`.  Another mean, such as
                that of `cross_entropy` with `weight` or with ignored targets, is
                neither: sum up, and divide in `loss_fn` by a number that is the same
                for all micro-batches.

        Returns:
            The loss of the batch, and the report of each stage.

        Raises:
            InvalidContextError: there is no autograd context here, or it ended.
            RemoteError: a stage or the loss raised; also an instance of the original
                class.  Its `worker` and a note say where.
            WorkerLostError: the worker of a stage is lost.  If it was lost while
                gradients entered the context, the context has only some of them: leave
                it.
            OwnerLostError: the worker of a stage had been lost before.
            RejectedError: the worker of a stage is shutting down.
            DeadlineExceededError: the enclosing deadline passed.
            EncodeError: `loss_fn` cannot be found by its name.
            UsageError: `x` or `target` cannot be cut into micro-batches, or `x`
                requires a gradient; an argument is wrong; or this is not the worker's
                event loop.

        Cancellation:
            All stages are told, and drop their part of the step.  Once all have
            computed, the gradients enter the context nevertheless.

        Source: torch.distributed.pipelining.ScheduleGPipe.step and Schedule1F1B.step;
        those weigh micro-batches equally, even if they have different sizes.
        """
        self._worker.check_on_loop("Pipeline.forward_backward")
        current_context()
        check_callable("loss_fn", loss_fn)
        check_choice("reduction", reduction, REDUCTIONS)
        rows = rows_of(x, "x")
        _check_input(x)
        if rows_of(target, "target") != rows:
            raise UsageError(
                f"target must have as many rows as x, {rows}, not "
                f"{rows_of(target, 'target')}"
            )
        chunks = self._count(x, rows)
        weights = _weights(rows, chunks, reduction)
        number = self._number()
        step = PipelineStep(
            self._stages, number, split(x, chunks), split(target, chunks)
        )
        plans = [(number, self.schedule, chunks, True)] * len(self._stages)
        answers = await step.run(plans, loss_fn=loss_fn, weights=weights)
        return PipelineResult(answers[-1].result, self._report(answers, chunks))

    async def train_step(
        self,
        x: Any,
        target: Any,
        loss_fn: LossFunction,
        optimizer: DistributedOptimizer,
        *,
        reduction: str = "mean",
        clip_grad_norm: float | None = None,
    ) -> PipelineResult:
        """Run a batch forward and backward in a context of its own, and step.

        Args:
            x: as for `forward_backward`.
            target: as for `forward_backward`.
            loss_fn: as for `forward_backward`.
            optimizer: of the parameters of the stages: `remote_parameters()`.
            reduction: as for `forward_backward`.
            clip_grad_norm: as for `DistributedOptimizer.step`.

        Returns:
            The loss of the batch, before the step, and the report of each stage.

        Raises:
            OptimizerError: the step failed; see `DistributedOptimizer.step`.
            UsageError: an argument is wrong; nothing has begun.
            Exception: as `forward_backward`; then there was no step.

        Cancellation:
            As that of `forward_backward`, and then of `DistributedOptimizer.step`.
        """
        wanted = "a DistributedOptimizer"
        check_kind("optimizer", optimizer, DistributedOptimizer, wanted)
        check_clipping(clip_grad_norm)
        async with context() as ctx:
            result = await self.forward_backward(
                x, target, loss_fn=loss_fn, reduction=reduction
            )
            await optimizer.step(ctx, clip_grad_norm=clip_grad_norm)
        return result

    # --- parts -----------------------------------------------------------------------

    def _count(self, x: Any, rows: int) -> int:
        """Return how many micro-batches a batch makes."""
        if not rows:
            raise UsageError("x must have at least one row")
        return min(self.chunks, rows)

    def _number(self) -> int:
        self._steps += 1
        return self._steps

    def _report(self, answers: Sequence[StageAnswer], chunks: int) -> PipelineReport:
        stages = [
            StageReport(
                worker,
                tuple(
                    ActionSpan(StageAction(ActionKind(kind), chunk), start_s, end_s)
                    for kind, chunk, start_s, end_s in answer.spans
                ),
                answer.held_most,
            )
            for worker, answer in zip(self.workers, answers, strict=True)
        ]
        return PipelineReport(self.schedule, chunks, tuple(stages))

    def __repr__(self) -> str:
        where = " -> ".join(self.workers)
        return f"<Pipeline {where}, {self.schedule!r}, {self.chunks} micro-batches>"


def _placed(index: int, stage: StageModule) -> tuple[RRef[Any], str]:
    """Return a reference to a stage's module, and its device if that is known."""
    if isinstance(stage, RemoteModule):
        return stage.module_rref, stage._device  # noqa: SLF001  (of this package)
    if isinstance(stage, RRef):
        return stage, ""
    if isinstance(stage, nn.Module):
        return RRef(stage), ""
    wanted = "a RemoteModule, an RRef of a module, or a module of this worker"
    raise wrong(f"stages[{index}]", wanted, stage)


def _check_input(x: Any) -> None:
    """Refuse an input whose gradient would get lost."""
    for leaf in pytree.tree_leaves(x):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            raise UsageError(
                "x requires a gradient, which a pipeline does not return: detach x, or "
                "make the module that computes it the first stage (it may be on this "
                "worker)"
            )


def _weights(rows: int, chunks: int, reduction: str) -> list[float]:
    """Return the weight of each micro-batch's loss in that of the batch."""
    if reduction == "sum":
        return [1.0] * chunks
    return [size / rows for size in sizes(rows, chunks)]

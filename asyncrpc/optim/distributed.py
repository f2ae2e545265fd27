"""One optimizer over parameters that live on many workers.

    optimizer = asyncrpc.optim.DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.05)
    async with asyncrpc.autograd.context() as ctx:
        loss = ...
        await asyncrpc.autograd.backward(ctx, [loss])
        await optimizer.step(ctx)

Each owner runs a torch optimizer on its own parameters; here is who asks them.

Source: torch.distributed.optim.DistributedOptimizer.  There, `step` of an optimizer
without a functional twin applies old gradients again to parameters that took no part,
and an error on one owner leaves the others stepped.
"""

from __future__ import annotations

import asyncio
import math
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from asyncrpc.autograd.context import Context
from asyncrpc.errors import OptimizerError, UsageError
from asyncrpc.ids import WorkerId
from asyncrpc.optim.groups import Parameters, groups_of, owners_of, part_of
from asyncrpc.optim.local import scale_for
from asyncrpc.optim.owners import Owners, named, try_each
from asyncrpc.runtime.calls.context import current_worker


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did.

    Attributes:
        is_applied: False if it was skipped, as `skip_nonfinite` asks.
        gradients: parameters, over all owners, that had a gradient in the context.
        grad_norm: of all gradients together, before clipping; None if neither
            `clip_grad_norm` nor `skip_nonfinite` needed it.
    """

    is_applied: bool
    gradients: int
    grad_norm: float | None


class DistributedOptimizer:
    """Optimizes parameters on their owners, by one local optimizer on each.

    Making one returns at once; the local optimizers are made by the first step, or by
    awaiting it.  They are let go when this object is collected, or its worker dies.

    Several trainers may each have one over the same parameters.  An owner carries out
    steps one at a time, whole; two owners may take two trainers' steps in different
    orders.  As in one process, a step makes torch refuse the backward pass of another
    context that has used the same parameters already ("modified by an inplace
    operation"): let trainers that share a model take turns, or step together, or step
    with `allow_stale`.

    Example:
        >>> optimizer = await DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.05)
        >>> result = await optimizer.step(ctx, clip_grad_norm=1.0)

    Source: torch.distributed.optim.DistributedOptimizer.
    """

    def __init__(
        self,
        optimizer_class: Callable[..., Any],
        params_rref: Parameters,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Describe an optimizer of the current worker.

        Args:
            optimizer_class: a subclass of `torch.optim.Optimizer`; travels by name.
            params_rref: RRefs to leaf tensors that require a gradient, of any owners;
                or groups of them: dictionaries with `"params"` and options, as torch's
                optimizers take.
            *args: of the class, after the parameters.
            **kwargs: likewise.

        Raises:
            NotStartedError: there is no running worker here.
            UsageError: there are no parameters, or they are no RRefs.
        """
        self._worker = current_worker()
        self._class = optimizer_class
        self._groups = groups_of(params_rref)
        self._args, self._kwargs = list(args), dict(kwargs)
        self._owners = Owners(self._worker, owners_of(self._groups))
        self._unmade = set(self._owners.listed)  # without a local optimizer yet
        self._making = asyncio.Lock()
        # The owners learn of our end by themselves.
        weakref.finalize(self, self._owners.let_go).atexit = False

    def __await__(self) -> Generator[Any, None, Self]:
        """Make the local optimizers now; return this object.

        Raises:
            OptimizerError: an owner could not make its own; the text says which and
                why.  The next use tries again.
        """
        return self._made().__await__()

    async def step(
        self,
        context: Context,
        *,
        clip_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
        allow_stale: bool = False,
    ) -> StepResult:
        """Apply the gradients that gathered in a context, on all owners or on none.

        Each parameter is changed by its gradient of this context; those without one are
        left alone, whatever steps came before.  `.grad` looks untouched.  Several
        owners are first asked if they can (a round trip), then told to.

        Args:
            context: open on this worker, its backward passes awaited.
            clip_grad_norm: scale all gradients, over all owners, so that their norm
                together is at most this; the context keeps them as they are.
            skip_nonfinite: apply nothing anywhere if any gradient is infinite or NaN.
            allow_stale: let other contexts that have used these parameters before run
                their backward passes all the same, with the new values in place of the
                old: asynchronous training, as Hogwild does it.  Without it torch
                refuses those passes.

        Returns:
            Whether it was applied, and to how many parameters.

        Raises:
            OptimizerError: nothing was applied anywhere; or an owner failed while it
                applied, and then the text says which did and which did not.
            InvalidContextError: the context is not open here.
            UsageError: `clip_grad_norm` is not positive.

        Cancellation:
            Until the owners have been told, nothing is applied.  Afterwards the step is
            completed everywhere, without this task.

        Source: torch.distributed.optim.DistributedOptimizer.step.
        """
        if clip_grad_norm is not None and not clip_grad_norm > 0:
            raise UsageError(f"clip_grad_norm is positive, not {clip_grad_norm!r}")
        context.service.state(context)
        if self._unmade:
            await self._made()
        step = _Step(
            list(context.id),
            clip_grad_norm,
            skip_nonfinite=skip_nonfinite,
            allow_stale=allow_stale,
        )
        if len(self._owners.listed) == 1:
            return await self._step_one(step)
        return await self._step_many(step)

    async def _step_one(self, step: _Step) -> StepResult:
        """Prepare and commit by one message: a round trip less."""
        (owner,) = self._owners.listed
        try:
            count, norm, is_applied = await self._owners.ask(
                owner,
                "step",
                step.context_id,
                step.clip_norm,
                step.skip_nonfinite,
                step.allow_stale,
            )
        except Exception as error:  # any optimizer's code runs there
            raise OptimizerError(
                f"the step on worker {owner.name!r}, the only owner, failed: {error}"
            ) from error
        return StepResult(is_applied, count, norm)

    async def _step_many(self, step: _Step) -> StepResult:
        found = await self._owners.each(
            "prepare",
            step.context_id,
            step.needs_norm,
            problem="the step was refused, and nothing was applied anywhere",
        )
        count = sum(each[0] for each in found.values())
        norm = None
        if step.needs_norm:
            norm = math.sqrt(math.fsum(each[1] for each in found.values()))
        scale = scale_for(norm, step.clip_norm, skip_nonfinite=step.skip_nonfinite)
        if scale is not None:
            # Once one owner is told, all are: a task that our cancellation passes by.
            commit = self._commit(list(found), step, scale)
            await asyncio.shield(self._worker.start_task(commit))
        return StepResult(scale is not None, count, norm)

    async def _commit(
        self, owners: Sequence[WorkerId], step: _Step, scale: float
    ) -> None:
        applied, failed = await try_each(
            owners,
            lambda one: self._owners.ask(
                one, "commit", step.context_id, scale, step.allow_stale
            ),
        )
        if failed:
            names = ", ".join(repr(one.name) for one in applied) or "no worker"
            raise OptimizerError(
                f"the step was applied on {names}, and failed on {named(failed)}; "
                "load the last checkpoint on all of them"
            ) from next(iter(failed.values()))

    # --- groups, rates, state --------------------------------------------------------

    async def add_param_group(self, group: Mapping[str, Any]) -> None:
        """Optimize more parameters, with options of their own.

        Args:
            group: `"params"`, a list of RRefs, and options such as `"lr"`.

        Raises:
            OptimizerError: an owner refused it.
            UsageError: it is no group.

        Cancellation:
            Some owners may have taken it up: make a new optimizer.

        Source: torch.optim.Optimizer.add_param_group.
        """
        await self._made()
        added = groups_of([group])[0]
        old = list(self._owners.listed)
        self._groups.append(added)
        self._unmade.update(self._owners.add(owners_of([added])))
        await self._owners.gather(
            old,
            lambda one: self._owners.ask(one, "add_group", part_of(added, one)),
            problem="the group was not added everywhere",
        )
        await self._made()

    async def set_lr(self, lr: float, *, group: int | None = None) -> None:
        """Set the learning rate on all owners.

        Args:
            lr: the rate.
            group: index of the group it is for; None: all.

        Raises:
            OptimizerError: an owner failed.

        Cancellation:
            Some owners may have set it.
        """
        await self._made()
        await self._owners.each(
            "set_rate", lr, group, problem="the rate was not set everywhere"
        )

    async def get_lr(self) -> list[float]:
        """Return the learning rate of each group.

        Raises:
            OptimizerError: an owner failed.

        Cancellation:
            Nothing changes.
        """
        await self._made()
        rates = await self._owners.each("rates", problem="the rates could not be had")
        first: list[float] = next(iter(rates.values()))  # the same everywhere
        return first

    async def lr_scheduler(
        self, scheduler_class: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> DistributedScheduler:
        """Make a scheduler of the learning rates, which runs on every owner.

        Args:
            scheduler_class: of `torch.optim.lr_scheduler`; travels by name.
            *args: of the class, after the optimizer.  Functions must be importable.
            **kwargs: likewise.

        Returns:
            The scheduler, to be stepped with `await scheduler.step()`.

        Raises:
            OptimizerError: an owner could not make it.

        Cancellation:
            Some owners may have made it; steps of other schedulers are not affected.

        Example:
            >>> schedule = await optimizer.lr_scheduler(StepLR, step_size=10)
        """
        await self._made()
        made = await self._owners.each(
            "add_scheduler",
            scheduler_class,
            list(args),
            kwargs,
            problem="the scheduler was not made everywhere",
        )
        return DistributedScheduler(self, self._owners, made)

    async def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state of each local optimizer, by its owner's name.

        Raises:
            OptimizerError: an owner failed.

        Cancellation:
            Nothing changes.
        """
        await self._made()
        states = await self._owners.each("state", problem="the state could not be had")
        return {owner.name: state for owner, state in states.items()}

    async def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take up a state, as `state_dict` of an optimizer like this one returned it.

        Args:
            state_dict: by the name of the owner.

        Raises:
            UsageError: it is of other owners.  Nothing changed.
            OptimizerError: an owner refused its part.

        Cancellation:
            Some owners may have taken up theirs.
        """
        await self._made()
        names = {owner.name for owner in self._owners.listed}
        if names != set(state_dict):
            raise UsageError(
                f"the state is of the workers {sorted(state_dict)}, and the parameters "
                f"are on {sorted(names)}"
            )
        await self._owners.gather(
            self._owners.listed,
            lambda one: self._owners.ask(one, "load_state", state_dict[one.name]),
            problem="the state was not loaded everywhere",
        )

    def __repr__(self) -> str:
        name = getattr(self._class, "__name__", repr(self._class))
        owners = ", ".join(repr(one.name) for one in self._owners.listed)
        return f"<DistributedOptimizer {name} on {owners}>"

    async def _made(self) -> Self:
        """Make the local optimizers that are not made yet."""

        async def create(owner: WorkerId) -> None:
            # Every owner has every group, if need be an empty one, so that an index
            # means the same group everywhere.
            groups = [part_of(group, owner) for group in self._groups]
            values = (self._class, groups, self._args, self._kwargs)
            await self._owners.ask(owner, "create", *values)
            self._unmade.discard(owner)

        async with self._making:
            await self._owners.gather(
                [one for one in self._owners.listed if one in self._unmade],
                create,
                problem=f"{self!r} could not be made",
            )
        return self


class DistributedScheduler:
    """Changes the learning rates of an optimizer; from `lr_scheduler`."""

    __slots__ = ("_indices", "_optimizer", "_owners")

    def __init__(
        self,
        optimizer: DistributedOptimizer,
        owners: Owners,
        indices: Mapping[WorkerId, int],
    ) -> None:
        self._optimizer = optimizer  # which must not be let go while this is used
        self._owners = owners
        self._indices = indices

    async def step(self, *args: Any) -> None:
        """Step the scheduler of each owner.

        Args:
            *args: as its class takes them, a metric for instance.

        Raises:
            OptimizerError: an owner failed.

        Cancellation:
            Some owners may have stepped.
        """
        owners, indices = self._owners, self._indices
        await owners.gather(
            list(indices),
            lambda one: owners.ask(one, "step_scheduler", indices[one], list(args)),
            problem="the scheduler did not step everywhere",
        )


class _Step:
    """What one step asks for."""

    __slots__ = (
        "allow_stale",
        "clip_norm",
        "context_id",
        "needs_norm",
        "skip_nonfinite",
    )

    def __init__(
        self,
        context_id: list[int],
        clip_norm: float | None,
        *,
        skip_nonfinite: bool,
        allow_stale: bool,
    ) -> None:
        self.allow_stale = allow_stale
        self.context_id = context_id
        self.clip_norm = clip_norm
        self.skip_nonfinite = skip_nonfinite
        self.needs_norm = clip_norm is not None or skip_nonfinite

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
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, TypeVar

from asyncrpc.autograd.context import Context
from asyncrpc.errors import OptimizerError, UsageError
from asyncrpc.ids import WorkerId
from asyncrpc.optim.local import scale_for
from asyncrpc.optim.service import SERVICE, OptimizerService
from asyncrpc.rref.handle import RRef
from asyncrpc.runtime.context import current_worker, effective_deadline
from asyncrpc.runtime.worker import Worker

T = TypeVar("T")
Group = dict[str, Any]
Parameters = Sequence[RRef[Any]] | Sequence[Mapping[str, Any]]


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
    operation"): let trainers that share a model take turns, or step together.

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
        self._worker: Worker = current_worker()
        # Only this package makes services of the name.
        service: Any = self._worker.service(SERVICE)
        self._service: OptimizerService = service
        self._serial = self._service.next_serial()
        self._class = optimizer_class
        self._groups = _groups_of(params_rref)
        self._args, self._kwargs = list(args), dict(kwargs)
        self._owners = _owners_of(self._groups)
        self._unmade = set(self._owners)  # those without their local optimizer yet
        self._making = asyncio.Lock()
        finalizer = weakref.finalize(
            self, _let_go, self._worker, self._service, self._serial, self._owners
        )
        finalizer.atexit = False  # the owners learn of our end by themselves

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
        step = _Step(list(context.id), clip_grad_norm, skip_nonfinite=skip_nonfinite)
        if len(self._owners) == 1:
            return await self._step_one(step)
        return await self._step_many(step)

    async def _step_one(self, step: _Step) -> StepResult:
        """Prepare and commit by one message: a round trip less."""
        (owner,) = self._owners
        try:
            count, norm, is_applied = await self._ask(
                owner, "step", step.context_id, step.clip_norm, step.skip_nonfinite
            )
        except Exception as error:  # any optimizer's code runs there
            raise OptimizerError(
                f"the step on worker {owner.name!r}, the only owner, failed: {error}"
            ) from error
        return StepResult(is_applied, count, norm)

    async def _step_many(self, step: _Step) -> StepResult:
        found = await self._ask_each(
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
            commit = self._commit(list(found), step.context_id, scale)
            await asyncio.shield(self._worker.start_task(commit))
        return StepResult(scale is not None, count, norm)

    async def _commit(
        self, owners: Sequence[WorkerId], context_id: list[int], scale: float
    ) -> None:
        applied, failed = await _try_each(
            owners, lambda one: self._ask(one, "commit", context_id, scale)
        )
        if failed:
            names = ", ".join(repr(one.name) for one in applied) or "no worker"
            raise OptimizerError(
                f"the step was applied on {names}, and failed on {_listed(failed)}; "
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
        added = _groups_of([group])[0]
        old = list(self._owners)
        self._groups.append(added)
        for owner in _owners_of([added]):
            if owner not in self._owners:
                self._owners[owner] = None
                self._unmade.add(owner)
        await self._gather(
            old, lambda one: self._ask(one, "add_group", _part(added, one))
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
        await self._ask_each("set_rate", lr, group)

    async def get_lr(self) -> list[float]:
        """Return the learning rate of each group.

        Raises:
            OptimizerError: an owner failed.

        Cancellation:
            Nothing changes.
        """
        await self._made()
        rates: list[float] = await self._ask(next(iter(self._owners)), "rates")
        return rates

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
        made = await self._ask_each(
            "add_scheduler", scheduler_class, list(args), kwargs
        )
        return DistributedScheduler(self, made)

    async def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state of each local optimizer, by its owner's name.

        Raises:
            OptimizerError: an owner failed.

        Cancellation:
            Nothing changes.
        """
        await self._made()
        states = await self._ask_each("state")
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
        names = {owner.name for owner in self._owners}
        if names != set(state_dict):
            raise UsageError(
                f"the state is of the workers {sorted(state_dict)}, and the parameters "
                f"are on {sorted(names)}"
            )
        await self._gather(
            list(self._owners),
            lambda one: self._ask(one, "load_state", state_dict[one.name]),
        )

    def __repr__(self) -> str:
        name = getattr(self._class, "__name__", repr(self._class))
        owners = ", ".join(repr(one.name) for one in _owners_of(self._groups))
        return f"<DistributedOptimizer {name} on {owners}>"

    # --- asking owners ---------------------------------------------------------------

    async def _made(self) -> Self:
        """Make what is not made yet."""

        async def create(owner: WorkerId) -> None:
            # Every owner has every group, if need be an empty one, so that an index
            # means the same group everywhere.
            groups = [_part(group, owner) for group in self._groups]
            await self._ask(
                owner, "create", self._class, groups, self._args, self._kwargs
            )
            self._unmade.discard(owner)

        async with self._making:
            await self._gather(
                [one for one in self._owners if one in self._unmade],
                create,
                problem=f"{self!r} could not be made",
            )
        return self

    async def _ask_each(
        self, method: str, *values: Any, problem: str = ""
    ) -> dict[WorkerId, Any]:
        return await self._gather(
            list(self._owners),
            lambda one: self._ask(one, method, *values),
            problem=problem,
        )

    async def _gather(
        self,
        owners: Sequence[WorkerId],
        ask: Callable[[WorkerId], Coroutine[Any, Any, T]],
        *,
        problem: str = "",
    ) -> dict[WorkerId, T]:
        """Ask owners at once, wait for all, and name those that fail.

        Raises:
            OptimizerError: one or more did.
        """
        answers, failed = await _try_each(owners, ask)
        if failed:
            named = problem or f"{self!r} failed, maybe after others had done it"
            raise OptimizerError(f"{named}: {_listed(failed)}") from next(
                iter(failed.values())
            )
        return answers

    async def _ask(self, owner: WorkerId, method: str, *values: Any) -> Any:
        """Send one message about this optimizer to an owner; return the answer."""
        worker = self._worker
        if owner.incarnation == worker.incarnation:
            mine = [self._serial, *values]
            return await self._service.answer(owner.incarnation, method, mine)
        link = worker.directory.link_of(owner.incarnation)
        if link is None:
            link = await worker.link_to(owner.name)
            if link.peer != owner:
                raise OptimizerError(
                    f"worker {owner.name!r} has been restarted, and its parameters are "
                    "gone; make them again, and a new optimizer"
                )
        limit = effective_deadline(worker.options.rpc_timeout_s, worker.loop.time())
        return await link.request_service(
            SERVICE, method, [self._serial, *values], deadline=limit
        )


class DistributedScheduler:
    """Changes the learning rates of an optimizer; from `lr_scheduler`."""

    __slots__ = ("_indices", "_optimizer")

    def __init__(
        self, optimizer: DistributedOptimizer, indices: Mapping[WorkerId, int]
    ) -> None:
        self._optimizer = optimizer
        self._indices = dict(indices)

    async def step(self, *args: Any) -> None:
        """Step the scheduler of each owner.

        Args:
            *args: as its class takes them, a metric for instance.

        Raises:
            OptimizerError: an owner failed.

        Cancellation:
            Some owners may have stepped.
        """
        optimizer, indices = self._optimizer, self._indices
        await optimizer._gather(  # noqa: SLF001  (its other half)
            list(indices),
            lambda one: optimizer._ask(  # noqa: SLF001
                one, "step_scheduler", indices[one], list(args)
            ),
        )


class _Step:
    """What one step asks for."""

    __slots__ = ("clip_norm", "context_id", "needs_norm", "skip_nonfinite")

    def __init__(
        self, context_id: list[int], clip_norm: float | None, *, skip_nonfinite: bool
    ) -> None:
        self.context_id = context_id
        self.clip_norm = clip_norm
        self.skip_nonfinite = skip_nonfinite
        self.needs_norm = clip_norm is not None or skip_nonfinite


async def _try_each(
    owners: Sequence[WorkerId], ask: Callable[[WorkerId], Coroutine[Any, Any, T]]
) -> tuple[dict[WorkerId, T], dict[WorkerId, BaseException]]:
    """Ask owners at once and wait for all; return their answers, and their errors."""
    results = await asyncio.gather(
        *(ask(owner) for owner in owners), return_exceptions=True
    )
    answers: dict[WorkerId, T] = {}
    failed: dict[WorkerId, BaseException] = {}
    for owner, result in zip(owners, results, strict=True):
        if isinstance(result, BaseException):
            failed[owner] = result
        else:
            answers[owner] = result
    return answers, failed


def _let_go(
    worker: Worker,
    service: OptimizerService,
    serial: int,
    owners: Mapping[WorkerId, None],
) -> None:
    """Queue a note to the owners; runs wherever the collector does."""

    def tell() -> None:
        for owner in owners:
            link = worker.directory.link_of(owner.incarnation)
            if owner.incarnation == worker.incarnation:
                service.drop(owner.incarnation, serial)
            elif link is not None:
                link.notify(SERVICE, "drop", serial)

    if not worker.is_closed and not worker.loop.is_closed():
        worker.loop.call_soon_threadsafe(tell)


_GROUP_KEY: Final = "params"


def _groups_of(parameters: Parameters) -> list[Group]:
    """Check parameters, and return them as groups.

    Raises:
        UsageError: there are none, or they are no RRefs.
    """
    listed: list[Any] = list(parameters)
    if not listed:
        raise UsageError("an optimizer needs at least one parameter; it was given none")
    if isinstance(listed[0], Mapping):
        groups = [dict(group) for group in listed]
    else:
        groups = [{_GROUP_KEY: listed}]
    for group in groups:
        given = group.get(_GROUP_KEY)
        group[_GROUP_KEY] = [given] if isinstance(given, RRef) else list(given or ())
        for index, one in enumerate(group[_GROUP_KEY]):
            if not isinstance(one, RRef):
                raise UsageError(
                    f"parameter {index} is a {type(one).__name__}; an optimizer takes "
                    "RRefs: asyncrpc.RRef(parameter), made on the worker that has it"
                )
    if not any(group[_GROUP_KEY] for group in groups):
        raise UsageError(
            "an optimizer needs at least one parameter; its groups are empty"
        )
    return groups


def _owners_of(groups: Sequence[Group]) -> dict[WorkerId, None]:
    """Return the owners of the parameters, each once, in the order of the parameters."""
    listed = [one.owner_id for group in groups for one in group[_GROUP_KEY]]
    return dict.fromkeys(listed)


def _part(group: Group, owner: WorkerId) -> Group:
    """Return a group with the parameters of one owner only."""
    own = [one for one in group[_GROUP_KEY] if one.owner_id == owner]
    return {**group, _GROUP_KEY: own}


def _listed(failed: Mapping[WorkerId, BaseException]) -> str:
    return "; ".join(f"worker {one.name!r}: {error}" for one, error in failed.items())

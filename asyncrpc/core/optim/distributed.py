"""One optimizer over parameters that live on many workers.

    optimizer = asyncrpc.optim.DistributedOptimizer("SGD", rrefs, lr=0.05)
    async with asyncrpc.autograd.context() as ctx:
        loss = ...
        await asyncrpc.autograd.backward(ctx, [loss])
        await optimizer.step(ctx)

Each owner runs a torch optimizer on its own parameters (`optim.per_owner`).  An
optimizer that evaluates the model again during its step runs here, on copies of all
parameters (`optim.gathered`).

Source: torch.distributed.optim.DistributedOptimizer.  There, `step` of an optimizer
without a functional version applies old gradients again to parameters that took no
part, and an error on one owner leaves the others stepped.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import replace
from types import BuiltinFunctionType, FunctionType
from typing import Any, Self

import torch

from asyncrpc.core.arguments import (
    UNSET,
    check_callable,
    check_flag,
    check_flags,
    check_kind,
    shown,
    wrong,
)
from asyncrpc.core.autograd import public as autograd
from asyncrpc.core.autograd.contexts import Context
from asyncrpc.core.autograd.engine import Keeping
from asyncrpc.core.autograd.state import StepAfterPass, VotesWithPass
from asyncrpc.core.calls.futures import task_here
from asyncrpc.core.optim.gathered import GatheredOptimizer, needs_closure
from asyncrpc.core.optim.groups import Parameters, group_of, groups_of, owners_of
from asyncrpc.core.optim.options import Closure, StepOptions, StepResult
from asyncrpc.core.optim.per_owner import Owners, PerOwnerOptimizer
from asyncrpc.core.trace.events import OK, outcome_of
from asyncrpc.core.worker import current_worker
from asyncrpc.errors import UsageError


class DistributedOptimizer:
    """Optimizes parameters on their owners, by one local optimizer on each.

    The constructor returns at once; the local optimizers are made by the first step, or
    by awaiting this object.  They are let go when it is collected, or its worker dies.

    Several trainers may each have an optimizer over the same parameters.  An owner
    carries out steps one at a time, whole, and loses none; two owners may take two
    trainers' steps in different orders.  As in one process, a step makes torch refuse
    the backward pass of another context that has used the same parameters already
    ("modified by an inplace operation"): let trainers that share a model take turns, or
    step together, or step with `allow_stale`.

    Learning rates and other options are set here, by hand or by any of torch's
    schedulers, on `options`; the owners learn of them with the next step.

    An optimizer whose step needs a closure, such as LBFGS, runs on this worker, on
    copies of the parameters: they travel twice for each evaluation.

    Example:
        >>> optimizer = await DistributedOptimizer("SGD", rrefs, lr=0.05)
        >>> schedule = torch.optim.lr_scheduler.StepLR(optimizer.options, step_size=10)
        >>> result = await optimizer.step(ctx, clip_grad_norm=1.0)
        >>> schedule.step()

    Source: torch.distributed.optim.DistributedOptimizer.
    """

    def __init__(
        self,
        optimizer_class: Callable[..., torch.optim.Optimizer] | str,
        params_rref: Parameters,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Describe an optimizer of the current worker.

        Args:
            optimizer_class: a subclass of `torch.optim.Optimizer`, of torch's or your
                own, which travels by name; or the name of one in `torch.optim`.
            params_rref: RRefs to leaf tensors that require a gradient, of any owners;
                or groups of them: dictionaries with `"params"` and options, as torch's
                optimizers take.
            *args: positional arguments of the class, after the parameters.
            **kwargs: keyword arguments of the class.

        Raises:
            NotStartedError: there is no running worker here.
            UsageError: there are no parameters, or they are not RRefs; or torch has no
                optimizer of the name.
            EncodeError: an argument cannot travel to an owner.
        """
        self._worker = current_worker().parts
        self._class = class_of(optimizer_class)
        groups, arguments = groups_of(params_rref), (args, kwargs)
        owners = Owners(self._worker, owners_of(groups))
        self._owners = owners
        self._engine: PerOwnerOptimizer | GatheredOptimizer
        if needs_closure(self._class):
            self._engine = GatheredOptimizer(
                self._class, groups, arguments, owners, self._worker
            )
        else:
            self._engine = PerOwnerOptimizer(self._class, groups, arguments, owners)
        # The owners notice the end of this worker by themselves.
        weakref.finalize(self, owners.let_go).atexit = False

    def __await__(self) -> Generator[Any, None, Self]:
        """Make the local optimizers now; return this object.

        Raises:
            OptimizerError: an owner could not make its local optimizer; the text says
                which and why.  The next use tries again.
        """
        return self._ready().__await__()

    @property
    def options(self) -> torch.optim.Optimizer:
        """The groups' options, as an optimizer that torch's schedulers take.

        `options.param_groups` is as torch has it, except for the parameters, which are
        not here.  Changes there hold from the next step on.  Do not call its own
        `step`.

        Raises:
            UsageError: the local optimizers, which know the defaults, are not made yet.
        """
        options = self._engine.options
        if options is None:
            raise UsageError(
                "the options are not known yet: await the optimizer first, as in "
                "`optimizer = await DistributedOptimizer(...)`"
            )
        return options

    async def step(
        self,
        context: Context | None = None,
        closure: Closure | None = None,
        *,
        clip_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
        allow_stale: bool = False,
    ) -> StepResult:
        """Apply the gradients that gathered in a context, on all owners or on none.

        Each parameter is changed by its gradient of this context; parameters without a
        gradient are left alone, whatever steps came before.  `.grad` looks untouched.
        Several owners are first asked whether they can step (a round trip), then told
        to.

        Args:
            context: open on this worker, its backward passes awaited.
            closure: instead of a context: a coroutine function that is called with a
                new one, goes forward and backward in it, and returns the loss.
                Optimizers such as LBFGS call it several times in a step, others once.
            clip_grad_norm: scale all gradients, over all owners, so that their norm
                together is at most this; the context keeps them as they are.  With a
                closure, at each evaluation.
            skip_nonfinite: apply nothing anywhere if any gradient is infinite or NaN.
            allow_stale: let other contexts that have used these parameters before run
                their backward passes nevertheless, with the new values in place of the
                old: asynchronous training, like Hogwild.  Otherwise torch refuses those
                passes.

        Returns:
            Whether the step was applied, and to how many parameters.

        Raises:
            OptimizerError: an owner failed; the text names the worker and the problem,
                and says that nothing was applied anywhere.  Or, if a worker died or
                could not be reached during the step, the text says which workers
                applied the step.
            InvalidContextError: the context is not open here.
            UsageError: `clip_grad_norm` is not positive; or not exactly one of context
                and closure was given.
            Exception: the error of the closure.  Nothing was applied.

        Cancellation:
            Until the owners have been told, nothing is applied.  Afterwards the step is
            completed everywhere, without this task.  A step that runs here, because it
            calls a closure, is undone everywhere.

        Example:
            >>> async def closure(ctx: Context) -> torch.Tensor:
            ...     loss = (await module.forward_async(x)).square().mean()
            ...     await asyncrpc.autograd.backward(ctx, [loss])
            ...     return loss
            >>> result = await optimizer.step(closure=closure)

        Source: torch.distributed.optim.DistributedOptimizer.step.
        """
        how = StepOptions(clip_grad_norm, skip_nonfinite, allow_stale)
        how.check()
        engine = self._engine
        if context is not None:
            check_kind("context", context, Context, "an autograd context")
        if closure is not None:
            check_callable("closure", closure)
        if (context is None) == (closure is None) or (
            isinstance(engine, GatheredOptimizer) and closure is None
        ):
            raise UsageError(self._step_usage())
        if context is not None:
            context.service.state(context)  # it is open, or this raises
        return await self._noted(self._take_step(context, closure, how))

    async def backward_and_step(
        self,
        context: Context,
        roots: torch.Tensor | Sequence[torch.Tensor],
        retain_graph: bool = False,  # noqa: FBT001, FBT002  (as of `autograd.backward`)
        *,
        gradients: Sequence[torch.Tensor | None] | None = None,
        timeout_s: Any = UNSET,
        clip_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
        allow_stale: bool = False,
    ) -> StepResult:
        """Run a backward pass, then take a step: a round trip less, where that can be.

        It is `await autograd.backward(...)` and `await self.step(...)`.  If one other
        worker owns all parameters and no worker has anything to do for the pass after
        it, the step goes with the gradients, and is answered with the pass.  If several
        own them, they vote as they end their parts of the pass, and are then told to
        step; where the norm is needed, they are asked first, as by `step`.

        Args:
            context: open on this worker.
            roots: as for `asyncrpc.autograd.backward`.
            retain_graph: likewise.
            gradients: likewise.
            timeout_s: seconds that the pass may take; likewise.
            clip_grad_norm: as for `step`.
            skip_nonfinite: likewise.
            allow_stale: likewise.

        Returns:
            Whether the step was applied, and to how many parameters.

        Raises:
            BackwardFailedError: the pass failed, and no step was taken; where the step
                had been sent and the owner could not be heard any more, a note says
                that it may have been applied.
            NoGradientPathError: as of `asyncrpc.autograd.backward`.
            OptimizerError: the pass succeeded, and the step failed, as of `step`.
            InvalidContextError: the context is not open here.
            UsageError: an argument is of another kind; or the optimizer evaluates the
                model several times in a step, such as LBFGS.

        Cancellation:
            The pass is undone, and no step taken, unless the owner has taken it
            already.

        Example:
            >>> async with asyncrpc.autograd.context() as ctx:
            ...     loss = (await layer.rpc_async().forward(rows)).square().mean()
            ...     await optimizer.backward_and_step(ctx, loss)
        """
        how = StepOptions(clip_grad_norm, skip_nonfinite, allow_stale)
        how.check()
        root_tensors = autograd.checked_roots(context, roots, gradients, timeout_s)
        check_flags(retain_graph=retain_graph)
        engine = self._engine
        if isinstance(engine, GatheredOptimizer):
            raise UsageError(self._step_usage())
        service = context.service
        service.check_on_loop("DistributedOptimizer.backward_and_step")
        service.state(context)  # it is open, or this raises
        keeping, deadline = Keeping(retain_graph), service.deadline_of(timeout_s)

        async def run_pass(step: StepAfterPass | VotesWithPass | None) -> None:
            await service.backward(
                context, root_tensors, gradients, keeping, deadline, step=step
            )

        async def take_step() -> StepResult:
            await self._ready()
            return await engine.step_with_pass(context.id, how, run_pass)

        return await self._noted(take_step())

    async def _noted(self, step: Coroutine[Any, Any, StepResult]) -> StepResult:
        """Take a step, and note how it ended."""
        began_s = self._worker.recorder.now_s()
        try:
            result = await step
        except BaseException as error:
            self._note_step(began_s, outcome_of(error))
            raise
        self._note_step(began_s, OK if result.is_applied else "skipped")
        return result

    async def _take_step(
        self, context: Context | None, closure: Closure | None, how: StepOptions
    ) -> StepResult:
        """Take a step whose arguments have been checked."""
        engine = self._engine
        await self._ready()
        if isinstance(engine, GatheredOptimizer):
            assert closure is not None  # checked by `step`
            return await engine.step(closure, how)
        if context is not None:
            return await engine.step(context.id, how)
        assert closure is not None  # checked by `step`
        async with autograd.context() as own:
            loss = await closure(own)
            return replace(await engine.step(own.id, how), loss=loss)

    def _note_step(self, began_s: float, outcome: str) -> None:
        recorder, owners = self._worker.recorder, self._owners.listed
        names = tuple(owner.name for owner in owners)
        task = task_here(self._worker.loop)
        recorder.steps.record(
            (recorder.now_s(), began_s, self._name, names, outcome, task)
        )

    def _step_usage(self) -> str:
        if isinstance(self._engine, GatheredOptimizer):
            return (
                f"{self._name} evaluates the model several times in a step: pass a "
                "closure and no context, `await optimizer.step(closure=closure)`"
            )
        return (
            "step needs either the context of a backward pass, `await "
            "optimizer.step(ctx)`, or a closure"
        )

    # --- groups, state ---------------------------------------------------------------

    async def add_param_group(self, group: Mapping[str, Any]) -> None:
        """Optimize more parameters, with options of their own.

        Args:
            group: `"params"`, a list of RRefs, and options such as `"lr"`.

        Raises:
            OptimizerError: an owner refused it: make a new optimizer.
            UsageError: `group` is not a group of parameters, or the optimizer takes
                one group only.

        Cancellation:
            Some owners may have added the group: make a new optimizer.

        Source: torch.optim.Optimizer.add_param_group.
        """
        added = group_of("group", group)
        await self._ready()
        await self._engine.add_group(added, repr(self))

    async def state_dict(self, *, per_owner: bool = False) -> dict[str, Any]:
        """Return a copy of the optimizer's state.

        It has torch's form, with the parameters numbered in the order in which they
        were given: it can be loaded into an optimizer over the same parameters on other
        workers, or into torch's own in one process.  Each owner's part is of one
        moment; call this when no step is running.

        Args:
            per_owner: return the state of each local optimizer instead, as
                `{"owners": {name: state}}`, to be loaded on workers of these names.

        Returns:
            `{"state": ..., "param_groups": ...}`, tensors in the host's memory.

        Raises:
            OptimizerError: an owner failed.
            UsageError: the optimizer keeps a value that belongs to no parameter; use
                `per_owner`.

        Cancellation:
            Nothing changes.

        Source: torch.optim.Optimizer.state_dict.
        """
        check_flag("per_owner", per_owner)
        await self._ready()
        return await self._engine.state(per_owner=per_owner)

    async def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned, here or in one process.

        The options come with it.  Schedulers have a state of their own, which you keep.

        Args:
            state_dict: in either form.

        Raises:
            UsageError: the state belongs to other groups of parameters, or to other
                owners.  Nothing changed.
            OptimizerError: an owner refused its part; others may have loaded theirs.

        Cancellation:
            Some owners may have loaded their parts.

        Source: torch.optim.Optimizer.load_state_dict.
        """
        check_kind("state_dict", state_dict, Mapping, "what state_dict() returned")
        await self._ready()
        await self._engine.load_state(state_dict)

    def __repr__(self) -> str:
        owners = ", ".join(repr(owner.name) for owner in self._owners.listed)
        return f"<DistributedOptimizer {self._name} on {owners}>"

    @property
    def _name(self) -> str:
        is_named = isinstance(self._class, type | FunctionType | BuiltinFunctionType)
        return self._class.__name__ if is_named else shown(self._class)

    async def _ready(self) -> Self:
        self._worker.check_on_loop("a DistributedOptimizer")
        await self._engine.make(repr(self))
        return self


def class_of(wanted: Any) -> Callable[..., torch.optim.Optimizer]:
    """Return the class of an argument; a name is looked up in `torch.optim`."""
    if type(wanted) is str:
        candidate = getattr(torch.optim, wanted, None)
        if not _is_optimizer(candidate):
            known = sorted(
                optimizer_name
                for optimizer_name in dir(torch.optim)
                if _is_named(optimizer_name)
            )
            raise UsageError(
                f"optimizer_class must be an optimizer, but torch.optim has no "
                f"{shown(wanted)}; it has {', '.join(known)}. Pass the class itself if "
                "it is not torch's"
            )
        wanted = candidate
    if not callable(wanted) or (isinstance(wanted, type) and not _is_optimizer(wanted)):
        is_named = "a subclass of torch.optim.Optimizer, or a name in torch.optim"
        raise wrong("optimizer_class", is_named, wanted)
    optimizer_class: Callable[..., torch.optim.Optimizer] = wanted
    return optimizer_class


def _is_named(name: str) -> bool:
    return _is_optimizer(getattr(torch.optim, name))


def _is_optimizer(candidate: Any) -> bool:
    return (
        isinstance(candidate, type)
        and issubclass(candidate, torch.optim.Optimizer)
        and candidate is not torch.optim.Optimizer
    )

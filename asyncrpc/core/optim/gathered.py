"""An optimizer that needs a closure runs where it was made, on copies of parameters.

LBFGS sees all parameters as one vector: one such optimizer on each owner would be
another algorithm.  So torch's own runs here, on mirrors of the parameters; each time it
calls its closure, the owners get the mirrors' values and return the gradients.  The
results are those of one process.  A parameter travels twice for each evaluation.

From begin to end no other step changes these parameters: owners keep the old values,
and put them back if the step fails, or if this worker dies.

A plain algorithm in a thread, whose questions a coroutine answers.

An optimizer with a closure calls it from the middle of its step, and waits.  Ours is a
coroutine function of the user's: it runs in the task that waits for the step, with its
deadline and its contexts.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import enum
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from asyncrpc.core.autograd import public as autograd
from asyncrpc.core.calls.futures import refuse_on_loop
from asyncrpc.core.ids import ContextId, WorkerId
from asyncrpc.core.optim import messages as m
from asyncrpc.core.optim import states
from asyncrpc.core.optim.groups import Group, numbers_of, part_of
from asyncrpc.core.optim.local import Gradients, norm_of, scale_for, scaled, squares
from asyncrpc.core.optim.options import Closure, StepOptions, StepResult
from asyncrpc.core.optim.per_owner import Owners, error_text
from asyncrpc.core.optim.service import checked
from asyncrpc.core.optim.snapshot import Snapshot
from asyncrpc.core.parts import Parts
from asyncrpc.errors import OptimizerError, UsageError

R = TypeVar("R")


class _ThreadEvent(enum.Enum):
    """An event of the thread."""

    ASKED = "asked"
    ENDED = "ended"


async def run_with_callbacks(
    worker: Parts,
    algorithm: Callable[[Callable[[], Any]], R],
    evaluate: Callable[[], Awaitable[Any]],
) -> R:
    """Run `algorithm(ask)` in a thread, where `ask()` returns the result of `evaluate`.

    An error of `evaluate` is raised by `ask`.
    """
    # Bounded by the thread, which asks one question at a time.
    events: asyncio.Queue[_ThreadEvent] = asyncio.Queue()
    answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
    is_abandoned = threading.Event()

    def ask() -> Any:
        refuse_on_loop("a closure", "in a simulation, step without one")
        if is_abandoned.is_set():  # the algorithm has caught the error, and goes on
            raise _AbandonedError
        worker.loop.call_soon_threadsafe(events.put_nowait, _ThreadEvent.ASKED)
        with worker.pool.blocked():
            value, error = answers.get()
        if error is not None:
            raise error
        return value

    context = contextvars.copy_context()
    work = worker.run_in_thread(lambda: context.run(algorithm, ask))
    work.add_done_callback(lambda _: events.put_nowait(_ThreadEvent.ENDED))
    try:
        # The thread asks or ends; a job that its pool has dropped also ends.
        while await events.get() is _ThreadEvent.ASKED:
            try:
                answers.put((await evaluate(), None))
            except Exception as error:  # noqa: BLE001  (the thread raises it)
                answers.put((None, error))
    except BaseException:
        is_abandoned.set()
        answers.put((None, _AbandonedError()))
        await asyncio.wait([work])
        work.exception()  # that error, or another that the algorithm made of it
        raise
    return work.result()


class _AbandonedError(Exception):
    """The task that answers has ended."""


def needs_closure(cls: Any) -> bool:
    """Return whether a class's step cannot be called without a closure."""
    step = getattr(cls, "step", None) if isinstance(cls, type) else None
    if step is None:
        return False
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


class GatheredOptimizer:
    """An optimizer of this worker over parameters of others."""

    def __init__(
        self,
        cls: Callable[..., Any],
        groups: list[Group],
        arguments: tuple[Sequence[Any], Mapping[str, Any]],
        owners: Owners,
        worker: Parts,
    ) -> None:
        self.options: torch.optim.Optimizer | None = None
        self._cls = cls
        self._groups = groups
        self._arguments = arguments
        self._owners = owners
        self._worker = worker
        self._mirrors: list[torch.Tensor] = []
        self._listed_on: set[WorkerId] = set()  # owners that list their parameters
        self._turn_lock = asyncio.Lock()

    async def make(self, name: str) -> None:
        """List the parameters on their owners; make the optimizer of the mirrors."""
        if self.options is not None:
            return
        async with self._turn_lock:
            problem = f"{name} could not be made"
            if not self._listed_on:
                await self._owners.relist(self._groups)
            unmade = [
                owner for owner in self._owners.listed if owner not in self._listed_on
            ]
            await self._owners.gather(unmade, self._create, problem=problem)
            values = await self._owners.each(
                m.GetValues(self._owners.serial), problem=problem
            )
            if self.options is None:
                self._mirrors = self._in_order(values)
                for mirror in self._mirrors:
                    mirror.requires_grad_()
                try:
                    self.options = self._optimizer()
                except Exception as error:  # any optimizer's code
                    raise OptimizerError(f"{problem}: {error_text(error)}") from error

    async def _create(self, owner: WorkerId) -> None:
        groups = [{"params": part_of(group, owner)["params"]} for group in self._groups]
        await self._owners.ask(
            owner, m.CreateOptimizer(self._owners.serial, None, groups, [], {})
        )
        self._listed_on.add(owner)

    def _optimizer(self) -> torch.optim.Optimizer:
        listed, at = [], 0
        for group in self._groups:
            after = at + len(group["params"])
            listed.append({**group, "params": self._mirrors[at:after]})
            at = after
        args, kwargs = self._arguments
        return checked(self._cls(listed, *args, **kwargs))

    # --- a step ----------------------------------------------------------------------

    async def step(self, closure: Closure, how: StepOptions) -> StepResult:
        """Take a step; see `DistributedOptimizer.step`."""
        task = self._owners.start(self._step(closure, how))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.cancel()
            raise
        except _ExitsError as exits:
            raise exits.error from None

    async def _step(self, closure: Closure, how: StepOptions) -> StepResult:
        optimizer = self.options
        assert optimizer is not None  # made
        async with self._turn_lock:
            run = _StepRun(self, closure, how)
            owners = sorted(self._owners.listed)
            snapshot: Snapshot | None = None
            try:
                await self._begin(owners)
                snapshot = Snapshot(self._mirrors, optimizer)
                await run_with_callbacks(self._worker, optimizer.step, run.evaluate)
                self.take([None] * len(self._mirrors))
                await self.assign(how)
            except BaseException as error:
                if snapshot is not None:
                    snapshot.restore()
                await self._owners.settle(owners, is_applied=False)
                kind = type(error)  # a user's error may describe itself wrongly
                if issubclass(kind, _NotFiniteError):
                    return run.result(is_applied=False)
                if not issubclass(kind, (Exception, asyncio.CancelledError)):
                    raise _ExitsError(error) from error
                raise
            failed = await self._owners.settle(owners, is_applied=True)
            if failed:
                names = ", ".join(repr(owner.name) for owner in failed)
                raise OptimizerError(
                    f"the step was applied, but perhaps undone on {names}; load the "
                    "last checkpoint on all owners"
                ) from next(iter(failed.values()))
            return run.result(is_applied=True)

    async def _begin(self, owners: Sequence[WorkerId]) -> None:
        """Reserve the parameters, and copy their values.

        One owner after the other, in the order of all trainers: see `optim.turns`.
        """
        problem = "the step was refused, and nothing was applied anywhere"
        values: dict[WorkerId, list[torch.Tensor]] = {}
        for owner in owners:
            values |= await self._owners.gather(
                [owner], self._begin_on, problem=problem
            )
        with torch.no_grad():
            for mirror, value in zip(
                self._mirrors, self._in_order(values), strict=True
            ):
                mirror.copy_(value)

    async def _begin_on(self, owner: WorkerId) -> list[torch.Tensor]:
        return await self._owners.ask(owner, m.BeginStep(self._owners.serial))

    async def assign(self, how: StepOptions) -> None:
        """Give the owners the mirrors' values."""
        problem = "the parameters could not be set"

        def assign_on(owner: WorkerId) -> Coroutine[Any, Any, None]:
            places = numbers_of(self._groups, owner)
            values = [self._mirrors[at].detach() for at in places]
            return self._owners.ask(
                owner, m.AssignValues(self._owners.serial, values, how.allow_stale)
            )

        await self._owners.gather(self._owners.listed, assign_on, problem=problem)

    async def gradients(self, context_id: ContextId) -> list[torch.Tensor | None]:
        """Return the gradients of a context, in the order of the mirrors."""
        gradients = await self._owners.each(
            m.GetGradients(self._owners.serial, context_id),
            problem="the gradients could not be read",
        )
        return self._in_order(gradients)

    def take(self, gradients: Gradients) -> None:
        """Give the mirrors their gradients."""
        for mirror, gradient in zip(self._mirrors, gradients, strict=True):
            mirror.grad = gradient

    def _in_order(self, by_owner: Mapping[WorkerId, Sequence[Any]]) -> list[Any]:
        """Put the owners' parts into the order of all parameters."""
        placed: dict[int, Any] = {}
        for owner, values in by_owner.items():
            places = numbers_of(self._groups, owner)
            placed |= dict(zip(places, values, strict=True))
        return [placed[at] for at in range(len(placed))]

    # --- groups, state ---------------------------------------------------------------

    async def add_group(self, group: Mapping[str, Any], name: str) -> None:
        """Refuse: such an optimizer counts its parameters only once."""
        raise UsageError(
            f"{name} needs a closure and runs on all parameters at once; make a new one"
        )

    async def state(self, *, per_owner: bool) -> dict[str, Any]:
        """Return the state; see `DistributedOptimizer.state_dict`."""
        if per_owner:
            raise UsageError(
                "this optimizer runs where it was made, so its state is whole there; "
                "leave per_owner out"
            )
        assert self.options is not None  # made
        async with self._turn_lock:
            return copy.deepcopy(self.options.state_dict())

    async def load_state(self, state: Mapping[str, Any]) -> None:
        """Load a state; see `DistributedOptimizer.load_state_dict`."""
        states.check_fits(self._groups, state)
        assert self.options is not None  # made
        async with self._turn_lock:
            self.options.load_state_dict(dict(state))


class _NotFiniteError(Exception):
    """A gradient is infinite or NaN, and the step must be skipped."""


class _ExitsError(Exception):
    """Wraps an error, such as SystemExit, that in a task would end the event loop.

    Attributes:
        error: the error that the user's code raised.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


@dataclass(slots=True)
class _StepRun:
    """The evaluations of one step."""

    of: GatheredOptimizer
    closure: Closure
    how: StepOptions
    first: tuple[int, float | None, Any] | None = None

    async def evaluate(self) -> Any:
        """Give the owners the values, run the closure, and take the gradients."""
        if self.first is not None:  # else the owners have these values already
            await self.of.assign(self.how)
        async with autograd.context() as ctx:
            loss = await self.closure(ctx)
            gradients = await self.of.gradients(ctx.id)
        norm = norm_of(squares(gradients)) if self.how.needs_norm else None
        if self.first is None:
            self.first = sum(gradient is not None for gradient in gradients), norm, loss
        scale = scale_for(
            norm, self.how.clip_norm, skip_nonfinite=self.how.skip_nonfinite
        )
        if scale is None:
            raise _NotFiniteError
        self.of.take(scaled(gradients, scale))
        return loss

    def result(self, *, is_applied: bool) -> StepResult:
        """Return what the step did."""
        count, norm, loss = self.first or (0, None, None)
        return StepResult(is_applied, count, norm, loss)

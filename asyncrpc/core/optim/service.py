"""The owner's side of distributed optimizers: their local parts, and steps on them.

A step over several owners has two phases.  PREPARE asks each what gradients it has, and
whether its step might raise; it changes nothing and keeps nothing, so to abort is to
send no COMMIT.  COMMIT applies them.  With one owner both are one message, `step`.

If several owners' steps might raise, a COMMIT is also *kept*: the owner keeps a
snapshot that undoes it, and lets no other trainer step on these parameters, until
SETTLE tells whether all have applied it.  The steps of a trainer that dies in between
are undone.  `begin` keeps in the same way, for optimizers that run at the trainer.

Steps that are not kept do not wait for each other: PREPARE reads the gradients of its
own context, which no other context changes.  Each owner's COMMIT is serialized, whole,
by turns and by the lock that also keeps backward passes off `.grad`.

A COMMIT that has begun is completed: it runs in a thread, without interruption, or at
once, if steps of its kind have always been short.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Hashable
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

import torch

from asyncrpc.core.autograd.inline import Runner
from asyncrpc.core.autograd.service import AutogradService
from asyncrpc.core.ids import ContextId, Incarnation, WorkerId
from asyncrpc.core.optim import messages as m
from asyncrpc.core.optim.local import (
    Gathered,
    Gradients,
    LocalOptimizer,
    LocalParameters,
    check_parameters,
    in_host_memory,
    norm_of,
    scale_for,
    squares,
)
from asyncrpc.core.optim.options import Options, can_travel, options_of
from asyncrpc.core.optim.snapshot import Snapshot
from asyncrpc.core.optim.turns import TurnQueue, step_label
from asyncrpc.core.parts import Parts
from asyncrpc.core.rref.handle import RRef
from asyncrpc.core.serde import words_of
from asyncrpc.core.services.ports import PeerLink
from asyncrpc.core.services.router import Route, answers, takes
from asyncrpc.core.services.schema import Request, UnfitError, refusal
from asyncrpc.errors import MalformedError, OptimizerError, RejectedError

# What an optimizer takes, besides its parameters and its state, as measured.
OPTIMIZER_BYTES: Final = 8 << 10

T = TypeVar("T")
Key = tuple[int, int]  # the maker, and its number there: only the maker can name it
Handler: TypeAlias = Callable[[Key, Any], Coroutine[Any, Any, Any]]


@dataclass(frozen=True, slots=True)
class _UndoableStep:
    """A change that was made here and may have to be undone."""

    turn: int
    local: LocalParameters
    snapshot: Snapshot


class OptimizerService:
    """A `runtime.extensions.Service`."""

    name = m.SERVICE

    def __init__(self, worker: Parts, autograd: AutogradService) -> None:
        self.me = worker.id
        self._worker = worker
        self._functions = worker.functions
        self._autograd = autograd
        self._optimizers: dict[Key, LocalParameters] = {}
        self._optimizer_counts: Counter[int] = Counter()  # of them, by each maker
        self._kept: dict[Key, _UndoableStep] = {}
        # Why a step that came with a backward pass failed: the maker asks for it next.
        self._failed: dict[Key, tuple[ContextId, BaseException]] = {}
        self._turns = TurnQueue(self._steps_kept_on)
        self._runner = Runner(worker.pool, autograd.engine.lock)
        self._serial = 0
        autograd.step_with(self.vote_after_pass, self.step_after_pass)
        self._handlers: dict[type[Request[Any]], Handler] = {
            m.CreateOptimizer: self._create,
            m.TakeStep: self._step,
            m.PrepareStep: self._prepare,
            m.CommitStep: self._commit,
            m.SettleStep: self._settle,
            m.BeginStep: self._begin,
            m.AssignValues: self._assign,
            m.GetGradients: self._gradients,
            m.GetValues: self._values,
            m.AddGroup: self._add_group,
            m.GetState: self._state,
            m.LoadState: self._load_state,
            m.SetOptions: self._set_options,
        }
        self.routes = [
            *(_route(kind, handler) for kind, handler in self._handlers.items()),
            takes(m.DropOptimizer, self._on_drop),
        ]

    def next_serial(self) -> int:
        """Return a number for a new optimizer of this worker."""
        self._serial += 1
        return self._serial

    def _steps_kept_on(self, keys: AbstractSet[int]) -> tuple[str, ...]:
        """Return labels of the steps that are kept on some of these parameters."""
        kept = tuple(self._kept.items())
        return tuple(step_label(key) for key, step in kept if step.local.keys & keys)

    # --- messages (Service) ----------------------------------------------------------

    async def answer(self, request: Request[T]) -> T:
        """Answer a request of this worker itself, as the maker of an optimizer."""
        untyped: Any = request  # all have a serial
        try:
            answer: T = await self._handlers[type(request)](
                (self.me.incarnation, untyped.serial), request
            )
        except (Exception, asyncio.CancelledError):
            raise
        except BaseException as error:
            raise RuntimeError(words_of(error)) from error
        return answer

    def _on_drop(self, link: PeerLink, dropped: m.DropOptimizer) -> None:
        """Let go of an optimizer that its maker has let go of."""
        self.drop(link.peer.incarnation, dropped.serial)

    def held_for(self, peer: Incarnation) -> int:
        """Return how many bytes the optimizers of a maker take (HoldsForPeers)."""
        return OPTIMIZER_BYTES * self._optimizer_counts[peer]

    def _add(self, key: Key, local: LocalParameters) -> None:
        self._optimizers[key] = local
        self._optimizer_counts[key[0]] += 1

    def drop(self, maker: Incarnation, serial: int) -> None:
        """Let go of an optimizer."""
        if self._optimizers.pop((maker, serial), None) is not None:
            self._optimizer_counts[maker] -= 1
            if not self._optimizer_counts[maker]:
                del self._optimizer_counts[maker]
        self._failed.pop((maker, serial), None)

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        """Let go of a dead worker's optimizers, and undo its unsettled steps."""
        for key in [key for key in self._optimizers if key[0] == peer.incarnation]:
            self.drop(peer.incarnation, key[1])
        for key in [key for key in self._kept if key[0] == peer.incarnation]:
            kept = self._kept.pop(key)
            with suppress(RejectedError):  # this worker also ends
                self._put_back(kept)

    async def close(self) -> None:
        """Let go of all optimizers and kept steps."""
        self._optimizers.clear()
        self._optimizer_counts.clear()
        self._kept.clear()
        self._failed.clear()
        self._turns.close()

    # --- steps -----------------------------------------------------------------------

    async def step_after_pass(
        self, maker: WorkerId, content: list[Any]
    ) -> list[Any] | None:
        """Take a step that came with the last gradients of a backward pass."""
        try:
            step = m.TakeStep.record.read(content)
        except UnfitError as error:
            raise refusal(maker.name, m.TakeStep.name, error) from None
        key = (maker.incarnation, step.serial)
        self._failed.pop(key, None)
        try:
            answer: list[Any] = m.TakeStep.answer.write(await self._apply(key, step))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001  (an optimizer's code may exit)
            if key in self._optimizers:  # or the maker will hear that it is gone
                self._failed[key] = step.context_id, error
            return None
        return answer

    def vote_after_pass(
        self, maker: Incarnation, serial: int, gathered: Gathered
    ) -> bool | None:
        """Return whether a step with these gradients cannot raise.

        None: there is no part of that optimizer here.
        """
        local = self._optimizers.get((maker, serial))
        if not isinstance(local, LocalOptimizer):
            return None
        return local.is_sure(local.gradients(gathered))

    async def _step(self, key: Key, step: m.TakeStep) -> m.StepTaken:
        """Prepare and commit in one: all parameters are here."""
        context_id, failed = self._failed.pop(key, (None, None))
        if failed is not None and context_id == step.context_id:
            raise failed
        return await self._apply(key, step)

    async def _apply(self, key: Key, step: m.TakeStep) -> m.StepTaken:
        local = self._find_optimizer(key)
        gradients = await self._gradients_of(local, step.context_id)

        def job(is_sure: bool) -> m.StepTaken:  # noqa: FBT001
            clip_norm, skip_nonfinite = step.clip_norm, step.skip_nonfinite
            needs_norm = clip_norm is not None or skip_nonfinite
            norm = norm_of(squares(gradients)) if needs_norm else None
            scale = scale_for(norm, clip_norm, skip_nonfinite=skip_nonfinite)
            if scale is not None:
                allow_stale, differing = step.how
                local.step(
                    gradients,
                    scale,
                    differing,
                    allow_stale=allow_stale,
                    is_sure=is_sure,
                )
            return m.StepTaken(_count(gradients), norm, scale is not None)

        return await self._run_in_turn(local, gradients, step.context_id, job)

    async def _prepare(self, key: Key, request: m.PrepareStep) -> m.StepVote:
        """Vote: how many gradients, their squares, whether the step cannot raise."""
        local = self._find_optimizer(key)
        gradients = await self._gradients_of(local, request.context_id)
        parts: list[float] = []
        if request.needs_norm:
            parts = await self._worker.run_in_thread(partial(squares, gradients))
        return m.StepVote(_count(gradients), parts, local.is_sure(gradients))

    async def _commit(self, key: Key, commit: m.CommitStep) -> int:
        """Step; if it raises, nothing has changed here."""
        local = self._find_optimizer(key)
        allow_stale, differing = commit.how
        gradients = await self._gradients_of(local, commit.context_id)
        step_arguments = gradients, commit.scale, differing
        if commit.is_kept:
            kept = partial(local.step_kept, *step_arguments, allow_stale=allow_stale)
            turn = await self._turns.take(local.keys)
            variables = self._autograd.variables_of(commit.context_id)
            await self._keep(key, turn, local, partial(variables.run, kept))
        else:
            step = partial(local.step, *step_arguments, allow_stale=allow_stale)
            await self._run_in_turn(
                local,
                gradients,
                commit.context_id,
                lambda is_sure: step(is_sure=is_sure),
            )
        return _count(gradients)

    async def _settle(self, key: Key, request: m.SettleStep) -> None:
        """Settle a kept step, if there is one."""
        kept = self._kept.pop(key, None)
        if kept is None:
            return
        if request.is_applied:
            self._turns.end(kept.turn)
        else:
            await asyncio.shield(self._put_back(kept))

    # --- for optimizers that run where they were made --------------------------------

    async def _begin(self, key: Key, _: m.BeginStep) -> list[torch.Tensor]:
        """Keep the parameters as they are; return their values."""
        local = self._find(key)
        turn = await self._turns.take(local.keys)
        await self._keep(key, turn, local, partial(local.locked, local.snapshot))
        return await self._worker.run_in_thread(local.values)

    async def _assign(self, key: Key, request: m.AssignValues) -> None:
        kept = self._kept.get(key)
        if kept is None:
            raise OptimizerError("parameters may only be set between begin and settle")
        values, allow_stale = request.values, request.allow_stale
        await self._worker.run_in_thread(
            partial(kept.local.assign, values, allow_stale=allow_stale)
        )

    async def _gradients(self, key: Key, request: m.GetGradients) -> Gradients:
        gradients = await self._gradients_of(self._find(key), request.context_id)
        in_memory: Gradients = await self._worker.run_in_thread(
            partial(in_host_memory, gradients)
        )
        return in_memory

    async def _values(self, key: Key, _: m.GetValues) -> list[torch.Tensor]:
        return await self._worker.run_in_thread(self._find(key).values)

    # --- turns, and kept steps -------------------------------------------------------

    async def _run_in_turn(
        self,
        local: LocalOptimizer,
        gradients: Gradients,
        context_id: ContextId,
        job: Callable[[bool], T],
    ) -> T:
        """Wait for a turn, and run a step of these gradients of a context in it.

        Args:
            job: the step; it is told whether it is known not to raise.
        """
        turn = await self._turns.take(local.keys)
        kind = local.kind(gradients)
        if not self._runner.may_run_here(kind):
            run = self._autograd.variables_of(context_id).run
            work = self._in_turn(turn, partial(run, job, False), kind)  # noqa: FBT003
            return await asyncio.shield(work)
        try:  # a kind tells that it is sure, and nothing has come in between
            return self._runner.run_here(kind, partial(job, True))  # noqa: FBT003
        finally:
            self._turns.end(turn)

    def _in_turn(
        self, turn: int, job: Callable[[], T], kind: Hashable | None = None
    ) -> asyncio.Future[T]:
        """Run a job in a thread; when it is done, and not before, its turn ends."""

        def end(done: asyncio.Future[T]) -> None:
            done.exception()  # the waiting task may have been cancelled
            self._turns.end(turn)

        work = self._runner.run_in_thread(kind, job)
        work.add_done_callback(end)
        return work

    async def _keep(
        self, key: Key, turn: int, local: LocalParameters, job: Callable[[], Snapshot]
    ) -> None:
        """Run a job that returns its snapshot; keep the snapshot and the turn."""
        work = self._worker.run_in_thread(job)
        try:
            snapshot = await asyncio.shield(work)
        except asyncio.CancelledError:
            work.add_done_callback(partial(self._unwanted, turn, local))
            raise
        except BaseException:
            self._turns.end(turn)
            raise
        self._kept[key] = _UndoableStep(turn, local, snapshot)

    def _unwanted(
        self, turn: int, local: LocalParameters, work: asyncio.Future[Snapshot]
    ) -> None:
        if work.exception() is None:
            self._put_back(_UndoableStep(turn, local, work.result()))
        else:
            self._turns.end(turn)

    def _put_back(self, kept: _UndoableStep) -> asyncio.Future[None]:
        return self._in_turn(
            kept.turn, partial(kept.local.locked, kept.snapshot.restore)
        )

    async def _gradients_of(
        self, local: LocalParameters, context_id: ContextId
    ) -> Gradients:
        return local.gradients(await self._autograd.gathered(context_id))

    # --- everything else -------------------------------------------------------------

    async def _create(
        self, key: Key, request: m.CreateOptimizer
    ) -> m.MadeOptimizer | None:
        """Make a local optimizer, or, without a class, list the parameters."""
        cls, args, kwargs = request.optimizer_class, request.args, request.kwargs
        self._check_new(key)
        resolved = [await _resolved(group) for group in request.params_rref]
        lock = self._autograd.engine.lock
        if cls is None:
            listed = (parameter for group in resolved for parameter in group["params"])
            self._add(key, LocalParameters(listed, lock))
            return None
        self._functions.check(cls)

        def make() -> tuple[LocalOptimizer, m.MadeOptimizer]:
            optimizer = checked(cls(resolved, *args, **kwargs))
            report = m.MadeOptimizer(
                options_of(optimizer), travelling(optimizer.defaults)
            )
            return LocalOptimizer(optimizer, lock), report

        local, report = await self._in_thread(make)
        self._check_new(key)
        self._add(key, local)
        return report

    async def _add_group(self, key: Key, request: m.AddGroup) -> list[Options]:
        """Add a group; return the options of all."""
        local = self._find_optimizer(key)
        resolved = await _resolved(request.group)
        return await self._in_thread(partial(local.add_group, resolved))

    async def _state(self, key: Key, _: m.GetState) -> dict[str, Any]:
        return await self._in_thread(self._find_optimizer(key).state)

    async def _load_state(self, key: Key, request: m.LoadState) -> list[Options]:
        """Load a state; return the options of all groups."""
        local = self._find_optimizer(key)
        return await self._in_thread(partial(local.load_state, request.state))

    async def _set_options(self, key: Key, request: m.SetOptions) -> None:
        local = self._find_optimizer(key)
        await self._in_thread(partial(local.set_options, request.differing))

    def _in_thread(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Run code of an optimizer, which may ask for the current worker."""
        run = self._autograd.variables_of(None).run
        return self._worker.run_in_thread(lambda: run(job))

    def _check_new(self, key: Key) -> None:
        """Refuse to replace an optimizer that may keep a step."""
        if key in self._optimizers:
            raise MalformedError(f"optimizer {key[1]} has been made here before")

    def _find(self, key: Key) -> LocalParameters:
        parameters = self._optimizers.get(key)
        if parameters is None:
            raise OptimizerError(
                f"worker {self.me.name!r} has no part of this optimizer: the part was "
                "dropped when the connection to the optimizer's maker broke; make a "
                "new optimizer"
            )
        return parameters

    def _find_optimizer(self, key: Key) -> LocalOptimizer:
        local = self._find(key)
        if not isinstance(local, LocalOptimizer):
            raise MalformedError("this optimizer runs where it was made")
        return local


def _route(kind: type[Request[Any]], handler: Handler) -> Route:
    """Return the route of a request, whose handler gets the optimizer that it names."""

    def reply(link: PeerLink, request: Any) -> Coroutine[Any, Any, Any]:
        if kind is m.CreateOptimizer:
            link.check_room(OPTIMIZER_BYTES)
        return handler((link.peer.incarnation, request.serial), request)

    return answers(kind, reply)


async def _resolved(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group with the parameters themselves in place of references."""
    references = group.get("params")
    if type(references) is not list or not all(
        isinstance(reference, RRef) for reference in references
    ):
        raise MalformedError("a group of parameters has no list of references")
    values = [await rref for rref in references]
    check_parameters(values)
    return {**group, "params": values}


def checked(product: Any) -> torch.optim.Optimizer:
    """Return the object that a class or function has made, if it is an optimizer."""
    if not isinstance(product, torch.optim.Optimizer):
        raise OptimizerError(
            f"optimizer_class must make a torch.optim.Optimizer, but made a "
            f"{type(product).__name__}"
        )
    return product


def travelling(options: Options) -> Options:
    """Return the options that can travel."""
    return {key: value for key, value in options.items() if can_travel(value)}


def _count(gradients: Gradients) -> int:
    return sum(gradient is not None for gradient in gradients)

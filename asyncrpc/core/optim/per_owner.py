"""An optimizer that runs on every owner: steps in two phases, groups, state.

Each owner first votes: when it is asked to, or as it reports the end of its part of the
backward pass.  The way in which a step is committed depends on the votes.

*   If at most one owner's step might raise, it goes first, alone.  If it raises, it has
undone itself, and no other owner has begun.  The others follow, at once.
*   If the maker and one other worker own all parameters, that worker does not vote, but
counts as an owner whose step might raise: one round trip less.
*   If more than one might raise, all owners go one after the other, and keep a snapshot
that undoes the step until the last has applied it.  Their order is that of their ids,
as for all trainers, so two steps never wait for each other in a circle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from asyncrpc.core.autograd.state import StepAfterPass, VotesWithPass
from asyncrpc.core.calls.context import deadline_var, effective_deadline
from asyncrpc.core.ids import ContextId, WorkerId
from asyncrpc.core.loop.waits import does
from asyncrpc.core.optim import messages as m
from asyncrpc.core.optim import states
from asyncrpc.core.optim.groups import Group, owners_of, part_of, references_in
from asyncrpc.core.optim.local import norm_of, scale_for
from asyncrpc.core.optim.options import (
    Changes,
    GroupOptions,
    Options,
    StepOptions,
    StepResult,
    changes,
    is_harmless,
)
from asyncrpc.core.optim.service import OptimizerService
from asyncrpc.core.optim.turns import step_label
from asyncrpc.core.parts import Parts
from asyncrpc.core.serde import text_of, words_of
from asyncrpc.core.services.ports import PeerLink, ask
from asyncrpc.core.services.schema import Request
from asyncrpc.errors import (
    AsyncRpcError,
    CallError,
    EncodeError,
    OptimizerError,
    RemoteError,
    UsageError,
)

T = TypeVar("T")
Ask = Callable[[WorkerId], Coroutine[Any, Any, T]]


class Owners:
    """Sends messages about one optimizer.

    Attributes:
        serial: number of the optimizer on this worker.
        listed: the owners, each once.
    """

    def __init__(self, worker: Parts, listed: Sequence[WorkerId]) -> None:
        # Only this package makes services of the name.
        service: Any = worker.service(m.SERVICE)
        self._service: OptimizerService = service
        self._worker = worker
        self.serial = self._service.next_serial()
        self.listed = list(listed)

    @property
    def me(self) -> WorkerId:
        """Return the worker that has made the optimizer."""
        return self._service.me

    @property
    def key(self) -> tuple[int, int]:
        """Return the key by which owners know the optimizer."""
        return self.me.incarnation, self.serial

    @property
    def only_other(self) -> WorkerId | None:
        """Return the other owner, if there are two and this worker is one of them."""
        if len(self.listed) != 2 or self.me not in self.listed:  # noqa: PLR2004
            return None
        return next(owner for owner in self.listed if owner != self.me)

    @property
    def only_one_elsewhere(self) -> WorkerId | None:
        """Return the only owner, if it is another worker."""
        if len(self.listed) != 1 or self.listed[0] == self.me:
            return None
        return self.listed[0]

    async def relist(self, groups: Sequence[Group]) -> None:
        """List the owners of groups again, once they are known for certain.

        While a parameter is being made over a connection that is not open, it is not
        yet known which life of that worker will have it.
        """
        link_of = self._worker.directory.link_of
        if all(owner == self.me or link_of(owner.incarnation) for owner in self.listed):
            return
        for parameter in references_in(groups):
            await parameter.made_on()
        self.listed = owners_of(groups)

    def add(self, owners: Sequence[WorkerId]) -> list[WorkerId]:
        """Add owners; return those that are new."""
        fresh = [owner for owner in owners if owner not in self.listed]
        self.listed += fresh
        return fresh

    async def ask(self, owner: WorkerId, request: Request[T]) -> T:
        """Send one message to an owner; return the answer."""
        worker = self._worker
        if owner == self._service.me:
            return await self._service.answer(request)
        link: PeerLink | None = worker.directory.link_of(owner.incarnation)
        if link is None:
            link = await worker.link_to(owner.name)
            if link.peer != owner:
                raise OptimizerError(
                    f"worker {owner.name!r} has been restarted, and its parameters are "
                    "lost; make them again, and a new optimizer"
                )
        limit = effective_deadline(worker.options.rpc_timeout_s, worker.loop.time())
        return await ask(link, request, deadline=limit)

    async def each(self, request: Request[T], *, problem: str) -> dict[WorkerId, T]:
        """Send one message to every owner; return the answers."""
        return await self.gather(
            list(self.listed), lambda owner: self.ask(owner, request), problem=problem
        )

    async def gather(
        self, owners: Sequence[WorkerId], ask: Ask[T], *, problem: str
    ) -> dict[WorkerId, T]:
        """Ask owners at once, wait for all, and name the owners that fail."""
        answers, failed = await try_each(owners, ask)
        if failed:
            first = next(iter(failed.values()))
            raise OptimizerError(f"{problem}: {named(failed)}") from first
        return answers

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start work that is not cancelled with the caller."""
        task = self._worker.start_task(work)
        task.add_done_callback(_seen)
        return task

    async def settle(
        self, owners: Sequence[WorkerId], *, is_applied: bool
    ) -> dict[WorkerId, BaseException]:
        """Settle kept steps; return the errors of owners that could not be reached.

        The caller's deadline may have passed, but the steps must be settled: so each
        message has the time that any call has.
        """
        token = deadline_var.set(None)
        try:
            settle = m.SettleStep(self.serial, is_applied)
            _, failed = await try_each(owners, lambda owner: self.ask(owner, settle))
        finally:
            deadline_var.reset(token)
        return failed

    def let_go(self) -> None:
        """Queue a note to every owner that the optimizer is gone; from any thread."""
        worker = self._worker
        if not worker.is_closed and not worker.loop.is_closed():
            worker.loop.call_soon_threadsafe(self._tell_all)

    def _tell_all(self) -> None:
        for owner in self.listed:
            link: PeerLink | None = self._worker.directory.link_of(owner.incarnation)
            if owner == self._service.me:
                self._service.drop(owner.incarnation, self.serial)
            elif link is not None:
                link.tell(m.DropOptimizer(self.serial))


async def try_each(
    owners: Sequence[WorkerId], ask: Ask[T]
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


def _seen(task: asyncio.Task[Any]) -> None:
    """Mark an error as read, as the task that waits for it may have been cancelled."""
    if not task.cancelled():
        task.exception()


def named(failed: Mapping[WorkerId, BaseException]) -> str:
    """Return the names of failed owners, with their errors."""
    return "; ".join(
        f"worker {owner.name!r}: {error_text(error)}" for owner, error in failed.items()
    )


def error_text(error: BaseException) -> str:
    """Return the text of an owner's error, with its class unless that is ours."""
    kind = type(error)
    if issubclass(getattr(kind, "remote_class", kind), AsyncRpcError):
        return text_of(error)
    return words_of(error)


RunPass: TypeAlias = Callable[
    [StepAfterPass | VotesWithPass | None], Coroutine[Any, Any, None]
]


class PerOwnerOptimizer:
    """Local optimizers on all owners, and the options that they know.

    Attributes:
        options: of the groups; None until the first owner has made its optimizer.
    """

    def __init__(
        self,
        cls: Callable[..., Any],
        groups: list[Group],
        arguments: tuple[Sequence[Any], Mapping[str, Any]],
        owners: Owners,
    ) -> None:
        self.options: GroupOptions | None = None
        self._cls = cls
        self._groups = groups
        self._args, self._kwargs = list(arguments[0]), dict(arguments[1])
        self._owners = owners
        self._known: dict[WorkerId, list[Options]] = {}  # owners with an optimizer
        self._making = asyncio.Lock()

    @property
    def key(self) -> tuple[int, int]:
        """Return the key by which owners know the optimizer."""
        return self._owners.key

    async def make(self, name: str) -> None:
        """Make the local optimizers that are not made yet."""
        if len(self._known) == len(self._owners.listed):
            return
        async with self._making:
            if not self._known:
                await self._owners.relist(self._groups)
            await self._owners.gather(
                [owner for owner in self._owners.listed if owner not in self._known],
                self._create,
                problem=f"{name} could not be made",
            )

    async def _create(self, owner: WorkerId) -> None:
        # Every owner has every group, even if it is empty there, so that an index means
        # the same group everywhere.
        groups = [part_of(group, owner) for group in self._groups]
        create = m.CreateOptimizer(
            self._owners.serial, self._cls, groups, self._args, self._kwargs
        )
        try:
            created = await self._owners.ask(owner, create)
        except EncodeError as error:
            raise _named_as_given(error) from error
        if created is None:
            raise OptimizerError(f"worker {owner.name!r} did not make an optimizer")
        options, defaults = created
        if self.options is None:
            self.options = GroupOptions(options, defaults)
        self._known[owner] = options

    def _options(self) -> GroupOptions:
        assert self.options is not None  # an owner has made its optimizer
        return self.options

    # --- a step ----------------------------------------------------------------------

    async def step(self, context_id: ContextId, how: StepOptions) -> StepResult:
        """Take a step; see `DistributedOptimizer.step`."""
        now = self._options().now()
        # Numbers travel with the step; options that may make it raise are set before.
        await self._tell(lambda differing: not is_harmless(differing), now)
        if len(self._owners.listed) == 1:
            return await self._step_one(context_id, how, now)
        return await self._step_many(context_id, how, now, {})

    async def step_with_pass(
        self,
        context_id: ContextId,
        how: StepOptions,
        run_pass: RunPass,
    ) -> StepResult:
        """Run a backward pass, and take a step, which may go with it.

        Args:
            run_pass: runs the pass with a step, or with votes on one; or with neither.
        """
        owner = self._owners.only_one_elsewhere
        if owner is None and (len(self._owners.listed) == 1 or how.needs_norm):
            await run_pass(None)
            return await self.step(context_id, how)
        now = self._options().now()
        await self._tell(lambda differing: not is_harmless(differing), now)
        if owner is None:
            votes = VotesWithPass(self._owners.serial)
            await run_pass(votes)
            return await self._step_many(context_id, how, now, votes.are_sure)
        step = StepAfterPass(
            owner.incarnation, self._whole_step(owner, context_id, how, now).pack()
        )
        try:
            await run_pass(step)
        except Exception as error:
            if step.is_open:
                error.add_note(
                    f"The step had been sent to worker {owner.name!r} with the "
                    "gradients: it may have been applied."
                )
            raise
        if step.answer is None:
            return await self.step(context_id, how)
        step_taken = m.TakeStep.read_answer(owner.name, step.answer)
        return self._result_of(owner, step_taken, now)

    def _whole_step(
        self,
        owner: WorkerId,
        context_id: ContextId,
        how: StepOptions,
        now: list[Options],
    ) -> m.TakeStep:
        return m.TakeStep(
            self._owners.serial,
            context_id,
            how.clip_norm,
            how.skip_nonfinite,
            self._applying(owner, how, now),
        )

    def _result_of(
        self, owner: WorkerId, step_taken: m.StepTaken, now: list[Options]
    ) -> StepResult:
        if step_taken.is_applied:
            self._known[owner] = now
            self._options().note_step()
        return StepResult(step_taken.is_applied, step_taken.gradients, step_taken.norm)

    async def _step_one(
        self, context_id: ContextId, how: StepOptions, now: list[Options]
    ) -> StepResult:
        """Prepare and commit by one message: a round trip less."""
        (owner,) = self._owners.listed
        try:
            step_taken = await self._owners.ask(
                owner, self._whole_step(owner, context_id, how, now)
            )
        except Exception as error:  # any optimizer's code runs there
            # An OptimizerError itself says what was applied.
            is_undone = _has_answered(error) and not _is_a(error, OptimizerError)
            effect = ", and nothing was applied" if is_undone else ""
            raise OptimizerError(
                f"the step on worker {owner.name!r}, the only owner, failed{effect}: "
                f"{error_text(error)}"
            ) from error
        return self._result_of(owner, step_taken, now)

    async def _step_many(
        self,
        context_id: ContextId,
        how: StepOptions,
        now: list[Options],
        have_voted: Mapping[int, bool],
    ) -> StepResult:
        """Step on several owners."""
        owners = self._owners.listed
        # One message less: this owner goes first, alone, so its answer is its vote.
        silent = None if how.needs_norm else self._owners.only_other
        prepare = m.PrepareStep(self._owners.serial, context_id, how.needs_norm)
        votes = await self._owners.gather(
            [
                owner
                for owner in owners
                if owner != silent and owner.incarnation not in have_voted
            ],
            lambda owner: self._owners.ask(owner, prepare),
            problem="the step was refused, and nothing was applied anywhere",
        )
        count = sum(vote.gradients for vote in votes.values())
        norm = None
        if how.needs_norm:
            norm = norm_of(part for vote in votes.values() for part in vote.squares)
        scale = scale_for(norm, how.clip_norm, skip_nonfinite=how.skip_nonfinite)
        if scale is not None:
            step = _Commit(self._owners, context_id, scale)
            parts = {owner: self._applying(owner, how, now) for owner in owners}
            are_sure = dict(have_voted)
            are_sure |= {
                owner.incarnation: vote.is_sure for owner, vote in votes.items()
            }
            unsure = [owner for owner in owners if not are_sure.get(owner.incarnation)]
            # Once one owner is told, all must be: in a task that our cancellation does
            # not reach.
            task = self._owners.start(self._commit(step, parts, unsure, now))
            count = await asyncio.shield(task)
            self._options().note_step()
        return StepResult(scale is not None, count, norm)

    @does(lambda at: step_label(at["self"].key))
    async def _commit(
        self,
        step: _Commit,
        parts: Mapping[WorkerId, m.Applying],
        unsure: Sequence[WorkerId],
        now: list[Options],
    ) -> int:
        """Apply the step everywhere; return how many parameters had a gradient."""
        deadline_var.set(None)  # of this task: a step that has begun is completed
        if len(unsure) > 1:
            count = await step.one_by_one(parts)
        else:
            count = await step.at_once(parts, unsure)
        self._known.update(dict.fromkeys(parts, now))
        return count

    def _applying(
        self, owner: WorkerId, how: StepOptions, now: list[Options]
    ) -> m.Applying:
        """Return what an owner needs to know when it applies a step."""
        return m.Applying(how.allow_stale, changes(now, self._known[owner]))

    async def _tell(
        self, is_due: Callable[[Changes], bool], now: list[Options]
    ) -> None:
        """Tell owners of options that have changed, if that is due."""
        differing = {
            owner: changes(now, self._known[owner]) for owner in self._owners.listed
        }
        due = [owner for owner, change in differing.items() if is_due(change)]
        if due:
            serial = self._owners.serial
            await self._owners.gather(
                due,
                lambda owner: self._owners.ask(
                    owner, m.SetOptions(serial, differing[owner])
                ),
                problem="options could not be set everywhere; no step was taken",
            )
            self._known.update(dict.fromkeys(due, now))

    # --- groups, state ---------------------------------------------------------------

    async def add_group(self, group: Mapping[str, Any], name: str) -> None:
        """Optimize more parameters; see `DistributedOptimizer.add_param_group`."""
        added = dict(group)
        for parameter in references_in([added]):
            await parameter.made_on()
        old = list(self._owners.listed)
        self._groups.append(added)
        self._owners.add(owners_of([added]))
        serial = self._owners.serial
        known = await self._owners.gather(
            old,
            lambda owner: self._owners.ask(
                owner, m.AddGroup(serial, part_of(added, owner))
            ),
            problem="the group was not added everywhere",
        )
        options = next(iter(known.values()))[-1]
        self._options().add_param_group({**options, "params": []})
        for owner, group_options in known.items():
            self._known[owner] = [*self._known[owner], group_options[-1]]
        await self.make(name)

    async def state(self, *, per_owner: bool) -> dict[str, Any]:
        """Return the state; see `DistributedOptimizer.state_dict`."""
        now = self._options().now()
        if per_owner:
            await self._tell(bool, now)
        owner_states = await self._owners.each(
            m.GetState(self._owners.serial), problem="the state could not be read"
        )
        if per_owner:
            return {
                "owners": {owner.name: state for owner, state in owner_states.items()}
            }
        return states.joined(self._groups, owner_states, now)

    async def load_state(self, state: Mapping[str, Any]) -> None:
        """Load a state; see `DistributedOptimizer.load_state_dict`."""
        if "owners" in state:
            parts = self._parts_by_name(state["owners"])
        else:
            states.check_fits(self._groups, state)
            parts = {
                owner: states.part_for(self._groups, state, owner)
                for owner in self._owners.listed
            }
        serial = self._owners.serial
        known = await self._owners.gather(
            self._owners.listed,
            lambda owner: self._owners.ask(owner, m.LoadState(serial, parts[owner])),
            problem="the state was not loaded everywhere",
        )
        self._known.update(known)
        first = next(iter(known.values()))
        for group, options in zip(self._options().param_groups, first, strict=True):
            group.clear()
            group.update(options, params=[])

    def _parts_by_name(self, parts: Mapping[str, Any]) -> dict[WorkerId, Any]:
        names = {owner.name for owner in self._owners.listed}
        if names != set(parts):
            raise UsageError(
                f"the state belongs to the workers {sorted(parts)}, but the parameters "
                f"are on {sorted(names)}; the result of state_dict() without per_owner "
                "fits any workers"
            )
        return {owner: parts[owner.name] for owner in self._owners.listed}


class _Commit:
    """The second phase of one step."""

    def __init__(self, owners: Owners, context_id: ContextId, scale: float) -> None:
        self._owners = owners
        self._context_and_scale = (context_id, scale)

    async def at_once(
        self, parts: Mapping[WorkerId, m.Applying], unsure: Sequence[WorkerId]
    ) -> int:
        """Tell the owner whose step might raise, then all others."""
        count = 0
        for owner in unsure:
            try:
                count += await self._ask(owner, parts[owner], is_kept=False)
            except Exception as error:
                raise _refused(owner, error) from error
        sure = [owner for owner in parts if owner not in unsure]
        applied, failed = await try_each(
            sure, lambda owner: self._ask(owner, parts[owner], is_kept=False)
        )
        if failed:
            names = ", ".join(repr(owner.name) for owner in [*unsure, *applied])
            names = names or "no worker"
            raise OptimizerError(
                f"the step was applied on {names}, and failed on {named(failed)}; "
                "load the last checkpoint on all of them"
            ) from next(iter(failed.values()))
        return count + sum(applied.values())

    async def one_by_one(self, parts: Mapping[WorkerId, m.Applying]) -> int:
        """Tell the owners in turn; if one fails, undo the step on those before it."""
        count, begun = 0, list[WorkerId]()
        for owner in sorted(parts):
            begun.append(owner)
            try:
                count += await self._ask(owner, parts[owner], is_kept=True)
            except Exception as error:
                await self._owners.settle(begun, is_applied=False)
                raise _refused(owner, error) from error
        failed = await self._owners.settle(begun, is_applied=True)
        if failed:
            raise OptimizerError(
                f"the step was applied, but perhaps undone on {named(failed)}; "
                "load the last checkpoint on all owners"
            ) from next(iter(failed.values()))
        return count

    async def _ask(self, owner: WorkerId, part: m.Applying, *, is_kept: bool) -> int:
        commit = m.CommitStep(
            self._owners.serial, *self._context_and_scale, is_kept, part
        )
        return await self._owners.ask(owner, commit)


def _named_as_given(error: EncodeError) -> EncodeError:
    """Return an error that names the value that cannot be sent as the user does."""
    text = str(error).replace("value:", "optimizer_class, args and kwargs:", 1)
    return EncodeError(text, outcome=error.outcome)


def _refused(owner: WorkerId, error: Exception) -> OptimizerError:
    scope = "anywhere" if _has_answered(error) else "on any other worker"
    return OptimizerError(
        f"the step failed on worker {owner.name!r}, and nothing was applied {scope}: "
        f"{error_text(error)}"
    )


def _has_answered(error: Exception) -> bool:
    """Return whether the owner itself reported the error, and so undid the step."""
    return _is_a(error, RemoteError) or not _is_a(error, CallError)


def _is_a(error: Exception, kind: type[Exception]) -> bool:
    return issubclass(type(error), kind)  # a user's error may fake its `__class__`

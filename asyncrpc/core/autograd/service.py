"""Distributed autograd of one worker: a propagator of contexts, and a service.

It joins its parts, and decides nothing itself:

        contexts        contexts that are open here, or have ended
        crossings       tensors that messages take out of the local graph, or bring
        lifetime        the end of contexts that others opened
        root            backward passes that this worker begins
        participant     its part in the passes of others
        work            the local part of a pass;  requests: its requests to others
        ends, waits     how a pass ends; what it waits for

Source: torch.distributed.autograd.
"""

from __future__ import annotations

import contextvars
from collections.abc import Sequence
from typing import Any, ClassVar, Final

import torch

from asyncrpc.core.arguments import UNSET
from asyncrpc.core.autograd.contexts import (
    Context,
    ContextLifetime,
    Contexts,
    Crossings,
    PassEnds,
    current_context_var,
)
from asyncrpc.core.autograd.engine import Engine, Keeping
from asyncrpc.core.autograd.messages import (
    SERVICE,
    AbortPass,
    Advance,
    AskWaits,
    ClosePass,
    CommitPass,
    JoinContext,
    PassOutcome,
    ReleaseContext,
    read_meta,
)
from asyncrpc.core.autograd.participant import PassParticipant
from asyncrpc.core.autograd.root import RootPasses
from asyncrpc.core.autograd.state import ContextState, StepAfterPass, VotesWithPass
from asyncrpc.core.autograd.waits import PassWaits
from asyncrpc.core.autograd.work import (
    PassRequests,
    PassWork,
    SegmentEvents,
    TakeStep,
    VoteOnStep,
)
from asyncrpc.core.calls.context import current_worker_var, effective_deadline
from asyncrpc.core.ids import ContextId, Incarnation, WorkerId
from asyncrpc.core.loop.clock import Deadline
from asyncrpc.core.parts import Parts
from asyncrpc.core.services.extensions import OnGradient
from asyncrpc.core.services.ports import PeerLink
from asyncrpc.core.services.router import answers, takes
from asyncrpc.errors import InvalidContextError

SERIAL_BYTES: Final = 8


class AutogradService:
    """A `runtime.extensions.Propagator` and `Service`.

    Attributes:
        me: the worker.
        engine: runs local graphs; its lock guards `.grad` of every parameter here.
        contexts: the contexts that this worker knows.
        routes: the messages that other workers may send.
        held_for: see `Contexts.held_for`.
        state_class: of the contexts' states; a facade has its own.
    """

    name = SERVICE
    key = "a"
    variable = current_context_var
    state_class: ClassVar[type[ContextState]] = ContextState

    def __init__(self, worker: Parts) -> None:
        """Make and join the parts; called on the worker's loop.

        Args:
            worker: the worker; each part gets what it needs of it.
        """
        self.me = me = worker.id
        self.engine = Engine()
        worker.pool.locks.append(self.engine.lock)
        self._worker = worker
        number = me.incarnation
        link_of, link_to = worker.directory.link_of, worker.link_to
        self.contexts = contexts = Contexts(me, link_of, self.state_class)
        self._crossings = Crossings(number, contexts, worker.loop)
        self._lifetime = ContextLifetime(number, contexts, link_to, worker)
        requests = PassRequests(number, contexts, link_of, link_to, worker)
        self._work = work = PassWork(
            number,
            self.engine,
            requests,
            worker,
            events=SegmentEvents(worker.recorder),
            variables_of=self.variables_of,
        )
        ends = PassEnds(
            number,
            contexts,
            link_of,
            worker.recorder,
            is_exclusive=worker.pool.is_exclusive,
        )
        waits = PassWaits(me, link_of)
        self._root = RootPasses(me, contexts, worker, work=work, ends=ends, waits=waits)
        self._participant = PassParticipant(
            me,
            contexts,
            work=work,
            ends=ends,
            waits=waits,
            devices=worker.devices,
            receive=self._crossings.receive,
            link_to=link_to,
            scheduler=worker,
        )
        requests.take_gradients = self._participant.on_gradients_back
        passes, lifetime = self._participant, self._lifetime
        self.routes = (
            answers(Advance, passes.on_advance),
            answers(ClosePass, passes.on_close),
            answers(AskWaits, passes.on_waits),
            answers(PassOutcome, passes.on_outcome),
            answers(JoinContext, lifetime.on_join),
            takes(ReleaseContext, lifetime.on_release),
            takes(CommitPass, passes.on_commit),
            takes(AbortPass, passes.on_abort),
        )
        # Called for each message of the worker, so without a call in between.
        self.outgoing = self._crossings.outgoing
        self.held_for = contexts.held_for

    def step_with(self, vote: VoteOnStep, take_step: TakeStep) -> None:
        """Say what votes on the steps of optimizers, and takes those of passes."""
        self._work.vote, self._work.take_step = vote, take_step

    # --- contexts --------------------------------------------------------------------

    def new_context(self) -> Context:
        """Make a context; `async with` opens it."""
        # It cannot be guessed: who knows the context was sent it.
        serial = int.from_bytes(self._worker.random_bytes(SERIAL_BYTES))
        return Context(self, ContextId(self.me.incarnation, serial))

    def context_of(self, context_id: Sequence[int]) -> Context:
        """Return a handle of a context that another worker opened."""
        creator, serial = context_id
        return Context(self, ContextId(Incarnation(creator), serial))

    def variables_of(
        self, context_id: ContextId | None, task: contextvars.Context | None = None
    ) -> contextvars.Context:
        """Return context variables for user code: this worker and context are current.

        Args:
            context_id: of the autograd context; None: no context is current.
            task: the variables of the task for which the code runs, or None.
        """
        worker = self._worker.context
        variables = (worker if task is None else task).copy()
        if context_id is not None:
            current = Context(self, context_id, is_of_pass=True)
            variables.run(current_context_var.set, current)
        variables.run(current_worker_var.set, worker[current_worker_var])
        return variables

    def check_on_loop(self, used: str) -> None:
        """Raise unless this is the loop of the worker, and the worker is running."""
        self._worker.check_on_loop(used)

    def open(self, context_id: ContextId, creator: WorkerId) -> ContextState:
        """Return a context's state, made if it is new here; see `Contexts.enter`."""
        return self.contexts.enter(context_id, creator)

    def state(self, context: Context | ContextId) -> ContextState:
        """Return the state of a context that is open; see `Contexts.state`."""
        context_id = context.id if isinstance(context, Context) else context
        return self.contexts.state(context_id)

    def release(self, context_id: ContextId) -> None:
        """End a context here, and on every worker that it went on to."""
        self.contexts.release(context_id)

    async def gathered(self, context_id: ContextId) -> dict[torch.Tensor, torch.Tensor]:
        """Return the gradients here of a context; none if it is not known here.

        It waits for passes that run here: when `backward` returns at the worker that
        started it, its commit may still be on the way to this one.
        """
        state = self.contexts.open.get(context_id)
        if state is not None:
            await state.settled()
            self._worker.check_running()  # else its shutdown has ended the passes
        if self.contexts.has_ended(context_id):
            raise InvalidContextError(
                f"autograd context {context_id} has ended on worker {self.me.name!r}"
            )
        if state is None:
            return {}
        if state.is_added_up:
            return state.gradients
        return await self._worker.run_in_thread(lambda: state.gradients)

    def context_ids(self) -> list[ContextId]:
        """Return the ids of the contexts that this worker knows of."""
        return list(self.contexts.open)

    @property
    def running_passes(self) -> int:
        """The number of backward passes that run here."""
        return sum(len(state.passes) for state in self.contexts.open.values())

    @property
    def open_contexts(self) -> int:
        """The number of contexts that this worker knows of."""
        return len(self.contexts.open)

    # --- passes ----------------------------------------------------------------------

    def deadline_of(self, timeout_s: Any) -> Deadline | None:
        """Return the deadline of a pass that is given a timeout.

        Args:
            timeout_s: seconds; None is no limit, `UNSET` the worker's default.
        """
        if timeout_s is UNSET:
            timeout_s = self._worker.options.rpc_timeout_s
        return effective_deadline(timeout_s, self._worker.loop.time())

    async def backward(
        self,
        context: Context,
        roots: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None] | None,
        keeping: Keeping,
        deadline: Deadline | None,
        *,
        is_fast: bool = False,
        step: StepAfterPass | VotesWithPass | None = None,
    ) -> None:
        """Run a pass from local roots; see `asyncrpc.autograd.backward`.

        A step goes with the last gradients, if they are for its owner; or the workers
        vote on it.
        """
        await self._root.backward(
            context.id, roots, gradients, keeping, deadline, is_fast=is_fast, step=step
        )

    # --- what travels with calls (Propagator) ----------------------------------------

    def incoming(self, link: PeerLink, meta: Any) -> OnGradient | None:
        """Join the context of a message; return the function for its tensors."""
        return self._crossings.incoming(link, meta)

    def decoded(self, on_gradient: OnGradient) -> None:
        """Do nothing: every tensor was ready by itself."""

    def enter(self, meta: Any) -> None:
        """Make the message's context the current one of the function it runs."""
        context_id, *_ = read_meta(meta)
        current_context_var.set(Context(self, context_id))

    # --- messages (Service) ----------------------------------------------------------

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        """End the contexts that a dead worker opened, and its passes."""
        _ = reason  # requests under way fail by themselves
        self._lifetime.on_peer_lost(peer)
        self._participant.on_peer_lost(peer)

    async def close(self) -> None:
        """Drop every graph, and fail the tasks that wait here for a pass."""
        self.contexts.close()

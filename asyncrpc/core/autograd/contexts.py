"""The autograd contexts of one worker: handles, states, messages, and how they end.

Which context is current is a context variable: every task has its own, and a function
that runs for a call joins its caller's (`Context`).  `Contexts` knows those that are
open here, and those that have ended.

In the forward pass an outgoing message in a context notes where the gradients of its
tensors will enter this worker's graph; an incoming one makes its tensors differentiable
(`Crossings`).  At the end of a backward pass its gradients are committed, or dropped,
everywhere (`PassEnds`).  A context of another worker ends when that worker says so or
is lost (`ContextLifetime`).
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, Self

import torch

from asyncrpc.core.autograd.functions import CrossingId, Received, received_as
from asyncrpc.core.autograd.messages import (
    AbortPass,
    CommitPass,
    JoinContext,
    PassIds,
    ReleaseContext,
    read_meta,
)
from asyncrpc.core.autograd.state import ABORTED, ContextState, Pass, Sent
from asyncrpc.core.ids import ContextId, Incarnation, MessageId, WorkerId
from asyncrpc.core.serde import Encoded
from asyncrpc.core.services.ports import LinkOf, LinkTo, PeerLink, Scheduler, ask
from asyncrpc.core.torch_modes import with_defaults
from asyncrpc.core.trace.recorder import FlightRecorder
from asyncrpc.core.trace.ring import plain
from asyncrpc.errors import (
    AsyncRpcError,
    EncodeError,
    InvalidContextError,
    MalformedError,
    NotStartedError,
    Outcome,
    UsageError,
)

if TYPE_CHECKING:
    from asyncrpc.core.autograd.service import AutogradService

current_context_var: Final[ContextVar[Context | None]] = ContextVar(
    "asyncrpc_autograd_context", default=None
)


class Context:
    """A handle of an autograd context; from `asyncrpc.autograd.context()`.

    Attributes:
        id: the same on every worker that takes part.
    """

    __slots__ = ("_service", "_token", "id", "is_of_pass")

    def __init__(
        self,
        service: AutogradService,
        context_id: ContextId,
        *,
        is_of_pass: bool = False,
    ) -> None:
        self._service = service
        self._token: Any = None
        self.id = context_id
        # Current in user code of a pass or a step, whose calls take no part in it.
        self.is_of_pass = is_of_pass

    @property
    def service(self) -> AutogradService:
        """Internal: the worker's service that keeps this context's state."""
        return self._service

    async def __aenter__(self) -> Self:
        """Make this the current context of the task.

        Raises:
            InvalidContextError: the context has ended.
            NotStartedError: the context's worker has been shut down.
            UsageError: the context has been entered before; or this is not the worker's
                loop.
        """
        self._service.check_on_loop("autograd.context")
        if self._token is not None:
            raise UsageError(
                "this autograd context has been entered before: make a new one, "
                "`async with asyncrpc.autograd.context() as ctx:`"
            )
        self._service.open(self.id, self._service.me)
        self._token = current_context_var.set(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the context on every worker that it reached; they are not waited for.

        Raises:
            UsageError: this is not the worker's loop; the context has not ended.
        """
        with suppress(NotStartedError):  # the end of the worker has ended it
            self._service.check_on_loop("autograd.context")
        with suppress(ValueError):  # a task with variables of its own ends it
            current_context_var.reset(self._token)
        self._service.release(self.id)

    def __repr__(self) -> str:
        return f"<autograd context {self.id}>"


# What a context takes, or something noted in one, besides its graph, as measured.
RECORD_BYTES: Final = 4 << 10
# Contexts that have ended, so that a late message does not revive one.
ENDED_MAX: Final = 4096


class Contexts:
    """The contexts of one worker.

    Attributes:
        open: the states of contexts that are open here.
    """

    def __init__(
        self,
        me: WorkerId,
        link_of: LinkOf,
        state_class: type[ContextState] = ContextState,
    ) -> None:
        self.open: dict[ContextId, ContextState] = {}
        self.on_released: Callable[[ContextId], None] = _do_nothing
        self._me = me
        self._link_of = link_of
        self._state_class = state_class
        # Each with whether its creator has said so, or another worker.
        self._ended: OrderedDict[ContextId, bool] = OrderedDict()
        self._serial = 0
        self._kept: Counter[Incarnation] = Counter()

    def next_serial(self) -> int:
        """Return a number that no context, pass or message of this worker has yet."""
        self._serial += 1
        return self._serial

    def has_ended(self, context_id: ContextId) -> bool:
        """Return whether a context has ended, as far as is remembered."""
        return context_id in self._ended

    def reopen(self, context_id: ContextId) -> bool:
        """Return whether a context that others ended goes on for its creator."""
        if self._ended.get(context_id, True):
            return False
        del self._ended[context_id]
        return True

    def enter(self, context_id: ContextId, creator: WorkerId) -> ContextState:
        """Return a context's state, made if it is new here.

        Args:
            creator: the worker that opened it; its name may not be known yet.
        """
        state = self.open.get(context_id)
        if state is None:
            if context_id in self._ended:
                raise InvalidContextError(f"autograd context {context_id} has ended")
            state = self.open[context_id] = self._state_class(context_id, creator)
        elif creator.name and not state.creator.name:
            state.creator = creator
        return state

    def keep(self, state: ContextState, link: PeerLink) -> None:
        """Count something that a worker brings, until the context ends."""
        link.check_room(RECORD_BYTES)
        state.kept_for[link.peer.incarnation] += 1
        self._kept[link.peer.incarnation] += 1

    def held_for(self, peer: Incarnation) -> int:
        """Return how many bytes that takes which a worker has brought."""
        return RECORD_BYTES * self._kept[peer]

    def state(self, context_id: ContextId) -> ContextState:
        """Return the state of a context that is open."""
        state = self.open.get(context_id)
        if state is None:
            raise InvalidContextError(
                f"autograd context {context_id} is not open on worker "
                f"{self._me.name!r}: it has ended, or no call brought it here"
            )
        return state

    def release(self, context_id: ContextId, reporter: int = 0) -> None:
        """End a context here, and on every worker that it went on to.

        Args:
            reporter: the worker that reported the end, and knows it already; 0: the end
                is known here first.
        """
        state = self.open.pop(context_id, None)
        if state is None:
            return
        self.on_released(context_id)
        for peer, count in state.kept_for.items():
            self._kept[peer] -= count
            if not self._kept[peer]:
                del self._kept[peer]
        self._ended[context_id] = reporter in (0, context_id.creator)
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)
        for pass_id in list(state.passes):
            backward_pass = state.end_pass(pass_id, commit=False)
            if backward_pass is not None:
                backward_pass.abort("the autograd context was left")
        self._tell(state.peers, context_id, {reporter, context_id.creator})

    def _tell(
        self, peers: Iterable[WorkerId], context_id: ContextId, knowing: set[int]
    ) -> None:
        for peer in peers:
            if peer.incarnation not in knowing:
                link = self._link_of(peer.incarnation)
                if link is not None:
                    link.tell(ReleaseContext(context_id))

    def close(self) -> None:
        """Drop every graph, and fail the tasks that wait here for a pass."""
        for state in self.open.values():
            for pass_id in list(state.passes):
                backward_pass = state.end_pass(pass_id, commit=False)
                # Requests of passes that other workers began are cancelled elsewhere.
                if backward_pass is not None and pass_id[0] == self._me.incarnation:
                    backward_pass.abort("the worker was shut down")
        self.open.clear()


def _do_nothing(_context_id: ContextId) -> None:
    """Do nothing when a context ends."""


class PassEnds:
    """Ends passes here, and on the workers that this one asked."""

    def __init__(
        self,
        me: Incarnation,
        contexts: Contexts,
        link_of: LinkOf,
        recorder: FlightRecorder,
        *,
        is_exclusive: bool,
    ) -> None:
        self._me = me
        self._contexts = contexts
        self._link_of = link_of
        self._recorder = recorder
        self._is_exclusive = is_exclusive

    def note_begun(self, backward_pass: Pass) -> None:
        """Note that this worker takes part in a pass."""
        backward_pass.began_s = backward_pass.began_s or self._recorder.now_s()

    def finish(self, ids: PassIds, *, commit: bool) -> None:
        """Commit or abort a pass here, and on the workers that this one asked."""
        context_id, pass_id = ids
        state = self._contexts.open.get(context_id)
        backward_pass = (
            None if state is None else state.end_pass(pass_id, commit=commit)
        )
        if state is None or backward_pass is None:
            return
        self._note_end(backward_pass, commit=commit)
        if commit:
            state.commit(backward_pass.flow.staged, defers=self._is_exclusive)
        else:
            backward_pass.abort(ABORTED)
        # It takes the way of the requests, so that workers that only others know learn
        # of it; on each link it comes after the request that made them take part.
        for peer in backward_pass.onward:
            if peer not in (self._me, pass_id.root):
                link = self._link_of(peer)
                if link is not None:
                    link.tell(CommitPass(ids) if commit else AbortPass(ids))

    def _note_end(self, backward_pass: Pass, *, commit: bool) -> None:
        recorder = self._recorder
        recorder.passes.record(
            (
                recorder.now_s(),
                backward_pass.began_s,
                plain(backward_pass.ids.context_id),
                backward_pass.root,
                commit,
                backward_pass.ids.pass_id.number,
                backward_pass.task,
            )
        )


JOINS_MAX: Final = 64  # creators that are asked at a time
ENDED_IN_A_TURN: Final = 1024  # contexts of a lost worker, some 10 us each


class ContextLifetime:
    """Ends contexts when their creators report the end, or die."""

    def __init__(
        self,
        me: Incarnation,
        contexts: Contexts,
        link_to: LinkTo,
        scheduler: Scheduler,
    ) -> None:
        self._me = me
        self._contexts = contexts
        self._link_to = link_to
        self._scheduler = scheduler

    def on_release(self, link: PeerLink, notice: ReleaseContext) -> None:
        """End a context that a peer reports to have ended."""
        context_id, peer = notice.context_id, link.peer
        state = self._contexts.open.get(context_id)
        if state is None:
            return
        state.check_part(peer)
        if context_id.creator == self._me or (
            peer.incarnation != context_id.creator and peer not in state.brought_by
        ):
            raise MalformedError(
                f"worker {peer.name!r} ended autograd context {context_id}, which only "
                "the worker that opened it, or brought it here, may end"
            )
        self._contexts.release(context_id, peer.incarnation)

    async def on_join(self, link: PeerLink, request: JoinContext) -> bool:
        """Arrange to tell a worker when a context ends; return whether it is open."""
        if request.context_id.creator != self._me:
            raise MalformedError(
                f"autograd context {request.context_id} was opened by another worker"
            )
        state = self._contexts.open.get(request.context_id)
        if state is not None:
            state.joined.add(link.peer)
        return state is not None

    def on_peer_lost(self, peer: WorkerId) -> None:
        """End the contexts that a dead worker opened: no other worker will.

        For contexts that it may have brought here, ask their creators.
        """
        ended: list[ContextState] = []
        brought: list[ContextState] = []
        for state in list(self._contexts.open.values()):  # 40,000 of a peer at most
            creator = state.id.creator
            if creator == peer.incarnation:
                ended.append(state)
            elif creator != self._me and state.has_part(peer):
                brought.append(state)
        self._end(ended)
        for _ in range(min(len(brought), JOINS_MAX)):
            self._scheduler.start_task(self._join_all(brought))

    def _end(self, remaining: list[ContextState]) -> None:
        """End some of the contexts of a lost worker, and the rest in later turns."""
        for state in remaining[-ENDED_IN_A_TURN:]:
            if self._contexts.open.get(state.id) is state:
                self._contexts.release(state.id)
        del remaining[-ENDED_IN_A_TURN:]
        if remaining:
            self._scheduler.loop.call_soon(self._end, remaining)

    async def _join_all(self, remaining: list[ContextState]) -> None:
        """Ask the creators of contexts, which others take from the list as well."""
        while remaining:
            await self._join(remaining.pop())
            await asyncio.sleep(0)  # the loss of a creator may be known at once

    async def _join(self, state: ContextState) -> None:
        """Ask the creator of a context to report its end itself."""
        is_open = False
        try:
            link = await self._link_to(state.creator.name)
            if link.peer.incarnation == state.id.creator:
                is_open = await ask(link, JoinContext(state.id))
        except AsyncRpcError:
            pass  # the creator is lost as well
        if not is_open:
            self._contexts.release(state.id)


# Nodes of a graph that the loop looks at in one go: about 0.1 ms.
WALK_BUDGET: Final = 64


class Crossings:
    """The crossings of one worker's messages."""

    def __init__(
        self, me: Incarnation, contexts: Contexts, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._me = me
        self._contexts = contexts
        self._open = contexts.open
        self._loop = loop
        self._anchor = torch.zeros(
            (), requires_grad=True, dtype=torch.float32, device="cpu"
        )  # so that `receive` is noted

    def outgoing(self, link: PeerLink, encoded: Encoded) -> Any:
        """Record what a message takes out of this worker's graph."""
        context = current_context_var.get()
        if context is None or context.is_of_pass or context.id not in self._open:
            return None
        if encoded.loses_gradient is not None and torch.is_grad_enabled():
            loss = encoded.loses_gradient()
            if loss is not None:
                raise EncodeError(
                    f"cannot be sent: {loss}", outcome=Outcome.NOT_EXECUTED
                )
        tensors = encoded.gradient_tensors
        state = self._open[context.id]
        serial = 0
        if tensors:
            serial = self._note_sent(state, tensors, link)
        state.sent_to.add(link.peer)
        if context.id.creator == self._me:
            return [*context.id, serial]  # the receiver knows this worker's name
        # Each time: this message may be the first of the context that is read there,
        # though others were sent before, and the reader may have to ask the creator.
        return [*context.id, serial, state.creator.name]

    @with_defaults
    def _note_sent(
        self, state: ContextState, tensors: list[torch.Tensor], link: PeerLink
    ) -> int:
        """Note the tensors of a message; return its serial number."""
        message = MessageId(self._me, self._contexts.next_serial())
        state.note_sent(message, Sent.of(tensors, link.peer))
        if not state.is_prefetching:
            self._prefetch_soon(state)
        return message.serial

    def _prefetch_soon(self, state: ContextState) -> None:
        """Walk the graph of sent tensors while other workers use them.

        Otherwise the backward pass would walk it, while all its workers wait.
        """
        state.is_prefetching = True
        # Twice: messages that are joined are written at the loop's next turn.
        soon = self._loop.call_soon
        soon(soon, self._prefetch, state)

    def _prefetch(self, state: ContextState) -> None:
        is_open = state.id in self._open
        state.is_prefetching = is_open and state.prefetched.go_on(WALK_BUDGET)
        if state.is_prefetching:
            self._loop.call_soon(self._prefetch, state)

    def incoming(
        self, link: PeerLink, meta: Any
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Join the context of a message; return the function for its tensors."""
        context_id, serial, name = read_meta(meta)
        is_its_own = context_id.creator == link.peer.incarnation
        if self._contexts.has_ended(context_id) and not (
            is_its_own and self._contexts.reopen(context_id)
        ):
            return None
        if context_id.creator == self._me and context_id not in self._open:
            return None  # this worker has not opened it, or has long forgotten it
        if is_its_own:
            name = link.peer.name
        is_new = context_id not in self._open
        if is_new:
            link.check_room(RECORD_BYTES)
        state = self._contexts.enter(context_id, WorkerId(name, context_id.creator))
        if link.peer not in state.sent_to:  # else it answers, or goes round
            state.brought_by.add(link.peer)
        if is_new or (serial and link.peer in state.brought_by):
            self._contexts.keep(state, link)
        if is_its_own:
            state.creator = link.peer  # others may have given it another name
        if not serial:
            return None
        message = MessageId(link.peer.incarnation, serial)
        positions = itertools.count()

        def receive(tensor: torch.Tensor) -> torch.Tensor:
            crossing = CrossingId(message, next(positions))
            return self.receive(tensor, Received(crossing, link.peer))

        return receive

    def receive(self, tensor: torch.Tensor, received: Received) -> torch.Tensor:
        """Give a received tensor a history."""
        return received_as(self._anchor, tensor, received)

"""Distributed autograd of one worker: contexts, and the crossings of messages.

A message that goes out in a context notes where the gradients of its tensors will enter
this worker's graph; one that comes in makes its tensors differentiable.  How gradients
go back is in `passes`.

Source: torch.distributed.autograd.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import torch

from asyncrpc.autograd.context import (
    Context,
    ContextState,
    Sent,
    current_context_var,
)
from asyncrpc.autograd.functions import CrossingId, Received
from asyncrpc.autograd.messages import CONTEXT, META, PASS, read_context, read_ids
from asyncrpc.autograd.passes import SERVICE, Passes
from asyncrpc.errors import AsyncRpcError, InvalidContextError, MalformedError
from asyncrpc.ids import ContextId, Incarnation, MessageId, WorkerId
from asyncrpc.runtime.extensions import OnGradient
from asyncrpc.runtime.forms import Methods
from asyncrpc.runtime.ports import PeerLink
from asyncrpc.runtime.worker import Worker

# Contexts that have ended, so that a late message does not revive one.
ENDED_MAX: Final = 4096
AT_ONCE: Final = 64  # nodes of a graph that the loop looks at in one go: some 0.1 ms


class AutogradService(Passes):
    """A `runtime.extensions.Propagator` and `Service`."""

    name = SERVICE
    key = "a"

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._ended: OrderedDict[ContextId, None] = OrderedDict()
        self.notices = Methods(
            SERVICE,
            {
                "release": (CONTEXT, self._on_release),
                "commit": (PASS, partial(self._on_end, commit=True)),
                "abort": (PASS, partial(self._on_end, commit=False)),
            },
        )

    # --- contexts --------------------------------------------------------------------

    def new_context(self) -> Context:
        """Make a context; `async with` opens it."""
        return Context(self, ContextId(self.worker.incarnation, self._next()))

    def context_of(self, context_id: Sequence[int]) -> Context:
        """Return a handle of a context that another worker opened."""
        creator, serial = context_id
        return Context(self, ContextId(Incarnation(creator), serial))

    def open(self, context_id: ContextId, creator: WorkerId) -> ContextState:
        """Return a context's state, made if it is new here.

        Args:
            context_id: of the context.
            creator: the worker that opened it; its name may not be known yet.

        Raises:
            InvalidContextError: it has ended.
        """
        state = self._contexts.get(context_id)
        if state is None:
            if context_id in self._ended:
                raise InvalidContextError(f"autograd context {context_id} has ended")
            state = self._contexts[context_id] = ContextState(context_id, creator)
        elif creator.name and not state.creator.name:
            state.creator = creator
        return state

    def release(self, context_id: ContextId, told_by: int = 0) -> None:
        """End a context here, and on every worker that it went on to.

        Args:
            context_id: of the context.
            told_by: the worker that knows already.
        """
        state = self._contexts.pop(context_id, None)
        if state is None:
            return
        self._ended[context_id] = None
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)
        for pass_id in list(state.passes):
            one = state.end_pass(pass_id, commit=False)
            if one is not None:
                one.abort("the autograd context was left")
        for peer in state.peers:
            if peer.incarnation in (told_by, context_id.creator):
                continue
            link = self.worker.directory.link_of(peer.incarnation)
            if link is not None:
                link.notify(SERVICE, "release", list(context_id))

    async def gathered(self, context_id: ContextId) -> dict[torch.Tensor, torch.Tensor]:
        """Return the gradients here of a context; none if it never came here.

        Passes that run here are waited for: when `backward` returns at the worker that
        started it, its commit may still be on the way to this one.

        Raises:
            InvalidContextError: the context has ended.
            NotStartedError: the worker was shut down meanwhile.
        """
        state = self._contexts.get(context_id)
        if state is not None:
            await state.settled()
            self.worker.check_running()  # else its end is what ended the passes
        if context_id in self._ended:
            raise InvalidContextError(
                f"autograd context {context_id} has ended on worker "
                f"{self.worker.name!r}"
            )
        if state is None:
            return {}
        if state.is_added_up:
            return state.gradients
        return await self.worker.run_in_thread(lambda: state.gradients)

    def context_ids(self) -> list[ContextId]:
        """Return the ids of the contexts that this worker knows of."""
        return list(self._contexts)

    @property
    def running_passes(self) -> int:
        """How many backward passes run here."""
        return sum(len(state.passes) for state in self._contexts.values())

    @property
    def open_contexts(self) -> int:
        """How many contexts this worker knows of."""
        return len(self._contexts)

    # --- the forward pass: crossings (Propagator) ------------------------------------

    def outgoing(self, link: PeerLink, tensors: list[torch.Tensor]) -> Any:
        """Record what a message takes out of this worker's graph."""
        context = current_context_var.get()
        if context is None or context.id not in self._contexts:
            return None
        state = self._contexts[context.id]
        serial = 0
        if tensors:
            message = MessageId(self.worker.incarnation, self._next())
            serial = message.serial
            state.note_sent(message, Sent.of(tensors, link.peer))
            if not state.foresees:
                self._foresee_soon(state)
        state.peers.add(link.peer)
        if context.id.creator == self.worker.incarnation:
            return [*context.id, serial]  # whoever reads it knows this worker's name
        # Each time: this message may be the first of the context that is read there,
        # though others were sent before, and who reads it may have to ask its creator.
        return [*context.id, serial, state.creator.name]

    def _foresee_soon(self, state: ContextState) -> None:
        """Look at the graph of what is sent while others work with that.

        A backward pass would have to, and everybody would wait for it.
        """
        state.foresees = True
        # Twice: messages that are joined are written at the loop's next turn.
        soon = self.worker.loop.call_soon
        soon(soon, self._foresee, state)

    def _foresee(self, state: ContextState) -> None:
        state.foresees = state.id in self._contexts and state.foreseen.go_on(AT_ONCE)
        if state.foresees:
            self.worker.loop.call_soon(self._foresee, state)

    def incoming(self, link: PeerLink, meta: Any) -> OnGradient | None:
        """Join the context of a message; return what its tensors go through."""
        context_id, serial, name = _read_meta(meta)
        if context_id in self._ended:
            return None
        if context_id.creator == link.peer.incarnation:
            name = link.peer.name
        state = self.open(context_id, WorkerId(name, context_id.creator))
        state.peers.add(link.peer)
        if not serial:
            return None
        message = MessageId(link.peer.incarnation, serial)
        positions = itertools.count()

        def receive(tensor: torch.Tensor) -> torch.Tensor:
            crossing = CrossingId(message, next(positions))
            return self.receive(tensor, Received(crossing, link.peer))

        return receive

    def decoded(self, on_gradient: OnGradient) -> None:
        """Do nothing: every tensor was ready by itself."""

    def enter(self, meta: Any) -> None:
        """Make the message's context the current one of the function it runs."""
        context_id, *_ = _read_meta(meta)
        current_context_var.set(Context(self, context_id))

    # --- messages (Service) ----------------------------------------------------------

    def _on_release(self, link: PeerLink, value: list[int]) -> None:
        """A context has ended.

        Raises:
            MalformedError: the peer has no part in it, or this worker opened it.
        """
        context_id = read_context(value)
        state = self._contexts.get(context_id)
        if state is not None:
            self._check_part(link, state)
            if context_id.creator == self.worker.incarnation:
                raise MalformedError(
                    f"worker {link.peer.name!r} ended autograd context {context_id}, "
                    "which only the worker that opened it may end"
                )
            self.release(context_id, link.peer.incarnation)

    def _on_end(self, link: PeerLink, value: list[int], *, commit: bool) -> None:
        """A pass has ended.

        Raises:
            MalformedError: the peer has no part in it.
        """
        ids = read_ids(value)
        state = self._contexts.get(ids[0])
        if state is not None:
            self._check_part(link, state)
            one = state.passes.get(ids[1])
            told_by = link.peer.incarnation
            if one is not None and told_by not in (ids[1][0], *one.inward):
                raise MalformedError(
                    f"worker {link.peer.name!r} ended a backward pass that it did not "
                    "ask this worker to take part in"
                )
            self._finish(ids, commit=commit)

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        """End the contexts that a dead worker opened: nobody else will.

        Of those that it may have brought here their creator is asked.
        """
        _ = reason  # requests under way fail by themselves
        for context_id, state in list(self._contexts.items()):
            if context_id.creator == peer.incarnation:
                self.release(context_id)
                continue
            self._on_lost(context_id, state, peer)
            is_mine = context_id.creator == self.worker.incarnation
            if peer in state.peers and not is_mine:
                self.worker.start_task(self._join(context_id, state))

    async def _join(self, context_id: ContextId, state: ContextState) -> None:
        """Ask the creator of a context to say itself when it ends."""
        is_open = False
        try:
            link = await self.worker.link_to(state.creator.name)
            if link.peer.incarnation == context_id.creator:
                value = list(context_id)
                is_open = bool(await link.request_service(SERVICE, "join", value))
        except AsyncRpcError:
            pass  # the creator is lost as well
        if not is_open:
            self.release(context_id)

    async def close(self) -> None:
        """Let go of every graph, and tell whoever waits here for a pass."""
        for state in self._contexts.values():
            for pass_id in list(state.passes):
                one = state.end_pass(pass_id, commit=False)
                # Those that others began are served, and their requests cancelled.
                if one is not None and pass_id[0] == self.worker.incarnation:
                    one.abort("the worker was shut down")
        self._contexts.clear()


def _read_meta(meta: Any) -> tuple[ContextId, int, str]:
    META("what travels of an autograd context", meta)
    creator, serial, message, *more = meta
    name = more[0] if more and type(more[0]) is str else ""
    return ContextId(Incarnation(creator), serial), message, name

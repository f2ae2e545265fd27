"""The forward pass: the tensors that messages take from a worker's graph or bring it.

An outgoing message in a context notes where the gradients of its tensors will enter
this worker's graph; an incoming one makes its tensors differentiable.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, Final

import torch

from asyncrpc.core.autograd.context import current_context_var
from asyncrpc.core.autograd.contexts import RECORD_BYTES, Contexts
from asyncrpc.core.autograd.functions import CrossingId, Received, received_as
from asyncrpc.core.autograd.messages import read_meta
from asyncrpc.core.autograd.state import ContextState, Sent
from asyncrpc.core.ids import Incarnation, MessageId, WorkerId
from asyncrpc.core.serde import Encoded
from asyncrpc.core.services.ports import PeerLink
from asyncrpc.core.torch_modes import with_defaults
from asyncrpc.errors import EncodeError, Outcome

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

"""The end of contexts of other workers, when these report it or are lost."""

from __future__ import annotations

import asyncio
from typing import Final

from asyncrpc.core.autograd.contexts import Contexts
from asyncrpc.core.autograd.messages import JoinContext, ReleaseContext
from asyncrpc.core.autograd.state import ContextState
from asyncrpc.core.ids import Incarnation, WorkerId
from asyncrpc.core.services.ports import LinkTo, PeerLink, Scheduler, ask
from asyncrpc.errors import AsyncRpcError, MalformedError

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

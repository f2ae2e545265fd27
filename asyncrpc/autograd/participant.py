"""The part of a worker in backward passes that others have begun; see `root`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from asyncrpc.autograd.contexts import Contexts
from asyncrpc.autograd.ends import PassEnds
from asyncrpc.autograd.functions import CrossingId, Received
from asyncrpc.autograd.machine import Report
from asyncrpc.autograd.messages import (
    Abort,
    Advance,
    Close,
    Commit,
    Outcome,
    PassIds,
    Waits,
)
from asyncrpc.autograd.placing import at_their_devices
from asyncrpc.autograd.ports import Devices, Links
from asyncrpc.autograd.state import ABORTED
from asyncrpc.autograd.waits import PassWaits
from asyncrpc.autograd.work import PassWork
from asyncrpc.errors import AsyncRpcError, AutogradError, MalformedError
from asyncrpc.ids import MessageId, WorkerId
from asyncrpc.runtime.ports import PeerLink, Scheduler, ask

Receive = Callable[[torch.Tensor, Received], torch.Tensor]


class PassParticipant:
    """Answers the requests of backward passes, and takes note of how they end."""

    def __init__(
        self,
        me: WorkerId,
        contexts: Contexts,
        *,
        work: PassWork,
        ends: PassEnds,
        waits: PassWaits,
        devices: Devices,
        receive: Receive,
        links: Links,
        scheduler: Scheduler,
    ) -> None:
        """Prepare to take part.

        Args:
            me: this worker.
            contexts: in which passes run.
            work: runs the local part.
            ends: ends passes.
            waits: says what they wait for.
            devices: where gradients go.
            receive: gives a gradient that has come a history.
            links: to those who begin passes.
            scheduler: of what is asked of them.
        """
        self._me = me
        self._contexts = contexts
        self._work = work
        self._ends = ends
        self._waits = waits
        self._devices = devices
        self._receive = receive
        self._links = links
        self._scheduler = scheduler

    # --- requests --------------------------------------------------------------------

    async def on_advance(self, link: PeerLink, advance: Advance) -> list[Report]:
        """Take part in a pass, with gradients that have come and those that will."""
        advance.check()
        context_id, pass_id = advance.ids
        state = self._contexts.state(context_id)
        coming, arrived = self._crossings(advance.asked), self._crossings(advance.given)
        state.check_sent(link.peer, (*coming, *arrived))  # before a pass is made
        is_new = pass_id not in state.passes
        one = state.join_pass(pass_id, advance.root, advance.keeping)
        one.check()
        one.inward.add(link.peer.incarnation)
        if is_new:
            one.is_fast = advance.is_fast
        for crossing in (*coming, *arrived):
            if not one.machine.knows(crossing):
                raise state.never_sent(crossing)
        everything = one.machine.unsettled if is_new and one.is_fast else ()
        one.take_part(one.machine.want([*coming, *arrived, *everything]))
        gradients = await at_their_devices(
            self._devices, state, arrived, advance.gradients
        )
        if advance.history is not None:
            gradients = self._with_history(link, gradients, advance.history)
        one.enter(dict(zip(arrived, gradients, strict=True)))
        return await self._work.work(one)

    def _crossings(self, keys: Sequence[int]) -> list[CrossingId]:
        me = self._me.incarnation
        pairs = zip(keys[::2], keys[1::2], strict=True)
        return [CrossingId(MessageId(me, one), at) for one, at in pairs]

    def _with_history(
        self,
        link: PeerLink,
        gradients: Sequence[torch.Tensor | None],
        history: Sequence[int],
    ) -> list[torch.Tensor | None]:
        """Make gradients that have a history on another worker differentiable here."""
        serial, *indices = history
        message = MessageId(link.peer.incarnation, serial)
        found = list(gradients)
        for position, index in enumerate(indices):
            gradient = found[index]
            assert gradient is not None  # `Advance.check` has looked
            one = Received(CrossingId(message, position), link.peer)
            found[index] = self._receive(gradient, one)
        return found

    async def on_close(self, link: PeerLink, request: Close) -> list[Report]:
        """Nobody takes part but those who have been asked.

        Raises:
            AutogradError: the pass has been aborted.
            MalformedError: the peer has not asked this worker.
        """
        context_id, pass_id = request.ids
        state = self._contexts.state(context_id)
        one = state.passes.get(pass_id)
        if one is None:
            raise AutogradError(ABORTED)
        if link.peer.incarnation not in one.inward:
            raise MalformedError(
                f"worker {link.peer.name!r} closed a backward pass that it did not ask "
                "this worker to take part in"
            )
        one.check()
        return await self._work.close(one)

    async def on_waits(self, _link: PeerLink, request: Waits) -> list[str]:
        """Say what a pass waits for."""
        context_id, pass_id = request.ids
        one = self._contexts.state(context_id).passes.get(pass_id)
        return [] if one is None else await self._waits.explain(one, request.asked)

    async def on_outcome(self, _link: PeerLink, request: Outcome) -> bool:
        """Wait until a pass that began here has ended; say whether it succeeded."""
        context_id, pass_id = request.ids
        state = self._contexts.open.get(context_id)
        return False if state is None else await state.outcome(pass_id)

    # --- ends ------------------------------------------------------------------------

    def on_commit(self, link: PeerLink, notice: Commit) -> None:
        """A pass has succeeded; as `on_abort`."""
        self._on_end(link, notice.ids, commit=True)

    def on_abort(self, link: PeerLink, notice: Abort) -> None:
        """A pass has failed.

        Raises:
            MalformedError: the peer has no part in it.
        """
        self._on_end(link, notice.ids, commit=False)

    def _on_end(self, link: PeerLink, ids: PassIds, *, commit: bool) -> None:
        context_id, pass_id = ids
        state = self._contexts.open.get(context_id)
        if state is not None:
            state.check_part(link.peer)
            one = state.passes.get(pass_id)
            told_by = link.peer.incarnation
            if one is not None and told_by not in (pass_id.root, *one.inward):
                raise MalformedError(
                    f"worker {link.peer.name!r} ended a backward pass that it did not "
                    "ask this worker to take part in"
                )
            self._ends.finish(ids, commit=commit)

    def on_peer_lost(self, peer: WorkerId) -> None:
        """A worker is lost: end its passes; ask how those ended that it told us of."""
        for context_id, state in list(self._contexts.open.items()):
            for pass_id, one in list(state.passes.items()):
                ids = PassIds(context_id, pass_id)
                if pass_id.root == peer.incarnation:
                    self._ends.finish(ids, commit=False)
                elif peer.incarnation in one.inward and one.root != self._me.name:
                    self._scheduler.start_task(self._ask_outcome(ids, one.root))

    async def _ask_outcome(self, ids: PassIds, root: str) -> None:
        """Nobody may tell us how a pass has ended: ask who began it."""
        is_good = False
        try:
            link = await self._links.link_to(root)
            if link.peer.incarnation == ids.pass_id.root:
                is_good = await ask(link, Outcome(ids))
        except AsyncRpcError:
            pass  # who began it is lost as well
        self._ends.finish(ids, commit=is_good)

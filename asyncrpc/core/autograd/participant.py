"""The part of a worker in backward passes that others have begun; see `root`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from asyncrpc.core.autograd.contexts import Contexts, PassEnds
from asyncrpc.core.autograd.functions import CrossingId, Received
from asyncrpc.core.autograd.messages import (
    AbortPass,
    Advance,
    AskWaits,
    ClosePass,
    CommitPass,
    PassAnswer,
    PassIds,
    PassOutcome,
)
from asyncrpc.core.autograd.state import ABORTED, Pass
from asyncrpc.core.autograd.waits import PassWaits
from asyncrpc.core.autograd.work import NOTHING_NEW, PassWork, at_their_devices
from asyncrpc.core.devices.staging import Devices
from asyncrpc.core.ids import MessageId, WorkerId
from asyncrpc.core.services.ports import LinkTo, PeerLink, Scheduler, ask
from asyncrpc.errors import AsyncRpcError, AutogradError, MalformedError

Receive = Callable[[torch.Tensor, Received], torch.Tensor]


class PassParticipant:
    """Answers the requests of backward passes, and notes how they end."""

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
        link_to: LinkTo,
        scheduler: Scheduler,
    ) -> None:
        self._me = me
        self._contexts = contexts
        self._work = work
        self._ends = ends
        self._waits = waits
        self._devices = devices
        self._receive = receive
        self._link_to = link_to
        self._scheduler = scheduler

    # --- requests --------------------------------------------------------------------

    async def on_advance(self, link: PeerLink, advance: Advance) -> PassAnswer:
        """Take part in a pass, with gradients that have come and those that will."""
        advance.check()
        context_id, pass_id = advance.ids
        if advance.step is not None and link.peer.incarnation != pass_id.root:
            raise MalformedError("only the worker that began a pass may add a step")
        state = self._contexts.state(context_id)
        coming, arrived = self._crossings(advance.asked), self._crossings(advance.given)
        state.check_sent(link.peer, (*coming, *arrived))  # before a pass is made
        is_new = pass_id not in state.passes
        is_own = pass_id.root == self._me.incarnation
        if is_new and (is_own or (pass_id, link.peer.incarnation) in state.given_up):
            raise AutogradError(ABORTED)
        backward_pass = state.join_pass(pass_id, advance.root, advance.keeping)
        self._ends.note_begun(backward_pass)
        backward_pass.check()
        backward_pass.inward[link.peer.incarnation] = link.peer
        also: Sequence[CrossingId] = ()
        if is_new:
            backward_pass.is_fast, backward_pass.votes_on = (
                advance.is_fast,
                advance.votes_on,
            )
            also = backward_pass.machine.unsettled if backward_pass.is_fast else ()
        await self._take(backward_pass, link.peer, coming, arrived, also, advance)
        answer = await self._work.work(backward_pass, link.peer.incarnation)
        if advance.step is None:
            return answer
        return await self._with_step(backward_pass, link.peer, advance.step, answer)

    async def _with_step(
        self, backward_pass: Pass, peer: WorkerId, step: list[Any], answer: PassAnswer
    ) -> PassAnswer:
        """Commit a pass and take the step after it, if this worker was the last."""
        is_last = backward_pass.is_done and not (
            backward_pass.onward
            or answer.asked
            or answer.given
            or answer is NOTHING_NEW
        )
        take_step = self._work.take_step
        if not is_last or take_step is None:
            return answer
        self._ends.finish(backward_pass.ids, commit=True)
        return answer._replace(step=await take_step(peer, step))

    async def on_gradients_back(
        self, backward_pass: Pass, peer: WorkerId, answer: PassAnswer
    ) -> None:
        """Take gradients that came with the answer of a worker that was asked."""
        coming, arrived = self._crossings(answer.asked), self._crossings(answer.given)
        backward_pass.check()
        backward_pass.state.check_sent(peer, (*coming, *arrived))
        await self._take(backward_pass, peer, coming, arrived, (), answer)
        backward_pass.wave.outstanding -= 1
        await self._work.work(backward_pass)

    async def _take(  # noqa: PLR0917
        self,
        backward_pass: Pass,
        peer: WorkerId,
        coming: Sequence[CrossingId],
        arrived: Sequence[CrossingId],
        also: Sequence[CrossingId],
        brought: Advance | PassAnswer,
    ) -> None:
        """Let tensors take part, and enter the gradients that have come."""
        for crossing in (*coming, *arrived):
            if not backward_pass.machine.knows(crossing):
                raise backward_pass.state.never_sent(crossing)
        backward_pass.take_part(backward_pass.machine.want([*coming, *arrived, *also]))
        gradients = await at_their_devices(
            self._devices, backward_pass.state, arrived, brought.gradients
        )
        if brought.history is not None:
            gradients = self._with_history(peer, gradients, brought.history)
        backward_pass.enter(dict(zip(arrived, gradients, strict=True)))

    def _crossings(self, keys: Sequence[int]) -> list[CrossingId]:
        me = self._me.incarnation
        pairs = zip(keys[::2], keys[1::2], strict=True)
        return [CrossingId(MessageId(me, serial), at) for serial, at in pairs]

    def _with_history(
        self,
        peer: WorkerId,
        gradients: Sequence[torch.Tensor | None],
        history: Sequence[int],
    ) -> list[torch.Tensor | None]:
        """Make gradients that have a history on another worker differentiable here."""
        serial, *indices = history
        message = MessageId(peer.incarnation, serial)
        differentiable = list(gradients)
        for position, index in enumerate(indices):
            gradient = differentiable[index]
            assert gradient is not None  # `Advance.check` has checked it
            leaf = Received(CrossingId(message, position), peer)
            differentiable[index] = self._receive(gradient, leaf)
        return differentiable

    async def on_close(self, link: PeerLink, request: ClosePass) -> PassAnswer:
        """Record that no further workers take part."""
        context_id, pass_id = request.ids
        state = self._contexts.state(context_id)
        backward_pass = state.passes.get(pass_id)
        if backward_pass is None:
            raise AutogradError(ABORTED)
        if link.peer.incarnation not in backward_pass.inward:
            raise MalformedError(
                f"worker {link.peer.name!r} closed a backward pass that it did not ask "
                "this worker to take part in"
            )
        backward_pass.check()
        return await self._work.close(backward_pass, link.peer.incarnation)

    async def on_waits(self, link: PeerLink, request: AskWaits) -> list[str]:
        """Return what a pass waits for."""
        context_id, pass_id = request.ids
        backward_pass = self._contexts.state(context_id).passes.get(pass_id)
        if backward_pass is None:
            return []
        if link.peer.incarnation not in backward_pass.inward:
            raise MalformedError(
                f"worker {link.peer.name!r} asked what a backward pass waits for that "
                "it did not ask this worker to take part in"
            )
        return await self._waits.explain(backward_pass, request.asked)

    async def on_outcome(self, _link: PeerLink, request: PassOutcome) -> bool:
        """Wait until a pass that began here has ended; return whether it succeeded."""
        context_id, pass_id = request.ids
        if pass_id.root != self._me.incarnation:
            raise MalformedError("another worker began this backward pass")
        state = self._contexts.open.get(context_id)
        return False if state is None else await state.outcome(pass_id)

    # --- ends ------------------------------------------------------------------------

    def on_commit(self, link: PeerLink, notice: CommitPass) -> None:
        """Commit a pass that has succeeded; raises as `on_abort` does."""
        self._on_end(link, notice.ids, commit=True)

    def on_abort(self, link: PeerLink, notice: AbortPass) -> None:
        """Abort a pass that has failed."""
        self._on_end(link, notice.ids, commit=False)

    def _on_end(self, link: PeerLink, ids: PassIds, *, commit: bool) -> None:
        context_id, pass_id = ids
        state = self._contexts.open.get(context_id)
        if state is None:
            return
        state.check_part(link.peer)
        backward_pass, reporter = state.passes.get(pass_id), link.peer.incarnation
        if pass_id.root == self._me.incarnation:
            raise MalformedError(
                f"worker {link.peer.name!r} ended a backward pass that only this "
                "worker, which began it, may end"
            )
        if backward_pass is not None and reporter not in (
            pass_id.root,
            *backward_pass.inward,
        ):
            raise MalformedError(
                f"worker {link.peer.name!r} ended a backward pass that it did not "
                "ask this worker to take part in"
            )
        if backward_pass is None and pass_id not in state.ended:
            self._contexts.keep(state, link)
        if backward_pass is None and reporter != pass_id.root:
            state.given_up.add((pass_id, reporter))
            return
        self._ends.finish(ids, commit=commit)

    def on_peer_lost(self, peer: WorkerId) -> None:
        """End the passes of a lost worker; ask how those ended that it asked us for."""
        open_contexts = list(self._contexts.open.values())
        for state in [context for context in open_contexts if context.passes]:
            for pass_id, backward_pass in list(state.passes.items()):
                ids = PassIds(state.id, pass_id)
                if pass_id.root == peer.incarnation:
                    self._ends.finish(ids, commit=False)
                elif (
                    peer.incarnation in backward_pass.inward
                    and backward_pass.root != self._me.name
                ):
                    self._scheduler.start_task(
                        self._ask_outcome(ids, backward_pass.root)
                    )

    async def _ask_outcome(self, ids: PassIds, root: str) -> None:
        """Ask the worker that began a pass how it ended: its message may be lost."""
        is_good = False
        try:
            link = await self._link_to(root)
            if link.peer.incarnation == ids.pass_id.root:
                is_good = await ask(link, PassOutcome(ids))
        except AsyncRpcError:
            pass  # the worker that began it is lost as well
        self._ends.finish(ids, commit=is_good)

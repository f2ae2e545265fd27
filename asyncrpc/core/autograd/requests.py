"""The requests of a backward pass to other workers, and their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from asyncrpc.core.autograd.contexts import Contexts
from asyncrpc.core.autograd.functions import Received
from asyncrpc.core.autograd.messages import (
    Advance,
    ClosePass,
    PassAnswer,
    by_sender,
    check_gradients,
    keys_of,
)
from asyncrpc.core.autograd.state import ABORTED, ContextState, Pass, Sent
from asyncrpc.core.autograd.torch_only import is_plain, without_functions
from asyncrpc.core.devices.maps import TO_HOST
from asyncrpc.core.ids import Incarnation, MessageId, WorkerId
from asyncrpc.core.links.directory import Directory
from asyncrpc.core.services.ports import Links, PeerLink, Scheduler
from asyncrpc.core.torch_modes import with_defaults
from asyncrpc.errors import AutogradError, CallError, MalformedError, Outcome

PassRequest: TypeAlias = Advance | ClosePass
TakeGradients: TypeAlias = Callable[
    [Pass, WorkerId, PassAnswer], Coroutine[Any, Any, None]
]


class PassRequests:
    """Asks the senders of tensors to take part; each answer ends a part of the pass.

    Attributes:
        take_gradients: takes the gradients of an answer; the service sets it.
    """

    take_gradients: TakeGradients

    def __init__(
        self,
        me: Incarnation,
        contexts: Contexts,
        directory: Directory,
        links: Links,
        scheduler: Scheduler,
    ) -> None:
        self._me = me
        self._contexts = contexts
        self._directory = directory
        self._links = links
        self._scheduler = scheduler

    def send(
        self,
        backward_pass: Pass,
        asked: Sequence[Received],
        computed: Sequence[Received],
        gradients: Mapping[Received, torch.Tensor],
    ) -> None:
        """Ask the senders of received tensors to take part, or give them gradients."""
        for leaf in (*asked, *computed):
            backward_pass.new.pop(leaf, None)
        coming, going = by_sender(asked), by_sender(computed)
        for peer in coming | going:
            leaves = going.get(peer, [])
            leaf_gradients = [gradients.get(leaf) for leaf in leaves]
            advance = Advance(
                gradients=leaf_gradients,
                ids=backward_pass.ids,
                root=backward_pass.root,
                keeping=backward_pass.keeping,
                is_fast=backward_pass.is_fast,
                asked=keys_of(coming.get(peer, [])),
                given=keys_of(leaves),
                history=self._keep_history(backward_pass.state, peer, leaf_gradients),
                step=None
                if backward_pass.step is None
                else _step_for(backward_pass, peer, coming | going),
                votes_on=backward_pass.votes_on,
            )
            if backward_pass.wave.owes == peer.incarnation and _can_go_back(
                backward_pass, leaf_gradients
            ):
                backward_pass.going_back = advance
            else:
                self._request(backward_pass, peer, advance)
        if backward_pass.wave.outstanding:
            # Its answer may wait for the gradients that go back.
            self.send_ahead(backward_pass)

    def send_ahead(self, backward_pass: Pass) -> None:
        """Send gradients at once that should have gone with an answer, now delayed."""
        back, backward_pass.going_back = backward_pass.going_back, None
        if back is not None:
            asked_by = backward_pass.wave.owes
            assert asked_by is not None  # or nothing would go back
            self._request(
                backward_pass, backward_pass.inward[Incarnation(asked_by)], back
            )

    def close(self, backward_pass: Pass) -> None:
        """Tell the workers that take part that no others will."""
        for peer in list(backward_pass.onward.values()):
            if peer.incarnation not in (self._me, backward_pass.ids.pass_id.root):
                self._request(backward_pass, peer, ClosePass(backward_pass.ids))

    def _keep_history(
        self,
        state: ContextState,
        peer: WorkerId,
        gradients: Sequence[torch.Tensor | None],
    ) -> list[int] | None:
        """Record gradients that have a history as sent tensors."""
        with without_functions():
            having = [
                (index, gradient)
                for index, gradient in enumerate(gradients)
                if gradient is not None and gradient.requires_grad
            ]
        if not having:
            return None
        message = MessageId(self._me, self._contexts.next_serial())
        sent = with_defaults(Sent.of)([gradient for _, gradient in having], peer)
        state.note_sent(message, sent)
        return [message.serial, *(index for index, _ in having)]

    # --- one request -----------------------------------------------------------------

    def _request(
        self, backward_pass: Pass, peer: WorkerId, request: PassRequest
    ) -> None:
        backward_pass.onward[peer.incarnation] = peer
        backward_pass.wave.outstanding += 1
        link = self._directory.link_of(peer.incarnation)
        if link is not None:
            self._request_over(backward_pass, link, request)
        else:
            self._start(
                backward_pass, partial(self._dial, backward_pass, peer, request)
            )

    async def _dial(
        self, backward_pass: Pass, peer: WorkerId, request: PassRequest
    ) -> None:
        link = await self._links.link_to(peer.name)
        if link.peer.incarnation != peer.incarnation:
            raise AutogradError(
                f"worker {peer.name!r} has been restarted since it took part"
            )
        self._request_over(backward_pass, link, request)

    def _start(
        self, backward_pass: Pass, work: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """Run a job for a pass beside its requests; its error fails the pass."""

        async def watched() -> None:
            try:
                await work()  # made here: the task may be cancelled before it begins
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # noqa: BLE001  (a hook of the user's may exit)
                backward_pass.fail(error)  # the waiting task gets it

        task = self._scheduler.start_task(watched())
        backward_pass.tasks.add(task)
        task.add_done_callback(partial(_on_ended, backward_pass))

    def _request_over(
        self, backward_pass: Pass, link: PeerLink, request: PassRequest
    ) -> None:
        # Gradients go through host memory: the receiver knows the tensor's device.
        call = link.ask(request, device_map=TO_HOST)
        call.add_done_callback(
            partial(self._on_answer, backward_pass, request, link.peer)
        )

    def _on_answer(
        self,
        backward_pass: Pass,
        request: PassRequest,
        peer: WorkerId,
        call: asyncio.Future[Any],
    ) -> None:
        error = AutogradError(ABORTED) if call.cancelled() else call.exception()
        has_step = isinstance(request, Advance) and request.step is not None
        step = backward_pass.step if has_step else None
        if step is not None:
            step.is_open = call.cancelled() or _is_unknown(error)
        if error is not None:
            backward_pass.wave.outstanding -= 1
            backward_pass.fail(error)
            return
        try:
            answer = request.read_answer(peer.name, call.result())
            _check_answer(answer, peer, has_step=has_step)
        except MalformedError as wrong:
            backward_pass.wave.outstanding -= 1
            backward_pass.fail(wrong)
            return
        if step is not None and answer.step is not None:
            step.answer = answer.step
            del backward_pass.onward[peer.incarnation]  # which has committed the pass
        backward_pass.wave.receive(answer.reports)
        if answer.given or answer.asked:
            # The answer is not taken before the gradients, so this worker is not idle.
            self._start(
                backward_pass, partial(self.take_gradients, backward_pass, peer, answer)
            )
            return
        backward_pass.wave.outstanding -= 1
        backward_pass.look_up()


def _step_for(
    backward_pass: Pass, peer: WorkerId, peers: Collection[WorkerId]
) -> list[Any] | None:
    """Return the step that goes with a request: the last one, to the owner."""
    step, wave = backward_pass.step, backward_pass.wave
    assert step is not None  # or nobody asks
    is_last = (
        len(peers) == 1
        and not backward_pass.new
        and not wave.outstanding
        and not wave.unfinished
        and backward_pass.is_done
    )
    if not is_last or step.owner != peer.incarnation:
        return None
    step.is_open = True
    return step.content


def _check_answer(answer: PassAnswer, peer: WorkerId, *, has_step: bool) -> None:
    """Refuse an answer whose parts do not fit, or that has a step nobody asked for."""
    check_gradients(answer)
    if answer.step is not None and not has_step:
        raise MalformedError(
            f"worker {peer.name!r} answered a step that it was not asked to take"
        )


def _is_unknown(error: BaseException | None) -> bool:
    """Return whether an error leaves open what the other worker has done."""
    return isinstance(error, CallError) and error.outcome is Outcome.UNKNOWN


def _can_go_back(backward_pass: Pass, gradients: Sequence[torch.Tensor | None]) -> bool:
    """Return whether gradients may go with an answer: the first, and on the host."""
    with without_functions():
        return backward_pass.going_back is None and all(
            gradient is None or (is_plain(gradient) and gradient.is_cpu)
            for gradient in gradients
        )


def _on_ended(backward_pass: Pass, task: asyncio.Task[None]) -> None:
    """Let a pass fail if its work was cancelled: nothing else would report it."""
    backward_pass.tasks.discard(task)
    if task.cancelled():
        backward_pass.fail(AutogradError(ABORTED))

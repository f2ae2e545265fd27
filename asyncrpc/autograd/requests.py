"""What a backward pass asks of other workers, and their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from asyncrpc.autograd.contexts import Contexts
from asyncrpc.autograd.functions import Received
from asyncrpc.autograd.messages import (
    Advance,
    Close,
    by_sender,
    keys_of,
)
from asyncrpc.autograd.ports import Directory, Links
from asyncrpc.autograd.state import ABORTED, ContextState, Pass, Sent
from asyncrpc.errors import AutogradError, MalformedError
from asyncrpc.ids import Incarnation, MessageId, WorkerId
from asyncrpc.runtime.devices.maps import TO_HOST
from asyncrpc.runtime.ports import PeerLink, Scheduler

PassRequest: TypeAlias = Advance | Close


class PassRequests:
    """Asks the senders of tensors to take part; each answer ends a part of the pass."""

    def __init__(
        self,
        me: Incarnation,
        contexts: Contexts,
        directory: Directory,
        links: Links,
        scheduler: Scheduler,
    ) -> None:
        """Prepare to ask.

        Args:
            me: this worker.
            contexts: give numbers to what is sent.
            directory: the links that are open.
            links: makes those that are not.
            scheduler: makes them beside the pass.
        """
        self._me = me
        self._contexts = contexts
        self._directory = directory
        self._links = links
        self._scheduler = scheduler

    def send(
        self,
        one: Pass,
        asked: Sequence[Received],
        given: Sequence[Received],
        gradients: Mapping[Received, torch.Tensor],
    ) -> None:
        """Ask the senders of received tensors to take part, or give them gradients."""
        for leaf in (*asked, *given):
            one.new.pop(leaf, None)
        coming, going = by_sender(asked), by_sender(given)
        for peer in coming | going:
            leaves = going.get(peer, [])
            found = [gradients.get(leaf) for leaf in leaves]
            advance = Advance(
                gradients=found,
                ids=one.ids,
                root=one.root,
                keeping=one.keeping,
                is_fast=one.is_fast,
                asked=keys_of(coming.get(peer, [])),
                given=keys_of(leaves),
                history=self._keep_history(one.state, peer, found),
            )
            self._request(one, peer, advance)

    def close(self, one: Pass) -> None:
        """Tell those that were asked: nobody takes part who has not been."""
        for peer in list(one.onward.values()):
            if peer.incarnation not in (self._me, one.ids.pass_id.root):
                self._request(one, peer, Close(one.ids))

    def _keep_history(
        self,
        state: ContextState,
        peer: WorkerId,
        gradients: Sequence[torch.Tensor | None],
    ) -> list[int] | None:
        """Record gradients that have a history as what they are: tensors sent."""
        having = [
            (index, gradient)
            for index, gradient in enumerate(gradients)
            if gradient is not None and gradient.requires_grad
        ]
        if not having:
            return None
        message = MessageId(self._me, self._contexts.next_serial())
        sent = Sent.of([gradient for _, gradient in having], peer)
        state.note_sent(message, sent)
        return [message.serial, *(index for index, _ in having)]

    # --- one request -----------------------------------------------------------------

    def _request(self, one: Pass, peer: WorkerId, request: PassRequest) -> None:
        one.onward[peer.incarnation] = peer
        one.wave.outstanding += 1
        link = self._directory.link_of(peer.incarnation)
        if link is not None:
            self._request_over(one, link, request)
        else:
            self._start(one, partial(self._dial, one, peer, request))

    async def _dial(self, one: Pass, peer: WorkerId, request: PassRequest) -> None:
        link = await self._links.link_to(peer.name)
        if link.peer.incarnation != peer.incarnation:
            raise AutogradError(
                f"worker {peer.name!r} has been restarted since it took part"
            )
        self._request_over(one, link, request)

    def _start(self, one: Pass, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do something for a pass beside its requests; errors are the pass's."""

        async def watched() -> None:
            try:
                await work()  # made here: the task may be cancelled before it begins
            except Exception as error:  # noqa: BLE001  (whoever waits gets it)
                one.fail(error)

        task = self._scheduler.start_task(watched())
        one.tasks.add(task)
        task.add_done_callback(partial(_on_ended, one))

    def _request_over(self, one: Pass, link: PeerLink, request: PassRequest) -> None:
        # Gradients go by the host: who gets one knows where the tensor was.
        call = link.ask(request, device_map=TO_HOST)
        call.add_done_callback(partial(_on_answer, one, request, link.peer.name))


def _on_ended(one: Pass, task: asyncio.Task[None]) -> None:
    """Let a pass fail if its work was cancelled: nothing else would tell of it."""
    one.tasks.discard(task)
    if task.cancelled():
        one.fail(AutogradError(ABORTED))


def _on_answer(
    one: Pass, request: PassRequest, peer: str, call: asyncio.Future[Any]
) -> None:
    one.wave.outstanding -= 1
    error = AutogradError(ABORTED) if call.cancelled() else call.exception()
    if error is not None:
        one.fail(error)
        return
    try:
        reports = request.read_answer(peer, call.result())
    except MalformedError as wrong:
        one.fail(wrong)
        return
    one.wave.hear(reports)
    one.look_up()

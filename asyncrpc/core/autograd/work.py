"""The local part of a backward pass: ready segments run, their results are sent on.

`PassRequests` sends gradients to other workers and takes their answers; `SegmentEvents`
notes what ran, for the flight recorder.  Gradients travel through host memory, and are
moved to the devices of their tensors.  The event loop touches neither an exclusive
device nor a subclass of tensors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Hashable, Mapping, Sequence
from contextlib import suppress
from contextvars import Context as Variables
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

import torch

from asyncrpc.core.autograd.contexts import Contexts
from asyncrpc.core.autograd.engine import Engine, Leaving, SegmentRun, prepare
from asyncrpc.core.autograd.functions import CrossingId, Received, leaves_of
from asyncrpc.core.autograd.inline import Runner, is_plain, without_functions
from asyncrpc.core.autograd.messages import (
    Advance,
    ClosePass,
    PassAnswer,
    by_sender,
    check_gradients,
    keys_of,
)
from asyncrpc.core.autograd.state import ABORTED, ContextState, Pass, Sent
from asyncrpc.core.calls.futures import on_done
from asyncrpc.core.devices.maps import TO_HOST
from asyncrpc.core.devices.staging import Devices
from asyncrpc.core.ids import ContextId, Incarnation, MessageId, WorkerId
from asyncrpc.core.loop.waits import works_for
from asyncrpc.core.parts import Parts
from asyncrpc.core.services.ports import LinkOf, LinkTo, PeerLink, Scheduler
from asyncrpc.core.torch_modes import with_defaults
from asyncrpc.core.trace.events import MESSAGES_MAX, OK, outcome_of
from asyncrpc.core.trace.recorder import FlightRecorder
from asyncrpc.core.trace.ring import plain
from asyncrpc.errors import AutogradError, CallError, MalformedError, Outcome


async def at_their_devices(
    to: Devices,
    state: ContextState,
    arrived: Sequence[CrossingId],
    gradients: list[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    """Move arrived gradients to the devices of their tensors."""
    wanted: dict[int, tuple[torch.Tensor, str]] = {}
    for index, (crossing, gradient) in enumerate(zip(arrived, gradients, strict=True)):
        devices = state.sent[crossing.message].devices
        if devices is not None and gradient is not None:
            wanted[index] = gradient, devices[crossing.position]
    if not wanted:
        return gradients
    placed = await to.placed(wanted)
    return [placed.get(index, gradient) for index, gradient in enumerate(gradients)]


async def on_devices_of(
    worker: Parts, tensors: Sequence[torch.Tensor], job: Callable[[], T]
) -> T:
    """Run a job on tensors: at once, if the event loop may touch all of them."""
    is_exclusive = worker.pool.is_exclusive
    with without_functions():
        is_here = all(
            is_plain(tensor) and (tensor.is_cpu or not is_exclusive)
            for tensor in tensors
        )
    if is_here:
        return job()
    return await worker.run_in_thread(job)


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
        link_of: LinkOf,
        link_to: LinkTo,
        scheduler: Scheduler,
    ) -> None:
        self._me = me
        self._contexts = contexts
        self._link_of = link_of
        self._link_to = link_to
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
        link = self._link_of(peer.incarnation)
        if link is not None:
            self._request_over(backward_pass, link, request)
        else:
            self._start(
                backward_pass, partial(self._dial, backward_pass, peer, request)
            )

    async def _dial(
        self, backward_pass: Pass, peer: WorkerId, request: PassRequest
    ) -> None:
        link = await self._link_to(peer.name)
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
        on_done(call, partial(self._on_answer, backward_pass, request, link.peer))

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


class SegmentEvents:
    """Notes the segments of this worker."""

    def __init__(self, recorder: FlightRecorder) -> None:
        self.now_s = recorder.now_s
        self._segments = recorder.segments

    def note(
        self,
        backward_pass: Pass,
        nodes: int,
        began_s: float,
        entered: Sequence[CrossingId],
        sent: Sequence[CrossingId] = (),
        *,
        outcome: str = OK,
    ) -> None:
        """Record that a segment has ended."""
        ids = backward_pass.ids
        fed_by, feeds = _messages(entered), _messages(sent)
        left_out = 0
        if len(fed_by) > MESSAGES_MAX or len(feeds) > MESSAGES_MAX:
            left_out = len(fed_by) + len(feeds)
            fed_by, feeds = fed_by[:MESSAGES_MAX], feeds[:MESSAGES_MAX]
            left_out -= len(fed_by) + len(feeds)
        self._segments.record(
            (
                self.now_s(),
                began_s,
                plain(ids.context_id),
                backward_pass.root,
                ids.pass_id.number,
                nodes,
                fed_by,
                feeds,
                left_out,
                outcome,
            )
        )


def _messages(crossings: Sequence[CrossingId]) -> tuple[tuple[Any, ...], ...]:
    """Return the messages of tensors, each once; a root of a pass has no message."""
    if len(crossings) == 1:  # as a rule
        message, _ = crossings[0]
        return (plain(message),) if message.sender else ()
    messages: dict[MessageId, None] = {}
    for message, _ in crossings:
        if message.sender:
            messages[message] = None
    return tuple([plain(message) for message in messages])


T = TypeVar("T")

# Given the autograd context, and the variables of the task that began the pass.
VariablesOf: TypeAlias = Callable[[ContextId, Variables | None], Variables]

# Given the maker of an optimizer, the number of a step, and gradients: whether the step
# cannot raise with them; None: this worker has no part of the optimizer.
VoteOnStep: TypeAlias = Callable[
    [Incarnation, int, Mapping[torch.Tensor, torch.Tensor]], bool | None
]
# Given the maker of an optimizer and a step: takes it; returns the answer.
TakeStep: TypeAlias = Callable[
    [WorkerId, list[Any]], Coroutine[Any, Any, list[Any] | None]
]

# The answer to a worker that is not the first to ask: the first gets the reports.
NOTHING_NEW: Final = PassAnswer([], [], [], [], None, None)


class PassWork:
    """Runs the parts of this worker's graph that belong to passes.

    Attributes:
        vote: on the step of an optimizer that is to follow a pass; None: nothing votes.
        take_step: takes the step that came with a pass's last gradients; None: nothing
            does.
    """

    def __init__(
        self,
        me: Incarnation,
        engine: Engine,
        requests: PassRequests,
        worker: Parts,
        *,
        events: SegmentEvents,
        variables_of: VariablesOf,
    ) -> None:
        self._me = me
        self._engine = engine
        self._requests = requests
        self._worker = worker
        self._events = events
        self._variables_of = variables_of
        self._runner = Runner(worker.pool, engine.lock)
        self.vote: VoteOnStep | None = None
        self.take_step: TakeStep | None = None

    async def work(
        self, backward_pass: Pass, asked_by: Incarnation | None = None
    ) -> PassAnswer:
        """Run what is ready; return the answer for the worker that asked.

        Args:
            asked_by: the worker that asked; None: this one, which began the pass.
        """
        if not backward_pass.wave.engage(asked_by):
            if not backward_pass.wave.is_running:  # else the running task looks again
                backward_pass.wave.is_running = (
                    True  # from now on: this worker must not count as idle
                )
                # First the gradients that others wait for, then the answer.  If this
                # fails, the pass has failed, and its waiters know.
                with suppress(Exception):
                    await self._drain(backward_pass)
            return NOTHING_NEW
        if not backward_pass.wave.is_running:
            backward_pass.wave.is_running = True
            await self._drain(backward_pass)
        await backward_pass.idle()
        return backward_pass.answer(self._me, is_sure=self._vote(backward_pass))

    async def close(
        self, backward_pass: Pass, asked_by: Incarnation | None = None
    ) -> PassAnswer:
        """Continue, knowing that no further workers take part, and tell the others."""
        if backward_pass.is_settled:
            return NOTHING_NEW
        backward_pass.is_settled = True
        backward_pass.machine.rule_out()
        self._requests.close(backward_pass)
        return await self.work(backward_pass, asked_by)

    def _vote(self, backward_pass: Pass) -> bool | None:
        """Vote on the step that is to follow a pass, if that is asked for."""
        if backward_pass.votes_on is None or self.vote is None:
            return None
        gathered = backward_pass.state.gradients_with(backward_pass.flow.staged)
        if gathered is None:
            return None
        maker = backward_pass.ids.pass_id.root
        return self.vote(maker, backward_pass.votes_on, gathered)

    @works_for(lambda at: at["backward_pass"])
    async def _drain(self, backward_pass: Pass) -> None:
        """Run segments until none is ready; send their results on."""
        try:
            while await self._run_segment(backward_pass):
                backward_pass.check()
            if (
                backward_pass.flow.endings
                and backward_pass.machine.is_done
                and not backward_pass.machine.unsettled
            ):
                end = partial(self._engine.end, backward_pass.flow)
                await self._in_thread(backward_pass, None, end)
                backward_pass.check()
        except asyncio.CancelledError:
            backward_pass.fail(AutogradError(ABORTED))
            raise  # the thread goes on
        except BaseException as error:  # a user's hook may exit
            backward_pass.wave.is_running = False
            backward_pass.fail(error)
            raise
        backward_pass.wave.is_running = False
        backward_pass.look_up()

    async def _run_segment(self, backward_pass: Pass) -> bool:
        """Run a segment if one is ready; return whether it was."""
        segment = backward_pass.machine.next_segment()
        if segment is None:
            self._requests.send(backward_pass, list(backward_pass.new), [], {})
            return False
        self._requests.send_ahead(backward_pass)
        if not segment.is_whole and backward_pass.new:
            ready = set(leaves_of(segment.nodes)[1])
            later = [leaf for leaf in backward_pass.new if leaf not in ready]
            self._requests.send(backward_pass, later, [], {})
        arrived = {key: backward_pass.arrived.pop(key) for key in segment.starts}
        nodes, began_s = len(segment.nodes), self._events.now_s()
        entered = [key for key, gradient in arrived.items() if gradient is not None]
        starts = [
            (backward_pass.edges[key], gradient) for key, gradient in arrived.items()
        ]
        entering = [gradient for _, gradient in starts if gradient is not None]
        entering += backward_pass.flow.entering.values()
        prepared = partial(
            prepare,
            segment,
            starts,
            backward_pass.region,
            backward_pass.flow,
            backward_pass.keeping,
        )  # which may add gradients up
        run = await on_devices_of(self._worker, entering, prepared)
        leaving = run.straight_through()
        if leaving is None:
            try:
                leaving = await self._run(backward_pass, run)
            except BaseException as error:  # a user's hook may exit
                outcome = outcome_of(error)
                self._events.note(
                    backward_pass, nodes, began_s, entered, outcome=outcome
                )
                raise
        sent = [received.crossing for received in leaving]
        self._events.note(backward_pass, nodes, began_s, entered, sent)
        backward_pass.check()
        self._requests.send(backward_pass, [], run.received, leaving)
        return True

    async def _run(self, backward_pass: Pass, run: SegmentRun) -> Leaving:
        """Run a segment: in a thread, or at once if its kind is always short."""
        kind, job = run.kind, partial(self._engine.run, run)
        if self._runner.may_run_here(kind):
            return self._runner.run_here(kind, job)
        return await self._in_thread(backward_pass, kind, job)

    async def _in_thread(
        self, backward_pass: Pass, kind: Hashable | None, job: Callable[[], T]
    ) -> T:
        variables = self._variables_of(
            backward_pass.ids.context_id, backward_pass.variables
        )
        return await self._runner.run_in_thread(kind, partial(variables.run, job))

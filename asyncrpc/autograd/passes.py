"""Backward passes: how a worker begins one, and takes part in those of others.

Gradients go out with the request to take part, as soon as nothing that has been sent in
the context could still add to them; so a pass takes one message for each step of the
way.  Where that is not known yet, a worker is only asked to find out who else takes
part, and gets the gradient later.  Once all is quiet the worker that began knows who
takes part; if somebody still waits to hear that, it is told (`close`).

1.  `advance`: the tensors whose gradients come now, and those whose will come later.
2.  `close`: nobody takes part but those who have been asked.  Often not needed.
3.  `commit` or `abort`: gradients of parameters enter the context, or are dropped.

Each crossing that takes part gets exactly one gradient (or word that there is none),
the others get nothing: an unused result costs nothing, and nothing waits for it.  FAST
skips the question: everything that was sent is expected to take part, as in torch; if
it turns out that it does not, the pass fails, and says what it waits for.

Source: pytorch/pytorch#23110 describes the exact ("SMART") mode and its difficulty.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import torch

from asyncrpc.autograd import messages
from asyncrpc.autograd.context import Context, ContextState, Pass, Sent
from asyncrpc.autograd.engine import (
    Engine,
    Keeping,
    Leaving,
    Run,
    prepare,
    root_gradients,
)
from asyncrpc.autograd.failures import failed, is_told
from asyncrpc.autograd.functions import (
    CrossingId,
    Received,
    edge_of,
    leaves_of,
    received_as,
)
from asyncrpc.autograd.messages import REPORTS, Ids, lines_in, read_advance, read_ids
from asyncrpc.autograd.pace import Runner
from asyncrpc.autograd.placing import at_their_devices, on_devices_of
from asyncrpc.clock import Deadline
from asyncrpc.errors import (
    AsyncRpcError,
    AutogradError,
    BackwardTimeoutError,
    InvalidContextError,
    MalformedError,
)
from asyncrpc.ids import ContextId, Incarnation, MessageId, WorkerId
from asyncrpc.runtime.devices.maps import TO_HOST
from asyncrpc.runtime.forms import Methods, ServiceMethods
from asyncrpc.runtime.links.link import Link
from asyncrpc.runtime.worker import Worker

SERVICE: Final = "autograd"
EXPLAIN_S: Final = 1.0  # for the others to say what they wait for
_RETAIN, _CREATE, _FAST = 1, 2, 4
_ABORTED: Final = "the pass has been aborted"


class Passes(ServiceMethods):
    """The part of autograd that runs backward passes."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.engine = Engine()
        self._runner = Runner(worker, self.engine.lock)
        self._anchor = torch.zeros((), requires_grad=True)  # so that `receive` is noted
        self._contexts: dict[ContextId, ContextState] = {}
        self._serial = 0
        self.requests = Methods(
            SERVICE,
            {
                "advance": (messages.advance, self._on_advance),
                "close": (messages.PASS, self._on_close),
                "waits": (messages.WAITS, self._on_waits),
                "outcome": (messages.PASS, self._on_outcome),
                "join": (messages.CONTEXT, self._on_join),
            },
        )

    def state(self, context: Context | ContextId) -> ContextState:
        """Return the state of a context that is open.

        Raises:
            InvalidContextError: it is not, or never came here.
        """
        context_id = context.id if isinstance(context, Context) else context
        state = self._contexts.get(context_id)
        if state is None:
            raise InvalidContextError(
                f"autograd context {context_id} is not open on worker "
                f"{self.worker.name!r}: it has ended, or no call brought it here"
            )
        return state

    def _next(self) -> int:
        self._serial += 1
        return self._serial

    # --- the worker that begins ------------------------------------------------------

    async def backward(
        self,
        context: Context,
        roots: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None] | None,
        keeping: Keeping,
        deadline: Deadline | None,
        *,
        is_fast: bool,
    ) -> None:
        """Run a pass from local roots; see `asyncrpc.autograd.backward`."""
        state = self.state(context)
        check = partial(root_gradients, roots, gradients)
        given = await on_devices_of(self.worker, roots, check)
        ids = context.id, (int(self.worker.incarnation), self._next())
        one = state.join_pass(ids[1], self.worker.name, keeping)
        limit = asyncio.timeout_at(None if deadline is None else deadline.at_s)
        try:
            self._add_roots(one, roots, given, is_fast=is_fast)
            async with limit:
                await self._work(one)
                if one.wave.unfinished and not is_fast:
                    await self._close(one)
            if one.wave.unfinished:
                await self._raise_stuck(one)
        except BaseException as error:
            is_late = deadline is not None and limit.expired()
            waits = "; ".join(await self._waits(one, [])) if is_late else ""
            self._finish(ids, commit=False)
            if deadline is not None and is_late:
                raise BackwardTimeoutError(
                    f"the pass took more than {deadline.allowed_s:g} s: {waits}",
                    worker=self.worker.name,
                    context_id=str(context.id),
                ) from error
            if not is_told(error):
                raise
            raise failed(self.worker.name, context.id, error) from error
        self._finish(ids, commit=True)

    def _add_roots(
        self,
        one: Pass,
        roots: Sequence[torch.Tensor],
        given: Sequence[torch.Tensor],
        *,
        is_fast: bool,
    ) -> None:
        """Make the roots starts, under ids that no message has."""
        message = MessageId(Incarnation(0), 0)
        crossings = [CrossingId(message, index) for index in range(len(roots))]
        for crossing, root in zip(crossings, roots, strict=True):
            edge = one.edges[crossing] = edge_of(root)
            one.machine.add_root(crossing, edge.node)
        one.is_fast = is_fast
        also = one.machine.want(one.machine.unsettled) if is_fast else []
        one.take_part([*crossings, *also])
        one.enter(dict(zip(crossings, given, strict=True)))

    def _finish(self, ids: Ids, *, commit: bool) -> None:
        """Commit or abort a pass here, and on the workers that this one asked."""
        context_id, pass_id = ids
        state = self._contexts.get(context_id)
        one = None if state is None else state.end_pass(pass_id, commit=commit)
        if state is None or one is None:
            return
        if commit:
            state.commit(one.flow.staged, defers=self.worker.pool.takes_turns)
        else:
            one.abort(_ABORTED)
        # The way the requests took, so those whom only others know learn of it too; on
        # each link it comes after the request that made them take part.
        for peer in one.onward:
            if peer not in (self.worker.incarnation, pass_id[0]):
                link = self.worker.directory.link_of(peer)
                if link is not None:
                    how = "commit" if commit else "abort"
                    link.notify(SERVICE, how, [*context_id, *pass_id])

    # --- taking part -----------------------------------------------------------------

    async def _on_advance(self, link: Link, value: Any) -> list[list[int]]:
        gradients, ids, root, flags, asked, given, history = read_advance(value)
        state = self.state(ids[0])
        coming, arrived = self._crossings(asked), self._crossings(given)
        self._check_sent(link, state, (*coming, *arrived))  # before a pass is made
        keeping = Keeping(bool(flags & _RETAIN), bool(flags & _CREATE))
        is_new = ids[1] not in state.passes
        one = state.join_pass(ids[1], root, keeping)
        one.check()
        one.inward.add(link.peer.incarnation)
        if is_new:
            one.is_fast = bool(flags & _FAST)
        for crossing in (*coming, *arrived):
            if not one.machine.knows(crossing):
                raise _never_sent(crossing, state)
        everything = one.machine.unsettled if is_new and one.is_fast else ()
        one.take_part(one.machine.want([*coming, *arrived, *everything]))
        gradients = await at_their_devices(self.worker, state, arrived, gradients)
        if history is not None:
            gradients = self._with_history(link, gradients, history)
        one.enter(dict(zip(arrived, gradients, strict=True)))
        return await self._work(one)

    def _check_sent(
        self, link: Link, state: ContextState, crossings: Iterable[CrossingId]
    ) -> None:
        """Refuse gradients of tensors that were not sent to whom they come from.

        Raises:
            AutogradError: they were not sent in this context.
            MalformedError: they were sent to another worker.
        """
        for crossing in crossings:
            sent = state.sent.get(crossing.message)
            if sent is None or crossing.position >= len(sent.edges):
                raise _never_sent(crossing, state)
            if sent.to != link.peer:
                raise MalformedError(
                    f"worker {link.peer.name!r} sent a gradient for {crossing}, which "
                    f"was sent to {sent.to.name!r}"
                )

    def _check_part(self, link: Link, state: ContextState) -> None:
        """Refuse the word of a worker that has no part in a context.

        Raises:
            MalformedError: it is one.
        """
        peer = link.peer
        if peer.incarnation != state.id.creator and peer not in state.peers:
            raise MalformedError(
                f"worker {peer.name!r} has no part in autograd context {state.id}"
            )

    def _crossings(self, keys: Sequence[int]) -> list[CrossingId]:
        me = self.worker.incarnation
        pairs = zip(keys[::2], keys[1::2], strict=True)
        return [CrossingId(MessageId(me, one), at) for one, at in pairs]

    async def _work(self, one: Pass) -> list[list[int]]:
        """Do what can be done; return the answer to who asked for it.

        Raises:
            Exception: why the pass has failed.
        """
        if not one.wave.engage():
            if not one.wave.is_running:  # who runs it looks again
                one.wave.is_running = True  # from now on: nobody may take us for idle
                # First what others wait for, then an answer that nobody hurries for.
                # If it fails, so has the pass, and whoever waits for that knows.
                with suppress(Exception):
                    await self._drive(one)
            return []
        if not one.wave.is_running:
            one.wave.is_running = True
            await self._drive(one)
        await one.idle()
        me = self.worker.incarnation
        return one.wave.disengage(me, is_done=one.machine.is_done)

    async def _drive(self, one: Pass) -> None:
        """Run what is ready, until nothing is; send on what comes out."""
        try:
            while await self._run_segment(one):
                one.check()
        except asyncio.CancelledError:
            one.fail(AutogradError(_ABORTED))
            raise  # the thread goes on
        except BaseException as error:  # a hook of the user's may exit
            one.wave.is_running = False
            one.fail(error)
            raise
        one.wave.is_running = False
        one.look_up()

    async def _run_segment(self, one: Pass) -> bool:
        """Run a segment, if one is ready; say whether it was."""
        segment = one.machine.next_segment()
        if segment is None:
            self._send(one, list(one.new), [], {})
            return False
        if not segment.is_whole and one.new:
            ready = set(leaves_of(segment.nodes)[1])
            later = [leaf for leaf in one.new if leaf not in ready]
            self._send(one, later, [], {})
        starts = [(one.edges[key], one.arrived.pop(key)) for key in segment.starts]
        entering = [gradient for _, gradient in starts if gradient is not None]
        prepared = partial(
            prepare, segment, starts, one.region, one.flow, one.keeping
        )  # which may add gradients up
        run = await on_devices_of(self.worker, entering, prepared)
        leaving = run.straight_through()
        if leaving is None:
            leaving = await self._run(run)
        one.check()
        self._send(one, [], run.received, leaving)
        return True

    async def _run(self, run: Run) -> Leaving:
        """Run a segment: in a thread, or at once if its like is always short."""
        kind, job = run.kind, partial(self.engine.run, run)
        if self._runner.may_run_here(kind):
            return self._runner.run_here(kind, job)
        return await self._runner.run_in_thread(kind, job)

    def _start(self, one: Pass, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do something for a pass beside its requests; errors are the pass's."""

        async def watched() -> None:
            try:
                await work()  # made here: the task may be cancelled before it begins
            except Exception as error:  # noqa: BLE001  (whoever waits gets it)
                one.fail(error)

        task = self.worker.start_task(watched())
        one.tasks.add(task)
        task.add_done_callback(partial(self._on_ended, one))

    @staticmethod
    def _on_ended(one: Pass, task: asyncio.Task[None]) -> None:
        """Let a pass fail if its work was cancelled: nothing else would tell of it."""
        one.tasks.discard(task)
        if task.cancelled():
            one.fail(AutogradError(_ABORTED))

    # --- asking others ---------------------------------------------------------------

    def _send(
        self,
        one: Pass,
        asked: Sequence[Received],
        given: Sequence[Received],
        gradients: Mapping[Received, torch.Tensor],
    ) -> None:
        """Ask the senders of received tensors to take part, or give them gradients."""
        for leaf in (*asked, *given):
            one.new.pop(leaf, None)
        coming, going = messages.by_sender(asked), messages.by_sender(given)
        for peer in coming | going:
            leaves = going.get(peer, [])
            found = [gradients.get(leaf) for leaf in leaves]
            plan = [
                *one.ids[0],
                *one.ids[1],
                one.root,
                _flags(one),
                messages.keys_of(coming.get(peer, [])),
                messages.keys_of(leaves),
                self._keep_history(one.state, peer, found),
            ]
            # As the arguments of a call: for those serde has a shortcut.
            self._request(one, peer, "advance", [found, {"plan": plan}])

    def _keep_history(
        self,
        state: ContextState,
        peer: WorkerId,
        gradients: Sequence[torch.Tensor | None],
    ) -> list[Any] | None:
        """Record gradients that have a history as what they are: tensors sent."""
        having = [
            (index, gradient)
            for index, gradient in enumerate(gradients)
            if gradient is not None and gradient.requires_grad
        ]
        if not having:
            return None
        message = MessageId(self.worker.incarnation, self._next())
        sent = Sent.of([gradient for _, gradient in having], peer)
        state.note_sent(message, sent)
        return [message.serial, *(index for index, _ in having)]

    def _with_history(
        self,
        link: Link,
        gradients: Sequence[torch.Tensor | None],
        history: Sequence[Any],
    ) -> list[torch.Tensor | None]:
        """Make gradients that have a history on another worker differentiable here."""
        serial, *indices = history
        message = MessageId(link.peer.incarnation, serial)
        found = list(gradients)
        for position, index in enumerate(indices):
            gradient = found[index]
            assert gradient is not None  # `messages.advance` has looked
            one = Received(CrossingId(message, position), link.peer)
            found[index] = self.receive(gradient, one)
        return found

    def receive(self, tensor: torch.Tensor, received: Received) -> torch.Tensor:
        """Give a tensor that has come a history."""
        return received_as(self._anchor, tensor, received)

    def _request(
        self, one: Pass, peer: WorkerId, method: str, value: list[Any]
    ) -> None:
        one.onward[peer.incarnation] = peer
        one.wave.outstanding += 1
        link = self.worker.directory.link_of(peer.incarnation)
        if link is not None:
            self._request_over(one, link, method, value)
        else:
            self._start(one, partial(self._dial, one, peer, method, value))

    async def _dial(
        self, one: Pass, peer: WorkerId, method: str, value: list[Any]
    ) -> None:
        link = await self.worker.link_to(peer.name)
        if link.peer.incarnation != peer.incarnation:
            raise AutogradError(
                f"worker {peer.name!r} has been restarted since it took part"
            )
        self._request_over(one, link, method, value)

    def _request_over(
        self, one: Pass, link: Link, method: str, value: list[Any]
    ) -> None:
        # Gradients go by the host: who gets one knows where the tensor was.
        call = link.request_service(SERVICE, method, value, device_map=TO_HOST)
        call.add_done_callback(partial(self._on_answer, one, link.peer.name))

    def _on_answer(self, one: Pass, peer: str, call: asyncio.Future[Any]) -> None:
        one.wave.outstanding -= 1
        error = AutogradError(_ABORTED) if call.cancelled() else call.exception()
        if error is not None:
            one.fail(error)
            return
        try:
            REPORTS(f"the answer of {peer!r} to a backward pass", call.result())
        except MalformedError as wrong:
            one.fail(wrong)
            return
        one.wave.hear(call.result())
        one.look_up()

    # --- who takes part is known -----------------------------------------------------

    async def _close(self, one: Pass) -> list[list[int]]:
        """Nobody takes part who has not been asked: go on, and tell the others."""
        if one.is_settled:
            return []
        one.is_settled = True
        one.machine.rule_out()
        for peer in list(one.onward.values()):
            if peer.incarnation not in (self.worker.incarnation, one.ids[1][0]):
                self._request(one, peer, "close", [*one.ids[0], *one.ids[1]])
        return await self._work(one)

    async def _on_close(self, link: Link, value: Any) -> list[list[int]]:
        ids = read_ids(value)
        state = self.state(ids[0])
        one = state.passes.get(ids[1])
        if one is None:
            raise AutogradError(_ABORTED)
        if link.peer.incarnation not in one.inward:
            raise MalformedError(
                f"worker {link.peer.name!r} closed a backward pass that it did not ask "
                "this worker to take part in"
            )
        one.check()
        return await self._close(one)

    # --- what a pass waits for -------------------------------------------------------

    async def _raise_stuck(self, one: Pass) -> None:
        """All is quiet, and something still waits: say what."""
        text = "; ".join(await self._waits(one, []))
        if one.is_fast:
            text += (
                ". FAST takes every tensor that was sent in the context to be used by "
                "the roots; use mode='smart'"
            )
        raise AutogradError(text)

    async def _waits(self, one: Pass, path: list[int]) -> list[str]:
        me, name = self.worker.incarnation, self.worker.name
        lines = []
        if one.wave.is_running:
            lines.append(f"worker {name!r} runs its part of the graph")
        for message, position in one.machine.waits_for:
            sent = one.state.sent.get(message)
            to = "" if sent is None else f" to {sent.to.name!r}"
            lines.append(
                f"worker {name!r} waits for the gradient of tensor {position} of "
                f"message {message.serial}{to}"
            )
        here = [*path, me]
        value = [*one.ids[0], *one.ids[1], here]
        asked = {}
        for peer in one.onward.values():
            link = self.worker.directory.link_of(peer.incarnation)
            if link is not None and peer.incarnation not in here:
                asked[peer.name] = link.request_service(SERVICE, "waits", value)
        if asked:
            await asyncio.wait(asked.values(), timeout=EXPLAIN_S / (1 + len(path)))
        for to, call in asked.items():
            said = lines_in(call)
            if said is None:
                call.cancel()
                said = [f"worker {to!r} does not answer {name!r}"]
            lines += said
        return list(dict.fromkeys(lines))

    async def _on_waits(self, _link: Link, value: Any) -> list[str]:
        ids = read_ids(value)
        one = self.state(ids[0]).passes.get(ids[1])
        return [] if one is None else await self._waits(one, value[4])

    # --- workers that are lost -------------------------------------------------------

    def _on_lost(
        self, context_id: ContextId, state: ContextState, peer: WorkerId
    ) -> None:
        """A worker is lost: end its passes; ask how those ended that it told us of."""
        for pass_id, one in list(state.passes.items()):
            ids = context_id, pass_id
            if pass_id[0] == peer.incarnation:
                self._finish(ids, commit=False)
            elif peer.incarnation in one.inward and one.root != self.worker.name:
                self.worker.start_task(self._ask_outcome(ids, one.root))

    async def _ask_outcome(self, ids: Ids, root: str) -> None:
        """Nobody may tell us how a pass has ended: ask who began it."""
        is_good = False
        try:
            link = await self.worker.link_to(root)
            if link.peer.incarnation == ids[1][0]:
                value = [*ids[0], *ids[1]]
                is_good = bool(await link.request_service(SERVICE, "outcome", value))
        except AsyncRpcError:
            pass  # who began it is lost as well
        self._finish(ids, commit=is_good)

    async def _on_join(self, link: Link, value: Any) -> bool:
        state = self._contexts.get(messages.read_context(value))
        if state is not None:
            state.peers.add(link.peer)
        return state is not None

    async def _on_outcome(self, _link: Link, value: Any) -> bool:
        context_id, pass_id = read_ids(value)
        state = self._contexts.get(context_id)
        return False if state is None else await state.outcome(pass_id)


def _never_sent(crossing: CrossingId, state: ContextState) -> AutogradError:
    return AutogradError(
        f"nothing was sent as {crossing} in context {state.id}; was the tensor "
        "received in another context?"
    )


def _flags(one: Pass) -> int:
    keeping = one.keeping
    return (
        _RETAIN * keeping.retain_graph
        | _CREATE * keeping.create_graph
        | _FAST * one.is_fast
    )

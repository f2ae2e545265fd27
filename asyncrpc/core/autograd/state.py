"""One worker's state of an autograd context, and of the passes in it."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Final, Self

import torch
from torch.autograd.graph import GradientEdge, Node

from asyncrpc.core.autograd.engine import Flow, Keeping, is_apart
from asyncrpc.core.autograd.functions import (
    CrossingId,
    Received,
    Region,
    edge_of,
    following,
    total,
)
from asyncrpc.core.autograd.inline import PLAIN, is_plain, without_functions
from asyncrpc.core.autograd.machine import LocalPass, Wave
from asyncrpc.core.autograd.messages import Advance, PassAnswer, PassId, PassIds
from asyncrpc.core.ids import ContextId, Incarnation, MessageId, WorkerId
from asyncrpc.core.loop.waits import WaitDescription, WaitKind, waits
from asyncrpc.errors import AutogradError, MalformedError

ABORTED: Final = "the pass has been aborted"


@dataclass(frozen=True, slots=True)
class Sent:
    """The tensors that a message took out of this worker's graph.

    Attributes:
        edges: where the gradient of each tensor enters.
        devices: the device of each; None: all are in host memory.
    """

    edges: list[GradientEdge]
    to: WorkerId
    devices: list[str] | None = None

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], to: WorkerId) -> Self:
        """Record tensors as they are now."""
        edges = [edge_of(tensor) for tensor in tensors]
        if all(type(tensor) in PLAIN and tensor.is_cpu for tensor in tensors):
            return cls(edges, to)
        with without_functions():
            if all(tensor.is_cpu for tensor in tensors):
                return cls(edges, to)
            return cls(edges, to, [str(tensor.device) for tensor in tensors])


class ContextState:
    """One worker's state of one context.

    Attributes:
        id: the same on every worker.
        creator: the worker that opened it, whose name may not be known.
        sent: where gradients of sent tensors enter, by message.
        sent_to: workers that messages of this context went to.
        brought_by: workers that messages of this context came from first.
        joined: workers that have asked to be told the end of this context.
        passes: backward passes under way.
        ended: passes that are over, and whether they succeeded.
        given_up: passes that are not known here, by workers that did not begin them and
            have told their end: it may overtake their requests.
        kept_for: how much is noted here that each worker has brought.
        tensors_sent: the number of tensors in all messages.
        prefetched: the local graph behind all sent tensors, as far as it was walked.
        is_prefetching: whether the walk goes on when the loop has time.
        region_class: the class that finds a part of the local graph.
    """

    region_class: ClassVar[type[Region]] = Region

    __slots__ = (
        "_committed",
        "_later",
        "_lock",
        "_pass_ended",
        "brought_by",
        "creator",
        "ended",
        "given_up",
        "id",
        "is_prefetching",
        "joined",
        "kept_for",
        "passes",
        "prefetched",
        "sent",
        "sent_to",
        "tensors_sent",
    )

    def __init__(self, context_id: ContextId, creator: WorkerId) -> None:
        self.id = context_id
        self.creator = creator
        self.sent: dict[MessageId, Sent] = {}
        self.sent_to: set[WorkerId] = set()
        self.brought_by: set[WorkerId] = set()
        self.joined: set[WorkerId] = set()
        self.passes: dict[PassId, Pass] = {}
        self.ended: dict[PassId, bool] = {}
        self.given_up: set[tuple[PassId, Incarnation]] = set()
        self.kept_for: Counter[Incarnation] = Counter()
        self.tensors_sent = 0
        self.prefetched = self.region_class()
        self.is_prefetching = False
        self._pass_ended = asyncio.Event()
        self._committed: dict[torch.Tensor, torch.Tensor] = {}
        # What the loop must not add up, the thread that reads it does.
        self._later: list[dict[torch.Tensor, torch.Tensor]] = []
        self._lock = threading.Lock()

    def note_sent(self, message: MessageId, sent: Sent) -> None:
        """Record the tensors that a message takes out of the graph."""
        self.sent[message] = sent
        self.tensors_sent += len(sent.edges)
        self.prefetched.begin(sent.edges)

    @property
    def peers(self) -> set[WorkerId]:
        """The workers that are told the end of the context."""
        return self.sent_to | self.brought_by | self.joined

    def has_part(self, peer: WorkerId) -> bool:
        """Return whether a worker is one of `peers`."""
        return peer in self.brought_by or peer in self.sent_to or peer in self.joined

    def check_part(self, peer: WorkerId) -> None:
        """Refuse a message of a worker that has no part in the context."""
        if (
            peer.incarnation != self.id.creator
            and peer not in self.brought_by
            and peer not in self.sent_to
        ):
            raise MalformedError(
                f"worker {peer.name!r} has no part in autograd context {self.id}"
            )

    def check_sent(self, peer: WorkerId, crossings: Iterable[CrossingId]) -> None:
        """Refuse gradients of tensors that were not sent to their sender."""
        for crossing in crossings:
            sent = self.sent.get(crossing.message)
            if sent is None or crossing.position >= len(sent.edges):
                raise self.never_sent(crossing)
            if sent.to != peer:
                raise MalformedError(
                    f"worker {peer.name!r} sent a gradient for {crossing}, which "
                    f"was sent to {sent.to.name!r}"
                )

    def never_sent(self, crossing: CrossingId) -> AutogradError:
        """Return the error about a gradient of a tensor that was not sent."""
        return AutogradError(
            f"nothing was sent as {crossing} in context {self.id}; was the tensor "
            "received in another context?"
        )

    def join_pass(self, pass_id: PassId, root: str, keeping: Keeping) -> Pass:
        """Return a backward pass, made if it is new here."""
        backward_pass = self.passes.get(pass_id)
        if backward_pass is not None:
            return backward_pass
        if pass_id in self.ended:
            raise AutogradError(ABORTED)
        edges = dict(self._edges())
        backward_pass = self.passes[pass_id] = Pass(self, pass_id, root, edges, keeping)
        return backward_pass

    def _edges(self) -> Iterator[tuple[CrossingId, GradientEdge]]:
        for message, sent in self.sent.items():
            for position, edge in enumerate(sent.edges):
                yield CrossingId(message, position), edge

    def end_pass(self, pass_id: PassId, *, commit: bool) -> Pass | None:
        """Forget a backward pass, and return it if it was known."""
        self.ended.setdefault(pass_id, commit)
        self._pass_ended.set()
        return self.passes.pop(pass_id, None)

    async def outcome(self, pass_id: PassId) -> bool:
        """Wait until a pass has ended; return whether it has succeeded."""
        while pass_id in self.passes:  # its root, or the loss of its root, ends it
            self._pass_ended.clear()
            await self._pass_ended.wait()
        return self.ended.get(pass_id, False)

    async def settled(self) -> None:
        """Wait until no backward pass runs here."""
        while self.passes:  # as above; and the end of this worker ends them all
            self._pass_ended.clear()
            await self._pass_ended.wait()

    def commit(
        self, gradients: dict[torch.Tensor, torch.Tensor], *, defers: bool = False
    ) -> None:
        """Add the gradients of a pass that has succeeded everywhere."""
        if not (self._committed or self._later):
            self._committed.update(gradients)
            return
        # A gradient of a subclass may add up in user code.
        if any(
            (earlier := self._committed.get(key)) is not None
            and not (
                is_plain(earlier)
                and is_plain(gradient)
                and (gradient.is_cpu or not defers)
            )
            for key, gradient in gradients.items()
        ):
            self._later.append(gradients)
        else:
            self._add(gradients)

    def _add(self, gradients: dict[torch.Tensor, torch.Tensor]) -> None:
        for parameter, gradient in gradients.items():
            earlier = self._committed.get(parameter)
            self._committed[parameter] = total(earlier, gradient)

    def gradients_with(
        self, staged: dict[torch.Tensor, torch.Tensor]
    ) -> dict[torch.Tensor, torch.Tensor] | None:
        """Return `gradients` as they are once a pass that staged these is committed.

        None: some are still to be added up.
        """
        if self._later or not self._committed.keys().isdisjoint(staged):
            return None
        return self._committed | staged if self._committed else staged

    @property
    def is_added_up(self) -> bool:
        """Return whether `gradients` need not add up."""
        return not self._later

    @property
    def gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        """Return the gathered and committed gradients, by leaf tensor.

        Thread safety: from any thread.
        """
        with self._lock:
            while self._later:
                self._add(self._later.pop(0))
        return self._committed


@dataclass(slots=True)
class StepAfterPass:
    """A step that the only owner of an optimizer's parameters takes after a pass.

    It goes with the last gradients of the pass, if they are for the owner: a round trip
    less.

    Attributes:
        owner: the worker that is to take it.
        content: as `optim.step` brings it.
        is_open: whether it has been sent and nothing has been heard of it.
        answer: as `optim.step` answers; None: it was not taken.
    """

    owner: Incarnation
    content: list[Any]
    is_open: bool = False
    answer: list[Any] | None = None


@dataclass(slots=True)
class VotesWithPass:
    """Votes on a step, which come with a pass: a round trip less before the step.

    Attributes:
        serial: number of the optimizer at the worker that begins the pass.
        are_sure: by worker, whether the step cannot raise there; of workers that took
            part and had something to vote on, once the pass has succeeded.
    """

    serial: int
    are_sure: dict[int, bool] = field(default_factory=dict)


class Pass:
    """One backward pass on one worker.

    Attributes:
        ids: of the context and of the pass, the same on every worker that takes part.
        root: name of the worker that began it.
        keeping: whether the graph is kept.
        edges: where gradients enter, by crossing: of every sent tensor, and of roots.
        region: the local graph that takes part.
        machine: decides which part of it may run.
        flow: gradients on their way through the graph.
        began_s: when this worker began to take part, by its clock; 0: not noted yet.
        task: name of the task that began it here; empty if another worker did.
        arrived: gradients that have arrived and have not entered the graph.
        new: received tensors that were reached; their senders do not know yet.
        going_back: gradients for the worker that waits for the answer; or None.
        onward: the workers that this one asked to take part; it tells them the end.
        inward: the workers that asked this one.
        tasks: tasks that run for the pass here beside the requests.
        failure: its error, from here or elsewhere; None again once it is aborted.
        is_fast: whether every sent tensor is assumed to take part.
        is_settled: whether it is known which workers take part.
        step: of an optimizer, to be taken after it; at the worker that began it.
        votes_on: number of an optimizer of that worker, on whose step all vote.
        variables: context variables of the task that began it here; None if another
            worker did.
    """

    __slots__ = (
        "_aborted_because",
        "_idle",
        "arrived",
        "began_s",
        "edges",
        "failure",
        "flow",
        "going_back",
        "ids",
        "inward",
        "is_fast",
        "is_settled",
        "keeping",
        "machine",
        "new",
        "onward",
        "region",
        "root",
        "state",
        "step",
        "task",
        "tasks",
        "variables",
        "votes_on",
        "wave",
    )

    def __init__(
        self,
        state: ContextState,
        pass_id: PassId,
        root: str,
        edges: dict[CrossingId, GradientEdge],
        keeping: Keeping,
    ) -> None:
        self.ids = PassIds(state.id, pass_id)
        self.began_s = 0.0
        self.task = ""
        self.variables: contextvars.Context | None = None
        self.state = state
        self.root = root
        self.keeping = keeping
        self.edges = edges
        self.region = state.region_class()
        may_start = {key: edge.node for key, edge in edges.items()}
        self.machine: LocalPass[CrossingId, Node] = LocalPass(
            following, self.region.nodes, may_start, is_apart
        )
        self.wave = Wave()
        self.flow = Flow()
        self.arrived: dict[CrossingId, torch.Tensor | None] = {}
        self.new: dict[Received, None] = {}
        self.going_back: Advance | None = None
        self.onward: dict[Incarnation, WorkerId] = {}
        self.inward: dict[Incarnation, WorkerId] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.failure: BaseException | None = None
        self.is_fast = False
        self.is_settled = False
        self.step: StepAfterPass | None = None
        self.votes_on: int | None = None
        self._aborted_because = ""
        self._idle: asyncio.Future[None] | None = None

    def take_part(self, crossings: list[CrossingId]) -> None:
        """Let tensors take part: find the graph that they reach."""
        is_all = len(crossings) == len(self.edges) == self.state.tensors_sent
        if is_all and not self.region.nodes:
            nodes = self.region.adopt(self.state.prefetched)
        else:  # some of them, or roots
            edges = [self.edges[crossing] for crossing in crossings]
            nodes = self.region.extend(edges)
        self.new.update(dict.fromkeys(nodes))

    def enter(self, gradients: dict[CrossingId, torch.Tensor | None]) -> None:
        """Take gradients that have arrived."""
        self.machine.arrive(gradients)
        self.arrived.update(gradients)

    def fail(self, error: BaseException) -> None:
        """Tell the waiting tasks that the pass has failed."""
        if not self._is_over:
            self.failure = error
        self.look_up()

    @property
    def _is_over(self) -> bool:
        return self.failure is not None or bool(self._aborted_because)

    def check(self) -> None:
        """Raise the error of the pass, if it has failed."""
        if self.failure is not None:
            raise self.failure
        if self._aborted_because:
            raise AutogradError(self._aborted_because)

    def look_up(self) -> None:
        """Wake the waiting tasks if nothing is under way any more."""
        idle, is_over = self._idle, self.wave.is_idle or self._is_over
        if is_over and idle is not None and not idle.done():
            idle.set_result(None)

    @property
    def is_done(self) -> bool:
        """Return whether this worker has done all that it knows of."""
        return self.machine.is_done and not self.flow.endings

    def answer(self, me: Incarnation, *, is_sure: bool | None = None) -> PassAnswer:
        """Return the answer for the waiting worker, when all has ended here."""
        reports = self.wave.disengage(me, is_done=self.is_done, is_sure=is_sure)
        back, self.going_back = self.going_back, None
        if back is None:
            return PassAnswer([], reports, [], [], None, None)
        return PassAnswer(
            back.gradients, reports, back.asked, back.given, back.history, None
        )

    @waits(lambda at: at["self"].wait_now())
    async def idle(self) -> None:
        """Wait until nothing is under way for the pass here."""
        while not self._is_over and not self.wave.is_idle:
            self._idle = asyncio.get_running_loop().create_future()
            await self._idle  # work under way ends, well or not, and calls `look_up`
        self.check()

    def wait_now(self) -> WaitDescription:
        """Describe what it waits for: work for it, here and at peers."""
        return WaitDescription(
            WaitKind.BACKWARD, "its backward pass", self, is_part=self._asked_by
        )

    def _asked_by(self, call: Any) -> bool:
        """Return whether a call asks a peer to take part; its callback has the pass."""
        callbacks = tuple(getattr(call, "_callbacks", None) or ())
        return any(
            isinstance(callback, partial) and any(arg is self for arg in callback.args)
            for callback, _ in callbacks
        )

    def abort(self, reason: str) -> None:
        """End the work here."""
        for task in self.tasks:
            task.cancel()
        self.flow.is_over = True
        for ending in self.flow.endings:
            ending.give_up()
        # An error's traceback holds frames, and these hold the pass.  If the pass kept
        # the error, both would last until the garbage collector runs.
        self._aborted_because, self.failure = reason, None
        self.look_up()

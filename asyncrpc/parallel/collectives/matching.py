"""One group at one rank: running collectives, messages for them, and failures.

A collective fails on all ranks: the rank that notices tells every other.  A failure of
one collective does not affect the next ones; a lost rank fails them all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgpack
import torch

from asyncrpc.core.calls.futures import task_here
from asyncrpc.core.members import UNKNOWN_INCARNATION
from asyncrpc.errors import (
    AsyncRpcError,
    CollectiveError,
    MalformedError,
    RejectedError,
    WorkerLostError,
)
from asyncrpc.extend import (
    Incarnation,
    Notice,
    PeerLink,
    ServiceHost,
    WaitDescription,
    WaitKind,
    WorkerId,
    ask,
    waits,
)
from asyncrpc.parallel.collectives import messages as m
from asyncrpc.parallel.collectives.failure_errors import error_of
from asyncrpc.parallel.collectives.machine.matching import MatchedCollectives
from asyncrpc.parallel.collectives.machine.operations import (
    CollectiveFailure,
    Descriptor,
    MessageKey,
    Mismatch,
    Operation,
)
from asyncrpc.parallel.collectives.points import Points
from asyncrpc.trace import OK, outcome_of

# After this wait a rank tells the others which collective it waits in.  So ranks that
# wait in another collective notice the mismatch, and no rank waits forever.
ASK_AFTER_S: Final = 1.0
CLOSED: Final = "has closed"
ANSWER_S: Final = 2.0  # at a timeout, for the others to answer how far they are


@dataclass(slots=True)
class ReceivedTensors:
    """Tensors from another rank, and the future of the answer to that rank."""

    tensors: Sequence[torch.Tensor]
    answer: asyncio.Future[CollectiveFailure | None]


@dataclass
class EarlyMessages:
    """What a worker has said of a group that is not made here.

    Attributes:
        sender: this life of the worker.
        takes: take the messages, once the group is made.
    """

    sender: Incarnation
    takes: list[Callable[[], None]] = field(default_factory=list)
    nbytes: int = 0


class Matching:
    """The collectives of one group at one rank; carries out `machine.matching`.

    Attributes:
        machine: the machine, which only this object changes.
        label: the description of the group in errors.
        members: names of the workers, by rank; empty before the group is made here.
        path: the name of the group, with those of the groups that it is part of.
        is_elastic: whether it is a generation of an elastic group.
        lives: the incarnations of the members, as known when the group was made.
        early: what comes before the group is made here, by the name of its sender.
    """

    def __init__(self, worker: ServiceHost, group_id: int) -> None:
        self.worker = worker
        self.loop = worker.loop
        self.id = group_id
        self.machine: MatchedCollectives[ReceivedTensors] = MatchedCollectives()
        # Read in each collective, and told by the machine once.
        self.label = self.machine.label
        self.members = self.machine.members
        self.rank = self.machine.rank
        self.path = ""
        self.is_elastic = False
        self.lives: Mapping[str, Incarnation | None] = {}
        self.early: dict[str, EarlyMessages] = {}
        self.runs: dict[int, CollectiveRun] = {}
        self.points = Points(self)

    @property
    def lost(self) -> CollectiveFailure | None:
        """The failure by the first rank that is gone; None: no rank is gone."""
        return self.machine.lost

    def name_of(self, rank: int) -> str:
        """Return the description of a rank in errors."""
        return self.machine.name_of(rank)

    def join(self, label: str, members: Sequence[str], rank: int) -> None:
        """Set the members of the group; take what has been kept of them."""
        self.label, self.members, self.rank = label, members, rank
        self.machine.join(label, members, rank)
        early, self.early = self.early, {}
        for kept in early.values():
            for take in kept.takes:
                take()

    def has(self, peer: WorkerId) -> bool:
        """Return whether this life of a worker may be the member.

        The news of a loss may come long after the worker has been restarted.
        """
        life = self.lives.get(peer.name)
        return life in (None, UNKNOWN_INCARNATION, peer.incarnation)

    # --- beginning and ending --------------------------------------------------------

    def begin(self, descriptor: Descriptor, timeout_s: float | None) -> CollectiveRun:
        """Begin the next collective."""
        number = self.machine.operations.begun
        operation = self.machine.begin(descriptor)
        if self.machine.outbox:
            self._carry_out()
        if isinstance(operation, CollectiveFailure):
            if self.machine.operations.begun > number:  # nothing begins in a lost group
                now_s = self.worker.recorder.now_s()
                task = task_here(self.loop)
                self.note_end(number, descriptor, now_s, operation, task)
            raise error_of(operation)
        run = CollectiveRun(self, operation)
        self.runs[operation.number] = run
        run.watch(timeout_s)
        return run

    def refuse(self, reason: str) -> None:
        """Take the number of the next collective, and fail it for all ranks."""
        failure = self.machine.refuse(reason)
        self._carry_out()
        if failure is not None:
            raise error_of(failure)

    def end(self, run: CollectiveRun) -> None:
        """End a collective here, passed or failed."""
        self.machine.operations.end(run.operation)
        del self.runs[run.number]
        for place, arrival in run.operation.arrived.items():
            if not arrival.answer.done():
                failure = self.machine.too_late(run.number, place.rank)
                arrival.answer.set_result(failure)

    def note_end(
        self,
        number: int,
        descriptor: Descriptor,
        began_s: float,
        failure: CollectiveFailure | None,
        task: str,
    ) -> None:
        """Note that a collective that a task began has ended here."""
        recorder = self.worker.recorder
        recorder.collectives.record(
            (
                recorder.now_s(),
                began_s,
                self.label,
                descriptor.operation,
                number,
                self.rank,
                self.members,
                descriptor.dtype,
                descriptor.shape,
                OK if failure is None else outcome_of(error_of(failure)),
                self.id,
                task,
            )
        )

    # --- messages of other ranks -----------------------------------------------------

    async def on_block(self, block: m.TensorBlock) -> CollectiveFailure | None:
        """Take a message; return once it has been consumed, or its refusal."""
        number, rank = block.number, block.rank
        failure = self.machine.refusal_of(number, rank, block.descriptor)
        if self.machine.outbox:
            self._carry_out()
        if failure is not None:
            return failure
        place = MessageKey(rank, block.turn)
        arrival = ReceivedTensors(block.tensors, self.loop.create_future())
        operation = self.machine.operations.arrive(number, place, arrival)
        if operation is not None:
            self.runs[number].on_arrival(place)
        return (
            await arrival.answer
        )  # `_carry_out` also completes it, for example for a lost rank

    def on_begun(self, number: int, rank: int, descriptor: Descriptor) -> None:
        """Take another rank's report of a collective that it has begun."""
        self.machine.receive(number, rank, descriptor)
        self._carry_out()

    def on_mismatch(self, number: int, mismatch: Mismatch) -> None:
        """Fail a collective because two ranks began different ones under its number."""
        self.machine.on_mismatch(number, mismatch)
        self._carry_out()

    def on_failed(self, number: int, failure: CollectiveFailure) -> None:
        """Take a failure that another rank has sent."""
        self.machine.receive_failure(number, failure)
        self._carry_out()

    # --- failing ---------------------------------------------------------------------

    def fail(self, number: int, failure: CollectiveFailure) -> None:
        """Fail a collective, here and on all other ranks."""
        self.machine.fail(number, failure)
        self._carry_out()

    def _carry_out(self) -> None:
        """Carry out the machine's failures; see `machine.matching`."""
        outbox = self.machine.outbox
        while outbox:
            failing = outbox.pop(0)
            for arrival in failing.messages:
                if not arrival.answer.done():
                    arrival.answer.set_result(failing.failure)
            run = self.runs.get(failing.number)
            if run is not None:
                run.wake()
            if failing.is_news:
                failed = m.CollectiveFailed(self.id, failing.number, failing.failure)
                self.tell(failed)

    def lose(
        self, failure: CollectiveFailure, *, ended: int = 0, tell: bool = True
    ) -> None:
        """Fail all present and later collectives that need a rank that is gone."""
        if self.machine.lost is None:
            self.points.fail(failure)
        is_news = self.machine.lose(failure, ended=ended)
        self._carry_out()
        if is_news and tell:
            self.tell(m.RankGone(self.id, failure))

    def leave(self, deed: str = CLOSED) -> None:
        """Leave the group: tell the others which collectives this rank has ended."""
        was_whole = self.machine.lost is None
        ended, failure = self.machine.leave(deed)
        if was_whole:
            self.points.fail(failure)
        self._carry_out()
        self.tell(m.GroupLeft(self.id, ended, failure))

    def on_lost(self, name: str, reason: str) -> None:
        """Fail the group if a lost worker is a member."""
        failure = self.machine.loss_of(name, reason)
        if failure is not None:
            self.lose(failure)

    def tell(self, notice: Notice) -> None:
        """Send a notice to every other rank, also to ranks without a link."""
        for rank in range(len(self.members)):
            if rank != self.rank:
                self._tell(rank, notice)

    def wake(self, rank: int) -> None:
        """Tell a rank that the board holds the data that it sleeps for."""
        self._tell(rank, m.WakeUp(self.id))

    def _tell(self, rank: int, notice: Notice) -> None:
        name = self.members[rank]
        link = self.worker.open_link_to(name)
        if link is not None:
            link.tell(notice, at_once=True)
        elif not self.worker.is_draining:
            self.worker.start_task(self._dial_and_tell(name, notice))

    def on_woke(self) -> None:
        """Wake all collectives: the board holds data that this rank sleeps for."""
        for run in self.runs.values():
            run.wake()

    async def _dial_and_tell(self, name: str, notice: Notice) -> None:
        try:
            link = await self.worker.link_to(name)
        except AsyncRpcError:
            return  # it is lost, which other ranks report
        link.tell(notice, at_once=True)

    # --- timeouts --------------------------------------------------------------------

    async def give_up(self, run: CollectiveRun, timeout_s: float) -> None:
        """Fail a collective whose time limit has passed; find the late ranks."""
        others = [rank for rank in range(len(self.members)) if rank != self.rank]
        begun = await asyncio.gather(*(self._begun_by(rank) for rank in others))
        counts = dict(zip(others, begun, strict=True))
        self.machine.give_up(run.number, timeout_s, counts)
        self._carry_out()

    async def _begun_by(self, rank: int) -> int | None:
        """Ask a rank how many collectives it has begun; None: it does not answer."""
        try:
            async with asyncio.timeout(ANSWER_S):
                link = await self.worker.link_to(self.members[rank])
                return await ask(link, m.CountBegun(self.id))
        except (AsyncRpcError, TimeoutError):
            return None

    async def link(self, rank: int) -> PeerLink:
        """Return the link to a rank."""
        name = self.members[rank]
        link = self.worker.open_link_to(name)
        if link is not None:
            return link
        try:
            return await self.worker.link_to(name)
        except AsyncRpcError as error:
            self.on_lost(name, str(error))
            lost = self.machine.last_lost
            assert lost is not None  # at least for this
            raise error_of(lost) from error


class CollectiveRun:
    """One collective under way: its messages to and from other ranks.

    Attributes:
        matching: the `Matching` of its group.
        operation: the machine's record of it.
        began_s: when it began here.
        task: name of the task that began it.
    """

    def __init__(
        self, matching: Matching, operation: Operation[ReceivedTensors]
    ) -> None:
        self.matching = matching
        self.operation = operation
        self.number = operation.number
        # The header of the collective on the board.
        self.head = msgpack.packb([operation.number, *operation.descriptor])
        self._sent = [0] * len(matching.members)
        self._received = [0] * len(matching.members)
        self._unanswered = 0
        self._waits_for: MessageKey | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self.began_s = matching.worker.recorder.now_s()
        self.task = task_here(matching.loop)

    @property
    def label(self) -> str:
        """The description of the collective, as in errors."""
        operation = self.operation.descriptor.operation
        return f"{operation} {self.number} of {self.matching.label}"

    async def send(self, rank: int, tensors: Iterable[torch.Tensor]) -> None:
        """Send tensors to a rank; they must stay as they are until `settle`."""
        matching = self.matching
        link: PeerLink | None
        link = matching.worker.open_link_to(matching.members[rank])
        if link is None:
            link = await matching.link(rank)
        index = self._sent[rank]
        self._sent[rank] = index + 1
        descriptor = None if index else self.operation.descriptor
        block = m.TensorBlock(
            matching.id, self.number, matching.rank, index, descriptor, list(tensors)
        )
        try:
            answer = link.ask(block)
        except RejectedError as error:  # that rank shuts down
            self._on_refused(link.peer.name, error)
            self.check()
            raise
        self._unanswered += 1
        answer.add_done_callback(self._on_answer)

    @waits(lambda at: at["self"].wait_now())
    async def take(self, rank: int) -> Sequence[torch.Tensor]:
        """Return the next tensors from a rank; the caller owns them."""
        place = MessageKey(rank, self._received[rank])
        self._received[rank] += 1
        arrived = self.operation.arrived
        while place not in arrived:
            self._waits_for = place
            await self._wait()
        arrival = arrived.pop(place)
        if not arrival.answer.done():  # its sender may have been lost since
            arrival.answer.set_result(None)
        return arrival.tensors

    @waits(lambda at: at["self"].wait_now())
    async def settle(self) -> None:
        """Wait until all sent tensors have been consumed."""
        self._waits_for = None
        while self._unanswered:
            await self._wait()

    def wait_now(self) -> WaitDescription:
        """Describe the wait; a collective waits many times, on a new future each."""
        return WaitDescription(
            WaitKind.COLLECTIVE,
            self.label,
            members=tuple(self.matching.members),
            needs=tuple(group_labels(self.matching.path)),
            since_s=self.began_s,
        )

    def refuse(self, rank: int, deed: str) -> CollectiveError:
        """Fail the collective for a rank's deed; return the error to raise."""
        matching = self.matching
        failure = CollectiveFailure(
            CollectiveError.code,
            f"{self.label} has failed: {matching.name_of(rank)} {deed}",
            (matching.members[rank],),
        )
        matching.fail(self.number, failure)
        return error_of(failure)

    def abandon(self, deed: str) -> CollectiveError:
        """Give the collective up for all ranks; return the error to raise."""
        matching = self.matching
        if self.operation.failure is None:
            who = matching.name_of(matching.rank)
            problem = f"{self.label} has failed: {who} {deed}"
            names = (matching.members[matching.rank],)
            matching.fail(
                self.number, CollectiveFailure(CollectiveError.code, problem, names)
            )
        assert self.operation.failure is not None
        return error_of(self.operation.failure)

    def check(self) -> None:
        """Raise if the collective has failed."""
        if self.operation.failure is not None:
            raise error_of(self.operation.failure)

    @waits(lambda at: at["self"].wait_now())
    async def pause(self, limit_s: float) -> None:
        """Wait until the state has changed, for at most `limit_s` seconds."""
        timer = self.matching.loop.call_later(limit_s, self.wake)
        try:
            await self._wait()
        finally:
            timer.cancel()

    @waits(lambda at: at["self"].wait_now())
    async def until_done(self, other: asyncio.Future[Any]) -> None:
        """Wait for a future that this collective needs first."""
        other.add_done_callback(lambda _: self.wake())
        while not other.done():
            await self._wait()

    async def _wait(self) -> None:
        """Wait until the state has changed."""
        self.check()
        self._waiter = self.matching.loop.create_future()
        try:
            await self._waiter  # `fail` wakes it: for a lost rank, a limit, our `leave`
        finally:
            self._waiter = None
        self.check()

    def wake(self) -> None:
        """Wake the tasks that wait for a change."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def on_arrival(self, place: MessageKey) -> None:
        """Wake the collective if it waits for a message that has come."""
        if place == self._waits_for:
            self.wake()

    def _on_answer(self, answer: asyncio.Future[Any]) -> None:
        self._unanswered -= 1
        if answer.cancelled():
            return
        error, to = answer.exception(), getattr(answer, "to", "")
        failure: CollectiveFailure | None = None
        if error is None:
            try:
                failure = m.TensorBlock.read_answer(to, answer.result())
            except MalformedError as wrong:
                error = wrong
        if error is None:
            if failure is not None and self.operation.failure is None:
                self.matching.fail(self.number, failure)
        elif self.operation.failure is None:
            self._on_refused(to, error)
        if not self._unanswered:
            self.wake()

    def _on_refused(self, name: str, error: BaseException) -> None:
        """Fail the collective because a message could not be delivered."""
        matching = self.matching
        if isinstance(error, WorkerLostError):
            matching.on_lost(name, str(error))
            return
        problem = (
            f"{matching.name_of(matching.rank)} could not send to worker {name!r} in "
            f"{self.operation.descriptor.operation} {self.number} of "
            f"{matching.label}: {error}"
        )
        failure = CollectiveFailure(CollectiveError.code, problem, (name,))
        matching.fail(self.number, failure)

    # --- time ------------------------------------------------------------------------

    def watch(self, timeout_s: float | None) -> None:
        """Start the timers."""
        later = self.matching.loop.call_later
        self._timers.append(later(ASK_AFTER_S, self._ask))
        if timeout_s is not None:
            self._timers.append(later(timeout_s, self._give_up, timeout_s))

    def end(self) -> None:
        """Stop the timers, and end the collective here."""
        for timer in self._timers:
            timer.cancel()
        self.matching.end(self)
        descriptor, failure = self.operation.descriptor, self.operation.failure
        self.matching.note_end(
            self.number, descriptor, self.began_s, failure, self.task
        )

    def _ask(self) -> None:
        """Tell the others which collective this rank waits in."""
        matching = self.matching
        descriptor = self.operation.descriptor
        matching.tell(
            m.CollectiveBegun(matching.id, self.number, matching.rank, descriptor)
        )

    def _give_up(self, timeout_s: float) -> None:
        matching = self.matching
        matching.worker.start_task(matching.give_up(self, timeout_s))


def group_labels(path: str) -> Iterator[str]:
    """Yield the labels of a group and of its parent groups; see `waits.does`."""
    while path:
        yield group_label(path)
        path = path.rpartition("/")[0]


def group_label(path: str) -> str:
    """Return the label of what a group does; see `waits.does`."""
    return f"group {path}"

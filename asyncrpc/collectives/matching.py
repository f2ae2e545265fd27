"""One group at one rank: running collectives, messages for them, and failures.

A collective fails on all ranks: the rank that notices tells every other.  A failure of
one collective does not affect the next ones; a lost rank fails them all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgpack
import torch

from asyncrpc.collectives import messages as m
from asyncrpc.collectives.machine.operations import (
    CollectiveFailure,
    Descriptor,
    MessageKey,
    Mismatch,
    Operation,
    Operations,
)
from asyncrpc.collectives.points import Points
from asyncrpc.collectives.ports import GroupWorker
from asyncrpc.collectives.words import error_of
from asyncrpc.errors import (
    AsyncRpcError,
    CollectiveError,
    CollectiveTimeoutError,
    GroupChangedError,
    MalformedError,
    RankLostError,
    RejectedError,
    WorkerLostError,
)
from asyncrpc.ids import Incarnation, WorkerId
from asyncrpc.runtime.members import UNKNOWN_INCARNATION
from asyncrpc.runtime.messages import Notice
from asyncrpc.runtime.ports import PeerLink, ask

# How long a rank waits before it tells the others what it waits for: so those that wait
# for something else learn of it, and none waits for ever.
ASK_AFTER_S: Final = 1.0
ANSWER_S: Final = 2.0  # for the others to say how far they are, at a timeout


@dataclass(slots=True)
class ReceivedTensors:
    """Tensors from another rank, and what answers it once they are taken."""

    tensors: Sequence[torch.Tensor]
    taken: asyncio.Future[CollectiveFailure | None]


class Matching:
    """The collectives of one group at one rank."""

    def __init__(self, worker: GroupWorker, group_id: int) -> None:
        self.worker = worker
        self.loop = worker.loop
        self.id = group_id
        self.label = "a group"
        self.members: Sequence[str] = ()  # not known before the group is made here
        self.rank = -1
        self.lives: Mapping[str, Incarnation | None] = {}  # of members, as then known
        self.operations: Operations[ReceivedTensors] = Operations()
        # Why ranks are gone, and before which number collectives do without them: each
        # entry has a lower number than the one before it.
        self._gone: list[tuple[int, CollectiveFailure]] = []
        self.runs: dict[int, CollectiveRun] = {}
        self.points = Points(self)
        self._heard: dict[str, int | None] = {}  # who spoke before, as which rank

    def join(self, label: str, members: Sequence[str], rank: int) -> None:
        """The group has been made here; what strangers said of it before is dropped."""
        self.label, self.members, self.rank = label, members, rank
        for name, spoken in self._heard.items():
            if spoken is None or (spoken < len(members) and members[spoken] == name):
                continue
            problem = f"worker {name!r} is not rank {spoken} of {label}"
            failure = CollectiveFailure(GroupChangedError.code, problem, (name,))
            for arrival in self.operations.drop(spoken):
                if not arrival.taken.done():
                    arrival.taken.set_result(failure)
            self.points.drop(spoken, failure)
        self._heard.clear()

    def check_speaker(self, name: str, rank: int | None = None) -> None:
        """Refuse a worker that is not in the group, or does not have that rank.

        As far as is known: before the group is made here, a worker is believed as long
        as it says the same each time, and no other worker says it.

        Raises:
            MalformedError: it is not.
        """
        members = self.members
        if not members:
            others = [one for who, one in self._heard.items() if who != name]
            said = self._heard.setdefault(name, rank)
            if rank is not None and said is None:
                said = self._heard[name] = rank
            is_it = rank is None or (said == rank and rank not in others)
        elif rank is None:
            is_it = name in members
        else:
            is_it = rank < len(members) and members[rank] == name
        if not is_it:
            who = "a member" if rank is None else f"rank {rank}"
            raise MalformedError(f"worker {name!r} speaks as {who} of {self.label}")

    def is_hearsay_of(self, name: str) -> bool:
        """Return whether a group is known by the messages of this worker alone."""
        return not self.members and set(self._heard) <= {name}

    def has(self, peer: WorkerId) -> bool:
        """Return whether this life of a worker may be a member, and not a later one.

        Word that a worker was lost may come when it has been restarted long ago.
        """
        life = self.lives.get(peer.name)
        return life in (None, UNKNOWN_INCARNATION, peer.incarnation)

    # --- beginning and ending --------------------------------------------------------

    def begin(self, descriptor: Descriptor, timeout_s: float | None) -> CollectiveRun:
        """Begin the next collective.

        Raises:
            CollectiveError: it has failed already.
        """
        lost = self._lost_for(self.operations.begun)
        if lost is not None:
            raise error_of(lost)
        operation, mismatch = self.operations.begin(descriptor)
        if mismatch is not None:
            self.on_mismatch(operation.number, mismatch)
        if operation.failure is not None:
            self.operations.end(operation)
            raise error_of(operation.failure)
        run = CollectiveRun(self, operation)
        self.runs[operation.number] = run
        run.watch(timeout_s)
        return run

    def refuse(self, reason: str) -> None:
        """Take the number of the next collective, and let that one fail for all.

        Raises:
            CollectiveError: everything has failed before.
        """
        number = self.operations.begun
        lost = self._lost_for(number)
        if lost is not None:
            raise error_of(lost)
        who = self.name_of(self.rank)
        problem = f"collective {number} of {self.label} has failed: {who} {reason}"
        names = (self.members[self.rank],)
        self.fail(number, CollectiveFailure(CollectiveError.code, problem, names))
        operation, _ = self.operations.begin(Descriptor("refuse"))
        self.operations.end(operation)

    def end(self, run: CollectiveRun) -> None:
        """A collective has ended here, well or not."""
        self.operations.end(run.operation)
        self.runs.pop(run.number, None)
        for place, arrival in run.operation.arrived.items():
            if not arrival.taken.done():
                arrival.taken.set_result(self._too_late(run.number, place.rank, None))

    # --- what others send ------------------------------------------------------------

    async def on_block(self, block: m.TensorBlock) -> CollectiveFailure | None:
        """Take a message; return when it has been taken, or why it is refused."""
        number, rank, descriptor = block.number, block.rank, block.descriptor
        failure = self._lost_for(number) or self.operations.failure_of(number)
        if failure is None and self.operations.is_over(number):
            return self._too_late(number, rank, descriptor)
        if failure is None and descriptor is not None:
            self.on_begun(number, rank, descriptor)
            failure = self.operations.failure_of(number)
        if failure is not None:
            return failure
        place = MessageKey(rank, block.turn)
        arrival = ReceivedTensors(block.tensors, self.loop.create_future())
        operation = self.operations.arrive(number, place, arrival)
        if operation is not None:
            self.runs[number].on_arrival(place)
        return await arrival.taken  # `fail` completes it, too: of a lost rank, say

    def _too_late(
        self, number: int, rank: int, descriptor: Descriptor | None
    ) -> CollectiveFailure:
        """Return why nothing is taken from a rank for a collective that is over."""
        theirs, ours = self.name_of(rank), self.name_of(self.rank)
        what = "" if descriptor is None else f", and began {descriptor}"
        return CollectiveFailure(
            CollectiveError.code,
            f"the ranks do not agree on collective {number} of {self.label}: it is "
            f"over at {ours}, which has begun {self.operations.begun}, and {theirs} "
            f"sends to it{what}; all ranks have to begin the same ones in the same "
            "order",
            (self.members[rank], self.members[self.rank]),
        )

    def on_begun(self, number: int, rank: int, descriptor: Descriptor) -> None:
        """Take another rank's report of what it has begun."""
        mismatch = self.operations.hear(number, rank, descriptor)
        if mismatch is not None:
            self.on_mismatch(number, mismatch)

    def on_mismatch(self, number: int, mismatch: Mismatch) -> None:
        """Two ranks have begun different things."""
        theirs, ours = self.name_of(mismatch.rank), self.name_of(self.rank)
        self.fail(
            number,
            CollectiveFailure(
                CollectiveError.code,
                f"the ranks do not agree on collective {number} of {self.label}: "
                f"{theirs} began {mismatch.theirs}, {ours} began {mismatch.ours}; all "
                "ranks have to begin the same ones in the same order",
                (self.members[mismatch.rank], self.members[self.rank]),
            ),
        )

    # --- failing ---------------------------------------------------------------------

    def fail(
        self, number: int, failure: CollectiveFailure, *, tell: bool = True
    ) -> None:
        """Let a collective fail, here and at all others."""
        for arrival in self.operations.fail(number, failure):
            if not arrival.taken.done():
                arrival.taken.set_result(failure)
        run = self.runs.get(number)
        if run is not None:
            run.wake()
        if tell:
            self.tell(m.CollectiveFailed(self.id, number, failure))

    def on_failed(self, number: int, failure: CollectiveFailure) -> None:
        """Another rank says that a collective has failed."""
        operations = self.operations
        if not operations.is_over(number) and operations.failure_of(number) is None:
            self.fail(number, failure, tell=False)

    def lose(
        self, failure: CollectiveFailure, *, ended: int = 0, tell: bool = True
    ) -> None:
        """Let everything fail, now and later: a rank is gone.

        Args:
            failure: why.
            ended: collectives before this number do not need that rank any more.
            tell: whether the others are to learn of it from us.
        """
        if not self._gone:
            self.points.fail(failure)
        elif ended >= self._gone[-1][0]:
            return  # all of these have failed for a rank that was gone before
        for number in self.operations.numbers():
            if number >= ended and self._lost_for(number) is None:
                self.fail(number, failure, tell=False)
        self._gone.append((ended, failure))
        if tell:
            self.tell(m.RankGone(self.id, failure))

    @property
    def lost(self) -> CollectiveFailure | None:
        """Why every collective fails sooner or later; None: no rank is gone."""
        return self._gone[0][1] if self._gone else None

    def _lost_for(self, number: int) -> CollectiveFailure | None:
        """Return why a collective fails because a rank is gone, else None."""
        for ended, failure in self._gone:
            if number >= ended:
                return failure
        return None

    def leave(self) -> None:
        """Leave the group: tell the others which collectives this rank has ended."""
        who = self.name_of(self.rank)
        failure = CollectiveFailure(
            GroupChangedError.code,
            f"{who} has closed {self.label}",
            (self.members[self.rank],),
        )
        ended = min(self.runs, default=self.operations.begun)
        self.lose(failure, tell=False)
        self.tell(m.GroupLeft(self.id, ended, failure))

    def on_lost(self, name: str, reason: str) -> None:
        """A worker is gone; if it is one of ours, so is the group."""
        if name in self.members:
            who = self.name_of(self.members.index(name))
            problem = (
                f"{who} of {self.label} is lost: {reason}; make a group of those who "
                "are left"
            )
            self.lose(CollectiveFailure(RankLostError.code, problem, (name,)))

    def tell(self, notice: Notice) -> None:
        """Say something to every other rank, also to those never spoken to."""
        for rank in range(len(self.members)):
            if rank != self.rank:
                self._tell(rank, notice)

    def wake(self, rank: int) -> None:
        """Tell a rank that what it sleeps for on the board is there."""
        self._tell(rank, m.WakeUp(self.id))

    def _tell(self, rank: int, notice: Notice) -> None:
        name = self.members[rank]
        link = self.worker.directory.link_to(name)
        if link is not None:
            link.tell(notice, at_once=True)
        elif not self.worker.is_draining:
            self.worker.start_task(self._dial_and_tell(name, notice))

    def on_woke(self) -> None:
        """Something is there on the board that this rank sleeps for."""
        for run in self.runs.values():
            run.wake()

    async def _dial_and_tell(self, name: str, notice: Notice) -> None:
        try:
            link = await self.worker.link_to(name)
        except AsyncRpcError:
            return  # it is lost, which other ranks report
        link.tell(notice, at_once=True)

    # --- who is late -----------------------------------------------------------------

    async def give_up(self, run: CollectiveRun, timeout_s: float) -> None:
        """Let a collective fail that has taken too long; find out whose fault it is."""
        others = [rank for rank in range(len(self.members)) if rank != self.rank]
        begun = await asyncio.gather(*(self._begun_by(rank) for rank in others))
        if run.number not in self.runs:
            return
        late = [
            rank
            for rank, count in zip(others, begun, strict=True)
            if count is None or count <= run.number
        ]
        who = ", ".join(map(self.name_of, late))
        operation = run.operation.descriptor.operation
        what = (
            f"these did not come: {who}" if late else "all have come, and are too slow"
        )
        self.fail(
            run.number,
            CollectiveFailure(
                CollectiveTimeoutError.code,
                f"{operation} {run.number} of {self.label} has taken more than "
                f"{timeout_s:g} s: {what}",
                tuple(self.members[rank] for rank in late),
            ),
        )

    async def _begun_by(self, rank: int) -> int | None:
        """Ask a rank how many collectives it has begun; None: it does not say."""
        try:
            async with asyncio.timeout(ANSWER_S):
                link = await self.worker.link_to(self.members[rank])
                return await ask(link, m.CountBegun(self.id))
        except (AsyncRpcError, TimeoutError):
            return None

    def name_of(self, rank: int) -> str:
        """Return how a rank is called in errors."""
        return f"rank {rank} ({self.members[rank]!r})"

    async def link(self, rank: int) -> PeerLink:
        """Return the link to a rank.

        Raises:
            RankLostError: it cannot be reached.
        """
        name = self.members[rank]
        link = self.worker.directory.link_to(name)
        if link is not None:
            return link
        try:
            return await self.worker.link_to(name)
        except AsyncRpcError as error:
            self.on_lost(name, str(error))
            raise error_of(self._gone[-1][1]) from error


class CollectiveRun:
    """One collective under way: its messages to and from other ranks."""

    def __init__(
        self, matching: Matching, operation: Operation[ReceivedTensors]
    ) -> None:
        self.matching = matching
        self.operation = operation
        self.number = operation.number
        # What it is, as the board says it.
        self.head = msgpack.packb([operation.number, *operation.descriptor])
        self._sent = [0] * len(matching.members)
        self._taken = [0] * len(matching.members)
        self._unanswered = 0
        self._waits_for: MessageKey | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timers: list[asyncio.TimerHandle] = []

    async def send(self, rank: int, tensors: Iterable[torch.Tensor]) -> None:
        """Send tensors to a rank; they must stay as they are until `settle`.

        Raises:
            CollectiveError: the collective has failed, as that rank shuts down.
        """
        matching = self.matching
        link: PeerLink | None
        link = matching.worker.directory.link_to(matching.members[rank])
        if link is None:
            link = await matching.link(rank)
        index = self._sent[rank]
        self._sent[rank] = index + 1
        what = None if index else self.operation.descriptor
        block = m.TensorBlock(
            matching.id, self.number, matching.rank, index, what, list(tensors)
        )
        try:
            answer = link.ask(block)
        except RejectedError as error:  # that rank shuts down
            self._on_refused(link.peer.name, error)
            self.check()
            raise
        self._unanswered += 1
        answer.add_done_callback(self._on_answer)

    async def take(self, rank: int) -> Sequence[torch.Tensor]:
        """Return the next tensors from a rank, which are the taker's from now on."""
        place = MessageKey(rank, self._taken[rank])
        self._taken[rank] += 1
        arrived = self.operation.arrived
        while place not in arrived:
            self._waits_for = place
            await self._wait()
        arrival = arrived.pop(place)
        if not arrival.taken.done():  # who has sent it may have been lost since
            arrival.taken.set_result(None)
        return arrival.tensors

    async def settle(self) -> None:
        """Wait until all that was sent has been taken."""
        self._waits_for = None
        while self._unanswered:
            await self._wait()

    def refuse(self, rank: int, problem: str) -> CollectiveError:
        """Let the collective fail for what a rank has sent; return what to raise."""
        matching = self.matching
        failure = CollectiveFailure(
            CollectiveError.code,
            f"{self.operation.descriptor.operation} {self.number} of {matching.label} "
            f"has failed: {matching.name_of(rank)} sent {problem}",
            (matching.members[rank],),
        )
        matching.fail(self.number, failure)
        return error_of(failure)

    def abandon(self, what: str) -> CollectiveError:
        """Give the collective up, for all; return what to raise."""
        matching = self.matching
        if self.operation.failure is None:
            who = matching.name_of(matching.rank)
            problem = (
                f"{self.operation.descriptor.operation} {self.number} of "
                f"{matching.label} has failed: {who} {what}"
            )
            names = (matching.members[matching.rank],)
            matching.fail(
                self.number, CollectiveFailure(CollectiveError.code, problem, names)
            )
        assert self.operation.failure is not None
        return error_of(self.operation.failure)

    def check(self) -> None:
        """Raise if the collective has failed.

        Raises:
            CollectiveError: the collective has failed.
        """
        if self.operation.failure is not None:
            raise error_of(self.operation.failure)

    async def pause(self, limit_s: float) -> None:
        """Wait until something has changed, for at most `limit_s` seconds.

        Raises:
            CollectiveError: the collective has failed.
        """
        timer = self.matching.loop.call_later(limit_s, self.wake)
        try:
            await self._wait()
        finally:
            timer.cancel()

    async def until_done(self, other: asyncio.Future[Any]) -> None:
        """Wait until something else is done that this collective needs first.

        Raises:
            CollectiveError: the collective has failed before, by its time limit say.
        """
        other.add_done_callback(lambda _: self.wake())
        while not other.done():
            await self._wait()

    async def _wait(self) -> None:
        """Wait until something has changed.

        Raises:
            CollectiveError: the collective has failed.
        """
        self.check()
        self._waiter = self.matching.loop.create_future()
        try:
            await self._waiter  # `fail` wakes it: of a lost rank, a limit, our `leave`
        finally:
            self._waiter = None
        self.check()

    def wake(self) -> None:
        """Wake the tasks that wait for a change."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def on_arrival(self, place: MessageKey) -> None:
        """A message has come."""
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
        """A message could not be delivered."""
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
        """Begin to look at the clock."""
        later = self.matching.loop.call_later
        self._timers.append(later(ASK_AFTER_S, self._ask))
        if timeout_s is not None:
            self._timers.append(later(timeout_s, self._give_up, timeout_s))

    def end(self) -> None:
        """Look at the clock no more."""
        for timer in self._timers:
            timer.cancel()
        self.matching.end(self)

    def _ask(self) -> None:
        """Tell the others what this rank waits in."""
        matching = self.matching
        what = self.operation.descriptor
        matching.tell(m.CollectiveBegun(matching.id, self.number, matching.rank, what))

    def _give_up(self, timeout_s: float) -> None:
        matching = self.matching
        matching.worker.start_task(matching.give_up(self, timeout_s))

"""The rounds of one worker: barriers, rendezvous, and the waves of the end.

`machine.table` decides.  A worker takes part in a round even before it comes to it: it
stores messages, and passes them on.  A message is made when it is written, from the
present state of its sender: so one that waits for a link is never out of date, and one
for each rank is enough.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from asyncrpc.core.barriers.machine.series import Series, tree_position
from asyncrpc.core.barriers.machine.table import SeriesTable
from asyncrpc.core.barriers.messages import (
    LISTED_MAX,
    MISSING_MAX,
    PROBLEM_CHARS_MAX,
    SERVICE,
    TAG_CHARS_MAX,
    Blame,
    Failure,
    Key,
    KnownArrivals,
    LeftOutNotice,
    Purpose,
    Report,
    Result,
    RoundFailed,
    SeriesNotice,
    WaitsElsewhere,
    check_notice,
    check_replicas,
)
from asyncrpc.core.identity import WorkerIdentity
from asyncrpc.core.ids import WorkerId
from asyncrpc.core.links.directory import Directory
from asyncrpc.core.loop.waits import WaitDescription, WaitKind, waits
from asyncrpc.core.members import UNKNOWN_INCARNATION
from asyncrpc.core.services.ports import PeerLink, Scheduler
from asyncrpc.core.services.router import takes
from asyncrpc.errors import (
    AsyncRpcError,
    BarrierBrokenError,
    BarrierTimeoutError,
    MalformedError,
    NotStartedError,
    Outcome,
    UnknownWorkerError,
    UsageError,
    WorkerLostError,
)

if TYPE_CHECKING:
    from asyncrpc.core.barriers.graceful_shutdown import GracefulShutdown

BARRIER: Final = Key(Purpose.BARRIER, "", None)
STALL_S: Final = 0.05  # of silence, after which the whole state is sent again
# The last message of a worker that has left may be on its way for so long.
LAST_MESSAGE_S: Final = 0.5


class BarrierService:
    """The rounds of one worker; a `Service`."""

    name = SERVICE

    def __init__(
        self, identity: WorkerIdentity, scheduler: Scheduler, peers: Directory
    ) -> None:
        self.identity = identity
        self.scheduler = scheduler
        self.peers = peers
        self.is_closed = False
        self.shutdown: GracefulShutdown | None = None  # hears of the waves of the end
        self._participants: dict[Series, BarrierParticipant] = {}
        self.routes = (
            takes(KnownArrivals, self._on_notice),
            takes(Report, self._on_notice),
            takes(Result, self._on_notice),
            takes(RoundFailed, self._on_notice),
            takes(WaitsElsewhere, self._on_notice),
            takes(LeftOutNotice, self._on_left_out),
        )

    @property
    def size(self) -> int:
        """Number of workers in the group; 0 if this worker has no rank."""
        # A worker that joins a running group may get its rank from the group.
        rank, world_size = self.identity.rank, self.identity.world_size
        return world_size if 0 <= rank < world_size else 0

    @functools.cached_property
    def table(self) -> SeriesTable:
        """The machine of the rounds; only for a worker with a rank."""
        return SeriesTable(self.identity.rank, self.size, self.name_of)

    async def barrier(self, timeout_s: float | None) -> None:
        """Pass one barrier; see `Worker.barrier`."""
        if not self.size:
            raise UsageError("a barrier needs ranks, and this group has no ranks")
        await self.participant(BARRIER).come(timeout_s)

    def participant(self, key: Key) -> BarrierParticipant:
        """Return this worker's part in a series; make it if it does not exist."""
        series = self.table.series(key)
        for dropped in self.table.drop(series):
            self._participants.pop(dropped, None)
        return self._participant_of(series)

    def _participant_of(self, series: Series) -> BarrierParticipant:
        participant = self._participants.get(series)
        if participant is None:
            participant = self._participants[series] = BarrierParticipant(self, series)
        return participant

    def flush(self) -> None:
        """Send all messages that are due; wake the calls of their series."""
        for series, rank in self.table.due():
            participant = self._participant_of(series)
            participant.changed.set()
            participant.send(rank)

    def name_of(self, rank: int) -> str:
        """Return the name of a worker, for people to read."""
        try:
            return self.peers.member(rank).name
        except UnknownWorkerError:
            return f"rank {rank}"

    def rank_of(self, name: str) -> int:
        """Return the rank of a worker; -1 if it has no rank, or is forgotten."""
        try:
            return self.peers.member(name).rank
        except UnknownWorkerError:
            return -1

    # --- notices and losses of other workers -----------------------------------------

    def _on_notice(self, link: PeerLink, notice: SeriesNotice) -> None:
        """Take a message of a neighbour; refuse an invalid one, or of another peer."""
        rank, ranks = self.checked_sender(link, notice.key)
        check_notice(notice, len(ranks), self.size)
        if self.is_closed:
            return
        participant = self.participant(notice.key)
        participant.note_life(rank, link.peer)
        self.table.receive(rank, notice)
        participant.note_life(rank, link.peer)
        if notice.key.purpose is Purpose.END and self.shutdown is not None:
            self.shutdown.on_notice(notice)
        participant.changed.set()
        self.flush()

    def _on_left_out(self, link: PeerLink, notice: LeftOutNotice) -> None:
        rank = self.rank_of(link.peer.name)
        if not (
            0 <= rank < self.size and notice.incarnation == self.identity.incarnation
        ):
            raise MalformedError(
                f"worker {link.peer.name!r} must not leave out this worker: it has no "
                "rank here, or means another incarnation"
            )
        if self.shutdown is not None and not self.is_closed:
            self.shutdown.on_left_out(rank)
            self.flush()

    def checked_sender(self, link: PeerLink, key: Key) -> tuple[int, Sequence[int]]:
        """Return the sender's rank, and all members; make no state for it."""
        name, own, replicas = link.peer.name, self.identity.rank, key.replicas
        check_replicas(replicas, self.size)
        rank = self.rank_of(name)
        ranks = range(self.size) if replicas is None else replicas
        if len(key.tag) <= TAG_CHARS_MAX and rank in ranks and own in ranks:
            here, there = ranks.index(own), ranks.index(rank)
            if there == tree_position(here, len(ranks))[0]:
                return rank, ranks
            if here == tree_position(there, len(ranks))[0]:
                return rank, ranks
        purpose = key.purpose.value
        raise MalformedError(
            f"worker {name!r} is not a neighbour in a {purpose} {key.tag!r:.80}"
        )

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        """Fail every round that waits for the worker."""
        rank = self.rank_of(peer.name)
        for participant in tuple(self._participants.values()):
            if rank in participant.series.neighbours and participant.relies_on(
                rank, peer
            ):
                participant.on_gone(rank, reason)
        if self.shutdown is not None and rank >= 0:
            self.shutdown.on_peer_lost(rank)

    def on_unreachable(self, series: Series, rank: int, reason: str) -> None:
        """Fail the round that waits for a neighbour that cannot be reached."""
        self._participant_of(series).on_gone(rank, reason)
        if series.key.purpose is Purpose.END and self.shutdown is not None:
            self.shutdown.on_unreachable(rank, reason)
            self.flush()

    async def close(self) -> None:
        """Give up the rounds at which this worker waits, and tell the others."""
        self.is_closed = True
        for participant in tuple(self._participants.values()):
            participant.give_up("shuts down")


class BarrierParticipant:
    """A worker's part in one series: its calls, in turn, connections and errors."""

    def __init__(self, service: BarrierService, series: Series) -> None:
        self.series = series
        self.changed = asyncio.Event()  # the state of the series, perhaps
        self._turn = asyncio.Lock()
        self._service = service
        self._dials: dict[int, asyncio.Task[None]] = {}  # by rank
        self._unsent: set[int] = set()  # ranks that are told once they are connected

    @property
    def label(self) -> str:
        """The description of the round that this worker waits in, or heard of last."""
        series = self.series
        return series.key.label(series.number if series.is_waiting else series.latest)

    @property
    def members(self) -> tuple[str, ...]:
        """The names of all members, for people to read."""
        return tuple(map(self._service.name_of, self.series.ranks))

    # --- calls -----------------------------------------------------------------------

    @waits(
        lambda at: WaitDescription(
            WaitKind.ROUND, at["self"].label, members=at["self"].members
        )
    )
    async def come(
        self, timeout_s: float | None, on_passed: Callable[[int], None] | None = None
    ) -> None:
        """Join the next round in turn, and wait until it is over."""
        loop, series = self._service.scheduler.loop, self.series
        end_s = None if timeout_s is None else loop.time() + timeout_s
        series.calls += 1
        try:
            await self._take_turn(end_s, timeout_s)
            try:
                await self._come_in_turn(end_s, timeout_s)
            finally:
                has_passed = series.has_passed
                series.let_go()
                self._turn.release()
                if on_passed is not None and has_passed:  # also if cancelled just then
                    on_passed(series.number)
        finally:
            series.calls -= 1

    async def _take_turn(self, end_s: float | None, timeout_s: float | None) -> None:
        try:
            async with asyncio.timeout_at(end_s):
                await self._turn.acquire()
        except TimeoutError:
            raise BarrierTimeoutError(
                f"{self.series.key.label()}: an earlier call of this worker was still "
                f"waiting after {timeout_s:g} s, so this call did not begin",
                number=self.series.number,
                missing=(),
            ) from None

    async def _come_in_turn(self, end_s: float | None, timeout_s: float | None) -> None:
        service, series = self._service, self.series
        if service.is_closed:
            error = NotStartedError(f"worker {service.identity.name!r} shuts down")
            problem = f"{self._me} gave up {series.key.label()}: it has failed: {error}"
            series.fail_next(self._failure(Blame.GAVE_UP, problem, [self._rank]))
            service.flush()
            raise error
        try:
            failure = await self.join(end_s)
        except TimeoutError:
            absence, missing = self._absence(), series.missing
            timeout = BarrierTimeoutError(
                f"{self.label}: within {timeout_s:g} s {absence}; the round has failed "
                "for all members, and the next one can be used",
                number=series.number,
                missing=tuple(map(service.name_of, missing)),
            )
            self.give_up(f"waited {timeout_s:g} s; {absence}")
            raise timeout from None
        except BaseException as error:
            is_cancelled = isinstance(error, asyncio.CancelledError)
            self.give_up("was cancelled" if is_cancelled else f"failed: {error!r}")
            raise
        if failure is not None:
            raise self._error(failure)

    async def join(
        self, end_s: float | None, *, is_marked: bool = False
    ) -> Failure | None:
        """Join the next round, and wait until it is over; return its failure."""
        series = self.series
        self._service.table.join(series, is_marked=is_marked)
        self._service.flush()
        try:
            async with asyncio.timeout_at(end_s):
                await self._until_over()
                if series.has_passed:  # neighbours still rely on our messages
                    while self._unsent:  # each dial has a limit
                        await asyncio.wait([self._dials[rank] for rank in self._unsent])
                    for dial in self._dials.values():
                        dial.cancel()
                    self._dials.clear()
        except TimeoutError:
            if series.is_waiting:
                raise
        return series.failure

    async def _until_over(self) -> None:
        series, now_s = self.series, self._service.scheduler.loop.time
        tell_s: float | None = None  # when to send neighbours the state they lack
        while series.is_waiting:
            self.changed.clear()
            if tell_s is None and series.overdue():
                tell_s = now_s() + STALL_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(tell_s):
                    await self.changed.wait()  # set by a loss and by `close` as well
            if tell_s is not None and now_s() >= tell_s:
                tell_s = None
                for rank in series.overdue():
                    self.send(rank)

    def give_up(self, what: str) -> None:
        """Fail the round that this worker waits at, if any, for all."""
        if self.series.is_waiting:
            problem = f"{self._me} gave up {self.label}: it {what}"
            missing = self.series.missing[:MISSING_MAX]
            self.series.fail(self._failure(Blame.GAVE_UP, problem, missing))
            self._service.flush()

    # --- neighbours ------------------------------------------------------------------

    def send(self, rank: int) -> None:
        """Send a neighbour what it lacks, now or once it is connected."""
        link = self._link(rank)
        if link is not None:
            self._write(rank, link)
        else:
            self._unsent.add(rank)
            self.connect(rank)

    def connect(self, rank: int, patience_s: float = LAST_MESSAGE_S) -> None:
        """Connect to a neighbour, to notice its death if nothing else."""
        if rank not in self._dials and self._link(rank) is None:
            task = self._dial(rank, patience_s)
            dial = self._dials[rank] = self._service.scheduler.start_task(task)
            dial.add_done_callback(lambda _: self._on_dialed(rank, dial))

    def _link(self, rank: int) -> PeerLink | None:
        try:
            return self._service.peers.find(rank).link
        except UnknownWorkerError:  # the dial reports it
            return None

    def _write(self, rank: int, link: PeerLink) -> None:
        self.note_life(rank, link.peer)
        for notice in self.series.notices_for(rank):
            link.tell(notice, at_once=True)

    async def _dial(self, rank: int, patience_s: float) -> None:
        peers, reason = self._service.peers, ""
        dialed = present = UNKNOWN_INCARNATION
        while not reason or dialed != present:  # it was restarted meanwhile
            dialed = UNKNOWN_INCARNATION
            try:
                member = peers.member(rank)
                dialed = member.incarnation
                link = await peers.open_link(member.name)
            except AsyncRpcError as error:
                reason = str(error)
            else:
                if rank in self._unsent:
                    self._write(rank, link)
                return
            self._unsent.discard(rank)
            await asyncio.sleep(patience_s)  # its last message may be on its way
            present, patience_s = dialed, LAST_MESSAGE_S
            if dialed != UNKNOWN_INCARNATION:
                with contextlib.suppress(UnknownWorkerError):
                    present = peers.member(rank).incarnation
        self._service.on_unreachable(self.series, rank, reason)

    def _on_dialed(self, rank: int, dial: asyncio.Task[None]) -> None:
        """Clean up, also after a dial that was cancelled before it began."""
        if self._dials.get(rank) is dial:
            del self._dials[rank]
            self._unsent.discard(rank)

    def note_life(self, rank: int, peer: WorkerId) -> None:
        """Record the incarnation of a neighbour that sends, or is sent, a message."""
        neighbour = self.series.neighbours[rank]
        life, neighbour.life = neighbour.life, peer.incarnation
        if life not in (None, peer.incarnation):
            self.on_gone(rank, "it has been restarted")

    def relies_on(self, rank: int, peer: WorkerId) -> bool:
        """Return whether the series needs a lost worker: no later life replaced it."""
        life = self.series.neighbours[rank].life
        if life is not None:
            return life == peer.incarnation
        try:
            link = self._service.peers.find(peer.name).link
            present = self._service.peers.member(peer.name).incarnation
        except UnknownWorkerError:
            return True
        if link is not None:
            return link.peer == peer
        return present in (UNKNOWN_INCARNATION, peer.incarnation)

    def on_gone(self, rank: int, reason: str) -> None:
        """Record that a worker is gone, or cannot be reached."""
        who = self._service.table.who(rank)
        problem = f"{self.label} has failed: {who} is gone: {reason}"
        self.series.on_lost(rank, self._failure(Blame.LOST, problem, [rank]))
        self._service.flush()

    # --- errors ----------------------------------------------------------------------

    @property
    def _rank(self) -> int:
        return self._service.identity.rank

    @property
    def _me(self) -> str:
        return self._service.table.who(self._rank)

    def _failure(self, blame: Blame, problem: str, missing: Sequence[int]) -> Failure:
        return Failure(blame, problem[:PROBLEM_CHARS_MAX], tuple(missing))

    def _absence(self) -> str:
        missing = self.series.missing
        if not missing:
            return "all members came, but the news did not arrive in time"
        who = self._service.table.who
        listed = ", ".join(map(who, missing[:LISTED_MAX]))
        more = len(missing) - LISTED_MAX
        rest = f" and {more} more" if more > 0 else ""
        return f"these members did not come: {listed}{rest}"

    def _error(self, failure: Failure) -> AsyncRpcError:
        names = tuple(map(self._service.name_of, failure.missing))
        if failure.blame is Blame.LOST:
            return WorkerLostError(
                failure.problem,
                function=self.series.key.purpose.value,
                to=", ".join(names),
                outcome=Outcome.UNKNOWN,
            )
        number = self.series.number
        return BarrierBrokenError(failure.problem, number=number, missing=names)

"""The rendezvous of the group: payloads of some or all members, brought to each.

`machine.meetings` decides; here are its messages, its connections and its errors.
Whoever has not come yet takes part all the same: it keeps what is said to it, and
passes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from asyncrpc.arguments import wrong
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
from asyncrpc.ids import Incarnation, WorkerId
from asyncrpc.runtime.forms import TEXT, Methods, ServiceMethods, anything, array
from asyncrpc.runtime.machine.meetings import Meetings
from asyncrpc.runtime.machine.series import (
    Blame,
    Doubt,
    Failure,
    Payloads,
    Replicas,
    Report,
    Result,
    Series,
    Word,
)
from asyncrpc.runtime.machine.trees import are_neighbours
from asyncrpc.runtime.membership.meeting_codec import (
    TAG_CHARS_MAX,
    Arriving,
    Reader,
    messages_for,
    pack,
    payload_bytes_max,
    take_part,
    unpack,
)
from asyncrpc.runtime.membership.messenger import STALL_S, PeerMessenger
from asyncrpc.runtime.membership.ports import Peers
from asyncrpc.runtime.ports import Identity, PeerLink, Scheduler

SERVICE: Final = "meetings"
# Calls of one worker with the same tag and replicas that wait for their turn.
CALLS_MAX: Final = 256
# Of reports for meetings that this worker has not come to.  What is beyond that is
# dropped, and asked for when it comes.
EARLY_BYTES_MAX: Final = 64 << 20
NAMES_MAX: Final = 64  # of those that had not come, in an error
LISTED_MAX: Final = 8  # of them in its text


_METHODS: Final = ("here", "up", "down", "failed", "doubt")


class MeetingService(ServiceMethods):
    """What one worker does at rendezvous; a `Service`."""

    name = SERVICE

    def __init__(self, identity: Identity, scheduler: Scheduler, peers: Peers) -> None:
        """Prepare.

        Args:
            identity: who meets.
            scheduler: has the time, and runs the dials.
            peers: the others.
        """
        self.identity = identity
        self.scheduler = scheduler
        self.peers = peers
        self.is_closed = False
        self._venues: dict[Series, Venue] = {}
        self._early: dict[Venue, int] = {}  # bytes
        word = array(tag=TEXT, replicas=anything)  # `Reader` looks at the rest
        self.requests = Methods(SERVICE, {})
        self.notices = Methods(
            SERVICE,
            {method: (word, partial(self._on_message, method)) for method in _METHODS},
        )

    @functools.cached_property
    def size(self) -> int:
        """How many may meet; 0: this worker has no rank among them."""
        # Who joins a group that runs may be told its rank by it.
        rank, world_size = self.identity.rank, self.identity.world_size
        return world_size if 0 <= rank < world_size else 0

    @functools.cached_property
    def machine(self) -> Meetings:
        """Decides; there is one only where there are ranks."""
        return Meetings(self.identity.rank, self.size, self.name_of)

    @functools.cached_property
    def _reader(self) -> Reader:
        return Reader(self.identity.rank, self.size)

    async def meet(
        self,
        tag: str,
        payload: bytes,
        replicas: Sequence[int] | None,
        timeout_s: float | None,
    ) -> list[bytes]:
        """Bring a payload to a rendezvous; see `Worker.rendezvous`."""
        if not self.size:
            raise UsageError("a rendezvous needs ranks: this group was made without")
        if len(tag) > TAG_CHARS_MAX:
            raise wrong("tag", f"at most {TAG_CHARS_MAX} characters long", tag)
        venue = self._venue(tag, self._checked(replicas))
        return await venue.meet(payload, timeout_s)

    def _checked(self, replicas: Sequence[int] | None) -> Replicas:
        if replicas is None:
            return None
        found, rank = tuple(replicas), self.identity.rank
        for one in found:
            if type(one) is not int or not 0 <= one < self.size:
                wanted = f"a rank of a group of {self.size} workers"
                raise wrong("each of replicas", wanted, one)
        if len(set(found)) != len(found):
            twice = next(one for one in found if found.count(one) > 1)
            raise UsageError(f"rank {twice} is among the replicas more than once")
        if rank not in found:
            raise UsageError(
                f"worker {self.identity.name!r} (rank {rank}) is not among the "
                f"replicas of this rendezvous: {list(found[:LISTED_MAX])}"
                + ("..." if len(found) > LISTED_MAX else "")
            )
        return None if found == tuple(range(self.size)) else found

    # --- what other workers say ------------------------------------------------------

    def _on_message(self, method: str, link: PeerLink, value: list[Any]) -> None:
        """Take a message of a neighbour.

        Raises:
            MalformedError: it makes no sense, or is of nobody who takes part.
        """
        tag, given, *rest = value
        if not self.size or len(tag) > TAG_CHARS_MAX:
            raise MalformedError(f"a word {method!r} of no rendezvous")
        replicas = self._reader.replicas(given)
        rank = self.rank_of(link.peer.name)
        ranks = range(self.size) if replicas is None else replicas
        # Before anything is kept for it.
        if rank not in ranks or not are_neighbours(
            ranks.index(rank), ranks.index(self.identity.rank), len(ranks)
        ):
            raise MalformedError(
                f"worker {link.peer.name!r} has nothing to say of rendezvous "
                f"{tag!r:.80}"
            )
        word: Word | None = None
        passed = 0
        if method in {"up", "down"}:
            if method == "up":
                passed = self._reader.passed(rest)
            take_part(None, method, rest, len(ranks))  # it makes sense
        else:
            word = self._reader.plain_word(method, rest, len(ranks))
        if isinstance(word, Doubt) and word.rank not in ranks:
            raise MalformedError(f"rank {word.rank} is not in {tag!r:.80}")
        if self.is_closed:
            return
        venue = self._venue(tag, replicas)
        if word is None:
            word = self._taken(venue, rank, method, rest, passed)
        if word is not None:
            self._receive(venue, rank, link, word)

    def _receive(self, venue: Venue, rank: int, link: PeerLink, word: Word) -> None:
        venue.note_life(rank, link.peer)
        self.machine.hear(venue.series, rank, word)
        venue.note_life(rank, link.peer)
        venue.changed.set()
        self.flush()

    def _taken(
        self, venue: Venue, rank: int, method: str, rest: list[Any], passed: int
    ) -> Report | Result | None:
        """Put payloads together; return them once they are whole."""
        count = len(venue.series.ranks)
        arriving = take_part(venue.arriving.pop(rank, None), method, rest, count)
        if arriving is None or not self._has_room(venue, arriving):
            return None
        _, number, parts = arriving.head
        if arriving.parts < parts:
            venue.arriving[rank] = arriving
            return None
        payloads = unpack(arriving, count)
        if method == "up":
            return Report(number, passed, payloads)
        return Result(number, payloads)

    def _has_room(self, venue: Venue, arriving: Arriving) -> bool:
        """Say whether payloads can be kept although nobody waits for them here."""
        if venue.series.is_waiting:
            self._early.pop(venue, None)
            return True
        early = self._early
        early[venue] = venue.held_bytes + arriving.nbytes
        if sum(early.values()) <= EARLY_BYTES_MAX:
            return True
        self._early = {
            one: one.held_bytes
            for one in early
            if one.held_bytes and not one.series.is_waiting
        }
        return sum(self._early.values()) + arriving.nbytes <= EARLY_BYTES_MAX

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        """Fail every meeting that waits for the worker."""
        rank = self.rank_of(peer.name)
        for venue in tuple(self._venues.values()):
            if venue.series.is_neighbour(rank) and venue.relies_on(rank, peer):
                venue.on_gone(rank, reason)

    async def close(self) -> None:
        """Give up what this worker waits at; the others are told.

        Cancellation:
            It never waits.
        """
        self.is_closed = True
        for venue in tuple(self._venues.values()):
            venue.give_up("shuts down")

    # --- what venues ask -------------------------------------------------------------

    def flush(self) -> None:
        """Tell whoever is to be told; wake those whose meeting is over."""
        for series, rank in self.machine.due():
            self._venue_of(series).messenger.send(rank)
        for series in self.machine.ended:
            self._venue_of(series).changed.set()
        self.machine.ended.clear()

    def rank_of(self, name: str) -> int:
        """Return the rank of a worker; -1 if it has none, or is forgotten."""
        try:
            return self.peers.find(name).member.rank
        except UnknownWorkerError:
            return -1

    def link_to(self, name: str) -> PeerLink | None:
        """Return the open link to a worker, if there is one."""
        try:
            return self.peers.find(name).link
        except UnknownWorkerError:
            return None

    def name_of(self, rank: int) -> str:
        """Return the name of a worker, for people to read."""
        try:
            return self.peers.find(rank).member.name
        except UnknownWorkerError:
            return f"rank {rank}"

    def _venue(self, tag: str, replicas: Replicas) -> Venue:
        series = self.machine.series(tag, replicas)
        venue = self._venue_of(series)
        taken = (one for one, venue in self._venues.items() if venue.is_taken)
        in_use = itertools.chain((series,), taken)
        for dropped in self.machine.drop(in_use):
            self._early.pop(self._venue_of(dropped), None)
            del self._venues[dropped]
        return venue

    def _venue_of(self, series: Series) -> Venue:
        venue = self._venues.get(series)
        if venue is None:
            venue = self._venues[series] = Venue(self, series)
        return venue


@dataclass(slots=True)
class Waiting:
    """A call that waits for its turn.

    Attributes:
        ready: done when the turn has come.
        problem: why the call does not wait any more; empty if it does.
    """

    ready: asyncio.Future[None]
    problem: str = ""


class Venue:
    """One series at one worker: its connections, and the calls to it, in turn.

    Attributes:
        series: of which it is.
        changed: set when something was said of it.
        messenger: sends to those who are told of it.
        arriving: payloads of which some parts have come, by neighbour.
        is_taken: whether a call has its turn.
    """

    def __init__(self, service: MeetingService, series: Series) -> None:
        self.series = series
        self.changed = asyncio.Event()
        self.messenger = PeerMessenger(
            service.identity,
            service.scheduler,
            service.peers,
            self._write,
            self.on_gone,
        )
        self.arriving: dict[int, Arriving] = {}
        self.is_taken = False
        self._service = service
        self._machine = service.machine
        self._calls: deque[Waiting] = deque()
        # Which life of a neighbour has spoken, or was spoken to, of which meeting.
        self._lives: dict[int, tuple[int, Incarnation]] = {}
        self._packed: tuple[Payloads, list[list[bytes]]] = (), []
        replicas = series.replicas
        self._head = [series.tag, None if replicas is None else list(replicas)]

    @property
    def held_bytes(self) -> int:
        """Bytes of payloads that have come before this worker."""
        arriving = sum(one.nbytes for one in self.arriving.values())
        return arriving + self.series.held_bytes

    async def meet(self, payload: bytes, timeout_s: float | None) -> list[bytes]:
        """Come to the next meeting, and wait until it is over."""
        loop = self._service.scheduler.loop
        end_s = None if timeout_s is None else loop.time() + timeout_s
        try:
            async with asyncio.timeout_at(end_s):
                await self._line_up()
        except TimeoutError:
            raise BarrierTimeoutError(
                f"a rendezvous of {self.series.tag!r}: in {timeout_s:g} s its turn did "
                "not come: another call of this worker waits there",
                number=self.series.number,
                missing=(),
            ) from None
        try:
            self._refuse(payload)
            return await self._meet(payload, end_s, timeout_s or 0.0)
        finally:
            self.series.let_go()
            self._packed = (), []
            self._next()

    async def _meet(
        self, payload: bytes, end_s: float | None, timeout_s: float
    ) -> list[bytes]:
        series = self.series
        self._machine.come(series, payload)
        self._service.flush()
        try:
            async with asyncio.timeout_at(end_s):
                await self._until_over()
                if series.has_passed:  # whoever relies on our message has it first
                    await self.messenger.wait_sent()
                    self.messenger.cancel()
        except TimeoutError:
            if series.is_waiting:
                missing = self._missing()
                self.give_up(f"waited {timeout_s:g} s; {self._absence()}")
                raise self._timed_out(timeout_s, missing) from None
        except BaseException as error:
            is_cancelled = isinstance(error, asyncio.CancelledError)
            self.give_up("was cancelled" if is_cancelled else f"failed: {error!r}")
            raise
        if series.failure is not None:
            raise self._error(series.failure)
        return list(series.payloads)

    async def _until_over(self) -> None:
        series, now_s = self.series, self._service.scheduler.loop.time
        tell_s: float | None = None  # when neighbours are told what they lack
        while series.is_waiting:
            self.changed.clear()
            if tell_s is None and series.is_overdue:
                tell_s = now_s() + STALL_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(tell_s):
                    await self.changed.wait()  # a loss changes it, and our end
            if tell_s is not None and now_s() >= tell_s:
                tell_s = None
                for rank in series.overdue():
                    self.messenger.send(rank)

    def give_up(self, what: str) -> None:
        """Fail the meeting that this worker waits at, if any, for all."""
        if self.series.is_waiting:
            problem = f"{self._me} gave up {self._label}: it {what}"
            missing = self._missing()[:NAMES_MAX]
            self.series.fail(Failure(Blame.GAVE_UP, problem, missing))
            self._service.flush()

    def on_gone(self, rank: int, reason: str) -> None:
        """A worker is gone, or cannot be reached."""
        self.arriving.pop(rank, None)
        who = self._machine.who(rank)
        problem = f"{self._label} has failed: {who} is gone: {reason}"
        names = (self._service.name_of(rank),)
        self.series.on_lost(rank, Failure(Blame.LOST, problem, names))
        self._service.flush()

    def note_life(self, rank: int, peer: WorkerId) -> None:
        """Take note of which life of a neighbour a word comes from, or goes to."""
        latest, life = self._lives.get(rank, (-1, peer.incarnation))
        self._lives[rank] = self.series.latest, peer.incarnation
        if latest == self.series.latest and life != peer.incarnation:
            self.on_gone(rank, "it has been restarted")

    def relies_on(self, rank: int, peer: WorkerId) -> bool:
        """Say whether a worker that is gone matters: no later life has its place."""
        latest, life = self._lives.get(rank, (-1, peer.incarnation))
        if latest == self.series.latest:
            return life == peer.incarnation
        link = self._service.link_to(peer.name)
        return link is None or link.peer == peer

    # --- turns -----------------------------------------------------------------------

    async def _line_up(self) -> None:
        """Wait for the turn; a call that gives up before has come all the same."""
        if not self.is_taken:
            self.is_taken = True
            return
        if len(self._calls) >= CALLS_MAX:
            raise UsageError(
                f"{CALLS_MAX} calls of this worker wait for a rendezvous of "
                f"{self.series.tag!r} already; await them first"
            )
        call = Waiting(self._service.scheduler.loop.create_future())
        self._calls.append(call)
        try:
            await call.ready  # the one before it ends, at the latest with its worker
        except BaseException:
            call.problem = "stopped waiting before its turn came"
            if call.ready.done() and not call.ready.cancelled():  # it has just come
                self._decline(call.problem)
                self._next()
            raise

    def _next(self) -> None:
        """Let the next call have its turn."""
        while self._calls:
            call = self._calls.popleft()
            if not call.problem:
                call.ready.set_result(None)
                return
            self._decline(call.problem)
        self.is_taken = False

    def _decline(self, what: str) -> None:
        self._machine.decline(
            self.series,
            Failure(
                Blame.GAVE_UP,
                f"{self._me} gave a rendezvous of {self.series.tag!r} up: it {what}",
                (self._service.identity.name,),
            ),
        )
        self._service.flush()

    def _refuse(self, payload: bytes) -> None:
        """Fail the meeting for all if this worker cannot take part in it."""
        most = payload_bytes_max(len(self.series.ranks))
        error: AsyncRpcError | None = None
        if self._service.is_closed:
            error = NotStartedError(
                f"worker {self._service.identity.name!r} shuts down"
            )
        elif len(payload) > most:
            error = UsageError(
                f"the payload has {len(payload):,} bytes; in a rendezvous of "
                f"{len(self.series.ranks)} each may have {most:,}"
            )
        if error is not None:
            self._decline(f"has failed: {error}")
            raise error

    # --- messages --------------------------------------------------------------------

    def _write(self, link: PeerLink) -> None:
        """Write what the worker at the other end is to be told now."""
        rank = self._service.rank_of(link.peer.name)
        self.note_life(rank, link.peer)
        for word in self.series.words_for(rank):
            packed: list[list[bytes]] = []
            if isinstance(word, Report | Result):
                if self._packed[0] is not word.payloads:
                    self._packed = word.payloads, pack(word.payloads)
                packed = self._packed[1]
            for method, rest in messages_for(word, packed):
                link.notify(SERVICE, method, [*self._head, *rest], at_once=True)

    # --- errors ----------------------------------------------------------------------

    @property
    def _label(self) -> str:
        series = self.series
        number = series.number if series.is_waiting else series.latest
        return f"rendezvous {number} of {series.tag!r}"

    @property
    def _me(self) -> str:
        return self._machine.who(self._service.identity.rank)

    def _missing(self) -> tuple[str, ...]:
        return tuple(map(self._service.name_of, self.series.missing))

    def _absence(self) -> str:
        missing = self.series.missing
        if not missing:
            return "all have come, and are too slow"
        listed = ", ".join(map(self._machine.who, missing[:LISTED_MAX]))
        more = len(missing) - LISTED_MAX
        return f"these did not come: {listed}" + (
            f" and {more} more" if more > 0 else ""
        )

    def _timed_out(self, timeout_s: float, missing: Sequence[str]) -> AsyncRpcError:
        return BarrierTimeoutError(
            f"{self._label}: in {timeout_s:g} s {self._absence()}; it has failed for "
            "all, the next one can be used",
            number=self.series.number,
            missing=missing,
        )

    def _error(self, failure: Failure) -> AsyncRpcError:
        if failure.blame is Blame.LOST:
            return WorkerLostError(
                failure.problem,
                function="rendezvous",
                to=", ".join(failure.missing),
                outcome=Outcome.UNKNOWN,
            )
        return BarrierBrokenError(
            failure.problem, number=self.series.number, missing=failure.missing
        )

"""The rounds of one worker: barriers, rendezvous, the waves of the end; a `Service`.

`machine.table` decides.  This module checks senders, and limits the memory for early
payloads.  A worker takes part in a round even before it comes to it: it stores
messages, and passes them on.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Final, Protocol

from asyncrpc.arguments import wrong
from asyncrpc.errors import MalformedError, UsageError
from asyncrpc.ids import WorkerId
from asyncrpc.runtime.membership.ports import Peers
from asyncrpc.runtime.ports import Identity, PeerLink, Scheduler
from asyncrpc.runtime.rounds.machine.messages import (
    LISTED_MAX,
    Key,
    Purpose,
    Replicas,
    Report,
    Result,
    RoundMessage,
    WaitsElsewhere,
)
from asyncrpc.runtime.rounds.machine.series import Series
from asyncrpc.runtime.rounds.machine.table import Rounds
from asyncrpc.runtime.rounds.machine.tree import are_neighbours, branch_of, parent_of
from asyncrpc.runtime.rounds.messages import (
    SERVICE,
    TAG_CHARS_MAX,
    ArrivalsNotice,
    Arriving,
    DownNotice,
    ElsewhereNotice,
    FailedNotice,
    LeftOutNotice,
    PartNotice,
    PlainNotice,
    UpNotice,
    check_message,
    check_part,
    check_replicas,
    payload_bytes_max,
    take_part,
    unpack,
)
from asyncrpc.runtime.rounds.messenger import name_of, rank_of
from asyncrpc.runtime.rounds.participant import RoundParticipant
from asyncrpc.runtime.router import takes

# Limit of payloads for rounds that this worker has not come to.  Further payloads are
# dropped, and requested again when the worker comes.
EARLY_BYTES_MAX: Final = 64 << 20
BARRIER: Final = Key(Purpose.BARRIER, "", None)


class WaveObserver(Protocol):
    """Observes the waves of the end."""

    def on_message(self, key: Key, message: RoundMessage) -> None:
        """Take the message of a member about a wave."""

    def on_unreachable(self, rank: int, reason: str) -> None:
        """Record that a member cannot be reached."""

    def on_peer_lost(self, rank: int) -> None:
        """Record that a worker is gone."""

    def on_left_out(self, rank: int) -> None:
        """Record that a member goes on without this worker."""


class RoundService:
    """The rounds of one worker; a `Service`.

    Attributes:
        waves: the observer of the waves of the end, if there is one.
    """

    name = SERVICE

    def __init__(self, identity: Identity, scheduler: Scheduler, peers: Peers) -> None:
        """Prepare.

        Args:
            identity: of this worker.
            scheduler: provides the loop's clock, and runs the dials.
            peers: the other workers.
        """
        self.identity = identity
        self.scheduler = scheduler
        self.peers = peers
        self.is_closed = False
        self.waves: WaveObserver | None = None
        self._participants: dict[Series, RoundParticipant] = {}
        self._early: dict[RoundParticipant, int] = {}  # bytes
        self.routes = (
            takes(ArrivalsNotice, self._on_message),
            takes(FailedNotice, self._on_message),
            takes(ElsewhereNotice, self._on_message),
            takes(UpNotice, self._on_part),
            takes(DownNotice, self._on_part),
            takes(LeftOutNotice, self._on_left_out),
        )

    @property
    def size(self) -> int:
        """Number of workers in the group; 0 if this worker has no rank."""
        # A worker that joins a running group may get its rank from the group.
        rank, world_size = self.identity.rank, self.identity.world_size
        return world_size if 0 <= rank < world_size else 0

    @functools.cached_property
    def machine(self) -> Rounds:
        """The machine of the rounds; only for a worker with a rank."""
        return Rounds(self.identity.rank, self.size, self.name_of)

    async def barrier(self, timeout_s: float | None) -> None:
        """Pass one barrier; see `Worker.barrier`."""
        if not self.size:
            raise UsageError("a barrier needs ranks, and this group has no ranks")
        await self.participant(BARRIER).gather(b"", timeout_s)

    async def rendezvous(
        self,
        tag: str,
        payload: bytes,
        replicas: Sequence[int] | None,
        timeout_s: float | None,
    ) -> list[bytes]:
        """Bring a payload to a rendezvous; see `Worker.rendezvous`."""
        if not self.size:
            raise UsageError("a rendezvous needs ranks, and this group has no ranks")
        if len(tag) > TAG_CHARS_MAX:
            raise wrong("tag", f"at most {TAG_CHARS_MAX} characters long", tag)
        key = Key(Purpose.RENDEZVOUS, tag, self._checked(replicas))
        return await self.participant(key).gather(payload, timeout_s)

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

    # --- notices of other workers ----------------------------------------------------

    def _on_message(self, link: PeerLink, notice: PlainNotice) -> None:
        """Take a message of a neighbour that fits into one notice.

        Raises:
            MalformedError: the message is invalid, or its sender is not a neighbour.
        """
        rank, ranks = self._checked_sender(link, notice.key)
        message = notice.content
        check_message(message, len(ranks), self.size)
        if isinstance(message, WaitsElsewhere) and message.rank not in ranks:
            raise MalformedError(f"rank {message.rank} is not a member of the series")
        if not self.is_closed:
            self._receive(self.participant(notice.key), rank, link, message)

    def _on_part(self, link: PeerLink, notice: PartNotice) -> None:
        """Take a part of payloads; with the last one, the message that they make.

        Raises:
            MalformedError: the part is invalid, or its sender is not a neighbour.
        """
        rank, ranks = self._checked_sender(link, notice.key)
        sender, count = ranks.index(rank), len(ranks)
        is_up = isinstance(notice, UpNotice)
        if is_up is not (parent_of(sender, count) == ranks.index(self.identity.rank)):
            raise MalformedError("`up` must come from a child, `down` from the parent")
        members = len(branch_of(sender, count)[0]) if is_up else count
        check_part(notice.part, count)
        if self.is_closed:
            return
        participant = self.participant(notice.key)
        arriving = take_part(participant.arriving.pop(rank, None), notice)
        if arriving is None or not self._has_room(participant, arriving):
            return
        if not arriving.is_whole:
            participant.arriving[rank] = arriving
            return
        payloads = unpack(arriving.pieces, members, payload_bytes_max(count))
        message: RoundMessage = Result(notice.number, payloads)
        if isinstance(notice, UpNotice):
            message = Report(notice.number, notice.passed, payloads)
        self._receive(participant, rank, link, message)

    def _on_left_out(self, link: PeerLink, notice: LeftOutNotice) -> None:
        rank = rank_of(self.peers, link.peer.name)
        if not (
            0 <= rank < self.size and notice.incarnation == self.identity.incarnation
        ):
            raise MalformedError(
                f"worker {link.peer.name!r} must not leave out this worker: it has no "
                "rank here, or means another incarnation"
            )
        if self.waves is not None and not self.is_closed:
            self.waves.on_left_out(rank)
            self.flush()

    def _checked_sender(self, link: PeerLink, key: Key) -> tuple[int, Sequence[int]]:
        """Return the sender's rank, and all members, before any state is made for it.

        Raises:
            MalformedError: the sender is not a neighbour in the series.
        """
        name, own, replicas = link.peer.name, self.identity.rank, key.replicas
        check_replicas(replicas, self.size)
        rank = rank_of(self.peers, name)
        ranks = range(self.size) if replicas is None else replicas
        if (
            len(key.tag) > TAG_CHARS_MAX
            or rank not in ranks
            or own not in ranks
            or not are_neighbours(ranks.index(rank), ranks.index(own), len(ranks))
        ):
            raise MalformedError(
                f"worker {name!r} is not a neighbour in a {key.purpose.value} "
                f"{key.tag!r:.80}"
            )
        return rank, ranks

    def _receive(
        self,
        participant: RoundParticipant,
        rank: int,
        link: PeerLink,
        message: RoundMessage,
    ) -> None:
        participant.note_life(rank, link.peer)
        self.machine.receive(participant.series, rank, message)
        participant.note_life(rank, link.peer)
        if participant.series.key.purpose is Purpose.END and self.waves is not None:
            self.waves.on_message(participant.series.key, message)
        participant.changed.set()
        self.flush()

    def _has_room(self, participant: RoundParticipant, arriving: Arriving) -> bool:
        """Return whether payloads can be kept, although no call waits for them yet."""
        if participant.series.is_waiting:
            self._early.pop(participant, None)
            return True
        early = self._early
        early[participant] = participant.held_bytes + arriving.nbytes
        if sum(early.values()) <= EARLY_BYTES_MAX:
            return True
        self._early = {
            one: one.held_bytes
            for one in early
            if one.held_bytes and not one.series.is_waiting
        }
        return sum(self._early.values()) + arriving.nbytes <= EARLY_BYTES_MAX

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        """Fail every round that waits for the worker."""
        rank = rank_of(self.peers, peer.name)
        for one in tuple(self._participants.values()):
            if one.series.is_neighbour(rank) and one.relies_on(rank, peer):
                one.on_gone(rank, reason)
        if self.waves is not None and rank >= 0:
            self.waves.on_peer_lost(rank)

    async def close(self) -> None:
        """Give up the rounds at which this worker waits, and tell the others.

        Cancellation:
            The method never waits.
        """
        self.is_closed = True
        for participant in tuple(self._participants.values()):
            participant.give_up("shuts down")

    # --- for participants ------------------------------------------------------------

    def flush(self) -> None:
        """Send all messages that are due; wake the calls whose round is over."""
        for series, rank in self.machine.due():
            self._participant_of(series).messenger.send(rank)
        for series in self.machine.ended:
            self._participant_of(series).changed.set()
        self.machine.ended.clear()

    def on_unreachable(self, series: Series, rank: int, reason: str) -> None:
        """Record that a neighbour in a series cannot be reached."""
        if series.key.purpose is Purpose.END and self.waves is not None:
            self.waves.on_unreachable(rank, reason)
            self.flush()

    def name_of(self, rank: int) -> str:
        """Return the name of a worker, for people to read."""
        return name_of(self.peers, rank)

    def participant(self, key: Key) -> RoundParticipant:
        """Return this worker's part in a series; make it if it does not exist."""
        series = self.machine.series(key)
        participant = self._participant_of(series)
        taken = (
            one.series for one in self._participants.values() if one.turns.is_taken
        )
        in_use = itertools.chain((series,), taken)
        for dropped in self.machine.drop(in_use):
            self._early.pop(self._participant_of(dropped), None)
            del self._participants[dropped]
        return participant

    def _participant_of(self, series: Series) -> RoundParticipant:
        participant = self._participants.get(series)
        if participant is None:
            participant = self._participants[series] = RoundParticipant(self, series)
        return participant

"""The rounds of one worker: barriers, rendezvous, the waves of the end; a `Service`.

`machine.table` decides.  This module checks senders.  A worker takes part in a round
even before it comes to it: it stores messages, and passes them on.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Final, Protocol

from asyncrpc.core.ids import WorkerId
from asyncrpc.core.membership.ports import Peers
from asyncrpc.core.rounds.machine.messages import Key, Purpose, RoundMessage
from asyncrpc.core.rounds.machine.series import Series
from asyncrpc.core.rounds.machine.table import Rounds
from asyncrpc.core.rounds.machine.tree import are_neighbours
from asyncrpc.core.rounds.messages import (
    SERVICE,
    TAG_CHARS_MAX,
    ArrivalsNotice,
    ElsewhereNotice,
    FailedNotice,
    LeftOutNotice,
    ReportNotice,
    ResultNotice,
    SeriesNotice,
    check_message,
    check_replicas,
)
from asyncrpc.core.rounds.messenger import name_of, rank_of
from asyncrpc.core.rounds.participant import RoundParticipant
from asyncrpc.core.services.ports import Identity, PeerLink, Scheduler
from asyncrpc.core.services.router import takes
from asyncrpc.errors import MalformedError, UsageError

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
        self.identity = identity
        self.scheduler = scheduler
        self.peers = peers
        self.is_closed = False
        self.waves: WaveObserver | None = None
        self._participants: dict[Series, RoundParticipant] = {}
        self.routes = (
            takes(ArrivalsNotice, self._on_message),
            takes(ReportNotice, self._on_message),
            takes(ResultNotice, self._on_message),
            takes(FailedNotice, self._on_message),
            takes(ElsewhereNotice, self._on_message),
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
        await self.participant(BARRIER).come(timeout_s)

    # --- notices of other workers ----------------------------------------------------

    def _on_message(self, link: PeerLink, notice: SeriesNotice) -> None:
        """Take a message of a neighbour.

        Raises:
            MalformedError: the message is invalid, or its sender is not a neighbour.
        """
        rank, ranks = self.checked_sender(link, notice.key)
        check_message(notice.content, len(ranks), self.size)
        if not self.is_closed:
            self._receive(self.participant(notice.key), rank, link, notice.content)

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

    def checked_sender(self, link: PeerLink, key: Key) -> tuple[int, Sequence[int]]:
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
        taken = (one.series for one in self._participants.values() if one.calls)
        in_use = itertools.chain((series,), taken)
        for dropped in self.machine.drop(in_use):
            self._participants.pop(dropped, None)
        return participant

    def _participant_of(self, series: Series) -> RoundParticipant:
        participant = self._participants.get(series)
        if participant is None:
            participant = self._participants[series] = RoundParticipant(self, series)
        return participant

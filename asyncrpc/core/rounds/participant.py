"""A worker's part in one series of rounds: its calls, connections and errors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

from asyncrpc.core.ids import Incarnation, WorkerId
from asyncrpc.core.loop.waits import WaitDescription, WaitKind, waits
from asyncrpc.core.members import UNKNOWN_INCARNATION
from asyncrpc.core.membership.ports import Peers
from asyncrpc.core.rounds.machine.messages import (
    LISTED_MAX,
    MISSING_MAX,
    Blame,
    Failure,
)
from asyncrpc.core.rounds.machine.series import Series
from asyncrpc.core.rounds.machine.table import Rounds
from asyncrpc.core.rounds.messages import PROBLEM_CHARS_MAX, notice_of
from asyncrpc.core.rounds.messenger import STALL_S, PeerMessenger, rank_of
from asyncrpc.core.services.ports import Identity, PeerLink, Scheduler
from asyncrpc.errors import (
    AsyncRpcError,
    BarrierBrokenError,
    BarrierTimeoutError,
    NotStartedError,
    Outcome,
    UnknownWorkerError,
    WorkerLostError,
)


class Host(Protocol):
    """The service that a participant belongs to."""

    identity: Identity
    scheduler: Scheduler
    peers: Peers
    is_closed: bool

    @property
    def machine(self) -> Rounds:
        """The machine of the rounds."""

    def flush(self) -> None:
        """Send all messages that are due; wake the calls whose round is over."""

    def name_of(self, rank: int) -> str:
        """Return the name of a worker, for people to read."""

    def on_unreachable(self, series: Series, rank: int, reason: str) -> None:
        """Record that a neighbour in a series cannot be reached."""


class RoundParticipant:
    """A worker's part in one series: its connections, and its calls, in turn.

    Attributes:
        series: the series.
        changed: set when the state of the series may have changed.
        messenger: sends messages to the neighbours.
        calls: how many calls are in the series, or wait for their turn.
    """

    def __init__(self, service: Host, series: Series) -> None:
        self.series = series
        self.changed = asyncio.Event()
        self.messenger = PeerMessenger(
            service.scheduler,
            service.peers,
            self._write,
            self._on_unreachable,
        )
        self.calls = 0
        self._turn = asyncio.Lock()
        self._service = service
        self._machine = service.machine
        # By neighbour: the round and the incarnation of the last message from or to it.
        self._lives: dict[int, tuple[int, Incarnation]] = {}

    @property
    def members(self) -> tuple[str, ...]:
        """The names of all members, for people to read."""
        return tuple(map(self._service.name_of, self.series.ranks))

    @waits(
        lambda at: WaitDescription(
            WaitKind.ROUND, at["self"].label, members=at["self"].members
        )
    )
    async def come(
        self, timeout_s: float | None, on_passed: Callable[[int], None] | None = None
    ) -> None:
        """Join the next round in turn, and wait until it is over.

        Raises:
            AsyncRpcError: the round has failed; see `Worker.barrier`.

        Cancellation:
            The round fails for all, unless it has been passed.
        """
        loop, series = self._service.scheduler.loop, self.series
        end_s = None if timeout_s is None else loop.time() + timeout_s
        self.calls += 1
        try:
            async with asyncio.timeout_at(end_s):
                await self._turn.acquire()
        except BaseException as error:
            self.calls -= 1
            if not isinstance(error, TimeoutError):
                raise
            raise BarrierTimeoutError(
                f"{series.key.any_label}: an earlier call of this worker was still "
                f"waiting after {timeout_s:g} s, so this call did not begin",
                number=series.number,
                missing=(),
            ) from None
        try:
            self._refuse_if_closed()
            failure = await self._try(end_s, timeout_s or 0.0)
            if failure is not None:
                raise self._error(failure)
        finally:
            has_passed = series.has_passed
            series.let_go()
            self.calls -= 1
            self._turn.release()
            if on_passed is not None and has_passed:  # also if cancelled just then
                on_passed(series.number)

    async def _try(self, end_s: float | None, timeout_s: float) -> Failure | None:
        try:
            return await self.join(end_s)
        except TimeoutError:
            absence = self._absence()
            error = BarrierTimeoutError(
                f"{self.label}: within {timeout_s:g} s {absence}; the round has failed "
                "for all members, and the next one can be used",
                number=self.series.number,
                missing=tuple(map(self._service.name_of, self.series.missing)),
            )
            self.give_up(f"waited {timeout_s:g} s; {absence}")
            raise error from None
        except BaseException as error:
            is_cancelled = isinstance(error, asyncio.CancelledError)
            self.give_up("was cancelled" if is_cancelled else f"failed: {error!r}")
            raise

    async def join(
        self, end_s: float | None, *, is_marked: bool = False
    ) -> Failure | None:
        """Join the next round, and wait until it is over; return its failure.

        Raises:
            TimeoutError: `end_s` has passed; the others still wait for each other.

        Cancellation:
            As after a TimeoutError.
        """
        series = self.series
        self._machine.join(series, is_marked=is_marked)
        self._service.flush()
        try:
            async with asyncio.timeout_at(end_s):
                await self._until_over()
                if series.has_passed:  # neighbours still rely on our messages
                    await self.messenger.wait_sent()
                    self.messenger.cancel()
        except TimeoutError:
            if series.is_waiting:
                raise
        return series.failure

    async def _until_over(self) -> None:
        series, now_s = self.series, self._service.scheduler.loop.time
        tell_s: float | None = None  # when to send neighbours the state they lack
        while series.is_waiting:
            self.changed.clear()
            if tell_s is None and series.is_overdue:
                tell_s = now_s() + STALL_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(tell_s):
                    await self.changed.wait()  # set by a loss and by `close` as well
            if tell_s is not None and now_s() >= tell_s:
                tell_s = None
                for rank in series.overdue():
                    self.messenger.send(rank)

    def give_up(self, what: str) -> None:
        """Fail the round that this worker waits at, if any, for all."""
        if self.series.is_waiting:
            missing = tuple(self.series.missing[:MISSING_MAX])
            problem = f"{self._me} gave up {self.label}: it {what}"
            failure = Failure(Blame.GAVE_UP, problem[:PROBLEM_CHARS_MAX], missing)
            self.series.fail(failure)
            self._service.flush()

    def on_gone(self, rank: int, reason: str) -> None:
        """Record that a worker is gone, or cannot be reached."""
        who = self._machine.who(rank)
        problem = f"{self.label} has failed: {who} is gone: {reason}"
        failure = Failure(Blame.LOST, problem[:PROBLEM_CHARS_MAX], (rank,))
        self.series.on_lost(rank, failure)
        self._service.flush()

    def _on_unreachable(self, rank: int, reason: str) -> None:
        self.on_gone(rank, reason)
        self._service.on_unreachable(self.series, rank, reason)

    def note_life(self, rank: int, peer: WorkerId) -> None:
        """Record the incarnation of a neighbour that sends, or is sent, a message."""
        latest, life = self._lives.get(rank, (-1, peer.incarnation))
        self._lives[rank] = self.series.latest, peer.incarnation
        if latest == self.series.latest and life != peer.incarnation:
            self.on_gone(rank, "it has been restarted")

    def relies_on(self, rank: int, peer: WorkerId) -> bool:
        """Return whether the series needs a lost worker: no later life replaced it."""
        latest, life = self._lives.get(rank, (-1, peer.incarnation))
        if latest == self.series.latest:
            return life == peer.incarnation
        try:
            link = self._service.peers.find(peer.name).link
            present = self._service.peers.member(peer.name).incarnation
        except UnknownWorkerError:
            return True
        if link is not None:
            return link.peer == peer
        return present in (UNKNOWN_INCARNATION, peer.incarnation)

    def _abort(self, what: str) -> None:
        """Join the next round only to give it up."""
        problem = f"{self._me} gave up {self.series.key.any_label}: it {what}"[
            :PROBLEM_CHARS_MAX
        ]
        rank = self._service.identity.rank
        failure = Failure(Blame.GAVE_UP, problem, (rank,))
        self._machine.abort(self.series, failure)
        self._service.flush()

    def _refuse_if_closed(self) -> None:
        """Fail the round for all if this worker cannot take part in it."""
        if self._service.is_closed:
            name = self._service.identity.name
            error = NotStartedError(f"worker {name!r} shuts down")
            self._abort(f"has failed: {error}")
            raise error

    # --- messages --------------------------------------------------------------------

    def _write(self, link: PeerLink) -> None:
        """Write all messages that are due to the worker at the other end."""
        rank = rank_of(self._service.peers, link.peer.name)
        self.note_life(rank, link.peer)
        for message in self.series.messages_for(rank):
            link.tell(notice_of(self.series.key, message), at_once=True)

    # --- errors ----------------------------------------------------------------------

    @property
    def label(self) -> str:
        """The description of the round that this worker waits in, or heard of last."""
        series = self.series
        number = series.number if series.is_waiting else series.latest
        return series.key.label(number)

    @property
    def _me(self) -> str:
        return self._machine.who(self._service.identity.rank)

    def _absence(self) -> str:
        missing = self.series.missing
        if not missing:
            return "all members came, but the news did not arrive in time"
        listed = ", ".join(map(self._machine.who, missing[:LISTED_MAX]))
        more = len(missing) - LISTED_MAX
        return f"these members did not come: {listed}" + (
            f" and {more} more" if more > 0 else ""
        )

    def _error(self, failure: Failure) -> AsyncRpcError:
        names = tuple(map(self._service.name_of, failure.missing))
        if failure.blame is Blame.LOST:
            return WorkerLostError(
                failure.problem,
                function=self.series.key.purpose.value,
                to=", ".join(names),
                outcome=Outcome.UNKNOWN,
            )
        return BarrierBrokenError(
            failure.problem, number=self.series.number, missing=names
        )

"""The replicas of one router: which there are, their state, and which gets a call.

`machine.routing` decides.  This module feeds it the events: members come and go,
replicas report their state, answers bring notes.  It also waits for a ready replica.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Collection
from fnmatch import fnmatchcase
from typing import Final

from asyncrpc import ChangeKind, MemberChange, MemberChanges
from asyncrpc.core.worker import Worker
from asyncrpc.errors import (
    NAMES_SHOWN,
    AsyncRpcError,
    Outcome,
    OverloadedError,
    RejectedError,
    RemoteError,
    TransportError,
    UnknownWorkerError,
    WorkerLostError,
)
from asyncrpc.extend import Deadline, WorkerId, ask, host_of
from asyncrpc.serving.replicas.machine.attempts import HEALTH, AttemptFailure, Health
from asyncrpc.serving.replicas.machine.routing import ReplicaRecord, Routing
from asyncrpc.serving.replicas.machine.states import ReplicaEvent, ReplicaState
from asyncrpc.serving.replicas.messages import (
    AnswerNote,
    ReplicaStatement,
    WatchReplica,
)
from asyncrpc.serving.replicas.options import ReplicaOptions
from asyncrpc.serving.replicas.service import service_of

logger = logging.getLogger("asyncrpc")

# Pauses after which a replica that could not be asked for its state is asked again.
FIRST_PAUSE_S: Final = 0.1
LAST_PAUSE_S: Final = 2.0
WAITING_MAX: Final = 1024  # calls that wait for a replica to become ready
_ENDS: Final = (ChangeKind.LEFT, ChangeKind.LOST)


class ReplicaRouter:
    """Knows the replicas, and chooses among them.

    Attributes:
        ejections: how often a replica was left out because it failed.
    """

    def __init__(self, worker: Worker, pattern: str, options: ReplicaOptions) -> None:
        self.worker = worker
        self.pattern = pattern
        self.options = options
        self.routing = Routing(options)
        self.ejections = 0
        self.host = host_of(worker)
        seed = int.from_bytes(self.host.random_bytes(8), "big")
        self._draw = random.Random(seed).random  # noqa: S311  (no secret)
        self._changed = asyncio.Event()
        self._waiting = 0
        self._following: asyncio.Task[None] | None = None
        self._watching: dict[ReplicaRecord, asyncio.Task[None]] = {}

    # --- life ------------------------------------------------------------------------

    def open(self) -> None:
        """Begin to follow the members that are replicas."""
        service_of(self.host).listen(self)
        changes = self.worker.members_changed()
        self._sync()
        self._following = self.host.start_task(self._follow(changes))

    async def close(self) -> None:
        """End all tasks."""
        service_of(self.host).unlisten(self)
        tasks = [*self._watching.values()]
        if self._following is not None:
            tasks.append(self._following)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _follow(self, changes: MemberChanges) -> None:
        async for change in changes:
            self._on_member(change)

    def _on_member(self, change: MemberChange) -> None:
        name = change.member.name
        if change.kind is ChangeKind.RESYNC:
            self._sync()
        elif not fnmatchcase(name, self.pattern):
            return
        elif change.kind in _ENDS:
            known = self.routing.get(name)
            if known is not None and change.incarnation in (0, known.incarnation):
                self._remove(name)
        else:
            self._add(name, change.incarnation)

    def _sync(self) -> None:
        """Compare with the whole list of members."""
        there = {
            member.name
            for member in self.worker.known_members
            if fnmatchcase(member.name, self.pattern)
        }
        for record in self.routing.records:
            if record.name not in there:
                self._remove(record.name)
        for name in sorted(there):
            incarnation = self.host.incarnation_of(name) or 0
            known = self.routing.get(name)
            if known is None or incarnation not in (0, known.incarnation):
                self._add(name, incarnation)

    def _add(self, name: str, incarnation: int) -> None:
        known = self.routing.get(name)
        if known is not None:
            if known.incarnation == incarnation:
                return
            self._remove(name)
        record = self.routing.add(name, incarnation)
        task = self.host.start_task(self._watch(record))
        self._watching[record] = task
        task.add_done_callback(lambda _: self._watching.pop(record, None))

    def _remove(self, name: str) -> None:
        record = self.routing.get(name)
        self.routing.remove(name)
        if record is not None and record in self._watching:
            self._watching[record].cancel()
        self._changed.set()

    # --- what replicas say -----------------------------------------------------------

    async def _watch(self, record: ReplicaRecord) -> None:
        """Ask a worker for its state until it says that it is a replica, or is gone."""
        pause_s = FIRST_PAUSE_S
        while record.life.state is ReplicaState.JOINING:
            try:
                statement = await self._ask(record)
            except (AsyncRpcError, TimeoutError) as error:
                # It may not know the question before it enters a `Replica`.
                logger.debug("replica %r cannot be asked: %s", record.name, error)
            else:
                if statement is not None:
                    self._on_statement(record, statement)
                    return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    async def _ask(self, record: ReplicaRecord) -> ReplicaStatement | None:
        link = await self.host.link_to(record.name)
        record.incarnation = link.peer.incarnation
        timeout_s = self.worker.options.network.connect_timeout_s
        deadline = Deadline.after(timeout_s, self.worker.loop.time())
        return await ask(link, WatchReplica(), deadline=deadline)

    async def on_news(self, peer: WorkerId, statement: ReplicaStatement) -> None:
        """Take a replica's state; if it drains, wait for the calls from here."""
        record = self.routing.get(peer.name)
        if record is None or record.incarnation != peer.incarnation:
            return
        self._on_statement(record, statement)
        while record.outstanding and record.life.state is ReplicaState.DRAINING:
            self._changed.clear()
            await self._changed.wait()  # the replica has a limit

    def _on_statement(self, record: ReplicaRecord, statement: ReplicaStatement) -> None:
        now_s = self.worker.loop.time()
        record.weight = statement.weight if statement.weight > 0 else 1.0
        record.version = statement.version
        record.tell_load(statement.load, now_s)
        self.routing.set_canary(record, statement.canary)
        if statement.is_draining:
            self.routing.advance(record, ReplicaEvent.SAID_DRAINING)
        elif statement.is_ready:
            self.routing.make_ready(record, now_s, age_s=statement.age_s)
        self._changed.set()

    def on_note(self, record: ReplicaRecord, note: AnswerNote) -> None:
        """Take the note of an answer."""
        record.tell_load(note.load, self.worker.loop.time())
        if note.is_draining:
            self.routing.advance(record, ReplicaEvent.SAID_DRAINING)

    def is_leaving(self, name: str) -> bool:
        """Return whether a replica has said goodbye on its link."""
        link = self.host.open_link_to(name)
        return link is not None and link.is_draining

    # --- choosing --------------------------------------------------------------------

    async def choose(
        self,
        key: bytes | None,
        tried: Collection[ReplicaRecord],
        deadline: Deadline | None,
    ) -> ReplicaRecord | None:
        """Return a replica, waiting for one if none is ready at all."""
        record = self.choose_now(key, tried)
        if record is not None or self._has_ready:
            return record
        if self._waiting >= WAITING_MAX:
            raise self._none_ready(f"{self._waiting} calls wait for one, the limit")
        limit_s = self.worker.loop.time() + self.options.ready_timeout_s
        if deadline is not None:
            limit_s = min(limit_s, deadline.at_s)
        self._waiting += 1
        try:
            async with asyncio.timeout_at(limit_s):
                while not self._has_ready:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            waited = f"none became ready within {self.options.ready_timeout_s:g} s"
            raise self._none_ready(waited) from None
        finally:
            self._waiting -= 1
        return self.choose_now(key, tried)

    def choose_now(
        self, key: bytes | None, tried: Collection[ReplicaRecord]
    ) -> ReplicaRecord | None:
        """Return a replica; None: all ready ones have been tried."""
        now_s = self.worker.loop.time()
        return self.routing.choose(now_s, self._draw, key=key, tried=tried)

    @property
    def _has_ready(self) -> bool:
        return any(record.life.takes_calls for record in self.routing.records)

    def _none_ready(self, why: str) -> RejectedError:
        states = [
            f"{record.name!r}: {record.life.state.value}"
            for record in self.routing.records
        ]
        if more := states[NAMES_SHOWN:]:
            states[NAMES_SHOWN:] = [f"and {len(more)} more"]
        there = "; ".join(states) or "no worker has a matching name"
        return RejectedError(
            f"no replica matching {self.pattern!r} is ready: {why}; {there}",
            outcome=Outcome.NOT_EXECUTED,
        )

    async def wait_ready(self, count: int) -> None:
        """Wait until `count` replicas are ready."""
        while sum(record.life.takes_calls for record in self.routing.records) < count:
            self._changed.clear()
            await self._changed.wait()  # the caller has a limit

    # --- what becomes of a call ------------------------------------------------------

    def end(self, record: ReplicaRecord, health: Health) -> None:
        """Note that a call has ended at a replica."""
        now_s = self.worker.loop.time()
        is_ejected = self.routing.end(record, health, now_s)
        if not record.outstanding and not record.life.takes_calls:
            self._changed.set()
        if is_ejected:
            self.ejections += 1
            logger.warning(
                "replica %r failed %d times in a row: it gets no calls for %.3g s",
                record.name,
                record.failures,
                record.until_s - now_s,
            )

    def failure_of(self, record: ReplicaRecord, error: BaseException) -> AttemptFailure:
        """Return how an attempt has failed."""
        outcome = getattr(error, "outcome", Outcome.UNKNOWN)
        # If the function raised it, the outcome is `EXECUTED`, as it may have done
        # something before; but a request that a full queue refused has not begun.
        ran = outcome is Outcome.EXECUTED and not isinstance(error, OverloadedError)
        if isinstance(error, RejectedError) and not ran:
            if self.is_leaving(record.name) and outcome is Outcome.NOT_EXECUTED:
                self.routing.advance(record, ReplicaEvent.SAID_DRAINING)
            draining = record.life.state is ReplicaState.DRAINING
            return AttemptFailure.DRAINING if draining else AttemptFailure.OVERLOADED
        if isinstance(error, UnknownWorkerError):
            return AttemptFailure.UNREACHED
        if isinstance(error, WorkerLostError | TransportError):
            is_safe = outcome is Outcome.NOT_EXECUTED
            return AttemptFailure.UNREACHED if is_safe else AttemptFailure.LOST
        if isinstance(error, TimeoutError) and not isinstance(error, RemoteError):
            return AttemptFailure.LATE
        if isinstance(error, RemoteError):
            return AttemptFailure.RAISED
        return AttemptFailure.MISUSED


def health_of(failure: AttemptFailure) -> Health:
    """Return what a failed attempt says of its replica."""
    return HEALTH[failure]

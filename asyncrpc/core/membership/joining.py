"""Joining a running group: the new worker, and the member that admits it.

The new worker dials any member, with the whole handshake, and its HELLO does not say
which worker it expects.  The member checks whether the name is free; if a worker has
it, whether that one still lives.  Its answer is a verdict: empty if the worker was
admitted and connects as any other; or the reason.  So a name is taken over only from a
dead worker, and no member has to remember requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from asyncrpc.core.identity import WorkerIdentity
from asyncrpc.core.links.connection import Connection
from asyncrpc.core.links.directory import Directory
from asyncrpc.core.links.ports import JOIN_REFUSED
from asyncrpc.core.links.sinks import SILENT
from asyncrpc.core.loop.clock import Deadline
from asyncrpc.core.members import (
    UNKNOWN_INCARNATION,
    Member,
    OfferedGroup,
    Rendezvous,
    RunningGroup,
    member_of,
)
from asyncrpc.core.membership.comparison import MembershipTimes
from asyncrpc.core.membership.machine.arriving import (
    ArrivalEvent,
    ArrivalState,
    MeetingArrival,
)
from asyncrpc.core.membership.machine.membership import (
    MEMBERS_MAX,
    Membership,
)
from asyncrpc.core.membership.machine.records import (
    Effect,
    Record,
)
from asyncrpc.core.membership.messages import AskMembers, PingMember
from asyncrpc.core.membership.stores import StoreRendezvous
from asyncrpc.core.services.ports import Scheduler, ask
from asyncrpc.core.wire.frames import Hello
from asyncrpc.core.wire.handshake import Role
from asyncrpc.errors import (
    AsyncRpcError,
    AuthenticationError,
    ClosedError,
    ConnectError,
    ConnectionLostError,
    MalformedError,
    RendezvousTimeoutError,
    TransportError,
    UsageError,
)

REFUSED: Final = JOIN_REFUSED
PAUSE_S: Final = 0.2  # between two rounds of asking
SHOWN_MAX: Final = 8  # addresses in the text of an error


# --- the new worker ------------------------------------------------------------------


class _SilentError(TimeoutError):
    """The process that listens at an address has not answered as a worker."""


class _NotNowError(Exception):
    """A member was reached, but has not admitted the worker for now."""


class Joiner:
    """Joins this worker to a running group."""

    def __init__(
        self,
        identity: WorkerIdentity,
        scheduler: Scheduler,
        peers: Directory,
    ) -> None:
        self._identity = identity
        self._scheduler = scheduler
        self._peers = peers
        self._routes = peers.routes
        self._handshakes = peers.connections

    async def meet(
        self, rendezvous: Rendezvous, timeout_s: float
    ) -> tuple[Sequence[Member], list[Record] | None]:
        """Meet all other workers, or be admitted to a running group."""
        arrival, me = MeetingArrival(), self._identity.member
        members: Sequence[Member] = ()
        records: list[Record] | None = None
        while not arrival.is_over:
            match arrival.state:
                case ArrivalState.WAITING:
                    members = await rendezvous.join(me, timeout_s)
                    event = _event_of(members)
                case ArrivalState.KNOCKING:
                    is_there = await self._is_any_there(members)
                    event = ArrivalEvent.ANSWERED if is_there else ArrivalEvent.SILENT
                case ArrivalState.CLAIMING:
                    assert isinstance(rendezvous, StoreRendezvous)
                    is_claimed = await rendezvous.claim(me)
                    event = (
                        ArrivalEvent.CLAIMED if is_claimed else ArrivalEvent.TOO_LATE
                    )
                case ArrivalState.ASKING:
                    records = await self._join_offered(members, timeout_s)
                    is_in = records is not None
                    event = ArrivalEvent.ADMITTED if is_in else ArrivalEvent.SILENT
                case _:  # JOINING
                    records = await self.join(members, timeout_s)
                    event = ArrivalEvent.ADMITTED
            if event is ArrivalEvent.SILENT:
                assert isinstance(rendezvous, StoreRendezvous)
                rendezvous.refuse(members)
            arrival.advance(event)
        return members, records

    async def _is_any_there(self, members: Sequence[Member]) -> bool:
        """Return whether a process that knows the secret listens for a member."""
        other_members = [
            member for member in members if member.name != self._identity.name
        ]
        knocks = [
            self._scheduler.start_task(self._is_there(member))
            for member in other_members
        ]
        try:
            for knock in asyncio.as_completed(knocks):
                if await knock:
                    return True
        finally:
            for task in knocks:
                task.cancel()
        return False

    async def _is_there(self, member: Member) -> bool:
        usable = self._routes.to(member)
        if not usable:
            return False
        proved = self._scheduler.loop.create_future()

        def on_proved(_: Connection) -> None:
            if not proved.done():
                proved.set_result(None)

        def make() -> Connection:
            return self._handshakes.make(
                Role.DIALER, on_proved, lambda *_: None, is_cautious=True
            )

        try:
            async with asyncio.timeout(self._routes.timeout_s):
                connection = (await self._routes.connect(usable, make)).handler
                try:
                    either = {proved, connection.ended}
                    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    connection.end(ClosedError("it only checked who listens"))
        except (TransportError, TimeoutError):
            return False
        return proved.done()

    async def _join_offered(
        self, members: Sequence[Member], timeout_s: float
    ) -> list[Record] | None:
        """Ask the members of an offer; return None once they are gone."""
        try:
            return await self.join(members, timeout_s, while_there=True)
        except RendezvousTimeoutError:
            return None

    async def join(
        self, members: Sequence[Member], timeout_s: float, *, while_there: bool = False
    ) -> list[Record]:
        """Ask one of `members` to admit this worker; return all members."""
        loop = self._scheduler.loop
        end_s = loop.time() + timeout_s
        other_members = [
            member for member in members if member.name != self._identity.name
        ]
        problems: dict[str, str] = {}
        while True:
            is_any_there = False
            refused: list[AuthenticationError] = []
            for member in members:
                place = member.addresses[0] if member.addresses else member.name
                try:
                    async with asyncio.timeout_at(end_s):
                        return await self._join_through(member)
                except TimeoutError as error:
                    problems.setdefault(place, str(error) or "no answer in time")
                except AuthenticationError as error:
                    problems[place] = str(error)
                    refused.append(error)
                except (TransportError, _NotNowError) as error:
                    problems[place] = str(error)
                    is_any_there |= isinstance(error, _NotNowError)
                if loop.time() >= end_s:
                    raise _not_joined(problems, timeout_s, self._peers.early_joiners)
            if self._routes.gateway is not None and len(refused) == len(members):
                raise refused[0]  # a token that has ended does not come back
            if not other_members:  # the only member had this name, and has ended
                return []
            if while_there and not is_any_there:
                raise _not_joined(problems, timeout_s, self._peers.early_joiners)
            await asyncio.sleep(min(PAUSE_S, max(0.0, end_s - loop.time())))

    async def _join_through(self, member: Member) -> list[Record]:
        hello = await self.ask(member)
        if hello.verdict.startswith(REFUSED):
            why = hello.verdict.removeprefix(REFUSED)
            raise UsageError(f"worker {self._identity.name!r} cannot join: {why}")
        if hello.verdict:
            raise _NotNowError(hello.verdict)
        self._peers.add([member_of(hello)])
        now_s = self._scheduler.loop.time()
        deadline = Deadline.after(self._routes.timeout_s, now_s)
        try:
            link = await self._peers.open_link(hello.name)
            return await ask(link, AskMembers(), deadline=deadline)
        except MalformedError:
            raise
        except AsyncRpcError as error:
            raise _NotNowError(str(error)) from error

    async def is_there(self, member: Member) -> bool:
        """Return whether a life of a worker answers at its addresses."""
        hello = await self.ask(member)
        return (hello.name, hello.incarnation) == (member.name, member.incarnation)

    async def ask(self, member: Member) -> Hello:
        """Ask a member to admit this worker; return its answer."""
        usable = self._routes.to(member)
        if not usable:
            raise ConnectError("this worker cannot reach such an address")
        connection: Connection | None = None
        try:
            async with asyncio.timeout(self._routes.timeout_s):
                dialled = await self._routes.connect(usable, self._new_connection)
                connection = dialled.handler
                hello = await connection.until_open()
        except TimeoutError as error:
            if connection is None:
                raise
            raise _SilentError(
                "a process listens there, but did not answer as a running worker "
                f"within {self._routes.timeout_s:g} s"
            ) from error
        connection.close()
        return hello

    def _new_connection(self) -> Connection:
        def introduce(connection: Connection) -> None:
            connection.hello(self._identity.hello())

        def on_hello(connection: Connection, _hello: Hello) -> None:
            if self._handshakes.is_trusted(connection):
                connection.open_to(SILENT)

        return self._handshakes.make(Role.DIALER, introduce, on_hello)


def _event_of(members: Sequence[Member]) -> ArrivalEvent:
    """Return the event of a rendezvous that returned these members."""
    if isinstance(members, OfferedGroup):
        return ArrivalEvent.OFFER
    if isinstance(members, RunningGroup):
        return ArrivalEvent.MET_BEFORE
    return ArrivalEvent.ALL_CAME


def _not_joined(
    problems: dict[str, str], timeout_s: float, waiting: Sequence[str]
) -> RendezvousTimeoutError:
    """Return the error of a worker that no member has admitted."""
    shown = [f"{place}: {why}" for place, why in problems.items()][:SHOWN_MAX]
    advice = "check that a running worker listens at one of these addresses"
    if waiting:
        named = ", ".join(map(repr, waiting[:SHOWN_MAX]))
        advice = (
            f"{named} asked this worker for admission, but this worker is not running "
            "yet: join:// needs a running member. Start one of them, or all, with "
            "another rendezvous, such as tcp://host:port and a world size"
        )
    return RendezvousTimeoutError(
        f"no member admitted this worker within {timeout_s:g} s ({'; '.join(shown)}); "
        f"{advice}",
        missing=tuple(problems),
    )


# --- the member that admits it -------------------------------------------------------


class JoinAdmission:
    """Admits workers that ask to join."""

    def __init__(
        self,
        identity: WorkerIdentity,
        scheduler: Scheduler,
        peers: Directory,
        *,
        table: Membership,
        times: MembershipTimes,
        ask: Callable[[Member], Awaitable[Hello]],
        is_draining: Callable[[], bool],
        carry_out: Callable[[list[Effect]], None],
    ) -> None:
        self._identity = identity
        self._scheduler = scheduler
        self._peers = peers
        self._times = times
        self._ask = ask
        self._is_draining = is_draining
        self._carry_out = carry_out
        self._table = table
        self._probes: dict[str, asyncio.Task[bool]] = {}
        self._change: asyncio.Future[None] | None = None  # of what is known of anybody

    def begin(self, table: Membership) -> None:
        """Admit workers to the group of another table."""
        self._table = table

    def take_in(self, connection: Connection, hello: Hello) -> None:
        """Answer a worker that asks to be admitted; it waits meanwhile.

        The limits are those of all workers that have not introduced themselves:
        `LimitOptions.handshakes_max` and `connect_timeout_s`.
        """
        self._scheduler.start_task(self._answer(connection, hello))

    async def _answer(self, connection: Connection, hello: Hello) -> None:
        verdict = await self._judge(member_of(hello))
        if connection.ended.done():
            return
        connection.hello(self._identity.hello(verdict=verdict))
        connection.open_to(SILENT)
        connection.close()

    async def _judge(self, member: Member) -> str:
        """Admit a worker, or return why not."""
        limit_s = self._times.connect_timeout_s / 2
        why = self._refuse(member) or await self._contested(member, limit_s)
        if not why:
            self._carry_out(self._table.admit(member, self._scheduler.loop.time()))
        return why

    def _refuse(self, member: Member) -> str:
        """Return why a worker may not join, whatever others say; empty if it may."""
        why = ""
        if self._is_draining():
            return "it is shutting down"
        if self._table.is_static:
            why = 'the group is static (Options(membership="static"))'
        elif not member.name or member.incarnation == UNKNOWN_INCARNATION:
            why = "it has no name"
        elif member.name == self._identity.name:
            why = f"the name {member.name!r} is taken by the worker that was asked"
        elif (owner := self._table.owner_of(member.incarnation)) not in (
            "",
            member.name,
        ):
            why = f"its incarnation is that of worker {owner!r}"
        elif not self._has_room():
            why = f"the group has {MEMBERS_MAX} members, which is its limit"
        return why and f"{REFUSED}{why}"

    def _has_room(self) -> bool:
        """Return whether one more worker fits in, if need be in place of another."""
        if len(self._table) >= MEMBERS_MAX:
            self._carry_out(self._table.make_room())
        return len(self._table) < MEMBERS_MAX

    def is_claimed(self, member: Member) -> bool:
        """Return whether another worker may have the name or rank of a peer."""
        return bool(self._in_its_way(member))

    async def contest(self, member: Member) -> str:
        """Return why a peer may not have its name and rank; empty if it may."""
        for _, record in self._in_its_way(member):
            link = self._peers.link_of(record.incarnation)
            if link is not None and link.connection.is_broken:
                # The network says what a worker that is restarted cannot prove.
                error = ConnectionLostError("another worker has its name or rank")
                link.connection.end(error)
        limit_s = max(self._times.lost_after_s, self._times.connect_timeout_s / 2)
        why = (await self._contested(member, limit_s)).removeprefix(REFUSED)
        return why and f"{why}; give this worker another name or rank, or stop that one"

    def on_changed(self) -> None:
        """What is known of a worker has changed: it may be in the way no longer."""
        if self._change is not None:
            self._change.set_result(None)
            self._change = None

    async def _contested(self, member: Member, limit_s: float) -> str:
        """Return which worker has the name or rank of a new one; empty if none has."""
        loop, table = self._scheduler.loop, self._table
        for claim, record in self._in_its_way(member):
            if record.incarnation == UNKNOWN_INCARNATION:
                return f"{REFUSED}{claim} is listed for it"
            try:
                async with asyncio.timeout(limit_s):
                    is_alive = await self._is_in_the_way(record)
            except TimeoutError:
                return f"{claim} is taken by worker {record.name!r}, which may be alive"
            if is_alive:
                return f"{REFUSED}{claim} is taken by a running worker"
            lost = table.lose(record.name, record.incarnation, loop.time())
            self._carry_out(lost)
        # Another may have come meanwhile.
        return f"{member.name!r} is being admitted" if self._in_its_way(member) else ""

    def _in_its_way(self, member: Member) -> list[tuple[str, Record]]:
        """Return the workers that a new one would displace, if they live."""
        displaced = []
        named, ranked = self._table.get(member.name), self._table.holder_of(member.rank)
        if (
            named is not None
            and named.is_placed
            and named.incarnation != member.incarnation
        ):
            displaced.append((f"the name {member.name!r}", named))
        # One that is only listed may run, too.
        if ranked is not None and ranked.is_alive and ranked.name != member.name:
            displaced.append((f"rank {member.rank}, of {ranked.name!r},", ranked))
        return displaced

    async def _is_in_the_way(self, record: Record) -> bool:
        """Return whether a worker lives; it does not if another record replaces it."""
        probe = self._scheduler.start_task(self._probe(record))
        moved = self._scheduler.start_task(self._has_successor(record))
        either: set[asyncio.Future[Any]] = {probe, moved}
        try:
            while not probe.done():
                if self._change is None:
                    self._change = self._scheduler.loop.create_future()
                wake = {*either, self._change}
                await asyncio.wait(wake, return_when=asyncio.FIRST_COMPLETED)
                known = self._table.get(record.name)
                is_known = known and known.incarnation == record.incarnation
                if not is_known or (moved.done() and moved.result()):
                    return False
                if moved.done():
                    either.discard(moved)
            return probe.result()
        finally:
            probe.cancel()
            moved.cancel()

    async def _has_successor(self, record: Record) -> bool:
        """Return whether another life of a worker listens at its addresses."""
        try:
            hello = await self._ask(record.member)
        except (TransportError, TimeoutError):
            return False
        is_other = hello.incarnation != record.incarnation != UNKNOWN_INCARNATION
        return hello.name == record.name and is_other

    async def _probe(self, record: Record) -> bool:
        """Return whether a worker lives; concurrent callers share one question."""
        if record.name == self._identity.name:
            return True
        probe = self._probes.get(record.name)
        if probe is None:
            probe = self._scheduler.start_task(self._ping(record))
            self._probes[record.name] = probe
            probe.add_done_callback(lambda _: self._probes.pop(record.name, None))
        return await asyncio.shield(probe)

    async def _ping(self, record: Record) -> bool:
        limit_s = self._times.lost_after_s + self._times.connect_timeout_s
        deadline = Deadline.after(limit_s, self._scheduler.loop.time())
        try:
            link = await self._peers.open_link(record.name)
            if record.incarnation not in (link.peer.incarnation, UNKNOWN_INCARNATION):
                return False
            await ask(link, PingMember(), deadline=deadline)
        except TimeoutError:  # it did not answer; but a worker is there
            return True
        except AsyncRpcError:
            return False
        return True

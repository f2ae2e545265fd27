"""Joining a group that runs: the worker that comes, and the member that takes it in.

The new worker dials any member, with the whole handshake, and says HELLO without saying
whom it expects.  The member looks whether the name is free; if a worker has it, whether
that one still lives.  Its answer is a verdict: none, then the worker has been taken in
and connects as any other; or why not.  So a name is taken over only from the dead, and
nobody has to remember who asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from asyncrpc.clock import Deadline
from asyncrpc.errors import (
    AsyncRpcError,
    ConnectError,
    MalformedError,
    RendezvousTimeoutError,
    TransportError,
    UsageError,
)
from asyncrpc.ids import Incarnation
from asyncrpc.runtime.machine.membership import (
    MEMBERS_MAX,
    Effect,
    Membership,
    Record,
)
from asyncrpc.runtime.membership.members import UNKNOWN_INCARNATION, Member
from asyncrpc.runtime.membership.spreading import SERVICE
from asyncrpc.runtime.payloads.lane_dialing import SILENT
from asyncrpc.transport.dial import connect_any
from asyncrpc.wire.handshake import Role

if TYPE_CHECKING:
    from asyncrpc.runtime.links.connection import Connection
    from asyncrpc.runtime.worker import Worker
    from asyncrpc.wire.messages import Hello

REFUSED: Final = "refused: "  # begins a verdict that no member will think better of
PAUSE_S: Final = 0.2  # between two rounds of asking
SHOWN_MAX: Final = 8  # addresses in the text of an error


def member_of(hello: Hello) -> Member:
    """Return what a HELLO says of its sender."""
    return Member(
        hello.name,
        hello.rank,
        Incarnation(hello.incarnation),
        hello.addresses,
        hello.host_id,
    )


# --- the worker that comes -----------------------------------------------------------


async def join_group(
    worker: Worker, members: Sequence[Member], timeout_s: float
) -> list[Record]:
    """Have this worker taken in by one of `members`; return all there are.

    Raises:
        UsageError: the name or the rank is taken, or the group is static.
        RendezvousTimeoutError: none of them could be asked; it says why.
        AuthenticationError: the secrets differ.

    Cancellation:
        The group may have taken the worker in; it will find that it is not there.
    """
    loop = worker.loop
    end_s = loop.time() + timeout_s
    others = [one for one in members if one.name != worker.name]
    while True:
        problems: dict[str, str] = {}
        for member in members:
            place = member.addresses[0] if member.addresses else member.name
            try:
                async with asyncio.timeout_at(end_s):
                    return await _join_through(worker, member)
            except (TransportError, TimeoutError, _NotNowError) as error:
                problems[place] = str(error) or "no answer in time"
            if loop.time() >= end_s:
                raise _not_joined(problems, timeout_s)
        if not others:  # the group had this one member, and it has ended
            return []
        await asyncio.sleep(min(PAUSE_S, max(0.0, end_s - loop.time())))


class _NotNowError(Exception):
    """A member that could be reached has not taken the worker in, for now."""


async def _join_through(worker: Worker, member: Member) -> list[Record]:
    hello = await _ask(worker, member)
    if hello.verdict.startswith(REFUSED):
        why = hello.verdict.removeprefix(REFUSED)
        raise UsageError(f"worker {worker.name!r} cannot join: {why}")
    if hello.verdict:
        raise _NotNowError(hello.verdict)
    worker.directory.add([member_of(hello)])
    deadline = Deadline.after(worker.options.connect_timeout_s, worker.loop.time())
    try:
        link = await worker.link_to(hello.name)
        packed = await link.request_service(SERVICE, "members", None, deadline=deadline)
    except MalformedError:
        raise
    except AsyncRpcError as error:
        raise _NotNowError(str(error)) from error
    return [Record.unpack(one) for one in packed]


async def has_taken(worker: Worker, member: Member) -> bool:
    """Say whether another incarnation of this worker's name answers at its addresses.

    Raises:
        TransportError: nobody answers.
        TimeoutError: nor does anybody refuse.

    Cancellation:
        The connection is closed.
    """
    hello = await _ask(worker, member)
    return hello.name == worker.name and hello.incarnation == member.incarnation


async def _ask(worker: Worker, member: Member) -> Hello:
    """Ask a member to take this worker in; return its answer."""
    directory = worker.directory

    def on_proved(connection: Connection) -> None:
        connection.hello(worker.hello())

    def on_hello(connection: Connection, _hello: Hello) -> None:
        if directory._is_trusted(connection):  # noqa: SLF001  (a part of the directory)
            connection.open_to(SILENT)

    usable = directory._usable(member)  # noqa: SLF001
    if not usable:
        raise ConnectError("this worker has no way to such an address")
    async with asyncio.timeout(worker.options.connect_timeout_s):
        dialled = await connect_any(
            usable,
            lambda: directory.make_connection(Role.DIALER, on_proved, on_hello),
            worker.connectors,
        )
        connection = dialled.handler
        hello = await connection.until_open()
    connection.close()
    return hello


def _not_joined(problems: dict[str, str], timeout_s: float) -> RendezvousTimeoutError:
    shown = [f"{place}: {why}" for place, why in problems.items()][:SHOWN_MAX]
    return RendezvousTimeoutError(
        f"no member took this worker in within {timeout_s:g} s ({'; '.join(shown)}); "
        "is one of the addresses that of a worker that runs?",
        missing=tuple(problems),
    )


# --- the member that takes it in -----------------------------------------------------


class Admission:
    """Takes in workers that ask for it."""

    def __init__(
        self,
        worker: Worker,
        table: Membership,
        carry_out: Callable[[list[Effect]], None],
    ) -> None:
        """Prepare.

        Args:
            worker: the member.
            table: what it knows.
            carry_out: told what is to be done.
        """
        self._worker = worker
        self._table = table
        self._carry_out = carry_out
        self._probes: dict[str, asyncio.Task[bool]] = {}

    def take_in(self, connection: Connection, hello: Hello) -> None:
        """Answer a worker that asks to be taken in; it waits meanwhile.

        Bounded as all that have not introduced themselves: `Options.handshakes_max`,
        `connect_timeout_s`.
        """
        self._worker.start_task(self._answer(connection, hello))

    async def _answer(self, connection: Connection, hello: Hello) -> None:
        verdict = await self._judge(member_of(hello))
        if connection.ended.done():
            return
        connection.hello(self._worker.hello(verdict=verdict))
        connection.open_to(SILENT)
        connection.close()

    async def _judge(self, member: Member) -> str:
        """Take a worker in, or say why not."""
        why = self._refuse(member) or await self._contested(member)
        if not why:
            self._carry_out(self._table.admit(member, self._worker.loop.time()))
        return why

    def _refuse(self, member: Member) -> str:
        """Say why a worker is not taken in, whoever else there is; empty if it may."""
        worker, why = self._worker, ""
        if worker.is_draining:
            return "it is shutting down"
        if self._table.is_static:
            why = 'the group is static (Options(membership="static"))'
        elif not member.name or member.incarnation == UNKNOWN_INCARNATION:
            why = "it has no name"
        elif member.name == worker.name:
            why = f"the name {member.name!r} is taken by the worker that was asked"
        elif len(self._table) >= MEMBERS_MAX:
            why = f"the group has {MEMBERS_MAX} members, which is its limit"
        return why and f"{REFUSED}{why}"

    async def _contested(self, member: Member) -> str:
        """Say who keeps a worker from its name and rank; empty if nobody does."""
        worker, table = self._worker, self._table
        for what, record in self._in_its_way(member):
            try:
                async with asyncio.timeout(worker.options.connect_timeout_s / 2):
                    is_alive = await self._probe(record)
            except TimeoutError:
                return f"{what} is taken by worker {record.name!r}, which is looked for"
            if is_alive:
                return f"{REFUSED}{what} is taken by a worker that runs"
            now_s = worker.loop.time()
            self._carry_out(table.lose(record.name, record.incarnation, now_s))
        # Another may have come meanwhile.
        return f"{member.name!r} is being taken in" if self._in_its_way(member) else ""

    def _in_its_way(self, member: Member) -> list[tuple[str, Record]]:
        """Return whom a worker would displace, if they live."""
        found = []
        named, ranked = self._table.get(member.name), self._table.holder_of(member.rank)
        if named is not None and named.incarnation != member.incarnation:
            found.append((f"the name {member.name!r}", named))
        if ranked is not None and ranked.name != member.name:
            found.append((f"rank {member.rank}, of {ranked.name!r},", ranked))
        return [(what, record) for what, record in found if record.is_placed]

    async def _probe(self, record: Record) -> bool:
        """Say whether a worker lives.  It is asked once, however many want to know."""
        if record.name == self._worker.name:
            return True
        probe = self._probes.get(record.name)
        if probe is None:
            probe = self._worker.start_task(self._ping(record))
            self._probes[record.name] = probe
            probe.add_done_callback(lambda _: self._probes.pop(record.name, None))
        return await asyncio.shield(probe)

    async def _ping(self, record: Record) -> bool:
        worker = self._worker
        limit_s = worker.options.lost_after_s + worker.options.connect_timeout_s
        deadline = Deadline.after(limit_s, worker.loop.time())
        try:
            link = await worker.link_to(record.name)
            if link.peer.incarnation != record.incarnation:
                return False
            await link.request_service(SERVICE, "ping", None, deadline=deadline)
        except TimeoutError:  # nobody knows; but there is somebody
            return True
        except AsyncRpcError:
            return False
        return True

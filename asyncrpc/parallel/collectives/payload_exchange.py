"""A rendezvous: members come under a tag, and each gets the payloads of all.

That all have come is a round of `runtime.barriers`, which knows tags and subsets, and
names who is missing, and who passed other members.  The payloads follow on the tree of
the round: each parent collects those of its children's branches, and the list of the
root comes back down.  All members are there by then, so this waits for nobody; it goes
on if a call is cancelled meanwhile.

It is no collective of a `Group`: a group knows all its members, speaks to all of them
when one is late, and ends with the first that is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from typing import Final, NamedTuple, TypeAlias

from asyncrpc.core.arguments import check_kind, check_seconds, check_sequence, wrong
from asyncrpc.core.barriers.machine.series import Series, tree_position
from asyncrpc.core.barriers.messages import (
    LISTED_MAX,
    TAG_CHARS_MAX,
    Key,
    Purpose,
    Replicas,
)
from asyncrpc.core.barriers.service import BarrierService
from asyncrpc.core.worker import Worker
from asyncrpc.errors import (
    AsyncRpcError,
    BarrierBrokenError,
    BarrierTimeoutError,
    MalformedError,
    UsageError,
)
from asyncrpc.extend import (
    Count,
    PeerLink,
    Request,
    ServiceHost,
    Spread,
    WorkerId,
    answers,
    ask,
    host_of,
    message,
    service_of,
)

SERVICE: Final = "rendezvous"
PAYLOAD_BYTES_MAX: Final = 1 << 20  # of one member
ALL_BYTES_MAX: Final = 16 << 20  # of all members: every member receives so much


async def rendezvous(
    worker: Worker,
    tag: str,
    payload: bytes = b"",
    members: Sequence[str | int] | None = None,
    *,
    timeout_s: float | None = None,
) -> list[bytes]:
    """Wait until all members have reached it, and return the payloads of all.

    Members form a binary tree.  With n members no member is more than log2(n) steps
    from the root, and each exchanges messages with at most three others.  No device,
    graph or store takes part.

    The n-th call with a tag and members on one worker meets the n-th call with the same
    tag and members on the others.  Calls with another tag or other members are
    independent.  Concurrent calls of one worker with the same tag and members take
    turns.  If workers use one tag with several sets of members, they must use the sets
    in the same order.

    If a rendezvous fails, it fails at once on every member that has not passed it,
    including later arrivals.  After that, the live members can use the next one.

    Args:
        worker: the worker of this process; it must be running.
        tag: names the rendezvous; at most 1,024 characters.
        payload: the bytes of this worker: at most 1 MiB, and at most 16 MiB divided by
            the number of members.
        members: names or ranks of the workers; None: every rank of the group.  All
            members must pass the same ones in the same order.
        timeout_s: seconds to wait; None: no limit.

    Returns:
        The payload of each member, in the order of `members`, or of their ranks.

    Raises:
        UsageError: an argument is wrong; the group has no ranks; one of `members` has
            no rank, or is repeated; this worker is not among them.  The call does not
            count.
        UnknownWorkerError: no worker has a given name.  The call does not count.
        BarrierTimeoutError: `timeout_s` passed here; `missing` names the members that
            did not reach it.  It is a TimeoutError.
        BarrierBrokenError: another member gave it up; or two members wait for each
            other in two rendezvous, because one passed other members; or a member was
            lost while they exchanged their payloads.
        WorkerLostError: a member is gone before all had reached it; `to` names it.
        NotStartedError: `worker` does not run.

    Cancellation:
        The rendezvous fails on the other members as well, unless all have reached it.

    Example:
        >>> names = await rendezvous(worker, "saved", worker.name.encode())

    Source: torch_xla's `xm.rendezvous`.  There all replicas must take part, and
    payloads become part of the graph; older versions sent them through one server.
    """
    check_kind("worker", worker, Worker, "a worker")
    host_of(worker).check_on_loop("rendezvous")
    check_kind("tag", tag, str, "a string")
    if len(tag) > TAG_CHARS_MAX:
        raise wrong("tag", f"a string of at most {TAG_CHARS_MAX} characters", tag)
    check_kind("payload", payload, bytes, "bytes")
    if timeout_s is not None:
        check_seconds("timeout_s", timeout_s, at_least=0)
    barriers = service_of(worker, BarrierService)
    key = Key(Purpose.RENDEZVOUS, tag, _ranks_of(barriers, members))
    most = payload_bytes_max(len(key.replicas or range(barriers.size)))
    if len(payload) > most:
        raise UsageError(
            f"the payload has {len(payload):,} bytes; with so many members each may "
            f"have {most:,}"
        )
    return await service_of(worker, RendezvousService).meet(key, payload, timeout_s)


def payload_bytes_max(members: int) -> int:
    """Return the limit of the payload of each member, in bytes."""
    return min(PAYLOAD_BYTES_MAX, ALL_BYTES_MAX // members)


def _ranks_of(
    barriers: BarrierService, members: Sequence[str | int] | None
) -> Replicas:
    """Return the ranks of the members; None for all of the group, in order."""
    size, own = barriers.size, barriers.identity.rank
    if not size:
        raise UsageError("a rendezvous needs ranks, and this group has no ranks")
    if members is None:
        return None
    check_sequence("members", members, "a list of names or ranks of workers")
    wanted = f"the name or rank of a worker of a group of {size}"
    ranks = []
    for index, member in enumerate(members):
        check_kind(f"members[{index}]", member, (str, int), wanted)
        rank = barriers.peers.member(member).rank if type(member) is str else member
        assert isinstance(rank, int)
        if not 0 <= rank < size:
            raise UsageError(f"members[{index}] must be {wanted}, not {member!r}")
        ranks.append(rank)
    twice = next((rank for rank in ranks if ranks.count(rank) > 1), None)
    if twice is not None:
        raise UsageError(f"rank {twice} is among the members more than once")
    if own not in ranks:
        more = "..." if len(ranks) > LISTED_MAX else ""
        raise UsageError(
            f"worker {barriers.identity.name!r} (rank {own}) is not among the members"
            f" of this rendezvous: {ranks[:LISTED_MAX]}{more}"
        )
    return None if ranks == list(range(size)) else tuple(ranks)


# --- payloads ------------------------------------------------------------------------


class Payloads(NamedTuple):
    """Payloads of some members, by place; or the problem for which there are none."""

    payloads: list[bytes]
    problem: str = ""


class ExchangeId(NamedTuple):
    """The rendezvous whose payloads are exchanged: a round of a series."""

    tag: str
    replicas: Replicas
    number: Count


@message(SERVICE, "collect", about="a rendezvous in which the sender is the parent")
class CollectBranch(Request[Payloads]):
    """Ask a child for the payloads of its branch."""

    of: Spread[ExchangeId]


@message(SERVICE, "share", about="a rendezvous in which the sender is the parent")
class SharePayloads(Request[None]):
    """Give a child the payloads of all members."""

    of: Spread[ExchangeId]
    whole: Spread[Payloads]


Pending: TypeAlias = "asyncio.Future[Payloads]"


class PayloadExchange:
    """The exchange of the payloads of one rendezvous, at one member.

    Attributes:
        series: its series.
        branch: the payloads of this member's branch.
        whole: those of all members.
        over: as `whole`, once the children have it, too.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, series: Series) -> None:
        self.series = series
        self.branch: Pending = loop.create_future()
        self.whole: Pending = loop.create_future()
        self.over: Pending = loop.create_future()

    def fail(self, problem: str) -> None:
        """End what has not ended yet."""
        for pending in (self.branch, self.whole, self.over):
            settle(pending, Payloads([], problem))


class RendezvousService:
    """The rendezvous of one worker; a `runtime.extensions.Service`."""

    name = SERVICE

    def __init__(self, host: ServiceHost, barriers: BarrierService) -> None:
        self._host = host
        self._barriers = barriers
        self._open: dict[ExchangeId, PayloadExchange] = {}
        self._is_closed = False
        self.routes = (
            answers(CollectBranch, self._on_collect),
            answers(SharePayloads, self._on_share),
        )

    async def meet(
        self, key: Key, payload: bytes, timeout_s: float | None
    ) -> list[bytes]:
        """Come to the next round of a series, and exchange payloads."""
        loop, participant = self._host.loop, self._barriers.participant(key)
        end_s = None if timeout_s is None else loop.time() + timeout_s
        begun: list[tuple[int, PayloadExchange]] = []

        def begin(number: int) -> None:
            of = ExchangeId(key.tag, key.replicas, number)
            begun.append((number, self._begin(of, participant.series, payload)))

        await participant.come(timeout_s, begin)
        ((number, exchange),) = begun
        label = key.label(number)
        try:
            async with asyncio.timeout_at(end_s):
                whole = await asyncio.shield(exchange.over)
        except TimeoutError:
            raise BarrierTimeoutError(
                f"{label}: all members came, but their payloads did not arrive within "
                f"{timeout_s:g} s",
                number=number,
                missing=(),
            ) from None
        if whole.problem:
            text = f"{label} has failed: {whole.problem}"
            raise BarrierBrokenError(text, number=number, missing=())
        return whole.payloads

    def _begin(self, of: ExchangeId, series: Series, payload: bytes) -> PayloadExchange:
        exchange = self._exchange(of, series)
        if self._is_closed:
            exchange.fail(self._farewell)
        self._host.start_task(self._run(of, exchange, payload))
        return exchange

    def _exchange(self, of: ExchangeId, series: Series) -> PayloadExchange:
        exchange = self._open.get(of)
        if exchange is None:
            exchange = self._open[of] = PayloadExchange(self._host.loop, series)
        return exchange

    async def _run(
        self, of: ExchangeId, exchange: PayloadExchange, payload: bytes
    ) -> None:
        series = exchange.series
        children = [rank for rank in series.neighbours if rank != series.parent]
        try:
            parts = await asyncio.gather(
                *(self._collect(of, child) for child in children)
            )
            failed = next((part for part in parts if part.problem), None)
            below = chain.from_iterable(part.payloads for part in parts)
            branch = failed or Payloads([payload, *below])
            settle(exchange.branch, branch)
            if series.parent is None:
                settle(exchange.whole, branch)
            whole = await exchange.whole
            await asyncio.gather(*(self._share(of, child, whole) for child in children))
            settle(exchange.over, whole)
        finally:
            exchange.fail(self._farewell)
            del self._open[of]

    async def _collect(self, of: ExchangeId, rank: int) -> Payloads:
        try:
            link = await self._host.link_to(self._barriers.name_of(rank))
            return await ask(link, CollectBranch(of))
        except AsyncRpcError as error:
            return Payloads([], f"{self._who(rank)} is gone: {error}")

    async def _share(self, of: ExchangeId, rank: int, whole: Payloads) -> None:
        with suppress(AsyncRpcError):  # of a child that is gone meanwhile
            link = await self._host.link_to(self._barriers.name_of(rank))
            await ask(link, SharePayloads(of, whole))

    def _who(self, rank: int) -> str:
        return self._barriers.table.who(rank)

    @property
    def _farewell(self) -> str:
        return f"{self._who(self._host.rank)} shuts down"

    # --- requests of the parent ------------------------------------------------------

    async def _on_collect(self, link: PeerLink, request: CollectBranch) -> Payloads:
        exchange = self._asked_for(link, request.of)
        if exchange is None:
            own = self._who(self._host.rank)
            return Payloads([], f"{own} has given it up")
        # A parent that gives up must not cancel what others wait for.
        return await asyncio.shield(exchange.branch)

    async def _on_share(self, link: PeerLink, request: SharePayloads) -> None:
        exchange, whole = self._asked_for(link, request.of), request.whole
        if exchange is not None:
            count = len(exchange.series.ranks)
            if not whole.problem and len(whole.payloads) != count:
                raise MalformedError(f"there must be {count} payloads")
            settle(exchange.whole, whole)

    def _asked_for(self, link: PeerLink, of: ExchangeId) -> PayloadExchange | None:
        """Return the exchange that the parent speaks of; None: it is over here."""
        key = Key(Purpose.RENDEZVOUS, of.tag, of.replicas)
        rank, ranks = self._barriers.checked_sender(link, key)
        parent, _ = tree_position(ranks.index(self._host.rank), len(ranks))
        if parent is None or ranks[parent] != rank:
            raise MalformedError(f"rank {rank} is not the parent in {key.label()}")
        series = self._barriers.table.known(key)
        if series is None:  # this worker has not come to it: no member can have passed
            return None
        # The result of the round came before, but its call may have to be woken yet.
        if of in self._open or (series.has_passed and series.number == of.number):
            return self._exchange(of, series)
        return None

    # --- life ------------------------------------------------------------------------

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        """Fail every exchange whose next news would come from the worker."""
        for exchange in self._open.values():
            rank = exchange.series.parent
            if rank is not None and self._barriers.name_of(rank) == peer.name:
                problem = f"{self._who(rank)} is gone: {reason}"
                settle(exchange.whole, Payloads([], problem))

    async def close(self) -> None:
        """Fail the exchanges under way."""
        self._is_closed = True
        for exchange in tuple(self._open.values()):
            exchange.fail(self._farewell)


def settle(pending: Pending, payloads: Payloads) -> None:
    """Set a result, unless there is one."""
    if not pending.done():
        pending.set_result(payloads)

"""Credit for large requests, on the loop: what `machine.credit` decides is sent.

`InboundCredit` is the budget of one worker, `LinkCredit` its dealings with one peer in
both directions, and a `Claim` what one call that is served holds of the budget.

A claim ends when the call has been answered or forgotten, its function runs no more,
and its answer, if it has a payload, has left: until then the memory may be in use.
What a function keeps for later is its own affair.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from asyncrpc.core.calls.context import current_call_var
from asyncrpc.core.calls.machine.calls import LinkStatus
from asyncrpc.core.calls.machine.credit import (
    STALLED_AFTER_S,
    Account,
    CreditWanted,
    Grant,
    InboundBudget,
    WaitingRequests,
    Why,
)
from asyncrpc.core.calls.peer_memory import FREE_BYTES_MAX, PeerMemory
from asyncrpc.core.serde import memory_of
from asyncrpc.core.wire.frames import Flags, Frame, FrameKind

if TYPE_CHECKING:
    from asyncrpc.core.calls.ports import CallConnection

logger = logging.getLogger("asyncrpc")

# What a byte of a long control part counts for: decoded, it takes up to 88 bytes.
CONTROL_WEIGHT: Final = 16
# What a buffer counts for, of a message with many: it takes so much, however short.
BUFFER_BYTES: Final = 256
UNCOUNTED_BUFFERS_MAX: Final = 32

# Of the limit, what the pool of received memory may keep while calls fill the limit:
# blocks change hands, and a dropped one takes 1 to 8 ms to make anew.
IDLE_PART: Final = 16

_CREDIT: Final = int(FrameKind.CREDIT)


class InboundCredit:
    """The large requests that one worker accepts, over all peers.

    Attributes:
        budget: decides.
    """

    def __init__(
        self,
        name: str,
        loop: asyncio.AbstractEventLoop,
        limit_bytes: int,
        keep_idle: Callable[[int], None],
    ) -> None:
        self.budget: InboundBudget[LinkCredit] = InboundBudget(limit_bytes)
        self._name = name
        self._loop = loop
        self._keep_idle = keep_idle
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._stall_told_s = float("-inf")  # the stall that was logged last
        self._logged_magnitudes: set[int] = set()  # of requests above the limit

    def on_held(self) -> None:
        """Adjust the pool's part: more or less is held than before."""
        budget = self.budget
        used_bytes = budget.held_bytes + budget.tickets_bytes
        rest = budget.limit_bytes - used_bytes
        self._keep_idle(max(rest, budget.limit_bytes // IDLE_PART))

    def give(self, grants: Iterable[Grant[LinkCredit]]) -> None:
        """Send credit; then see when to look again."""
        if self._is_closed:
            return
        for grant in grants:
            if grant.why is not Why.FITS:
                self._tell(grant)
            grant.peer.give(grant.call_id, grant.nbytes)
        if self._timer is not None or self.budget.has_waiting:
            self._arm()

    def close(self) -> None:
        """Give no more credit: the worker ends."""
        self._is_closed = True
        self._disarm()

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        self._disarm()
        due_s, stalled_s = self.budget.due_s, self.budget.stalled_s
        times = [] if due_s is None else [due_s]
        if stalled_s is not None and stalled_s > self._stall_told_s:
            times.append(stalled_s)
        if times:
            self._timer = self._loop.call_at(min(times), self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        now_s = self._loop.time()
        stalled_s = self.budget.stalled_s
        if stalled_s is not None and self._stall_told_s < stalled_s <= now_s:
            self._stall_told_s = stalled_s
            budget = self.budget
            logger.warning(
                "worker %r: %d requests of peers have waited %g s for memory, and no "
                "call has ended meanwhile; %d bytes are in use, the limit is %d "
                "(LimitOptions.inbound_bytes_max). If the running calls wait for the "
                "waiting requests, raise the limit",
                self._name,
                budget.waiting,
                STALLED_AFTER_S,
                budget.held_bytes,
                budget.limit_bytes,
            )
        self.give(self.budget.on_time(now_s))

    def _tell(self, grant: Grant[LinkCredit]) -> None:
        if grant.why is Why.BEYOND:
            logger.warning(
                "worker %r: a request of %d bytes from %r exceeds the limit of %d "
                "(LimitOptions.inbound_bytes_max): a running call made it, and no call "
                "here has ended for 1 s, so it was let in to avoid a deadlock",
                self._name,
                grant.nbytes,
                grant.peer.name,
                self.budget.limit_bytes,
            )
        elif grant.nbytes.bit_length() not in self._logged_magnitudes:
            # Once for each magnitude.
            self._logged_magnitudes.add(grant.nbytes.bit_length())
            logger.warning(
                "worker %r: a request of %d bytes from %r is larger than the limit of "
                "%d (LimitOptions.inbound_bytes_max): such requests are accepted one "
                "by one",
                self._name,
                grant.nbytes,
                grant.peer.name,
                self.budget.limit_bytes,
            )


def request_bytes(control: bytes, control_bytes: int, lengths: Sequence[int]) -> int:
    """Return the bytes that a request, or an item of a stream, counts for.

    Both ends count so.

    Args:
        control: its control part; empty if that did not fit into memory.
    """
    nbytes = memory_of(control, lengths) if lengths else 0
    if control_bytes > FREE_BYTES_MAX:
        nbytes += CONTROL_WEIGHT * control_bytes
    if len(lengths) > UNCOUNTED_BUFFERS_MAX:
        nbytes += BUFFER_BYTES * len(lengths)
    return nbytes


class Claim:
    """The share of one served call in its worker's budget."""

    __slots__ = ("_credit", "_holds", "held_bytes", "nbytes")

    def __init__(self, credit: LinkCredit, nbytes: int) -> None:
        self._credit = credit
        self._holds = 1  # the call is served
        self.nbytes = nbytes
        self.held_bytes = 0

    def hold(self) -> None:
        """Count one more user of what was received; `let_go` must follow."""
        self._holds += 1

    def let_go(self) -> None:
        """Let go once; the last holder gives the credit back."""
        self._holds -= 1
        if not self._holds:
            if self.held_bytes:
                self._credit.memory.take(-self.held_bytes)
            if self.nbytes:
                self._credit.release(self.nbytes)

    def until_sent(self, then: Callable[[], None] | None) -> Callable[[], None]:
        """Hold until the answer is sent; return the function to call then."""
        self.hold()

        def on_sent() -> None:
            self.let_go()
            if then is not None:
                then()

        return on_sent


class LinkCredit:
    """Large requests between this worker and one peer, in both directions.

    Attributes:
        name: of the peer.
        account: what the peer has of this worker's budget.
        arriving: bytes of its requests that arrive, by call; always the same object.
        memory: what the peer holds without credit.
        waiting: our requests that wait for the peer's credit.
    """

    __slots__ = (
        "_expanded",
        "_inbound",
        "_loop",
        "_send",
        "_status",
        "account",
        "arriving",
        "memory",
        "name",
        "waiting",
    )

    def __init__(
        self,
        name: str,
        inbound: InboundCredit,
        memory: PeerMemory,
        *,
        loop: asyncio.AbstractEventLoop,
        connection: CallConnection,
        status: LinkStatus,
    ) -> None:
        """Open the account of a peer; it is welcomed in the loop's next turn.

        Args:
            status: of the link; once it is lost, nothing is given.
        """
        self.name = name
        self._inbound = inbound
        self._loop = loop
        self._send = connection.send
        self._status = status
        self.account: Account[LinkCredit] = inbound.budget.open(self)
        self.arriving = self.account.arriving
        self.memory = memory
        # By call: what requests become beyond what their credit is for.
        self._expanded: dict[int, int] = {}
        self.waiting: WaitingRequests[Callable[[], None]] = WaitingRequests()
        # Not now: where the peer has dialed, our HELLO goes first.
        loop.call_soon(self._welcome)

    def _welcome(self) -> None:
        if not self._status.is_lost:
            self._inbound.give(self._inbound.budget.welcome(self.account))

    def give(self, call_id: int, nbytes: int) -> None:
        """Tell the peer that it has so much more credit."""
        self._send(_CREDIT, call_id, aux=nbytes)

    def close(self) -> set[int]:
        """Close a lost peer's account; return our calls that waited for its credit."""
        inbound = self._inbound
        self.memory.take(-sum(self._expanded.values()))
        self._expanded.clear()
        grants = inbound.budget.close(self.account, self._now_s())
        inbound.on_held()
        inbound.give(grants)
        return self.waiting.clear()

    # --- requests of ours ------------------------------------------------------------

    def wait(self, call_id: int, nbytes: int, send: Callable[[], None]) -> None:
        """Keep a request until the peer has room for it; then `send` it."""
        nested = current_call_var.get() is not None
        self._ask(self.waiting.wait(call_id, nbytes, send, nested=nested))

    def withdraw(self, call_id: int) -> bool:
        """Do not send a request that waits; return whether there was one."""
        if call_id not in self.waiting:
            return False
        was_asked, wants = self.waiting.withdraw(call_id)
        if was_asked:
            self._send(FrameKind.CANCEL, call_id)
        self._ask(wants)
        return True

    def on_credit(self, frame: Frame) -> None:
        """Take credit, and send requests that have waited for it."""
        send, wants = self.waiting.on_credit(frame.call_id, frame.aux)
        self._ask(wants)
        if send is not None:
            send()

    def _ask(self, wants: list[CreditWanted]) -> None:
        for want in wants:
            self._send(
                FrameKind.WANT,
                want.call_id,
                flags=Flags.NESTED if want.nested else 0,
                aux=want.nbytes,
            )

    # --- requests of the peer --------------------------------------------------------

    def on_want(self, frame: Frame) -> None:
        """Give the peer room for a request, now or when there is some."""
        grants = self._inbound.budget.want(
            self.account,
            frame.call_id,
            frame.aux,
            self._now_s(),
            nested=bool(frame.flags & Flags.NESTED),
        )
        self._inbound.on_held()
        self._inbound.give(grants)

    def on_begun(
        self, call_id: int, control: bytes, control_bytes: int, lengths: Sequence[int]
    ) -> None:
        """Count a request that begins to arrive, unless it is small."""
        nbytes = request_bytes(control, control_bytes, lengths)
        if nbytes > FREE_BYTES_MAX:
            self._inbound.budget.begin(self.account, call_id, nbytes)
            self._inbound.on_held()
        else:
            self.account.arriving[call_id] = 0

    def on_arrived(
        self, call_id: int, control: bytes, buffers: list[memoryview]
    ) -> None:
        """Count an arrived request, before it is unpacked or read."""
        if call_id not in self.account.arriving:
            lengths = [buffer.nbytes for buffer in buffers]
            self.on_begun(call_id, control, len(control), lengths)

    def expand(self, call_id: int, nbytes: int) -> None:
        """Count what an arrived request is about to become, far more than arrived."""
        self.memory.check(nbytes)
        self._expanded[call_id] = nbytes
        self.memory.take(nbytes)

    def claim(
        self, call_id: int, control: bytes, buffers: list[memoryview]
    ) -> Claim | None:
        """Return what a call that is now served holds; None if it is small."""
        self.on_arrived(call_id, control, buffers)
        nbytes = self._inbound.budget.take(self.account, call_id)
        claim = Claim(self, nbytes) if nbytes else None
        if claim is not None and self._expanded:
            claim.held_bytes = self._expanded.pop(call_id, 0)
        return claim

    def hold(self, claim: Claim | None, nbytes: int) -> Claim:
        """Count what a call holds without credit; return all that it holds."""
        self.memory.check(nbytes)
        if claim is None:
            claim = Claim(self, 0)
        claim.held_bytes += nbytes
        self.memory.take(nbytes)
        return claim

    def on_cancel(self, call_id: int, unsent_bytes: int) -> None:
        """Take back the credit of a request that the peer gives up, sent or not."""
        if self._expanded:
            self.memory.take(-self._expanded.pop(call_id, 0))
        grants = self._inbound.budget.cancel(
            self.account, call_id, unsent_bytes, self._now_s()
        )
        self._inbound.on_held()
        self._inbound.give(grants)

    def release(self, nbytes: int) -> None:
        """Release the bytes of a call of the peer that has ended."""
        inbound = self._inbound
        grants = inbound.budget.release(self.account, nbytes, self._now_s())
        inbound.on_held()
        if grants:
            inbound.give(grants)

    def _now_s(self) -> float:
        return self._loop.time()


def item_bytes(control: bytes, buffers: Sequence[memoryview]) -> int:
    """Return the bytes that an item counts for, at both ends."""
    lengths = [buffer.nbytes for buffer in buffers]
    return request_bytes(control, len(control), lengths)

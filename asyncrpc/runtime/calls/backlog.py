"""The backlog of a peer: answers that it has not taken, and calls that wait for that.

A peer that asks and does not read makes this worker keep what it answers.  So a call
whose answer is large begins only while the peer has taken enough of the answers before
it, and the items of its streams wait as well.  Small answers do not wait, up to twice
as much; nor does anything that the peer must read to go on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from asyncrpc.errors import AsyncRpcError, MalformedError
from asyncrpc.runtime.calls.admission import PeerMemory

LARGE_BYTES: Final = 64 << 10  # of an answer; the calls that make such ones may wait
PEERS: Final = 16  # that may have their whole part of the limit at a time
LOOK_EVERY: Final = 64  # requests: they are answered with 64 KiB each at most
NAMES_MAX: Final = 1024  # functions that are known to answer with much


def nobody_waits() -> None:
    """Do nothing: what the peer takes makes no difference."""


class TellsOfRoom(Protocol):
    """What a connection writes.

    Attributes:
        on_taken: called when the peer has taken something.
        on_kept: called now and then while much is kept for it.
        room: set while the transport has room.
    """

    on_taken: Callable[[], None]
    on_kept: Callable[[], None]
    room: asyncio.Event


class KeepsAnswers(Protocol):
    """A link, as far as what its connection keeps of its messages goes."""

    @property
    def stream(self) -> TellsOfRoom:
        """What the connection writes."""

    def count_written(self) -> int:
        """Return how many bytes are kept of what was written."""

    def count_kept(self) -> int:
        """Return that, and how many bytes of answers wait to be written."""

    async def writable(self) -> None:
        """Wait until the transport has room."""

    def give_up(self, error: AsyncRpcError) -> None:
        """End the connection because of what the peer did."""


class OutboundBudget:
    """What the peers of one worker have not taken, over all of them."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._kept: dict[Backlog, int] = {}  # of those that have much
        self._total = 0

    def is_exceeded(self, backlog: Backlog, nbytes: int) -> bool:
        """Return whether a peer must take some of its answers first."""
        part = self.limit_bytes // PEERS
        self._total += nbytes - self._kept.pop(backlog, 0)
        self._kept[backlog] = nbytes
        if nbytes <= part // PEERS:
            self.forget(backlog)
            return False
        return nbytes > part or self._total > self.limit_bytes

    def forget(self, backlog: Backlog) -> None:
        """A peer has taken nearly all, or is gone."""
        self._total -= self._kept.pop(backlog, 0)


class Backlog:
    """The answers that one peer has not taken.

    Attributes:
        is_pressed: whether it has to take some of them before it gets more.
        is_full: whether the transport had no room for more at the last look.
    """

    __slots__ = (
        "_asked",
        "_budget",
        "_kept_bytes",
        "_large",
        "_link",
        "_memory",
        "_turns",
        "_waiting",
        "is_full",
        "is_pressed",
    )

    def __init__(
        self, link: KeepsAnswers, budget: OutboundBudget, memory: PeerMemory
    ) -> None:
        self.is_pressed = self.is_full = False
        self._link = link
        link.stream.on_kept = self.on_kept
        self._budget = budget
        self._memory = memory
        self._kept_bytes = self._asked = 0
        self._large: dict[str, None] = {}
        self._waiting: deque[Callable[[], None]] = deque()
        self._turns: set[asyncio.Event] = set()  # in `room`

    def on_large(self, name: str) -> None:
        """A large answer of a function has been sent."""
        self._large[name] = None
        if len(self._large) > NAMES_MAX:
            del self._large[next(iter(self._large))]
        self.look()

    def look(self) -> None:
        """See how much the peer has not taken; begin what may begin."""
        kept_bytes = self._link.count_kept()
        self.is_pressed = self._budget.is_exceeded(self, kept_bytes)
        self._kept_bytes = kept_bytes
        part = self._budget.limit_bytes // PEERS
        self.is_full = not self._link.stream.room.is_set()
        waits = self.is_pressed or self.is_full
        self._memory.on_kept(min(kept_bytes, part), is_pressed=waits)
        self._link.stream.on_taken = self.look if waits else nobody_waits
        if not self.is_pressed:
            self._begin_next()

    def on_kept(self) -> None:
        """Look, since much is kept of what was written, if only of small answers.

        A peer that asks on and on, and takes nothing, is given up.
        """
        self.look()
        nbytes = self._link.count_written()
        memory, part = self._memory, self._budget.limit_bytes // PEERS
        held_bytes = memory.used_bytes - memory.kept_bytes
        # All calls wait by now, or are refused: these are refusals.
        if held_bytes + nbytes > memory.limit_bytes + part + part // 2:
            error = MalformedError(
                f"the peer asks on, and has not taken {nbytes} bytes of what it was"
                " answered (LimitOptions.outbound_bytes_max)"
            )
            self._link.give_up(error)

    def on_asked(self) -> None:
        """Look now and then, since the peer asks while the transport has no room."""
        self._asked += 1
        if not self._asked % LOOK_EVERY:
            self.on_kept()

    def must_wait(self, name: str) -> bool:
        """Return whether a call of a function must not begin now."""
        if not self.is_pressed:
            return False
        part = self._budget.limit_bytes // PEERS
        return name in self._large or self._kept_bytes > 2 * part

    def hold(self, begin: Callable[[], None]) -> None:
        """Begin a request later; what it holds is in the account of the peer."""
        self._waiting.append(begin)
        if not self.is_pressed:  # a thread found it to be, a moment ago
            asyncio.get_running_loop().call_soon(self._go_on)

    async def room(self) -> None:
        """Wait until one more item of a stream may be sent.

        Cancellation:
            Nothing has changed.
        """
        while True:
            await self._link.writable()
            if not self.is_pressed:
                return
            turn = asyncio.Event()
            self._waiting.append(turn.set)
            self._turns.add(turn)
            try:
                await turn.wait()  # ends with the connection, too
            finally:
                self._turns.discard(turn)

    def close(self) -> None:
        """The connection has ended: calls that wait are cancelled, and never begin."""
        self._budget.forget(self)
        self._memory.on_kept(0, is_pressed=False)
        self.is_pressed = self.is_full = False
        self._link.stream.on_taken = nobody_waits
        self._waiting.clear()
        for turn in self._turns:
            turn.set()

    def _begin_next(self) -> None:
        """Begin what has waited the longest; what it answers decides about the next."""
        if self._waiting:
            self._waiting.popleft()()
            if self._waiting:
                asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        if self._waiting and not self.is_pressed:
            self.look()

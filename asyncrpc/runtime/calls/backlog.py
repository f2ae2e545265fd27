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

from asyncrpc.errors import OverloadedError

LARGE_BYTES: Final = 64 << 10  # of an answer; the calls that make such ones may wait
PEERS: Final = 16  # that may have their whole part of the limit at a time
RETRY_AFTER_S: Final = 1.0
NAMES_MAX: Final = 1024  # functions that are known to answer with much


def nobody_waits() -> None:
    """Do nothing: what the peer takes makes no difference."""


class TellsOfRoom(Protocol):
    """What a connection writes.

    Attributes:
        on_taken: called when the peer has taken something.
    """

    on_taken: Callable[[], None]


class KeepsAnswers(Protocol):
    """A link, as far as what its connection keeps of its messages goes."""

    @property
    def stream(self) -> TellsOfRoom:
        """What the connection writes."""

    def count_kept(self) -> int:
        """Return how many bytes the peer has not acknowledged, once all are written."""

    async def writable(self) -> None:
        """Wait until the transport has room."""


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
    """

    __slots__ = (
        "_budget",
        "_kept_bytes",
        "_large",
        "_link",
        "_request_bytes",
        "_waiting",
        "_waiting_bytes",
        "is_pressed",
    )

    def __init__(self, link: KeepsAnswers, budget: OutboundBudget) -> None:
        self.is_pressed = False
        self._link = link
        self._budget = budget
        self._kept_bytes = 0
        self._large: dict[str, None] = {}
        self._waiting: deque[tuple[Callable[[], None], int]] = deque()
        self._waiting_bytes = 0
        self._request_bytes = 0

    def on_large(self, name: str) -> None:
        """A large answer of a function has been sent."""
        self._large[name] = None
        if len(self._large) > NAMES_MAX:
            del self._large[next(iter(self._large))]
        self.look()

    def look(self) -> None:
        """See how much the peer has not taken; begin what may begin."""
        self._kept_bytes = self._link.count_kept()
        self.is_pressed = self._budget.is_exceeded(self, self._kept_bytes)
        self._link.stream.on_taken = self.look if self.is_pressed else nobody_waits
        if not self.is_pressed:
            self._begin_next()

    def must_wait(self, name: str) -> bool:
        """Return whether a call of a function must not begin now."""
        if not self.is_pressed:
            return False
        part = self._budget.limit_bytes // PEERS
        return name in self._large or self._kept_bytes > 2 * part

    def admit(self, request_bytes: int) -> None:
        """Take a request of a pressed peer, which may have to wait.

        Raises:
            OverloadedError: those that wait need too much memory.
        """
        part = self._budget.limit_bytes // PEERS
        if self._waiting_bytes + request_bytes > part:
            raise OverloadedError(
                f"the caller has not taken {self._kept_bytes} bytes of earlier answers "
                "(LimitOptions.outbound_bytes_max), and too many of its requests wait "
                "for that; let it take them first",
                retry_after_s=RETRY_AFTER_S,
            )
        self._request_bytes = request_bytes

    def hold(self, begin: Callable[[], None]) -> None:
        """Begin a request, the last one that was admitted, later."""
        nbytes, self._request_bytes = self._request_bytes, 0
        self._waiting.append((begin, nbytes))
        self._waiting_bytes += nbytes
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
            self._waiting.append((turn.set, 0))
            await turn.wait()  # ends with the connection, too

    def close(self) -> None:
        """The connection has ended: whatever waits ends by itself."""
        self._budget.forget(self)
        self.is_pressed = False
        self._link.stream.on_taken = nobody_waits
        while self._waiting:
            self._begin_next()

    def _begin_next(self) -> None:
        """Begin what has waited the longest; what it answers decides about the next."""
        if self._waiting:
            begin, nbytes = self._waiting.popleft()
            self._waiting_bytes -= nbytes
            begin()
            if self._waiting:
                asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        if self._waiting and not self.is_pressed:
            self.look()

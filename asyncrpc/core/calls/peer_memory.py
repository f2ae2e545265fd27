"""The account of one peer: what it makes a worker hold without credit, in one sum.

So a peer that reaches for several limits at once takes no more than one that reaches
for one.

    what                                    counted as
    a call, or message that is answered     `CALL_BYTES`, while it is served
    its arguments and its head              the most that they may take; once the
                                            account is half full, what they do take
    answers that the peer does not take     as they are kept
    what services keep for it               as they say: see `HoldsForPeers`

Large requests have credit (`credit`), which the user's options limit.

A peer that asks and does not read makes this worker keep what it answers (`Backlog`).
So a call whose answer is large begins only while the peer has taken enough of the
answers before it, and the items of its streams wait as well.  Small answers do not
wait, up to twice as much; nor does anything that the peer must read to go on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sized
from typing import TYPE_CHECKING, Final

from asyncrpc.core.serde.bounds import CONTAINER, values_in
from asyncrpc.core.transport.byte_stream import nobody_waits
from asyncrpc.errors import MalformedError, OverloadedError

if TYPE_CHECKING:
    from asyncrpc.core.calls.ports import CallLink
    from asyncrpc.core.calls.requests import CallAdmission


# Bytes, as measured.  A value is one as `serde.bounds` counts them.
CALL_BYTES: Final = 3584
VALUE_BYTES: Final = 64
# What a byte of a short message takes at most: an empty list; and of a text alone.
BYTE_BYTES_MAX: Final = 88
TEXT_BYTE_BYTES: Final = 4

# Requests of up to so many bytes go without credit: the path of a small call knows
# nothing of it.
FREE_BYTES_MAX: Final = 8 << 10
# A longer head of a request is weighed, however few calls run; the values in one are
# counted, some 0.5 us each, if it is no longer than this.
HEAD_BYTES_MAX: Final = 1 << 10
COUNTED_HEAD_BYTES_MAX: Final = 256
COUNTED: Final = -2  # as a weight: it is known once the message has been decoded

PEERS: Final = 16  # that may have their whole part at a time
# Up to so many calls at a time short ones are not weighed: they take 30 MiB at most.
UNWEIGHED_CALLS_MAX: Final = 32
WATCHED_BYTES_MIN: Final = 1 << 20
RETRY_AFTER_S: Final = 1.0

LARGE_BYTES: Final = 64 << 10  # of an answer; the calls that make such ones may wait
LOOK_EVERY: Final = 64  # requests: they are answered with 64 KiB each at most
NAMES_MAX: Final = 1024  # functions that are known to answer with much


class PeerMemory:
    """What one peer makes a worker hold without credit, in one sum.

    Attributes:
        held_bytes: besides its calls and the answers that it has not taken.
        kept_bytes: answers that it has not taken, as of the last look at them.
        limit_bytes: of the sum.
        is_watched: whether its next call is weighed, however short that is.
    """

    __slots__ = (
        "_admission",
        "_calls",
        "_is_pressed",
        "_services_hold",
        "held_bytes",
        "is_watched",
        "kept_bytes",
        "limit_bytes",
    )

    def __init__(
        self,
        admission: CallAdmission,
        calls: Sized,
        services_hold: Callable[[], int],
        limit_bytes: int,
    ) -> None:
        self._admission = admission
        self._calls = calls
        self._services_hold = services_hold
        self.limit_bytes = limit_bytes
        self._is_pressed = False
        self.held_bytes = self.kept_bytes = 0
        self.is_watched = False

    @property
    def used_bytes(self) -> int:
        """Return the sum."""
        held_bytes = self.held_bytes + CALL_BYTES * len(self._calls)
        return held_bytes + self.kept_bytes + self._services_hold()

    @property
    def is_half_full(self) -> bool:
        """Return whether what comes is weighed exactly."""
        return self.used_bytes > self.limit_bytes // 2

    def check(self, nbytes: int = 0) -> None:
        """Refuse what takes so many more bytes, unless there is room."""
        used_bytes = self.used_bytes
        if used_bytes + nbytes > self.limit_bytes:
            raise OverloadedError(
                f"this peer's {len(self._calls)} calls, their arguments, its"
                " references, autograd contexts and optimizers, and the"
                f" {self.kept_bytes} bytes of answers that it has not taken hold"
                f" {used_bytes} bytes of this worker, and {nbytes} more are"
                f" needed; the limit is {self.limit_bytes}"
                " (LimitOptions.peer_bytes_max); send less at a time, and large data"
                " as tensors, arrays or bytes",
                retry_after_s=RETRY_AFTER_S,
            )
        if self._admission.held_bytes + nbytes > PEERS * self.limit_bytes:
            raise OverloadedError(
                f"the peers of this worker hold {self._admission.held_bytes} bytes of"
                f" it; the limit is {PEERS} times LimitOptions.peer_bytes_max",
                retry_after_s=RETRY_AFTER_S,
            )

    def weigh(self, size_bytes: int, head: bytes, buffers: list[memoryview]) -> int:
        """Return the most that a message may hold without credit."""
        self.check()
        if size_bytes > FREE_BYTES_MAX or self.is_half_full:
            return COUNTED
        return BYTE_BYTES_MAX * (size_bytes + len(head)) + _free_bytes(buffers)

    def counted(
        self, values: int, size_bytes: int, head: bytes, buffers: list[memoryview]
    ) -> int:
        """Return what a message holds without credit that has so many values."""
        nbytes = min(VALUE_BYTES * values, BYTE_BYTES_MAX * size_bytes)
        nbytes += _free_bytes(buffers)
        if len(head) > COUNTED_HEAD_BYTES_MAX:
            nbytes += BYTE_BYTES_MAX * len(head)
        elif head:
            nbytes += VALUE_BYTES * values_in(memoryview(head), len(head) * CONTAINER)
        if size_bytes <= FREE_BYTES_MAX:
            nbytes += TEXT_BYTE_BYTES * size_bytes
        return nbytes

    def take(self, nbytes: int) -> None:
        """Count so many more bytes; a negative number gives bytes back."""
        self.held_bytes += nbytes
        self._admission.held_bytes += nbytes
        self.is_watched = self._is_pressed or self.held_bytes > WATCHED_BYTES_MIN

    def on_kept(self, kept_bytes: int, *, is_pressed: bool) -> None:
        """Note how much the peer has not taken of its answers."""
        self.kept_bytes = kept_bytes
        self._is_pressed = is_pressed
        self.take(0)


def _free_bytes(buffers: list[memoryview]) -> int:
    """Return the bytes of a payload that needs no credit."""
    nbytes = sum(buffer.nbytes for buffer in buffers) if buffers else 0
    return nbytes if nbytes <= FREE_BYTES_MAX else 0


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
        self, link: CallLink, budget: OutboundBudget, memory: PeerMemory
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
        """Wait until one more item of a stream may be sent."""
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

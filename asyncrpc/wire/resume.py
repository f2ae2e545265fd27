"""What was sent and may have to be sent again: how a connection outlives its transport.

From its HELLO on each side counts the bytes that it reads, and says from time to time
how many there were (ACK).  The other side keeps what has not been acknowledged.  If the
transport breaks, one side dials again; both HELLOs name the connection that is resumed
and how many bytes of it have been read, and each goes on sending from there.  So every
byte arrives once and in order, and what is above knows nothing of it: neither frames
nor payloads need numbers, and a cut may be anywhere, also inside a frame.

Sans-IO.

Source: RFC 9293 (TCP), whose sequence numbers count bytes too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from asyncrpc.errors import MalformedError

# An ACK is due after so many bytes: one for hundreds of small calls.  On a lane, where
# only chunks of 512 KiB travel, less often.
ACK_BYTES: Final = 32 << 10
LANE_ACK_BYTES: Final = 1 << 20


class Kept:
    """Bytes of one connection that its peer has not acknowledged.

    Attributes:
        add: takes the parts of a write, in order.  It is the deque's own method: it
            runs for every write, and parts are counted only when an ACK comes.
        start: how many bytes have been acknowledged, as far as whole parts go.
    """

    __slots__ = ("_acknowledged", "_parts", "add", "start")

    def __init__(self) -> None:
        self._parts: deque[bytes | memoryview] = deque()
        self.add: Callable[[Sequence[bytes | memoryview]], None] = self._parts.extend
        self.start = 0
        self._acknowledged = 0

    @property
    def nbytes(self) -> int:
        """How many bytes are kept; to be counted, so not for every write."""
        return sum(map(len, self._parts))

    @property
    def acknowledged(self) -> int:
        """How many bytes the peer says it has read."""
        return self._acknowledged

    def acknowledge(self, received: int) -> None:
        """Let go of what the peer has read.

        Args:
            received: how many bytes it has read, from the first one on.  Fewer than it
                has said before is no news: an ACK that was under way when the
                connection broke comes after the HELLO that said more.

        Raises:
            MalformedError: it has not been sent so many.
        """
        if received <= self._acknowledged:
            return
        self._acknowledged = received
        parts, start = self._parts, self.start
        while start < received:
            if not parts:
                raise MalformedError(
                    f"{received} bytes are acknowledged of {start} that were sent"
                )
            end = start + len(parts[0])
            if end > received:
                break  # within a part, which is kept whole
            parts.popleft()
            start = end
        self.start = start

    def rest(self, received: int) -> list[bytes | memoryview]:
        """Return what the peer has still to read.

        Args:
            received: how many bytes it has read.

        Raises:
            MalformedError: it has not been sent so many, or has said more before.
        """
        if received < self._acknowledged:
            raise MalformedError(
                f"{received} bytes were read when the connection broke, says the peer, "
                f"which has acknowledged {self._acknowledged}"
            )
        self.acknowledge(received)
        rest = list(self._parts)
        if received > self.start:
            rest[0] = memoryview(rest[0])[received - self.start :]
        return rest

    def clear(self) -> None:
        """Forget everything: the connection has ended."""
        self._parts.clear()

"""Payloads that follow their messages on the same connection, in pieces, in order.

Sans-IO, as all of `wire`.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

from asyncrpc.errors import MalformedError
from asyncrpc.wire.transfers import Opening


class Transfer:
    """A message whose payload is still arriving.

    Attributes:
        message: all but its buffers; empty once nobody wants it.
        buffers: where its bytes go; none if they are thrown away.
        missing: how many bytes are not there yet.
        bytes_copied: how many came by way of the scratch buffer.
    """

    __slots__ = ("buffers", "bytes_copied", "ends", "message", "missing")

    def __init__(
        self,
        message: Opening | tuple[()],
        buffers: list[memoryview],
    ) -> None:
        self.message = message
        self.buffers = buffers
        self.ends = list(accumulate(buffer.nbytes for buffer in buffers))
        self.missing = self.ends[-1] if buffers else 0
        self.bytes_copied = 0

    @classmethod
    def unfit(cls, nbytes: int) -> Transfer:
        """Return a payload of `nbytes` bytes for which there is no memory."""
        transfer = cls((), [])
        transfer.ends, transfer.missing = [nbytes], nbytes
        return transfer

    def segments(self, offset: int, nbytes: int) -> list[memoryview]:
        """Return where `nbytes` bytes at `offset` of the payload belong, reversed.

        Raises:
            MalformedError: they are not the next ones, or too many.  In order only: a
                piece sent twice would leave a gap, with old memory of ours in it.
        """
        if nbytes > self.missing or offset != self.ends[-1] - self.missing:
            raise MalformedError(
                f"{nbytes} bytes at {offset} of a payload of {self.ends[-1]} bytes, "
                f"the last {self.missing} of which are missing"
            )
        return self.places(offset, nbytes)

    def places(self, offset: int, nbytes: int) -> list[memoryview]:
        """Return the memory of `nbytes` bytes at `offset`, reversed; none if unfit."""
        found: list[memoryview] = []
        if not self.buffers:
            return found
        index = bisect_right(self.ends, offset)
        while nbytes:
            buffer, end = self.buffers[index], self.ends[index]
            start = offset - (end - buffer.nbytes)
            taken = min(nbytes, end - offset)
            if taken:
                found.append(buffer[start : start + taken])
            offset, nbytes, index = offset + taken, nbytes - taken, index + 1
        found.reverse()
        return found

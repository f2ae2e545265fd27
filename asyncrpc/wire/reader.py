"""The incremental reader: says where the next bytes must land, then what they were.

Bytes of a deferred payload land in their own buffers at once; everything else lands in
one scratch buffer that is reused, and is copied out of it.  While a payload is on its
way the reader asks for exactly the bytes that the next frame needs, so that none of the
payload strays into the scratch buffer; otherwise it takes what comes, which costs one
read for many small messages.

Sans-IO: no socket, no torch.  Every length is checked against `ReaderLimits` before a
byte is allocated for it.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Protocol

from asyncrpc.errors import FrameTooLargeError, MalformedError, VersionMismatchError
from asyncrpc.wire.frames import (
    BUFFER_LENGTH_BITS,
    HEADER,
    HEADER_BYTES,
    INLINE_BYTES_MAX,
    MAGIC,
    VERSION,
    Flags,
    FrameKind,
)

SCRATCH_BYTES: Final = 256 << 10
ALIGNMENT: Final = 64  # inline buffers start at multiples of it, as tensors like
_KINDS: Final = frozenset(FrameKind)
_MAY_DEFER: Final = frozenset(
    {
        FrameKind.REQUEST,
        FrameKind.RESPONSE,
        FrameKind.ERROR,
        FrameKind.STREAM_ITEM,
        FrameKind.SERVICE,
        FrameKind.NOTICE,
    }
)
_LENGTH_MASK: Final = (1 << BUFFER_LENGTH_BITS) - 1


@dataclass(frozen=True, slots=True)
class ReaderLimits:
    """What a peer may ask us to allocate.

    Attributes:
        control_bytes_max: of one control part; it holds structure, not tensors.
        payload_bytes_max: of all buffers of one message.
        buffers_max: of one message.
        transfers_max: deferred payloads on their way at the same time.
    """

    control_bytes_max: int = 64 << 20
    payload_bytes_max: int = 1 << 40
    buffers_max: int = 1 << 20
    transfers_max: int = 4096


class MessageSink(Protocol):
    """Who gets the messages."""

    def on_message(  # noqa: PLR0913  (a call per message: no object in between)
        self,
        kind: int,
        flags: int,
        call_id: int,
        aux: int,
        head: bytes,
        control: bytes,
        buffers: list[memoryview],
    ) -> None:
        """One whole message has arrived, its buffers filled."""

    def on_transfer_dropped(self, kind: int, call_id: int) -> None:
        """The peer gave up a message whose payload was on its way."""


class Transfer:
    """A message whose payload is still arriving."""

    __slots__ = ("buffers", "ends", "message", "missing")

    def __init__(
        self,
        message: tuple[int, int, int, int, bytes, bytes],
        buffers: list[memoryview],
    ) -> None:
        self.message = message
        self.buffers = buffers
        self.ends = list(accumulate(buffer.nbytes for buffer in buffers))
        self.missing = self.ends[-1]

    def segments(self, offset: int, nbytes: int) -> list[memoryview]:
        """Return where `nbytes` bytes at `offset` of the payload belong, reversed."""
        if nbytes > self.missing or offset < 0 or offset + nbytes > self.ends[-1]:
            raise MalformedError(
                f"{nbytes} bytes at {offset} of a payload of {self.ends[-1]} bytes, "
                f"{self.missing} of which are missing"
            )
        found: list[memoryview] = []
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


class FrameReader:
    """Reads the frames of one connection.

    Attributes:
        sink: gets the messages; may be replaced between two of them.
        bytes_copied: bytes of buffers that were copied out of the scratch buffer.
    """

    def __init__(
        self,
        sink: MessageSink,
        allocate: Callable[[int], memoryview],
        limits: ReaderLimits | None = None,
    ) -> None:
        """Make a reader.

        Args:
            sink: gets the messages.
            allocate: makes a writable buffer of so many bytes, format "B".
            limits: what a peer may ask for.
        """
        self.sink = sink
        self._allocate = allocate
        self._limits = limits or ReaderLimits()
        self._scratch = bytearray(SCRATCH_BYTES)
        self._view = memoryview(self._scratch)
        self._start = 0  # of what has not been parsed
        self._end = 0  # of what has been received
        self._wanted = HEADER_BYTES  # bytes of the frame at `_start`, as far as known
        self._transfers: dict[tuple[int, int], Transfer] = {}
        self._landing: list[memoryview] = []  # segments of a DATA body, the next last
        self._landing_for: tuple[int, int] | None = None
        self.bytes_copied = 0

    @property
    def transfers(self) -> int:
        """How many deferred payloads are on their way."""
        return len(self._transfers)

    def get_buffer(self) -> memoryview:
        """Return where the next bytes must land; at least one byte long."""
        if self._landing:
            return self._landing[-1]
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start + self._wanted > len(self._scratch):
            self._make_room()
        if self._transfers:  # take no more than this frame: a payload may follow it
            return self._view[self._end : self._start + self._wanted]
        return self._view[self._end :]

    def advance(self, nbytes: int) -> None:
        """Take note that `nbytes` bytes have landed in the last `get_buffer`.

        Raises:
            RemoteProtocolError: they are not what the protocol allows.  The position
                in the stream is lost: the connection must be aborted.
        """
        if self._landing:
            self._landed(nbytes)
            return
        self._end += nbytes
        while self._end - self._start >= self._wanted:
            if not self._parse_frame():
                return

    def drop_transfer(self, kind: int, call_id: int) -> bool:
        """Forget a message whose payload is arriving; say whether there was one."""
        transfer = self._transfers.get((kind, call_id))
        if transfer is None:
            return False
        transfer.message = ()  # type: ignore[assignment]  # its bytes go on arriving
        return True

    def _make_room(self) -> None:
        """Move the beginning of a frame to the front, or to a longer scratch buffer."""
        rest = bytes(self._view[self._start : self._end])
        size = max(SCRATCH_BYTES, self._wanted)
        if size != len(self._scratch):
            self._scratch = bytearray(size)
            self._view = memoryview(self._scratch)
        self._view[: len(rest)] = rest
        self._start, self._end = 0, len(rest)

    def _parse_frame(self) -> bool:
        """Read the frame at `_start`, all of whose wanted bytes are here.

        Returns:
            Whether the bytes that follow are a frame too; False in a DATA body that
            has not arrived in full, or when more of this frame is needed.
        """
        header = HEADER.unpack_from(self._scratch, self._start)
        magic, version, kind, flags, head_bytes, control_bytes = header[:6]
        count, aux, call_id, payload_bytes = header[6:]
        if magic != MAGIC or version != VERSION or kind not in _KINDS:
            self._refuse(magic, version, kind)
        if kind == FrameKind.DATA:
            return self._begin_data((flags, call_id), aux, payload_bytes)
        if self._wanted == HEADER_BYTES:
            self._wanted = self._frame_bytes(
                kind, flags, head_bytes, control_bytes, count, payload_bytes
            )
            if self._end - self._start < self._wanted:
                return True  # the loop in `advance` sees that bytes are missing
        at = self._start + HEADER_BYTES
        head = bytes(self._view[at : at + head_bytes]) if head_bytes else b""
        at += head_bytes
        control = bytes(self._view[at : at + control_bytes])
        at += control_bytes
        self._start += self._wanted
        self._wanted = HEADER_BYTES
        if kind == FrameKind.DROP:
            self._dropped((flags, call_id))
        elif count:
            message = (kind, flags, call_id, aux, head, control)
            self._with_buffers(message, at, count, payload_bytes)
        else:
            self.sink.on_message(kind, flags, call_id, aux, head, control, [])
        return True

    def _refuse(self, magic: bytes, version: int, kind: int) -> None:
        if magic != MAGIC:
            raise MalformedError(f"a frame begins with {magic!r}, not {MAGIC!r}")
        if version != VERSION:
            raise VersionMismatchError(
                f"the peer speaks version {version} of the protocol, we {VERSION}"
            )
        raise MalformedError(f"{kind} is no kind of frame")

    def _frame_bytes(  # noqa: PLR0913
        self,
        kind: int,
        flags: int,
        head_bytes: int,
        control_bytes: int,
        count: int,
        payload_bytes: int,
    ) -> int:
        """Check what a header announces; return the length of the frame, in bytes."""
        limits = self._limits
        for what, value, limit in (
            ("control part", control_bytes, limits.control_bytes_max),
            ("payload", payload_bytes, limits.payload_bytes_max),
            ("buffer table", count, limits.buffers_max),
        ):
            if value > limit:
                raise FrameTooLargeError(f"a {what} of {value}; the limit is {limit}")
        deferred = kind != FrameKind.DROP and bool(flags & Flags.DEFERRED)
        if deferred and (kind not in _MAY_DEFER or not count):
            raise MalformedError(f"a deferred {FrameKind(kind).name} of {count} buffers")
        if not deferred and payload_bytes > INLINE_BYTES_MAX:
            raise FrameTooLargeError(
                f"{payload_bytes} bytes inline; the limit is {INLINE_BYTES_MAX}"
            )
        inline = 0 if deferred else payload_bytes
        return HEADER_BYTES + head_bytes + control_bytes + 8 * count + inline

    def _with_buffers(
        self,
        message: tuple[int, int, int, int, bytes, bytes],
        at: int,
        count: int,
        payload_bytes: int,
    ) -> None:
        lengths = struct.unpack_from(f"<{count}Q", self._scratch, at)
        if max(lengths) > _LENGTH_MASK or sum(lengths) != payload_bytes:
            raise MalformedError("the buffer table does not add up to the payload")
        if message[1] & Flags.DEFERRED:
            self._begin_transfer(message, lengths)
            return
        buffers = self._copy_out(lengths, at + 8 * count)
        self.sink.on_message(*message, buffers)

    def _copy_out(self, lengths: Sequence[int], at: int) -> list[memoryview]:
        total = sum(-(-length // ALIGNMENT) * ALIGNMENT for length in lengths)
        block = self._allocate(total)
        buffers, to = [], 0
        for length in lengths:
            buffer = block[to : to + length]
            buffer[:] = self._view[at : at + length]
            buffers.append(buffer)
            at += length
            to += -(-length // ALIGNMENT) * ALIGNMENT
            self.bytes_copied += length
        return buffers

    def _begin_transfer(
        self,
        message: tuple[int, int, int, int, bytes, bytes],
        lengths: Sequence[int],
    ) -> None:
        key = (message[0], message[2])
        if key in self._transfers:
            raise MalformedError(f"two transfers at once for call {message[2]}")
        if len(self._transfers) >= self._limits.transfers_max:
            raise FrameTooLargeError(
                f"more than {self._limits.transfers_max} transfers at once"
            )
        if not sum(lengths):
            raise MalformedError("an empty payload is deferred")
        buffers = [self._allocate(length) for length in lengths]
        self._transfers[key] = Transfer(message, buffers)

    def _begin_data(self, key: tuple[int, int], offset: int, nbytes: int) -> bool:
        transfer = self._transfers.get(key)
        if transfer is None or not nbytes:
            raise MalformedError(f"{nbytes} bytes for call {key[1]}, which expects none")
        self._landing = transfer.segments(offset, nbytes)
        self._landing_for = key
        transfer.missing -= nbytes
        self._start += HEADER_BYTES
        return self._land_strays()

    def _land_strays(self) -> bool:
        """Move what came with the header to where it belongs."""
        while self._landing and self._start < self._end:
            segment = self._landing[-1]
            nbytes = min(segment.nbytes, self._end - self._start)
            segment[:nbytes] = self._view[self._start : self._start + nbytes]
            self._start += nbytes
            self.bytes_copied += nbytes
            self._landed(nbytes)
        return not self._landing

    def _landed(self, nbytes: int) -> None:
        segment = self._landing.pop()
        if nbytes < segment.nbytes:
            self._landing.append(segment[nbytes:])
        elif not self._landing and self._landing_for is not None:
            key, self._landing_for = self._landing_for, None
            self._complete(key)

    def _complete(self, key: tuple[int, int]) -> None:
        transfer = self._transfers[key]
        if transfer.missing:
            return
        del self._transfers[key]
        if transfer.message:
            self.sink.on_message(*transfer.message, transfer.buffers)

    def _dropped(self, key: tuple[int, int]) -> None:
        if self._transfers.pop(key, None) is None:
            raise MalformedError(f"call {key[1]} drops a transfer it never began")
        self.sink.on_transfer_dropped(*key)

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

# Plain numbers for what is looked at in every header: an enum's member costs 0.1 us to
# find, and a test of a flag 0.7 us.
_KINDS: Final = frozenset(int(kind) for kind in FrameKind)
_DATA: Final = int(FrameKind.DATA)
_DROP: Final = int(FrameKind.DROP)
_DEFERRED: Final = int(Flags.DEFERRED)
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

    def on_message(  # noqa: PLR0917  (a call per message: no object in between)
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
        self._control_bytes_max = self._limits.control_bytes_max
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
            if len(self._scratch) > SCRATCH_BYTES:
                self._make_room()  # a long frame has been read: give its memory back
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
            self._parse_frame()

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

    def _parse_frame(self) -> None:
        """Read the frame at `_start` if it is here in full; else learn its length."""
        start = self._start
        (
            magic,
            version,
            kind,
            flags,
            head_bytes,
            control_bytes,
            count,
            aux,
            call_id,
            payload_bytes,
        ) = HEADER.unpack_from(self._scratch, start)
        if magic != MAGIC or version != VERSION or kind not in _KINDS:
            self._refuse(magic, version, kind)
        if kind == _DATA:
            if head_bytes or control_bytes or count:
                raise MalformedError(
                    "a DATA frame that is more than a piece of payload"
                )
            self._begin_data((flags, call_id), aux, payload_bytes)
            return
        if self._wanted == HEADER_BYTES:
            wanted = HEADER_BYTES + head_bytes + control_bytes
            if control_bytes > self._control_bytes_max:
                self._refuse_control(control_bytes)
            if count or payload_bytes or flags & _DEFERRED:
                wanted += self._body_bytes(kind, flags, count, payload_bytes)
            self._wanted = wanted
            if self._end - start < wanted:
                return
        control_at = start + HEADER_BYTES + head_bytes
        table_at = control_at + control_bytes
        head = self._view[start + HEADER_BYTES : control_at].tobytes()
        control = self._view[control_at:table_at].tobytes()
        self._start = start + self._wanted
        self._wanted = HEADER_BYTES
        if kind == _DROP:
            self._dropped((flags, call_id))
        elif count:
            message = (kind, flags, call_id, aux, head, control)
            self._with_buffers(message, table_at, count, payload_bytes)
        else:
            self.sink.on_message(kind, flags, call_id, aux, head, control, [])

    def _refuse(self, magic: bytes, version: int, kind: int) -> None:
        if magic != MAGIC:
            raise MalformedError(f"a frame begins with {magic!r}, not {MAGIC!r}")
        if version != VERSION:
            raise VersionMismatchError(
                f"the peer speaks version {version} of the protocol, we {VERSION}"
            )
        raise MalformedError(f"{kind} is no kind of frame")

    def _refuse_control(self, control_bytes: int) -> None:
        raise FrameTooLargeError(
            f"a control part of {control_bytes} bytes; "
            f"the limit is {self._control_bytes_max}"
        )

    def _body_bytes(self, kind: int, flags: int, count: int, payload_bytes: int) -> int:
        """Check what a header says of buffers; return how many bytes follow with it."""
        limits = self._limits
        if payload_bytes > limits.payload_bytes_max:
            raise FrameTooLargeError(
                f"a payload of {payload_bytes} bytes; "
                f"the limit is {limits.payload_bytes_max}"
            )
        if count > limits.buffers_max:
            raise FrameTooLargeError(
                f"{count} buffers; the limit is {limits.buffers_max}"
            )
        if payload_bytes and not count:
            raise MalformedError(f"a payload of {payload_bytes} bytes in no buffer")
        if kind == _DROP:  # its flags are a kind
            if count:
                raise MalformedError("a DROP with buffers")
            return 0
        if flags & _DEFERRED:
            if kind not in _MAY_DEFER or not payload_bytes:
                raise MalformedError(
                    f"a deferred {FrameKind(kind).name} of {payload_bytes} bytes"
                )
            return 8 * count
        if payload_bytes > INLINE_BYTES_MAX:
            raise FrameTooLargeError(
                f"{payload_bytes} bytes inline; the limit is {INLINE_BYTES_MAX}"
            )
        return 8 * count + payload_bytes

    def _with_buffers(
        self,
        message: tuple[int, int, int, int, bytes, bytes],
        at: int,
        count: int,
        payload_bytes: int,
    ) -> None:
        lengths = struct.unpack_from(f"<{count}Q", self._scratch, at)
        # A codec or placement in the high bits, too, does not add up.
        if sum(lengths) != payload_bytes:
            raise MalformedError("the buffer table does not add up to the payload")
        if message[1] & _DEFERRED:
            self._begin_transfer(message, lengths)
            return
        buffers = self._copy_out(lengths, at + 8 * count)
        self.sink.on_message(*message, buffers)

    def _copy_out(self, lengths: Sequence[int], at: int) -> list[memoryview]:
        starts = [0]
        for length in lengths:
            starts.append((starts[-1] + length + ALIGNMENT - 1) & -ALIGNMENT)
        block = self._make_buffer(starts.pop())
        buffers = []
        for start, length in zip(starts, lengths, strict=True):
            buffer = block[start : start + length]
            buffer[:] = self._view[at : at + length]
            buffers.append(buffer)
            at += length
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
        buffers = [self._make_buffer(length) for length in lengths]
        self._transfers[key] = Transfer(message, buffers)

    def _make_buffer(self, nbytes: int) -> memoryview:
        try:
            return self._allocate(nbytes)
        except MemoryError as error:
            raise FrameTooLargeError(
                f"a payload of {nbytes} bytes, for which there is no memory here"
            ) from error

    def _begin_data(self, key: tuple[int, int], offset: int, nbytes: int) -> None:
        transfer = self._transfers.get(key)
        if transfer is None or not nbytes:
            raise MalformedError(
                f"{nbytes} bytes for call {key[1]}, which expects none"
            )
        self._landing = transfer.segments(offset, nbytes)
        self._landing_for = key
        transfer.missing -= nbytes
        self._start += HEADER_BYTES
        self._land_strays()

    def _land_strays(self) -> None:
        """Move what came with the header to where it belongs."""
        while self._landing and self._start < self._end:
            segment = self._landing[-1]
            nbytes = min(segment.nbytes, self._end - self._start)
            segment[:nbytes] = self._view[self._start : self._start + nbytes]
            self._start += nbytes
            self.bytes_copied += nbytes
            self._landed(nbytes)

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

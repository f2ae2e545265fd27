"""Large payloads, in chunks between which other messages pass.

A message with the flag DEFERRED goes over the connection of its link; the bytes of its
payload go in chunks over that connection (lane 0) or over its lanes, each chunk over
the first lane with room.  Both sides count these messages on lane 0, where they are in
order, from 1 in each direction.  The count is the serial of the transfer, and each
chunk names it.  So chunks may arrive in any order, over any lane, and on a lane even
before the message that they belong to.

`ChunkScheduler` returns the next chunk.  `Arrivals` knows the place of each byte, and
when a message is complete; a `ChunkLanding` has the place of the present chunk's bytes.
A `FrameReader` reads lane 0, a `LaneReader` every other lane.

Every chunk has a fixed place: its offset is a multiple of `CHUNK_BYTES`, and all but
the last are full.  So one bit per chunk shows that no byte is written twice; and since
all bytes are counted, a message is delivered only without a gap.

Sans-IO, as all of `wire`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from itertools import accumulate
from typing import Final

from asyncrpc.core.wire.frames import (
    CHUNK_BYTES,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    VERSION,
    Flags,
    Frame,
    FrameKind,
    data_prefix,
    prefix,
)
from asyncrpc.core.wire.outgoing import OutgoingMessage
from asyncrpc.errors import MalformedError

# The limit of one read of a lane: 256 KiB take 60 us at 4 GB/s, and no other message is
# read meanwhile.
READ_BYTES_MAX: Final = 256 << 10
_SCRATCH_BYTES: Final = 64 << 10
_DATA: Final = int(FrameKind.DATA)
_LANES: Final = int(Flags.LANES)
_REQUEST: Final = int(FrameKind.REQUEST)
_BUFFER_BYTES: Final = 256  # that each buffer takes, however short it is


# --- sending -------------------------------------------------------------------------


class OutgoingTransfer:
    """The rest of the payload of one message.

    Attributes:
        total: bytes of the payload.
        offset: bytes that have been taken.
    """

    __slots__ = ("_buffers", "_within", "message", "offset", "serial", "total")

    def __init__(self, message: OutgoingMessage, serial: int) -> None:
        self.message = message
        self.serial = serial
        self.total = sum(buffer.nbytes for buffer in message.buffers)
        self.offset = 0
        self._buffers = deque(buffer for buffer in message.buffers if buffer.nbytes)
        self._within = 0  # of the first buffer

    def opening(self, flags: int) -> bytes:
        """Return the message itself, sent before the chunks, with `flags` added."""
        message = self.message
        return prefix(
            message.kind,
            message.call_id,
            flags=message.flags | flags,
            aux=message.aux,
            head=message.head,
            control=message.control,
            lengths=[buffer.nbytes for buffer in message.buffers],
            payload_bytes=self.total,
        )

    def take(self) -> list[bytes | memoryview]:
        """Cut off the next chunk, with its header."""
        nbytes = min(CHUNK_BYTES, self.total - self.offset)
        chunk: list[bytes | memoryview] = [
            data_prefix(self.serial, self.offset, nbytes)
        ]
        self.offset += nbytes
        while nbytes:
            first = self._buffers[0]
            piece = first[self._within : self._within + nbytes]
            chunk.append(piece)
            nbytes -= piece.nbytes
            self._within += piece.nbytes
            if self._within == first.nbytes:
                self._buffers.popleft()
                self._within = 0
        return chunk


class ChunkScheduler:
    """The payloads that one side still sends: one chunk of each in turn."""

    __slots__ = ("_on_taken", "_serial", "_turn")

    def __init__(self, on_taken: Callable[[OutgoingMessage], None]) -> None:
        self._on_taken = on_taken
        self._turn: deque[OutgoingTransfer] = deque()
        self._serial = 0

    def __bool__(self) -> bool:
        return bool(self._turn)

    def add(
        self, message: OutgoingMessage, *, over_lanes: bool
    ) -> tuple[OutgoingTransfer, bytes]:
        """Queue a payload; return its transfer and the frame to send over lane 0.

        The frames must be sent in the order of these calls, which the serials count.
        """
        self._serial += 1
        transfer = OutgoingTransfer(message, self._serial)
        self._turn.append(transfer)
        flags = Flags.DEFERRED | Flags.LANES if over_lanes else Flags.DEFERRED
        return transfer, transfer.opening(flags)

    def next_chunk(self) -> list[bytes | memoryview]:
        """Return the next chunk, for any lane; must not be called without payloads."""
        transfer = self._turn.popleft()
        chunk = transfer.take()
        if transfer.offset < transfer.total:
            self._turn.append(transfer)
        else:
            self._on_taken(transfer.message)
        return chunk

    def remove(self, transfer: OutgoingTransfer) -> bytes:
        """Give up a transfer; return the DROP frame to send over lane 0."""
        self._turn.remove(transfer)
        return prefix(FrameKind.DROP, transfer.serial, aux=transfer.offset)

    def clear(self) -> list[OutgoingMessage]:
        """Forget all transfers, as the lanes are gone; return their messages."""
        turn, self._turn = self._turn, deque()
        return [transfer.message for transfer in turn]


# --- receiving -----------------------------------------------------------------------


def waiting_bytes(message: Frame, count: int) -> int:
    """Return what a message with so many buffers takes while it waits for its payload.

    Of a request it is 0: it has credit for all that it takes.
    """
    if message.kind == _REQUEST:
        return 0
    return len(message.control) + _BUFFER_BYTES * count


class Arrival:
    """A message whose payload is arriving.

    Attributes:
        message: the message without its buffers.
        buffers: the memory for the payload; empty once the message is not wanted any
            more, because the memory may then be reused.
        total: bytes of the payload.
        begun: bytes of the chunks whose header has been read.
        missing: bytes that have not arrived.
        dropped_at: bytes that the peer sent before it gave up; -1 if it has not.
        bytes_copied: bytes that were copied out of a scratch buffer.
        is_wanted: whether the message will be delivered.
        waiting_bytes: what the message takes without its payload.
    """

    __slots__ = (
        "_begun_chunks",
        "_ends",
        "begun",
        "buffers",
        "bytes_copied",
        "dropped_at",
        "is_wanted",
        "message",
        "missing",
        "serial",
        "total",
        "waiting_bytes",
    )

    def __init__(
        self, serial: int, message: Frame, buffers: list[memoryview], total: int
    ) -> None:
        self.serial = serial
        self.message = message
        self.buffers = buffers
        self._ends = list(accumulate(buffer.nbytes for buffer in buffers))
        self.total = self.missing = total
        self.begun = 0
        self.dropped_at = -1
        self.bytes_copied = 0
        self.is_wanted = True
        self.waiting_bytes = waiting_bytes(message, len(buffers))
        chunks = -(-self.total // CHUNK_BYTES)
        self._begun_chunks = bytearray(-(-chunks // 8))

    def begin(self, offset: int, nbytes: int) -> None:
        """Record a chunk whose bytes come next on some lane."""
        index, within = divmod(offset, CHUNK_BYTES)
        due = min(CHUNK_BYTES, self.total - offset)
        if offset < 0 or within or nbytes <= 0 or nbytes != due:
            raise MalformedError(
                f"{nbytes} bytes at {offset} are not a chunk of {self.total} bytes"
            )
        byte, bit = index >> 3, 1 << (index & 7)
        if self._begun_chunks[byte] & bit:
            raise MalformedError(f"the chunk at {offset} of a payload comes twice")
        self._begun_chunks[byte] |= bit
        self.begun += nbytes

    def place(self, offset: int, bytes_max: int) -> memoryview:
        """Return the memory for the bytes from `offset` on, at most `bytes_max` bytes.

        The memory ends at the latest with its buffer.
        """
        index = bisect_right(self._ends, offset)
        buffer = self.buffers[index]
        start = offset - (self._ends[index] - buffer.nbytes)
        return buffer[start : start + bytes_max]

    def forget(self) -> None:
        """Discard the rest of the payload when it comes."""
        self.is_wanted = False
        self.buffers = []

    @property
    def is_over(self) -> bool:
        """Whether all bytes have come, or all that the peer sent before it gave up."""
        if self.dropped_at < 0:
            return not self.missing
        return self.total - self.missing == self.dropped_at


class Arrivals:
    """The payloads that arrive over one link.

    Attributes:
        deliver: takes messages whose payload is complete.
        on_opened: called when a transfer has been opened: a lane may wait for it.
        on_complete: called when a message is complete, and delivered next.
        is_ready: whether memory may be written to now, or a lane must wait for it;
            None: all memory may.
        opened: number of messages that have announced a payload.
        here: number of payloads on their way whose chunks may come over lane 0.
        announced_bytes: of all payloads on their way.
        waiting_bytes: what the messages take that wait for them.
    """

    __slots__ = (
        "_arrivals",
        "announced_bytes",
        "deliver",
        "here",
        "is_ready",
        "on_complete",
        "on_opened",
        "opened",
        "waiting_bytes",
    )

    def __init__(self, deliver: Callable[[Arrival], None]) -> None:
        self.deliver = deliver
        self.on_opened: Callable[[], None] | None = None
        self.on_complete: Callable[[], None] | None = None
        self.is_ready: Callable[[memoryview], bool] | None = None
        self.opened = 0
        self.here = 0
        self.announced_bytes = self.waiting_bytes = 0
        self._arrivals: dict[int, Arrival] = {}

    def __len__(self) -> int:
        return len(self._arrivals)

    def open(
        self, message: Frame, buffers: list[memoryview] | None, total: int
    ) -> None:
        """Record a message whose payload is on its way.

        Args:
            buffers: the memory for the payload; None: the message has been delivered
                without its payload, which is discarded.
        """
        self.opened += 1
        arrival = Arrival(self.opened, message, buffers or [], total)
        self._arrivals[self.opened] = arrival
        self.announced_bytes += total
        self.waiting_bytes += arrival.waiting_bytes
        if not message.flags & _LANES:
            self.here += 1
        if buffers is None:
            arrival.forget()
        if self.on_opened is not None:
            self.on_opened()

    def begin(self, serial: int, offset: int, nbytes: int) -> Arrival:
        """Return the transfer of a chunk whose bytes come next."""
        arrival = self._arrivals.get(serial)
        if arrival is None or 0 <= arrival.dropped_at < arrival.begun + nbytes:
            raise MalformedError(
                f"{nbytes} bytes came for transfer {serial}, which expects none"
            )
        arrival.begin(offset, nbytes)
        return arrival

    def landed(self, arrival: Arrival, nbytes: int) -> None:
        """Count bytes that have arrived; deliver the message with the last one."""
        arrival.missing -= nbytes
        if arrival.is_over:
            self._close(arrival)
            if arrival.is_wanted:
                if self.on_complete is not None:
                    self.on_complete()  # an ACK goes with what answers at once
                self.deliver(arrival)

    def drop(self, serial: int, sent_bytes: int) -> tuple[int, int] | None:
        """Record that the peer gave up a transfer.

        Bytes that it sent before may still be on their way: they are discarded, and
        then the transfer is forgotten.
        """
        arrival = self._arrivals.get(serial)
        if arrival is None or arrival.dropped_at >= 0:
            raise MalformedError(f"transfer {serial} is given up, but is not under way")
        if not arrival.begun <= sent_bytes < arrival.total:
            raise MalformedError(
                f"transfer {serial} of {arrival.total} bytes is given up after "
                f"{sent_bytes} bytes, but {arrival.begun} bytes have come"
            )
        was_wanted = arrival.is_wanted
        arrival.forget()
        arrival.dropped_at = sent_bytes
        if arrival.is_over:
            self._close(arrival)
        message = arrival.message
        return (message.kind, message.call_id) if was_wanted else None

    def forget(self, kind: int, call_id: int) -> bytes | None:
        """Do not deliver a message; return its control part, None if not found."""
        arrival = self._wanted(kind, call_id)
        if arrival is None:
            return None
        arrival.forget()
        return arrival.message.control

    def move(self, kind: int, call_id: int, make: Callable[[int], memoryview]) -> None:
        """Let the rest of a payload land in other memory, which `make` returns.

        From now on no byte is written to its former buffers.
        """
        arrival = self._wanted(kind, call_id)
        if arrival is not None:
            arrival.buffers = [make(buffer.nbytes) for buffer in arrival.buffers]

    def _wanted(self, kind: int, call_id: int) -> Arrival | None:
        for arrival in self._arrivals.values():
            message = arrival.message
            if (
                arrival.is_wanted
                and message.kind == kind
                and message.call_id == call_id
            ):
                return arrival
        return None

    def _close(self, arrival: Arrival) -> None:
        del self._arrivals[arrival.serial]
        self.announced_bytes -= arrival.total
        self.waiting_bytes -= arrival.waiting_bytes
        if not arrival.message.flags & _LANES:
            self.here -= 1


class ChunkLanding:
    """The memory for the bytes of the present chunk.

    Attributes:
        bytes_left: bytes of the chunk that have not come.
        bytes_max: the limit of one read.
    """

    __slots__ = (
        "_arrival",
        "_arrivals",
        "_offset",
        "_scratch",
        "bytes_left",
        "bytes_max",
    )

    def __init__(self, arrivals: Arrivals, bytes_max: int) -> None:
        self.bytes_left = 0
        self.bytes_max = bytes_max
        self._arrivals = arrivals
        self._arrival: Arrival | None = None  # None: the bytes are discarded
        self._offset = 0
        self._scratch = memoryview(b"")

    def begin(self, serial: int, offset: int, nbytes: int) -> None:
        """Take a chunk, whose bytes come next."""
        self._arrival = self._arrivals.begin(serial, offset, nbytes)
        self._offset, self.bytes_left = offset, nbytes

    @property
    def is_ready(self) -> bool:
        """Whether the memory for the rest of the chunk may be written to now."""
        arrival, is_ready = self._arrival, self._arrivals.is_ready
        if arrival is None or is_ready is None or not arrival.is_wanted:
            return True
        at, end = self._offset, self._offset + self.bytes_left
        while at < end:
            piece = arrival.place(at, end - at)
            if not is_ready(piece):
                return False
            at += piece.nbytes
        return True

    def skip(self, nbytes: int) -> None:
        """Discard the bytes that come next."""
        self._arrival, self.bytes_left = None, nbytes

    def get_buffer(self) -> memoryview:
        """Return the memory for the next bytes; `bytes_left` must not be 0."""
        arrival = self._arrival
        if arrival is not None and arrival.is_wanted:
            return arrival.place(self._offset, min(self.bytes_left, self.bytes_max))
        if not self._scratch:
            self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        return self._scratch[: self.bytes_left]

    def landed(self, nbytes: int, *, copied: bool = False) -> None:
        """Count bytes that have landed; the last ones may deliver the message."""
        arrival = self._arrival
        self._offset += nbytes
        self.bytes_left -= nbytes
        if not self.bytes_left:
            self._arrival = None
            self._scratch = memoryview(b"")
        if arrival is not None:
            if copied:
                arrival.bytes_copied += nbytes
            self._arrivals.landed(arrival, nbytes)


class LaneReader:
    """Reads one lane: the header of a chunk, then its bytes into their place.

    It asks for exactly the bytes that come next, so no byte is ever copied.

    Attributes:
        waits_for: serial of a transfer whose message must come first, else 0.
        is_waiting: whether the lane must not be read until `proceed` returns True: it
            waits for a message, or for the memory of the present chunk.
        bytes_copied: always 0.
    """

    bytes_copied = 0

    def __init__(self, arrivals: Arrivals) -> None:
        self.waits_for = 0
        self.is_waiting = False
        self._arrivals = arrivals
        self._landing = ChunkLanding(arrivals, READ_BYTES_MAX)
        self._next = (0, 0, 0)  # serial, offset and bytes of the chunk that waits
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._filled = 0  # of the header

    @property
    def is_between_chunks(self) -> bool:
        """Whether the lane may end here without a loss."""
        return not (self._landing.bytes_left or self._filled or self.waits_for)

    def limit_reads(self, bytes_max: int) -> None:
        """Set the limit of one read."""
        self._landing.bytes_max = bytes_max

    def get_buffer(self) -> memoryview:
        """Return the memory for the next bytes; at least one byte long."""
        if self._landing.bytes_left:
            return self._landing.get_buffer()
        return self._header[self._filled :]

    def advance(self, nbytes: int) -> None:
        """Count `nbytes` bytes that have landed in the last `get_buffer`."""
        if self._landing.bytes_left:
            self._landing.landed(nbytes)
            return
        self._filled += nbytes
        if self._filled == HEADER_BYTES:
            self._filled = 0
            self._on_header()

    def proceed(self) -> bool:
        """Go on if what the lane waits for is there; return whether it is."""
        if self._arrivals.opened < self.waits_for:
            return False
        if self.waits_for:
            self.waits_for = 0
            self._landing.begin(*self._next)
        self.is_waiting = not self._landing.is_ready
        return not self.is_waiting

    def _on_header(self) -> None:
        (
            magic,
            version,
            kind,
            _,
            head_bytes,
            control_bytes,
            count,
            offset,
            serial,
            nbytes,
        ) = HEADER.unpack(self._header)
        if magic != MAGIC or version != VERSION or kind != _DATA:
            begin = bytes(self._header[:4])
            raise MalformedError(f"a frame on a lane must be DATA, not {begin!r}")
        if head_bytes or control_bytes or count or not serial:
            raise MalformedError("a DATA frame is more than a chunk of a payload")
        if serial > self._arrivals.opened:
            self._next = serial, offset, nbytes
            self.waits_for = serial
            self.is_waiting = True
        else:
            self._landing.begin(serial, offset, nbytes)
            self.is_waiting = not self._landing.is_ready

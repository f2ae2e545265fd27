"""Transfers over lanes: payloads that leave and arrive beside their messages.

A message with the flag LANES goes over the control connection; the bytes of its payload
go in chunks over the lanes, whichever has room first.  The two sides number these
messages alike, each direction from 1, by counting them on the control connection, where
they are in order: a chunk names its transfer by that serial.  So chunks may arrive in
any order, over any lane, and even before the message that they belong to.

`Departures` says what the next chunk is.  `Arrivals` knows where each byte belongs and
when a message is complete; a `LaneReader` is the receiving end of one lane.

Every chunk has its place: its offset is a multiple of `LANE_CHUNK_BYTES` and all but
the last are full, so one bit per chunk tells that nothing is written twice; and since
all bytes are counted, a message is delivered only without a gap.

Sans-IO, as all of `wire`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final, TypeAlias

from asyncrpc.errors import MalformedError
from asyncrpc.wire.frames import (
    HEADER,
    HEADER_BYTES,
    LANE_CHUNK_BYTES,
    MAGIC,
    VERSION,
    Flags,
    FrameKind,
    data_prefix,
    prefix,
)

# What one read may take: 256 KiB are 60 us at 4 GB/s, and no other message is read
# meanwhile.
READ_BYTES_MAX: Final = 256 << 10
_SCRATCH_BYTES: Final = 64 << 10
_DATA: Final = int(FrameKind.DATA)

Opening: TypeAlias = tuple[int, int, int, int, bytes, bytes]


class Departure:
    """A message whose payload leaves over lanes."""

    __slots__ = (
        "_buffers",
        "_within",
        "call_id",
        "is_bare",
        "kind",
        "offset",
        "on_sent",
        "opening",
        "serial",
        "total",
    )

    def __init__(
        self,
        kind: int,
        call_id: int,
        *,
        flags: int = 0,
        aux: int = 0,
        head: bytes = b"",
        control: bytes = b"",
        buffers: Sequence[memoryview] = (),
        on_sent: Callable[[], None] | None = None,
    ) -> None:
        lengths = [buffer.nbytes for buffer in buffers]
        self.kind = kind
        self.call_id = call_id
        self.serial = 0  # once it has one
        self.total = sum(lengths)
        self.offset = 0
        self.on_sent = on_sent
        self.is_bare = not head and on_sent is None  # nothing travels beside the value
        self.opening = prefix(
            kind,
            call_id,
            flags=flags | Flags.DEFERRED | Flags.LANES,
            aux=aux,
            head=head,
            control=control,
            lengths=lengths,
            payload_bytes=self.total,
        )
        self._buffers = deque(buffer for buffer in buffers if buffer.nbytes)
        self._within = 0  # of the first buffer

    def take(self) -> list[bytes | memoryview]:
        """Cut off the next chunk, with its header."""
        nbytes = min(LANE_CHUNK_BYTES, self.total - self.offset)
        chunk: list[bytes | memoryview] = [
            data_prefix(self.kind, self.serial, self.offset, nbytes)
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

    def sent(self) -> None:
        """Tell whoever waits: the last byte has been taken, or will not be."""
        on_sent, self.on_sent = self.on_sent, None
        if on_sent is not None:
            on_sent()


class Departures:
    """What one side has still to send over its lanes, one chunk of each in turn."""

    def __init__(self) -> None:
        self._turn: deque[Departure] = deque()
        self._serial = 0

    def __bool__(self) -> bool:
        return bool(self._turn)

    def add(self, departure: Departure) -> bytes:
        """Queue a payload; return its message, to be sent over the control connection.

        In the order of these calls: the serials count the messages as they are sent.
        """
        self._serial += 1
        departure.serial = self._serial
        self._turn.append(departure)
        opening, departure.opening = departure.opening, b""
        return opening

    def next_chunk(self) -> list[bytes | memoryview]:
        """Return the next chunk for any of the lanes; there must be one."""
        departure = self._turn.popleft()
        chunk = departure.take()
        if departure.offset < departure.total:
            self._turn.append(departure)
        else:
            departure.sent()
        return chunk

    def drop(self, kind: int, call_id: int, *, bare_only: bool = False) -> list[bytes]:
        """Give up the transfers of a message.

        Args:
            kind: of the message.
            call_id: of the message.
            bare_only: leave a message that tells the peer more than its value.

        Returns:
            What tells the peer, over the control connection; empty if there was none.
        """
        dropped = [
            one
            for one in self._turn
            if (one.kind, one.call_id) == (kind, call_id)
            and (one.is_bare or not bare_only)
        ]
        for departure in dropped:
            self._turn.remove(departure)
            departure.sent()
        return [
            prefix(FrameKind.LANE_DROP, one.serial, aux=one.offset) for one in dropped
        ]

    def clear(self) -> None:
        """Forget everything: the lanes are gone."""
        turn, self._turn = self._turn, deque()
        for departure in turn:
            departure.sent()


class Arrival:
    """A message whose payload arrives over lanes.

    Attributes:
        message: all but its buffers.
        buffers: where its bytes go; empty once nobody wants it, for then they may
            belong to somebody else.
        total: bytes of the payload.
        begun: how many of them are in chunks whose header has been read.
        missing: how many are not there yet.
        dropped_at: how many the peer has sent before it gave up; -1 if it has not.
    """

    __slots__ = (
        "_begun_chunks",
        "_ends",
        "begun",
        "buffers",
        "dropped_at",
        "is_wanted",
        "message",
        "missing",
        "total",
    )

    def __init__(self, message: Opening, buffers: list[memoryview], total: int) -> None:
        self.message = message
        self.buffers = buffers
        self._ends = list(accumulate(buffer.nbytes for buffer in buffers))
        self.total = self.missing = total
        self.begun = 0
        self.dropped_at = -1
        self.is_wanted = True
        chunks = -(-self.total // LANE_CHUNK_BYTES)
        self._begun_chunks = bytearray(-(-chunks // 8))

    def begin(self, offset: int, nbytes: int) -> None:
        """Take note of a chunk whose bytes come next on some lane.

        Raises:
            MalformedError: it is no chunk of this payload, or has come before.
        """
        index, within = divmod(offset, LANE_CHUNK_BYTES)
        due = min(LANE_CHUNK_BYTES, self.total - offset)
        if offset < 0 or within or nbytes <= 0 or nbytes != due:
            raise MalformedError(
                f"{nbytes} bytes at {offset} are no chunk of {self.total} bytes"
            )
        byte, bit = index >> 3, 1 << (index & 7)
        if self._begun_chunks[byte] & bit:
            raise MalformedError(f"the chunk at {offset} of a payload comes twice")
        self._begun_chunks[byte] |= bit
        self.begun += nbytes

    def place(self, offset: int, bytes_max: int) -> memoryview:
        """Return where the bytes from `offset` on belong, at most `bytes_max` of them.

        It ends with the buffer that they are in.
        """
        index = bisect_right(self._ends, offset)
        buffer = self.buffers[index]
        start = offset - (self._ends[index] - buffer.nbytes)
        return buffer[start : start + bytes_max]

    def forget(self) -> None:
        """Have what is still to come thrown away."""
        self.is_wanted = False
        self.buffers = []


class Arrivals:
    """The payloads that arrive over the lanes of one link.

    Attributes:
        deliver: takes the messages, whole.
        on_opened: called when a transfer has been opened: a lane may wait for it.
        opened: how many messages have announced a payload over lanes.
    """

    def __init__(self, deliver: Callable[..., None]) -> None:
        self.deliver = deliver
        self.on_opened: Callable[[], None] | None = None
        self.opened = 0
        self._arrivals: dict[int, Arrival] = {}

    def __len__(self) -> int:
        return len(self._arrivals)

    def open(
        self, message: Opening, buffers: list[memoryview] | None, total: int
    ) -> None:
        """Take note of a message whose payload is on its way.

        Args:
            message: all but its buffers.
            buffers: where its bytes go; None: it has been delivered without them, and
                they are thrown away.
            total: bytes of the payload.
        """
        self.opened += 1
        arrival = self._arrivals[self.opened] = Arrival(message, buffers or [], total)
        if buffers is None:
            arrival.forget()
        if self.on_opened is not None:
            self.on_opened()

    def find(self, serial: int) -> Arrival | None:
        """Return the transfer a chunk belongs to; None if its message has yet to come.

        Raises:
            MalformedError: it has all its bytes already.
        """
        if serial > self.opened:
            return None
        arrival = self._arrivals.get(serial)
        if arrival is None:
            raise MalformedError(f"bytes for transfer {serial}, which expects none")
        return arrival

    def landed(self, serial: int, nbytes: int) -> None:
        """Count bytes that have arrived; deliver the message with the last one."""
        arrival = self._arrivals[serial]
        arrival.missing -= nbytes
        if self._is_over(arrival):
            del self._arrivals[serial]
            if arrival.is_wanted:
                self.deliver(*arrival.message, arrival.buffers)

    def drop(self, serial: int, sent_bytes: int) -> tuple[int, int] | None:
        """Take note that the peer gave up a transfer.

        What it sent before may still be on its way: it is thrown away, and then the
        transfer forgotten.

        Args:
            serial: of the transfer.
            sent_bytes: how many of its bytes the peer has sent.

        Returns:
            Kind and call of its message, if anybody here waits for it.

        Raises:
            MalformedError: there is no such transfer, or more of it has arrived.
        """
        arrival = self._arrivals.get(serial)
        if arrival is None or arrival.dropped_at >= 0:
            raise MalformedError(f"transfer {serial} is given up, but is not under way")
        if not arrival.begun <= sent_bytes < arrival.total:
            raise MalformedError(
                f"transfer {serial} of {arrival.total} bytes is given up after "
                f"{sent_bytes}, of which {arrival.begun} have come"
            )
        was_wanted = arrival.is_wanted
        arrival.forget()
        arrival.dropped_at = sent_bytes
        if self._is_over(arrival):
            del self._arrivals[serial]
        kind, _, call_id = arrival.message[:3]
        return (kind, call_id) if was_wanted else None

    def forget(self, kind: int, call_id: int) -> bytes | None:
        """Do not deliver a message; return its control part, None if there is none."""
        arrival = self._wanted(kind, call_id)
        if arrival is None:
            return None
        arrival.forget()
        return arrival.message[5]

    def move(self, kind: int, call_id: int, make: Callable[[int], memoryview]) -> None:
        """Let the rest of a payload land in other memory, which `make` makes."""
        arrival = self._wanted(kind, call_id)
        if arrival is not None:
            arrival.buffers = [make(buffer.nbytes) for buffer in arrival.buffers]

    def _wanted(self, kind: int, call_id: int) -> Arrival | None:
        for arrival in self._arrivals.values():
            message = arrival.message
            if arrival.is_wanted and (message[0], message[2]) == (kind, call_id):
                return arrival
        return None

    @staticmethod
    def _is_over(arrival: Arrival) -> bool:
        if arrival.dropped_at < 0:
            return not arrival.missing
        return arrival.total - arrival.missing == arrival.dropped_at


class LaneReader:
    """Reads one lane: the header of a chunk, then its bytes where they belong.

    It asks for exactly the bytes that come next, so none of them is ever copied.

    Attributes:
        waits_for: serial of the transfer whose message has to come first, else 0.  Then
            nothing may be read from this lane until `proceed` says so.
        read_bytes_max: what one read may take.
        bytes_copied: 0, always.
    """

    bytes_copied = 0

    def __init__(self, arrivals: Arrivals) -> None:
        self.waits_for = 0
        self.read_bytes_max = READ_BYTES_MAX
        self._arrivals = arrivals
        self._arrival: Arrival | None = None  # whose bytes come next; None: a header
        self._serial = 0
        self._offset = 0
        self._left = 0  # bytes of the chunk
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._filled = 0  # of the header
        self._scratch = memoryview(b"")

    @property
    def is_between_chunks(self) -> bool:
        """Whether the lane may end here without a loss."""
        return self._arrival is None and not self._filled and not self.waits_for

    def get_buffer(self) -> memoryview:
        """Return where the next bytes must land; at least one byte long."""
        arrival = self._arrival
        if arrival is None:
            return self._header[self._filled :]
        if not arrival.is_wanted:
            if not self._scratch:
                self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
            return self._scratch[: self._left]
        return arrival.place(self._offset, min(self._left, self.read_bytes_max))

    def advance(self, nbytes: int) -> None:
        """Take note that `nbytes` bytes have landed in the last `get_buffer`.

        Raises:
            RemoteProtocolError: they are not what the protocol allows.
        """
        if self._arrival is None:
            self._filled += nbytes
            if self._filled == HEADER_BYTES:
                self._filled = 0
                self._on_header()
            return
        self._offset += nbytes
        self._left -= nbytes
        if not self._left:
            self._arrival = None
            self._scratch = memoryview(b"")
        self._arrivals.landed(self._serial, nbytes)

    def proceed(self) -> bool:
        """Go on if the message waited for has come; return whether it has."""
        if self._arrivals.opened < self.waits_for:
            return False
        self.waits_for = 0
        self._begin()
        return True

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
            raise MalformedError(f"no DATA frame on a lane: {begin!r}")
        if head_bytes or control_bytes or count or not serial:
            raise MalformedError("a DATA frame that is more than a chunk of a payload")
        self._serial, self._offset, self._left = serial, offset, nbytes
        if serial > self._arrivals.opened:
            self.waits_for = serial
        else:
            self._begin()

    def _begin(self) -> None:
        arrival = self._arrivals.find(self._serial)
        if arrival is None or 0 <= arrival.dropped_at < arrival.begun + self._left:
            raise MalformedError(
                f"{self._left} bytes for transfer {self._serial}, which expects none"
            )
        arrival.begin(self._offset, self._left)
        self._arrival = arrival

"""The incremental reader: provides memory for the next bytes, then parses them.

Bytes of a deferred payload land in their own buffers at once (`chunks`); everything
else lands in one scratch buffer that is reused, and is copied out of it.  While a
payload is on its way over this connection the reader asks for exactly the bytes that
the next frame needs, so that no byte of the payload lands in the scratch buffer;
otherwise it takes all available bytes, so that one read serves many small messages.

Sans-IO: no socket, no torch.  Every length is checked against `MessageLimits` before a
byte is allocated for it.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Sequence
from typing import Final, Protocol, cast

from asyncrpc.core.host.shortage import MORE_MEMORY
from asyncrpc.core.wire.chunks import Arrival, Arrivals, ChunkLanding, waiting_bytes
from asyncrpc.core.wire.frames import (
    CHUNK_BYTES,
    ENTRY_BYTES,
    HEADER,
    HEADER_BYTES,
    INLINE_BYTES_MAX,
    MAGIC,
    VERSION,
    Flags,
    Frame,
    FrameKind,
    Places,
    check_body,
    read_table,
)
from asyncrpc.core.wire.limits import MessageLimits
from asyncrpc.errors import FrameTooLargeError, MalformedError, VersionMismatchError

SCRATCH_BYTES: Final = 256 << 10
# Kept while nothing arrives: signs of life need no more, and find its pages in place.
RESTING_BYTES: Final = mmap.PAGESIZE
# A longer control part is not copied out of the scratch buffer: its message takes the
# buffer along.
_COPIED_BYTES_MAX: Final = 1 << 20
# Only messages with values have control parts that are longer.
_TEXT_BYTES_MAX: Final = 64 << 10
_NEVER: Final = 1 << 62  # more bytes than can come
# Of fewer bytes all messages are handled at once, some ten of the shortest: one whose
# error is described takes 0.5 ms.
_MANY_BYTES: Final = 1 << 10
ALIGNMENT: Final = 64  # inline buffers start at multiples of it, as tensors like

# Of a message to a service; messages that wait for payloads take so much, or are one.
UNASKED_CONTROL_BYTES_MAX: Final = 16 << 20
WAITING_BYTES_MAX: Final = 32 << 20

# Plain numbers for the values that are checked in every header: an enum's member costs
# 0.1 us to find, and a test of a flag 0.7 us.
_KINDS: Final = frozenset(int(kind) for kind in FrameKind)
_REQUEST: Final = int(FrameKind.REQUEST)
_UNASKED: Final = frozenset({int(FrameKind.SERVICE), int(FrameKind.NOTICE)})
_DATA: Final = int(FrameKind.DATA)
_DROP: Final = int(FrameKind.DROP)
_DEFERRED: Final = int(Flags.DEFERRED)
_PLACED: Final = int(Flags.PLACED)
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
# Gives pages back to the kernel; their content is lost.  None: not supported.
_DONTNEED: Final[int | None] = getattr(mmap, "MADV_DONTNEED", None)

# The fields of a `Frame`.
_Parts = tuple[int, int, int, int, bytes, bytes]

# For buffers that are allocated apart, of messages with several buffers.
_NO_CALL: Final = (0, 0)

# Returns writable buffers of these lengths, format "B", for a message of this kind and
# this call.
Allocate = Callable[[int, int, Sequence[int]], list[memoryview]]


def _no_memory(nbytes: int) -> FrameTooLargeError:
    return FrameTooLargeError(
        f"this worker has no memory for a message of {nbytes} bytes: {MORE_MEMORY}"
    )


# Given the call, the control part, its length, and the lengths of the buffers.
OnRequest = Callable[[int, bytes, int, Sequence[int]], None]
# Given kind, call, head and the bytes of the payload.
OnUnasked = Callable[[int, int, bytes, int], bool]


class MessageSink(Protocol):
    """Receives the messages."""

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
        """Take one whole message, with its buffers filled."""

    def on_transfer_dropped(self, kind: int, call_id: int) -> None:
        """Take note that the peer gave up a message whose payload was on its way."""


def _scratch(nbytes: int) -> mmap.mmap:
    """Return memory whose pages are allocated when they are first used.

    A bytearray is cleared, so a connection would take all 256 KiB from the beginning; a
    connection that becomes a lane, whose payloads land in place, uses one page of them.
    """
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class FrameReader:
    """Reads the frames of one connection.

    Attributes:
        sink: gets the messages; may be replaced between two messages.
        arrivals: deferred payloads that are on their way, over any lane.
        places: finds buffers in shared memory; None if no memory is shared.
        on_request: called for each request whose payload begins to arrive, or that does
            not fit into memory; an error that it raises ends the connection.
        on_unasked: called for each other message whose payload begins to arrive, with
            its kind, call and head, and the bytes; returns whether the payload is
            wanted, and is discarded otherwise.  An error ends the connection.
        unreadable: returns, for a reason, the control part of an unreadable message.
            The sink gets such a message in place of one that does not fit into memory,
            whose bytes are discarded.  None: a message that does not fit ends the
            connection.
        is_exact: whether to read at most the next frame; for a connection whose purpose
            is not known yet.
        begin_turn: called where many messages came at once; returns what says after
            each whether the turn is over, and then holds the reader.  None: none is.
        bytes_copied: bytes of buffers that were copied out of the scratch buffer.
        message_bytes_copied: the share of the message that the sink gets now.
    """

    def __init__(
        self,
        sink: MessageSink,
        allocate: Allocate,
        limits: MessageLimits | None = None,
    ) -> None:
        self.sink = sink
        self.arrivals = Arrivals(self._deliver_arrived)
        self.places: Places | None = None
        self.on_request: OnRequest | None = None
        self.on_unasked: OnUnasked | None = None
        self.unreadable: Callable[[str], bytes] | None = None
        self.is_exact = False
        self.begin_turn: Callable[[], Callable[[], bool]] | None = None
        self._allocate = allocate
        self._limits = limits or MessageLimits()
        self._text_bytes_max = min(self._limits.control_bytes_max, _TEXT_BYTES_MAX)
        self._scratch = _scratch(SCRATCH_BYTES)
        self._view = memoryview(self._scratch)
        self._start = 0  # of the bytes that have not been parsed
        self._end = 0  # of the bytes that have been received
        self._wanted = HEADER_BYTES  # known length of the frame at `_start`
        self._held_wanted = 0  # while the reader is held, the same; then none is parsed
        self._chunk = ChunkLanding(self.arrivals, CHUNK_BYTES)
        self._landing: ChunkLanding | None = None  # while bytes of a chunk come
        self._is_cut = False  # whether only the head of the frame at `_start` is wanted
        self.bytes_copied = 0
        self.message_bytes_copied = 0

    def get_buffer(self) -> memoryview:
        """Return the memory for the next bytes; at least one byte long."""
        if self._landing is not None:
            return self._landing.get_buffer()
        if self._start == self._end:
            self._start = self._end = 0
            if len(self._scratch) > SCRATCH_BYTES:
                self._make_room()  # a long frame has been read: give its memory back
        elif self._start + self._wanted > len(self._scratch):
            self._make_room()
        # Take no more than this frame if a payload may follow it.
        if self.arrivals.here or self.is_exact:
            return self._view[self._end : self._start + self._wanted]
        return self._view[self._end :]

    def rest(self, kept_bytes: int = RESTING_BYTES) -> None:
        """Give back the memory of what has been read: nothing comes for now.

        The beginning of a frame is kept; so is what may come at any time.

        Args:
            kept_bytes: of the scratch buffer that are kept; whole pages.
        """
        if self._start != self._end:
            return
        self._start = self._end = 0
        if len(self._scratch) > SCRATCH_BYTES:
            self._make_room()
        if _DONTNEED is not None:
            self._scratch.madvise(_DONTNEED, kept_bytes)

    def advance(self, nbytes: int) -> None:
        """Record that `nbytes` bytes have arrived in the last `get_buffer`."""
        landing = self._landing
        if landing is not None:
            if landing.bytes_left == nbytes:
                self._landing = None
            landing.landed(nbytes)
            return
        self._end += nbytes
        if self._end - self._start > _MANY_BYTES and self.begin_turn is not None:
            is_over = self.begin_turn()
            while self._end - self._start >= self._wanted:
                self._parse_frame()
                # After the last frame the turn ends by itself.
                if self._end - self._start >= self._wanted and is_over():
                    break
            return
        while self._end - self._start >= self._wanted:
            self._parse_frame()

    def hold(self) -> None:
        """Parse no further message until `go_on`; nothing may be read meanwhile."""
        if self._held_wanted:
            return
        self._held_wanted, self._wanted = self._wanted, _NEVER
        if self._start == self._end and len(self._scratch) > SCRATCH_BYTES:
            self._start = self._end = 0
            self._make_room()  # a long frame has been read: give its memory back

    def go_on(self) -> None:
        """Parse what has arrived meanwhile; undoes `hold`."""
        if self._held_wanted:
            self._wanted, self._held_wanted = self._held_wanted, 0
            self.advance(0)

    def _make_room(self) -> None:
        """Move the beginning of a frame to the front, or to a longer scratch buffer."""
        rest = self._view[self._start : self._end]
        size = max(SCRATCH_BYTES, self._held_wanted or self._wanted)
        if size != len(self._scratch):
            try:
                self._scratch = _scratch(size)
            except OSError:
                if size > len(self._scratch):
                    raise
            self._view = memoryview(self._scratch)
        self._view[: len(rest)] = rest
        self._start, self._end = 0, len(rest)

    def _parse_frame(self) -> None:  # noqa: C901, PLR0912  (of every message: no calls)
        """Read the frame at `_start` if it is complete; else compute its length."""
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
                raise MalformedError("a DATA frame is more than a chunk of a payload")
            self._chunk.begin(call_id, aux, payload_bytes)
            self._start = start + HEADER_BYTES
            self._place_chunk_bytes()
            return
        if self._wanted == HEADER_BYTES:
            wanted = HEADER_BYTES + head_bytes + control_bytes
            if control_bytes > self._text_bytes_max:
                self._check_control(kind, control_bytes)
            if count or payload_bytes or flags & _DEFERRED:
                wanted += self._body_bytes(kind, flags, count, payload_bytes)
            self._wanted = wanted
            if self._end - start < wanted:
                if wanted > len(self._scratch):
                    self._lengthen(head_bytes)
                return
        elif self._is_cut:
            self._skip(kind, flags, call_id, aux)
            return
        control_at = start + HEADER_BYTES + head_bytes
        table_at = control_at + control_bytes
        head = self._view[start + HEADER_BYTES : control_at].tobytes()
        view = self._view[control_at:table_at]
        if control_bytes > _COPIED_BYTES_MAX:
            long = (kind, flags, call_id, aux, head, cast("bytes", view))
            self._deliver_long(long, table_at, count, payload_bytes)
            return
        try:
            control = view.tobytes()
        except MemoryError:
            self._skip(kind, flags, call_id, aux)
            return
        self._start = start + self._wanted
        self._wanted = HEADER_BYTES
        if kind == _DROP:
            self._dropped(call_id, aux)
        elif count:
            message = (kind, flags, call_id, aux, head, control)
            self._with_buffers(message, table_at, count, payload_bytes)
        else:
            self.sink.on_message(kind, flags, call_id, aux, head, control, [])

    def _deliver_long(
        self, message: _Parts, table_at: int, count: int, payload_bytes: int
    ) -> None:
        """Deliver a message that takes the scratch buffer along."""
        scratch = self._scratch
        self._start += self._wanted
        self._wanted = HEADER_BYTES
        if count:
            self._with_buffers(message, table_at, count, payload_bytes)
        else:
            self.sink.on_message(*message, [])
        if scratch is self._scratch:  # and it has not been given back meanwhile
            rest = self._view[self._start : self._end]
            self._scratch = _scratch(max(SCRATCH_BYTES, rest.nbytes))
            self._view = memoryview(self._scratch)
            self._view[: rest.nbytes] = rest
            self._start, self._end = 0, rest.nbytes

    # --- frames that do not fit into memory ------------------------------------------

    def _lengthen(self, head_bytes: int) -> None:
        """Make room for a long frame; if that fails, wait only for its head.

        Heads are short.  At least one byte of the head is awaited: a `_wanted` of
        `HEADER_BYTES` means that the header has not been parsed.
        """
        try:
            self._make_room()
        except OSError:
            self._wanted = HEADER_BYTES + max(head_bytes, 1)
            self._is_cut = True

    def _skip(self, kind: int, flags: int, call_id: int, aux: int) -> None:
        """Deliver the frame at `_start` without its content, which is discarded."""
        fields = HEADER.unpack_from(self._scratch, self._start)
        head_bytes, control_bytes, count, payload_bytes = *fields[4:7], fields[9]
        rest = control_bytes
        if flags & _PLACED:  # it holds memory of the peer, which the table names
            raise _no_memory(control_bytes)
        if count or payload_bytes or flags & _DEFERRED:
            rest += self._body_bytes(kind, flags, count, payload_bytes)
        at = self._start + HEADER_BYTES
        head = self._view[at : at + head_bytes].tobytes()
        self._start, self._wanted, self._is_cut = at + head_bytes, HEADER_BYTES, False
        message = Frame(kind, flags, call_id, aux, head, b"")
        if kind == _REQUEST and self.on_request is not None:
            lengths = (payload_bytes,) if payload_bytes else ()
            self.on_request(call_id, b"", control_bytes, lengths)
        if flags & _DEFERRED:
            self._check_transfers(message, 0, payload_bytes)
            self.arrivals.open(message, None, payload_bytes)
        if rest:
            self._chunk.skip(rest)
            self._place_chunk_bytes()
        self._deliver_unfit(message, control_bytes + payload_bytes)

    def _deliver_unfit(self, message: _Parts, nbytes: int) -> None:
        """Give the sink an unreadable message in place of one that was discarded."""
        error = _no_memory(nbytes)
        if self.unreadable is None:
            raise error
        self.sink.on_message(*message[:5], self.unreadable(str(error)), [])

    # --- refusals --------------------------------------------------------------------

    def _refuse(self, magic: bytes, version: int, kind: int) -> None:
        if magic != MAGIC:
            raise MalformedError(f"a frame begins with {magic!r}, not {MAGIC!r}")
        if version != VERSION:
            raise VersionMismatchError(
                f"the peer speaks version {version} of the protocol, we {VERSION}"
            )
        raise MalformedError(f"{kind} is not a kind of frame")

    def _check_control(self, kind: int, control_bytes: int) -> None:
        limit = self._limits.control_bytes_max
        if kind not in _MAY_DEFER or kind in _UNASKED:
            unasked = UNASKED_CONTROL_BYTES_MAX if kind in _UNASKED else _TEXT_BYTES_MAX
            limit = min(limit, unasked)
        if control_bytes > limit:
            raise FrameTooLargeError(
                f"a control part of {control_bytes} bytes arrived; the limit is {limit}"
            )

    def _body_bytes(self, kind: int, flags: int, count: int, payload_bytes: int) -> int:
        """Check the buffers of a header; return the bytes of table and payload."""
        limits = self._limits
        if payload_bytes > limits.payload_bytes_max:
            raise FrameTooLargeError(
                f"a payload of {payload_bytes} bytes arrived; "
                f"the limit is {limits.payload_bytes_max}"
            )
        if count > limits.buffers_max:
            raise FrameTooLargeError(
                f"{count} buffers arrived; the limit is {limits.buffers_max}"
            )
        if payload_bytes and not count:
            raise MalformedError(f"a payload of {payload_bytes} bytes has no buffer")
        if flags & _PLACED:
            may = kind in _MAY_DEFER and not flags & _DEFERRED
            return check_body(count if may else 0, payload_bytes)
        if flags & _DEFERRED:
            if kind not in _MAY_DEFER or not payload_bytes:
                raise MalformedError(
                    f"a {FrameKind(kind).name} cannot defer {payload_bytes} bytes"
                )
            return 8 * count
        if payload_bytes > INLINE_BYTES_MAX:
            raise FrameTooLargeError(
                f"{payload_bytes} bytes came inline; the limit is {INLINE_BYTES_MAX}"
            )
        return 8 * count + payload_bytes

    def _with_buffers(
        self,
        message: _Parts,
        at: int,
        count: int,
        payload_bytes: int,
    ) -> None:
        if message[1] & _PLACED:
            self._with_places(message, at, count, payload_bytes)
            return
        lengths = struct.unpack_from(f"<{count}Q", self._scratch, at)
        # A placement in the high bits of a length does not add up either.
        if sum(lengths) != payload_bytes:
            raise MalformedError("the buffer table does not add up to the payload")
        if message[1] & _DEFERRED:
            self._begin_transfer(Frame(*message), lengths)
            return
        try:
            buffers = self._inline_buffers(message, lengths)
        except MemoryError:
            self._deliver_unfit(message, payload_bytes)
            return
        at += 8 * count
        for buffer, length in zip(buffers, lengths, strict=True):
            buffer[:] = self._view[at : at + length]
            at += length
        self._deliver_copied(message, buffers, payload_bytes)

    def _with_places(
        self,
        message: _Parts,
        at: int,
        count: int,
        payload_bytes: int,
    ) -> None:
        """Deliver a message some of whose buffers lie in shared memory."""
        if self.places is None:
            raise MalformedError("a PLACED message came, but no memory is shared")
        entries = read_table(self._view, at, count)
        if (
            sum(entry.length for entry in entries if entry.location < 0)
            != payload_bytes
        ):
            raise MalformedError("the buffer table does not add up to the payload")
        at += len(entries) * ENTRY_BYTES
        buffers = []  # the only reference to them: the sink may clear the list
        for length, location in entries:
            if location >= 0:
                buffers.append(self.places(location, length))
                continue
            try:
                buffers += self._allocate(*_NO_CALL, (length,))
            except MemoryError as error:
                raise _no_memory(length) from error
            buffers[-1][:] = self._view[at : at + length]
            at += length
        self._deliver_copied(message, buffers, payload_bytes)

    def _deliver_copied(
        self,
        message: _Parts,
        buffers: list[memoryview],
        nbytes: int,
    ) -> None:
        """Give the sink a message, `nbytes` of whose payload have been copied."""
        self.bytes_copied += nbytes
        self.message_bytes_copied = nbytes
        self.sink.on_message(*message, buffers)
        self.message_bytes_copied = 0

    def _inline_buffers(
        self,
        message: _Parts,
        lengths: Sequence[int],
    ) -> list[memoryview]:
        """Make room for the buffers of one message, in one block."""
        if len(lengths) == 1:
            return self._allocate(message[0], message[2], lengths)
        starts = [0]
        for length in lengths:
            starts.append((starts[-1] + length + ALIGNMENT - 1) & -ALIGNMENT)
        (block,) = self._allocate(message[0], message[2], (starts.pop(),))
        return [
            block[start : start + length]
            for start, length in zip(starts, lengths, strict=True)
        ]

    # --- deferred payloads -----------------------------------------------------------

    def _begin_transfer(self, message: Frame, lengths: Sequence[int]) -> None:
        nbytes = sum(lengths)
        if message.kind == _REQUEST and self.on_request is not None:
            control = message.control
            self.on_request(message.call_id, control, len(control), lengths)
        elif self.on_unasked is not None and not self.on_unasked(
            message.kind, message.call_id, message.head, nbytes
        ):
            self._check_transfers(message, 0, nbytes)
            self.arrivals.open(message, None, nbytes)
            self.sink.on_message(*message, [])
            return
        self._check_transfers(message, len(lengths), nbytes)
        try:
            buffers = self._allocate(message.kind, message.call_id, lengths)
        except MemoryError:
            self.arrivals.open(message, None, nbytes)
            self._deliver_unfit(message, nbytes)
            return
        self.arrivals.open(message, buffers, nbytes)

    def _check_transfers(self, message: Frame, count: int, nbytes: int) -> None:
        announced_bytes = self.arrivals.announced_bytes + nbytes
        if announced_bytes > self._limits.payload_bytes_max:
            raise FrameTooLargeError(
                f"payloads of {announced_bytes} bytes were announced; the limit of one"
                f" connection is {self._limits.payload_bytes_max}"
            )
        if len(self.arrivals) >= self._limits.transfers_max:
            raise FrameTooLargeError(
                f"the peer began more than {self._limits.transfers_max} transfers"
            )
        waiting = self.arrivals.waiting_bytes
        if waiting and waiting + waiting_bytes(message, count) > WAITING_BYTES_MAX:
            raise FrameTooLargeError(
                f"messages that wait for their payloads take {waiting} bytes; the limit"
                f" of one connection is {WAITING_BYTES_MAX}"
            )

    def _place_chunk_bytes(self) -> None:
        """Move chunk bytes that came with the header to their place."""
        landing = self._chunk
        while landing.bytes_left and self._start < self._end:
            place = landing.get_buffer()
            nbytes = min(place.nbytes, self._end - self._start)
            place[:nbytes] = self._view[self._start : self._start + nbytes]
            self._start += nbytes
            self.bytes_copied += nbytes
            landing.landed(nbytes, copied=True)
        self._landing = landing if landing.bytes_left else None

    def _deliver_arrived(self, arrival: Arrival) -> None:
        """Give the sink a message whose payload is complete."""
        self.message_bytes_copied = arrival.bytes_copied
        self.sink.on_message(*arrival.message, arrival.buffers)
        self.message_bytes_copied = 0

    def _dropped(self, serial: int, sent_bytes: int) -> None:
        message = self.arrivals.drop(serial, sent_bytes)
        if message is not None:
            self.sink.on_transfer_dropped(*message)

"""The incremental reader: says where the next bytes must land, then what they were.

Bytes of a deferred payload land in their own buffers at once; everything else lands in
one scratch buffer that is reused, and is copied out of it.  While a payload is on its
way the reader asks for exactly the bytes that the next frame needs, so that none of the
payload strays into the scratch buffer; otherwise it takes what comes, which costs one
read for many small messages.

Sans-IO: no socket, no torch.  Every length is checked against `MessageLimits` before a
byte is allocated for it.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from asyncrpc.errors import FrameTooLargeError, MalformedError, VersionMismatchError
from asyncrpc.wire.deferred import Transfer
from asyncrpc.wire.frames import (
    HEADER,
    HEADER_BYTES,
    INLINE_BYTES_MAX,
    MAGIC,
    VERSION,
    Flags,
    FrameKind,
)
from asyncrpc.wire.limits import MessageLimits
from asyncrpc.wire.placed import ENTRY_BYTES, Places, check_body, read_table
from asyncrpc.wire.transfers import Arrivals, Opening

SCRATCH_BYTES: Final = 256 << 10
ALIGNMENT: Final = 64  # inline buffers start at multiples of it, as tensors like

# Plain numbers for what is looked at in every header: an enum's member costs 0.1 us to
# find, and a test of a flag 0.7 us.
_KINDS: Final = frozenset(int(kind) for kind in FrameKind)
_REQUEST: Final = int(FrameKind.REQUEST)
_DATA: Final = int(FrameKind.DATA)
_DROP: Final = int(FrameKind.DROP)
_DEFERRED: Final = int(Flags.DEFERRED)
_LANES: Final = int(Flags.LANES)
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


# For buffers that come beside others: none of them is the only one of its message.
_NO_CALL: Final = (0, 0)

# Makes writable buffers of these lengths, format "B", for a message of this kind and
# this call.
Allocate = Callable[[int, int, Sequence[int]], list[memoryview]]


def _no_memory(nbytes: int) -> FrameTooLargeError:
    return FrameTooLargeError(
        f"a message of {nbytes} bytes, for which there is no memory here"
    )


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
        """The peer gave up a message whose payload was on its way."""


def _scratch(nbytes: int) -> mmap.mmap:
    """Return memory of which only what is used takes any.

    A bytearray is cleared, so that a connection had all 256 KiB from the beginning; a
    lane, whose payloads land in place, uses a page of them.
    """
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class FrameReader:
    """Reads the frames of one connection.

    Attributes:
        sink: gets the messages; may be replaced between two of them.
        arrivals: payloads that come over lanes; None if there can be none.
        places: finds buffers in shared memory; None if there can be none.
        on_request: called with the call and the bytes of each request whose payload
            begins to arrive; an error that it raises ends the connection.
        unreadable: makes a control part for a message that cannot be read, given the
            reason.  Such a message arrives instead of one that does not fit into
            memory, and its bytes are dropped.  None: such a message ends the
            connection.
        is_exact: take no more than the next frame; for a connection whose purpose is
            not known yet.
        bytes_copied: bytes of buffers that were copied out of the scratch buffer.
        message_bytes_copied: of these, those of the message that the sink is being
            given.
    """

    def __init__(
        self,
        sink: MessageSink,
        allocate: Allocate,
        limits: MessageLimits | None = None,
    ) -> None:
        """Make a reader.

        Args:
            sink: gets the messages.
            allocate: makes the buffers that payloads land in.
            limits: what a peer may ask for.
        """
        self.sink = sink
        self.arrivals: Arrivals | None = None
        self.places: Places | None = None
        self.on_request: Callable[[int, int], None] | None = None
        self.unreadable: Callable[[str], bytes] | None = None
        self.is_exact = False
        self._allocate = allocate
        self._limits = limits or MessageLimits()
        self._control_bytes_max = self._limits.control_bytes_max
        self._scratch = _scratch(SCRATCH_BYTES)
        self._view = memoryview(self._scratch)
        self._start = 0  # of what has not been parsed
        self._end = 0  # of what has been received
        self._wanted = HEADER_BYTES  # bytes of the frame at `_start`, as far as known
        self._transfers: dict[tuple[int, int], Transfer] = {}
        self._landing: list[memoryview] = []  # segments of a DATA body, the next last
        self._landing_for: tuple[int, int] | None = None
        self._waste = 0  # bytes to be thrown away after those in `_landing`
        self._is_cut = False  # of the frame at `_start` only the head is wanted
        self.bytes_copied = 0
        self.message_bytes_copied = 0

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
        # Take no more than this frame if a payload may follow it.
        if self._transfers or self.is_exact:
            return self._view[self._end : self._start + self._wanted]
        return self._view[self._end :]

    def advance(self, nbytes: int) -> None:
        """Record that `nbytes` bytes have arrived in the last `get_buffer`.

        Raises:
            RemoteProtocolError: the protocol does not allow them.  The position in the
                stream is lost: the connection must be aborted.
        """
        if self._landing:
            self._landed(nbytes)
            return
        self._end += nbytes
        while self._end - self._start >= self._wanted:
            self._parse_frame()

    def drop_transfer(self, kind: int, call_id: int) -> bytes | None:
        """Forget a message whose payload is arriving.

        Returns:
            Its control part; None if there is no such message.
        """
        transfer = self._transfers.get((kind, call_id))
        if transfer is None:
            arrivals = self.arrivals
            return None if arrivals is None else arrivals.forget(kind, call_id)
        if not transfer.message:
            return None
        control = transfer.message[5]
        transfer.message = ()  # its bytes go on arriving
        return control

    def move_transfer(
        self, kind: int, call_id: int, make: Callable[[int], memoryview]
    ) -> None:
        """Let the rest of a payload that is arriving land in other memory.

        From now on nothing is written to the buffers that were made for it.

        Args:
            kind: of the message.
            call_id: of the message.
            make: makes a writable buffer of so many bytes, format "B".
        """
        key = (kind, call_id)
        transfer = self._transfers.get(key)
        if transfer is None:
            if self.arrivals is not None:
                self.arrivals.move(kind, call_id, make)
            return
        transfer.buffers = [make(buffer.nbytes) for buffer in transfer.buffers]
        if self._landing_for == key and transfer.buffers:
            nbytes = sum(segment.nbytes for segment in self._landing)
            offset = transfer.ends[-1] - transfer.missing - nbytes
            self._landing = transfer.places(offset, nbytes)

    def _make_room(self) -> None:
        """Move the beginning of a frame to the front, or to a longer scratch buffer.

        Raises:
            OSError: there is no memory for a longer one; nothing has changed.
        """
        rest = self._view[self._start : self._end]
        size = max(SCRATCH_BYTES, self._wanted)
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
        """Read the frame at `_start` if it is complete; else learn its length."""
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
                raise MalformedError("a DATA frame is more than a piece of a payload")
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
                if wanted > len(self._scratch):
                    self._lengthen(head_bytes)
                return
        elif self._is_cut:
            self._skip(kind, flags, call_id, aux)
            return
        control_at = start + HEADER_BYTES + head_bytes
        table_at = control_at + control_bytes
        head = self._view[start + HEADER_BYTES : control_at].tobytes()
        try:
            control = self._view[control_at:table_at].tobytes()
        except MemoryError:
            self._skip(kind, flags, call_id, aux)
            return
        self._start = start + self._wanted
        self._wanted = HEADER_BYTES
        if kind == _DROP:
            self._dropped((flags, call_id))
        elif count:
            message = (kind, flags, call_id, aux, head, control)
            self._with_buffers(message, table_at, count, payload_bytes)
        else:
            self.sink.on_message(kind, flags, call_id, aux, head, control, [])

    # --- what there is no memory for -------------------------------------------------

    def _lengthen(self, head_bytes: int) -> None:
        """Make room for a long frame; if there is none, wait only for its head.

        Heads are short.  A byte more at least: the length of a bare header says that
        nothing of a frame has been read.
        """
        try:
            self._make_room()
        except OSError:
            self._wanted = HEADER_BYTES + max(head_bytes, 1)
            self._is_cut = True

    def _skip(self, kind: int, flags: int, call_id: int, aux: int) -> None:
        """Deliver the frame at `_start` without its content, which is thrown away."""
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
        message = kind, flags, call_id, aux, head, b""
        if flags & _DEFERRED:
            self._announce(message, payload_bytes)
            self._open_unfit(message, payload_bytes)
        self._throw_away(rest)
        self._land_strays()
        self._deliver_unfit(message, control_bytes + payload_bytes)

    def _open_unfit(self, message: Opening, nbytes: int) -> None:
        """Throw away the payload that follows a message."""
        if message[1] & _LANES and self.arrivals is not None:
            self.arrivals.open(message, None, nbytes)
        else:
            self._transfers[message[0], message[2]] = Transfer.unfit(nbytes)

    def _deliver_unfit(self, message: Opening, nbytes: int) -> None:
        """Give the sink what stands for a message that has not been kept."""
        error = _no_memory(nbytes)
        if self.unreadable is None:
            raise error
        self.sink.on_message(*message[:5], self.unreadable(str(error)), [])

    def _throw_away(self, nbytes: int) -> None:
        """Let the next bytes land in the scratch buffer: what was there is parsed."""
        taken = min(nbytes, len(self._view))
        self._landing = [self._view[:taken]] if taken else []
        self._waste = nbytes - taken

    # --- what is not allowed ---------------------------------------------------------

    def _refuse(self, magic: bytes, version: int, kind: int) -> None:
        if magic != MAGIC:
            raise MalformedError(f"a frame begins with {magic!r}, not {MAGIC!r}")
        if version != VERSION:
            raise VersionMismatchError(
                f"the peer speaks version {version} of the protocol, we {VERSION}"
            )
        raise MalformedError(f"{kind} is not a kind of frame")

    def _refuse_control(self, control_bytes: int) -> None:
        raise FrameTooLargeError(
            f"a control part of {control_bytes} bytes arrived; "
            f"the limit is {self._control_bytes_max}"
        )

    def _body_bytes(self, kind: int, flags: int, count: int, payload_bytes: int) -> int:
        """Check what a header says of buffers; return how many bytes follow with it."""
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
            raise MalformedError(f"a payload of {payload_bytes} bytes in no buffer")
        if kind == _DROP:  # its flags are a kind
            if count:
                raise MalformedError("a DROP has buffers")
            return 0
        if flags & _PLACED:
            may = kind in _MAY_DEFER and not flags & _DEFERRED
            return check_body(count if may else 0, payload_bytes)
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
        message: Opening,
        at: int,
        count: int,
        payload_bytes: int,
    ) -> None:
        if message[1] & _PLACED:
            self._with_places(message, at, count, payload_bytes)
            return
        lengths = struct.unpack_from(f"<{count}Q", self._scratch, at)
        # A codec or placement in the high bits, too, does not add up.
        if sum(lengths) != payload_bytes:
            raise MalformedError("the buffer table does not add up to the payload")
        if message[1] & _DEFERRED:
            self._begin_transfer(message, lengths)
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
        message: Opening,
        at: int,
        count: int,
        payload_bytes: int,
    ) -> None:
        """Deliver a message some of whose buffers lie in shared memory."""
        if self.places is None:
            raise MalformedError("a message in shared memory, of which there is none")
        entries = read_table(self._view, at, count)
        if sum(one.length for one in entries if one.location < 0) != payload_bytes:
            raise MalformedError("the buffer table does not add up to the payload")
        at += len(entries) * ENTRY_BYTES
        buffers = []  # and nothing else holds them: the sink may clear it
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
        message: Opening,
        buffers: list[memoryview],
        nbytes: int,
    ) -> None:
        """Give the sink a message of whose payload so much has been copied."""
        self.bytes_copied += nbytes
        self.message_bytes_copied = nbytes
        self.sink.on_message(*message, buffers)
        self.message_bytes_copied = 0

    def _inline_buffers(
        self,
        message: Opening,
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

    def _begin_transfer(self, message: Opening, lengths: Sequence[int]) -> None:
        nbytes = sum(lengths)
        self._announce(message, nbytes)
        try:
            buffers = self._allocate(message[0], message[2], lengths)
        except MemoryError:
            self._open_unfit(message, nbytes)
            self._deliver_unfit(message, nbytes)
            return
        if message[1] & _LANES and self.arrivals is not None:
            self.arrivals.open(message, buffers, nbytes)
        else:
            self._transfers[message[0], message[2]] = Transfer(message, buffers)

    def _announce(self, message: Opening, nbytes: int) -> None:
        """Check that a payload may follow a message, and say that one does."""
        kind, flags, call_id = message[:3]
        if kind == _REQUEST and self.on_request is not None:
            self.on_request(call_id, nbytes)
        if not flags & _LANES:
            if (kind, call_id) in self._transfers:
                raise MalformedError(f"two transfers at once for call {call_id}")
            self._check_transfers(len(self._transfers))
        elif self.arrivals is None:
            raise MalformedError("a payload over lanes on a connection without them")
        else:
            self._check_transfers(len(self.arrivals))

    def _check_transfers(self, count: int) -> None:
        if count >= self._limits.transfers_max:
            raise FrameTooLargeError(
                f"more than {self._limits.transfers_max} transfers at once"
            )

    def _begin_data(self, key: tuple[int, int], offset: int, nbytes: int) -> None:
        transfer = self._transfers.get(key)
        if transfer is None or not nbytes:
            raise MalformedError(
                f"{nbytes} bytes for call {key[1]}, which expects none"
            )
        self._landing = transfer.segments(offset, nbytes)
        if not self._landing:
            self._throw_away(nbytes)
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
            if self._landing_for is not None:
                self._transfers[self._landing_for].bytes_copied += nbytes
            self._landed(nbytes)

    def _landed(self, nbytes: int) -> None:
        segment = self._landing.pop()
        if nbytes < segment.nbytes:
            self._landing.append(segment[nbytes:])
        elif self._waste:
            self._throw_away(self._waste)
        elif not self._landing and self._landing_for is not None:
            key, self._landing_for = self._landing_for, None
            self._complete(key)

    def _complete(self, key: tuple[int, int]) -> None:
        transfer = self._transfers[key]
        if transfer.missing:
            return
        del self._transfers[key]
        if transfer.message:
            self.message_bytes_copied = transfer.bytes_copied
            self.sink.on_message(*transfer.message, transfer.buffers)
            self.message_bytes_copied = 0

    def _dropped(self, key: tuple[int, int]) -> None:
        if self._transfers.pop(key, None) is None:
            raise MalformedError(f"call {key[1]} drops a transfer it never began")
        self.sink.on_transfer_dropped(*key)

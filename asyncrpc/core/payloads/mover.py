"""Payloads to one peer of this host: copied into a slab, sent as a location.

Small copies are made at once.  Larger copies are made in pieces, between which the loop
runs, and the message is sent when the copy is complete.  So a large message may arrive
after a small one that was sent later, as by the other ways.

A tensor that lies in a slab already (`Worker.empty`) is not copied: `OwnSlabs` knows
the slabs of this worker, the holders of their blocks, and the tensors in them.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias

from asyncrpc.core.calls.futures import CallFuture
from asyncrpc.core.payloads.ports import PayloadLink
from asyncrpc.core.shm.machine.pool import OFFSET_MASK, PAGE_BYTES, Block, SlabPool
from asyncrpc.core.shm.slab import Slab
from asyncrpc.core.wire.frames import (
    INLINE_BYTES_MAX,
    BufferRow,
    FrameKind,
    placed_prefix,
)
from asyncrpc.core.wire.outgoing import OutgoingEvent, OutgoingMessage

# A shorter payload goes with its message.  A call with 64 KiB takes 70 us in this way
# (both sides together) and 85 us through a slab; with 128 KiB 115 and 95 us, with 1 MiB
# 300 and 120 us.
PLACED_BYTES_MIN: Final = INLINE_BYTES_MAX + 1
# In a message with longer buffers, shorter ones go with the message or share a block.
OWN_BLOCK_BYTES_MIN: Final = 16 << 10
REST_S: Final = 1.0
REST_S_MAX: Final = 60.0
ALIGNMENT: Final = 64  # of buffers that share a block

# Such a copy takes 45 us in the cache, and 150 us outside it.
COPY_AT_ONCE_BYTES: Final = 2 << 20

_REQUEST: Final = int(FrameKind.REQUEST)

COPY_PIECE_BYTES: Final = 512 << 10
Copy: TypeAlias = tuple[memoryview, memoryview]  # to, from


class _BufferPlacement:
    """The places of one message's buffers; all are given back if one finds no room.

    Attributes:
        entries: a row of the table for each buffer.
        inline: the buffers that go with the message.
        copies: sources and targets.
        copied_bytes: total bytes of the copies.
    """

    def __init__(self, mover: SlabMover) -> None:
        self._mover = mover
        self._slabs = mover.slabs
        self._packed: Block | None = None  # the block that short buffers share
        self.entries: list[BufferRow] = []
        self.inline: list[memoryview] = []
        self.copies: list[Copy] = []
        self.copied_bytes = 0

    def place_all(self, buffers: Sequence[memoryview]) -> bool:
        """Find a place for every buffer; return False if there is not enough room."""
        if len(buffers) == 1:
            return self._place(buffers[0])
        short = [buffer for buffer in buffers if buffer.nbytes < OWN_BLOCK_BYTES_MIN]
        offset = 0
        if sum(buffer.nbytes for buffer in short) > INLINE_BYTES_MAX:
            self._packed = self._allocate(
                sum(_aligned(buffer.nbytes) for buffer in short)
            )
            if self._packed is None:
                return False
        packed = self._packed
        for buffer in buffers:
            nbytes = buffer.nbytes
            if nbytes >= OWN_BLOCK_BYTES_MIN:
                if not self._place(buffer):
                    self.take_back()
                    return False
            elif packed is None or not nbytes:
                self.entries.append(BufferRow(nbytes, -1))
                self.inline.append(buffer)
            else:
                self._copy_to(packed, offset, buffer)
                offset += _aligned(nbytes)
        return True

    def take_back(self) -> None:
        """Free all places."""
        pool = self._slabs.pool
        if self._packed is not None and not self._packed.holds:
            pool.free(self._packed)
        for _, location in self.entries:
            if location >= 0:
                pool.release(self._mover, location)

    def _place(self, buffer: memoryview) -> bool:
        block = self._slabs.block_of(buffer) if self._slabs.has_tensors else None
        if block is not None:
            location = block.location + self._slabs.offset_in(block, buffer)
            if block.slab in self._mover.attached:
                self._slabs.pool.hold(self._mover, block, location)
                self.entries.append(BufferRow(buffer.nbytes, location))
                return True
            self._mover.unattached = block.slab
            return False
        block = self._allocate(buffer.nbytes)
        if block is None:
            return False
        self._copy_to(block, 0, buffer)
        return True

    def _allocate(self, nbytes: int) -> Block | None:
        return self._slabs.pool.allocate(nbytes, self._mover.attached)

    def _copy_to(self, block: Block, offset: int, buffer: memoryview) -> None:
        location = block.location + offset
        self._slabs.pool.hold(self._mover, block, location)
        nbytes = buffer.nbytes
        self.entries.append(BufferRow(nbytes, location))
        memory = self._slabs.by_id[block.slab].memory
        start = location & OFFSET_MASK
        self.copies.append((memory[start : start + nbytes], buffer))
        self.copied_bytes += nbytes


class SlabMover:
    """Moves large payloads to one peer through slabs; a `PayloadRoute`.

    Attributes:
        slabs: the worker's slabs.
        link: the link to the peer.
        path: the path of the peer's Unix socket; empty without one.
        attached: the slabs that the peer has mapped, in the order of their use.
        unattached: a slab that the peer must map next; -1: any slab.
        is_busy: whether a slab is being passed to the peer.
        is_refused: whether the peer shares no memory.
        rest_s: pause after a slab that the peer could not get; longer each time.
        rests_until_s: when it is asked again.
    """

    def __init__(
        self,
        slabs: OwnSlabs,
        copies: CopyQueue,
        link: PayloadLink,
        path: str,
        *,
        extend: Callable[[SlabMover, int], None],
        on_end: Callable[[SlabMover], None],
    ) -> None:
        """Prepare to take payloads.

        Args:
            path: the path of the peer's Unix socket; empty without one.
        """
        self.slabs = slabs
        self.link = link
        self.path = path
        self.attached: list[int] = []
        self.unattached = -1
        self.is_busy = False
        self.is_refused = not path
        self.rest_s = REST_S
        self.rests_until_s = -math.inf
        self._copies = copies
        self._extend = extend
        self._on_end = on_end
        self._copying: set[Copying] = set()

    def send(self, message: OutgoingMessage) -> bool:
        """Take a message if it is large and there is room; see `PayloadRoute`."""
        buffers = message.buffers
        total = sum(buffer.nbytes for buffer in buffers)
        if total < PLACED_BYTES_MIN or self.is_refused:
            return False
        placement = _BufferPlacement(self)
        if not self.attached or not placement.place_all(buffers):
            self._extend(self, sum(in_pages(buffer.nbytes) for buffer in buffers))
            return False
        opening = placed_prefix(
            message.kind,
            message.call_id,
            flags=message.flags,
            aux=message.aux,
            head=message.head,
            control=message.control,
            entries=placement.entries,
        )
        self._count_copied(message.kind, message.call_id, placement.copied_bytes)
        frame: list[bytes | memoryview] = [opening, *placement.inline]
        if placement.copied_bytes <= COPY_AT_ONCE_BYTES:
            copying = Copying(placement.copies, lambda: None)
            while not copying.step():
                pass
            self._write(message, frame)
        else:
            self._copy_in_pieces(message, frame, placement)
        return True

    def _copy_in_pieces(
        self,
        message: OutgoingMessage,
        frame: Sequence[bytes | memoryview],
        placement: _BufferPlacement,
    ) -> None:
        """Copy the payload of a message in pieces, then write the message."""

        def on_whole() -> None:
            self._copying.remove(copying)
            self._write(message, frame)

        def take_back() -> None:
            self._copying.remove(copying)
            self._copies.remove(copying)
            placement.take_back()

        copying = Copying(placement.copies, on_whole)
        outgoing = self.link.connection.outgoing
        outgoing.wait(message, OutgoingEvent.COPY, take_back)
        self._copying.add(copying)
        self._copies.add(copying)

    def _write(
        self, message: OutgoingMessage, frame: Sequence[bytes | memoryview]
    ) -> None:
        """Send a message whose payload has been placed."""
        self.link.connection.post(frame)
        self.link.connection.outgoing.sent(message)

    def clear(self) -> None:
        """Let go of all places of the peer, as the connection has ended."""
        copying, self._copying = self._copying, set()
        self.is_refused = True
        self.attached = []
        for copy in copying:
            self._copies.remove(copy)
        self._on_end(self)

    def _count_copied(self, kind: int, call_id: int, nbytes: int) -> None:
        self.link.connection.bytes_gathered += nbytes
        if kind == _REQUEST:
            call = self.link.pending.get(call_id)
            if isinstance(call, CallFuture):
                call.stats.bytes_copied += nbytes


def _aligned(nbytes: int) -> int:
    return (nbytes + ALIGNMENT - 1) & -ALIGNMENT


class OwnSlabs:
    """The slabs of one worker.

    Attributes:
        pool: the blocks in the slabs, and their holders.
        by_id: the slabs by id.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.pool = SlabPool(limit_bytes)
        self.by_id: dict[int, Slab] = {}
        self._tensors: list[
            tuple[int, int, Block]
        ] = []  # first and last address, sorted

    def add(self, new_slab: Slab) -> int:
        """Add a slab whose size has been reserved; return its id."""
        slab = self.pool.add(new_slab.size_bytes)
        self.by_id[slab] = new_slab
        return slab

    @property
    def has_tensors(self) -> bool:
        """Whether a tensor of this worker lies in one of its slabs."""
        return bool(self._tensors)

    def note_tensor(self, block: Block, nbytes: int) -> None:
        """Record that a tensor of this worker lies in a block."""
        first = self.by_id[block.slab].address + block.start
        insort(self._tensors, (first, first + nbytes, block), key=_first_address)

    def forget_tensors(self, locations: Iterable[int]) -> None:
        """Forget this worker's tensors at these places, as they are dead."""
        gone = set(locations)
        self._tensors = [
            tensor for tensor in self._tensors if tensor[2].location not in gone
        ]

    def block_of(self, buffer: memoryview) -> Block | None:
        """Return the block of the own tensor that a buffer lies in; None if in none."""
        address = address_of(buffer)
        index = bisect_right(self._tensors, address, key=_first_address) - 1
        if index < 0:
            return None
        _, last, block = self._tensors[index]
        return block if address + buffer.nbytes <= last else None

    def offset_in(self, block: Block, buffer: memoryview) -> int:
        """Return the offset of an own buffer in its block."""
        return address_of(buffer) - self.by_id[block.slab].address - block.start


def _first_address(entry: tuple[int, int, Block]) -> int:
    return entry[0]


def address_of(buffer: memoryview) -> int:
    """Return the address of a buffer; 0 if the buffer is read-only."""
    if buffer.readonly:
        return 0
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(buffer))


def in_pages(nbytes: int) -> int:
    """Return a number of bytes rounded up to whole pages."""
    return (nbytes + PAGE_BYTES - 1) & -PAGE_BYTES


class Copying:
    """The copies for one message."""

    __slots__ = ("_copies", "_done", "on_whole")

    def __init__(self, copies: Sequence[Copy], on_whole: Callable[[], None]) -> None:
        self.on_whole = on_whole
        self._copies = deque(copies)
        self._done = 0  # bytes of the first copy

    def step(self) -> bool:
        """Copy one piece; return whether that was the last."""
        bytes_left = COPY_PIECE_BYTES
        while bytes_left and self._copies:
            target, source = self._copies[0]
            start = self._done
            stop = min(start + bytes_left, source.nbytes)
            # Holds the GIL, for 0.1 ms at most.  A copy that releases the GIL would
            # wait for it after each piece, 5 ms if a thread is busy.
            target[start:stop] = source[start:stop]
            bytes_left -= stop - start
            self._done = stop
            if stop == source.nbytes:
                self._copies.popleft()
                self._done = 0
        return not self._copies


class CopyQueue:
    """The copies of one worker: one piece per turn of the loop, round robin."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Copying] = deque()

    def add(self, copying: Copying) -> None:
        """Begin to copy in pieces; an idle queue copies the first piece now."""
        self._waiting.append(copying)
        if len(self._waiting) == 1:
            self._copy_piece()

    def remove(self, copying: Copying) -> None:
        """Stop copying."""
        self._waiting.remove(copying)

    def _copy_piece(self) -> None:
        if not self._waiting:
            return
        copying = self._waiting.popleft()
        if copying.step():
            copying.on_whole()
        else:
            self._waiting.append(copying)
        if self._waiting:
            self._loop.call_soon(self._copy_piece)

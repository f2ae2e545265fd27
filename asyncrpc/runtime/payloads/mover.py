"""Payloads to one peer of this host: copied into a slab, sent as a location.

What is copied at once takes less than a small message may have to wait for; more is
copied in pieces, between which the loop goes on, and its message is sent when it is
whole.  So a large message may come after a small one that was sent later, as it may on
the other ways.

A tensor that lies in a slab already (`Worker.empty`) is not copied.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from asyncrpc.runtime.calls.futures import CallFuture
from asyncrpc.shm.machine.pool import OFFSET_MASK, PAGE_BYTES, Block
from asyncrpc.wire.frames import INLINE_BYTES_MAX, FrameKind, Outgoing
from asyncrpc.wire.placed import Entry, placed_prefix

if TYPE_CHECKING:
    from asyncrpc.runtime.links.link import Link
    from asyncrpc.runtime.payloads.sharing import Sharing

# Up to here a payload goes with its message: a call that sends 64 KiB so takes 70 us of
# both sides' time, through a slab 85; of 128 KiB 115 and 95, of 1 MiB 300 and 120.
PLACED_BYTES_MIN: Final = INLINE_BYTES_MAX + 1
# Shorter buffers beside longer ones go with the message, or share a block.
OWN_BLOCK_BYTES_MIN: Final = 16 << 10
ALIGNMENT: Final = 64  # of buffers that share a block

# Warm 45 us, from and to memory that is not in the cache 150 us.
COPY_AT_ONCE_BYTES: Final = 2 << 20
COPY_PIECE_BYTES: Final = 512 << 10

_REQUEST: Final = int(FrameKind.REQUEST)
_Copy = tuple[memoryview, memoryview]  # to, from


class Copying:
    """A message whose payload is on its way into a slab."""

    __slots__ = ("_copies", "_done", "frame", "key", "mover", "on_sent", "placement")

    def __init__(
        self,
        mover: SlabMover,
        key: tuple[int, int],
        frame: Sequence[bytes | memoryview],
        placement: _Placement,
        on_sent: Callable[[], None] | None,
    ) -> None:
        self.mover = mover
        self.key = key  # its kind and call
        self.frame = frame
        self.placement = placement
        self.on_sent = on_sent
        self._copies = deque(placement.copies)
        self._done = 0  # bytes of the first copy

    def step(self) -> bool:
        """Copy one piece; say whether that was the last."""
        left = COPY_PIECE_BYTES
        while left and self._copies:
            target, source = self._copies[0]
            start = self._done
            stop = min(start + left, source.nbytes)
            # Holds the GIL, for 0.1 ms at most.  What releases it would wait for it
            # after each piece, 5 ms if a thread is busy.
            target[start:stop] = source[start:stop]
            left -= stop - start
            self._done = stop
            if stop == source.nbytes:
                self._copies.popleft()
                self._done = 0
        return not self._copies


class _Placement:
    """Where the buffers of one message will be; taken back whole if one finds no room.

    Attributes:
        entries: a line of the table for each buffer.
        inline: the buffers that go with the message.
        copies: what is to be copied where.
    """

    def __init__(self, mover: SlabMover) -> None:
        self._mover = mover
        self._sharing = mover.sharing
        self._packed: Block | None = None  # what the short ones share
        self.entries: list[Entry] = []
        self.inline: list[memoryview] = []
        self.copies: list[_Copy] = []
        self.copied_bytes = 0

    def place_all(self, buffers: Sequence[memoryview]) -> bool:
        """Find a place for every buffer; False: there is not enough room."""
        if len(buffers) == 1:
            return self._place(buffers[0])
        short = [one for one in buffers if one.nbytes < OWN_BLOCK_BYTES_MIN]
        offset = 0
        if sum(one.nbytes for one in short) > INLINE_BYTES_MAX:
            self._packed = self._allocate(sum(_aligned(one.nbytes) for one in short))
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
                self.entries.append(Entry(nbytes, -1))
                self.inline.append(buffer)
            else:
                self._copy_to(packed, offset, buffer)
                offset += _aligned(nbytes)
        return True

    def take_back(self) -> None:
        """Free what was taken."""
        pool = self._sharing.pool
        if self._packed is not None and not self._packed.holds:
            pool.free(self._packed)
        for _, location in self.entries:
            if location >= 0:
                pool.release(self._mover, location)

    def _place(self, buffer: memoryview) -> bool:
        block = self._sharing.own_block_of(buffer) if self._sharing.has_own else None
        if block is not None:
            location = block.location + self._sharing.offset_in(block, buffer)
            if block.slab in self._mover.attached:
                self._sharing.pool.hold(self._mover, block, location)
                self.entries.append(Entry(buffer.nbytes, location))
                return True
            self._mover.unattached = block.slab
            return False
        found = self._allocate(buffer.nbytes)
        if found is None:
            return False
        self._copy_to(found, 0, buffer)
        return True

    def _allocate(self, nbytes: int) -> Block | None:
        return self._sharing.pool.allocate(nbytes, self._mover.attached)

    def _copy_to(self, block: Block, offset: int, buffer: memoryview) -> None:
        location = block.location + offset
        self._sharing.pool.hold(self._mover, block, location)
        nbytes = buffer.nbytes
        self.entries.append(Entry(nbytes, location))
        memory = self._sharing.slabs[block.slab].memory
        start = location & OFFSET_MASK
        self.copies.append((memory[start : start + nbytes], buffer))
        self.copied_bytes += nbytes


class SlabMover:
    """Takes large payloads to one peer over from its connection; a `PayloadRoute`.

    Attributes:
        sharing: the worker's slabs.
        link: to the peer.
        path: of the peer's Unix socket; empty if it has none.
        attached: the slabs that the peer has mapped, in the order of their use.
        unattached: a slab that it must map next; -1 for none in particular.
        is_busy: a slab is being passed to it.
        is_refused: it could not map one, and is not asked again.
    """

    def __init__(self, sharing: Sharing, link: Link, path: str) -> None:
        self.sharing = sharing
        self.link = link
        self.path = path
        self.attached: list[int] = []
        self.unattached = -1
        self.is_busy = False
        self.is_refused = not path
        self._copying: list[Copying] = []

    def send(self, message: Outgoing) -> bool:
        """Take a message over if it is large and there is room; see `PayloadRoute`."""
        kind, call_id, flags, aux, head, control, buffers, on_sent = message
        total = sum(buffer.nbytes for buffer in buffers)
        if total < PLACED_BYTES_MIN or self.is_refused:
            return False
        placement = _Placement(self)
        if not self.attached or not placement.place_all(buffers):
            self.sharing.extend(self, sum(in_pages(one.nbytes) for one in buffers))
            return False
        opening = placed_prefix(
            kind,
            call_id,
            flags=flags,
            aux=aux,
            head=head,
            control=control,
            entries=placement.entries,
        )
        self._count_copied(kind, call_id, placement.copied_bytes)
        frame: list[bytes | memoryview] = [opening, *placement.inline]
        job = Copying(self, (kind, call_id), frame, placement, on_sent)
        if placement.copied_bytes <= COPY_AT_ONCE_BYTES:
            while not job.step():
                pass
            self._finish(job)
        else:
            self._copying.append(job)
            self.sharing.copy(job)
        return True

    def finish(self, job: Copying) -> None:
        """Send a message whose payload is in its place."""
        self._copying.remove(job)
        self._finish(job)

    def _finish(self, job: Copying) -> None:
        self.link.connection.post(job.frame)
        if job.on_sent is not None:
            job.on_sent()

    def drop(self, kind: int, call_id: int) -> bool:
        """Give up a message that is still being copied; see `PayloadRoute`."""
        found = [job for job in self._copying if job.key == (kind, call_id)]
        for job in found:
            self._copying.remove(job)
            self.sharing.abandon(job)
            job.placement.take_back()
        return bool(found)

    def clear(self) -> None:
        """Let go of all that the peer held: the connection has ended."""
        jobs, self._copying = self._copying, []
        self.is_refused = True
        self.attached = []
        for job in jobs:
            self.sharing.abandon(job)
        self.sharing.on_link_lost(self)

    def _count_copied(self, kind: int, call_id: int, nbytes: int) -> None:
        self.link.connection.bytes_gathered += nbytes
        if kind == _REQUEST:
            call = self.link.pending.get(call_id)
            if isinstance(call, CallFuture):
                call.stats.bytes_copied += nbytes


def address_of(buffer: memoryview) -> int:
    """Return where a buffer lies; 0 if it may not be written to."""
    if buffer.readonly:
        return 0
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(buffer))


def in_pages(nbytes: int) -> int:
    """Return what a block of so many bytes takes."""
    return (nbytes + PAGE_BYTES - 1) & -PAGE_BYTES


def _aligned(nbytes: int) -> int:
    return (nbytes + ALIGNMENT - 1) & -ALIGNMENT

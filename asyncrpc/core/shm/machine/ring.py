"""Items on their way from process to process, in order: slots in shared memory.

An item is a short record: the blocks it refers to, how many descriptors come beside it,
and its *body*.  An item that does not fit its slot is at the start of the last of its
blocks; then the slot names only this block.

The items are those from `HEAD` to `TAIL`, two serial numbers that only grow.  One store
puts an item, and one takes it; so a process that is killed has done it, or has not.

As with `shelf`, which shares the memory: all state is in it, and one process at a time
changes it, under a lock that this module does not know.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from asyncrpc.core.shm.machine.shelf import EPOCH, HEAD, SLOT_BYTES, TAIL, Layout, Shelf

# length of the body; how many blocks, descriptors; epoch; whether it is outside
_RECORD: Final = struct.Struct("<IHHII")
_INLINE_BYTES: Final = SLOT_BYTES - _RECORD.size
_NUMBER_BYTES: Final = 4  # of a block
BLOCKS_MAX: Final = (1 << 16) - 1  # that one item may refer to
DESCRIPTORS_MAX: Final = (1 << 16) - 1


def fits_slot(blocks: int, body_bytes: int) -> bool:
    """Return whether an item needs no block for itself."""
    return outside_bytes(blocks, body_bytes) <= _INLINE_BYTES


def outside_bytes(blocks: int, body_bytes: int) -> int:
    """Return the bytes that an item outside of its slot takes of its last block."""
    return _NUMBER_BYTES * blocks + body_bytes


@dataclass(slots=True)
class QueueItem:
    """One item of a queue.

    Attributes:
        tag: epoch and serial number of the queue when it was put.
        descriptors: how many come beside it.
        body: what is in the slot; None if it is in the last block.
        body_at: offset of its first byte, wherever it is.
    """

    tag: tuple[int, int]
    blocks: tuple[int, ...]
    descriptors: int
    body: bytes | None
    body_at: int
    body_bytes: int


class QueueRing:
    """The items of one queue."""

    def __init__(self, layout: Layout, memory: memoryview, shelf: Shelf) -> None:
        self._layout = layout
        self._items_max = layout.items_max
        self._octets = memory
        self._words = memory[: layout.entries_at].cast("Q")
        self._shelf = shelf

    def __len__(self) -> int:
        """Return how many items there are; without the lock, how many there were."""
        count: int = self._words[TAIL] - self._words[HEAD]
        return max(0, count)

    @property
    def is_full(self) -> bool:
        words = self._words
        is_full: bool = words[TAIL] - words[HEAD] >= self._items_max
        return is_full

    @property
    def tag(self) -> tuple[int, int]:
        """Epoch and serial number of the item that will be put next."""
        return self._words[EPOCH], self._words[TAIL]

    def write_outside(self, blocks: Sequence[int], body: bytes) -> None:
        """Write an item that does not fit its slot; the caller holds its blocks."""
        at = self._layout.start_of(blocks[-1])
        struct.pack_into(f"<{len(blocks)}I", self._octets, at, *blocks)
        at += _NUMBER_BYTES * len(blocks)
        self._octets[at : at + len(body)] = body

    def put(self, blocks: Sequence[int], body: bytes, descriptors: int = 0) -> None:
        """Put an item; there must be room for it.

        Args:
            blocks: that it refers to; the caller holds them until it is put.
        """
        epoch, serial = self.tag
        at, count = self._slot(serial), len(blocks)
        is_outside = not fits_slot(count, len(body))
        _RECORD.pack_into(
            self._octets, at, len(body), count, descriptors, epoch, is_outside
        )
        at += _RECORD.size
        named = blocks[-1:] if is_outside else blocks
        if named:
            struct.pack_into(f"<{len(named)}I", self._octets, at, *named)
        if not is_outside:
            at += _NUMBER_BYTES * count
            self._octets[at : at + len(body)] = body
        self._shelf.refer(blocks, 1)
        self._words[TAIL] = serial + 1

    def first(self) -> QueueItem | None:
        """Return the next item without taking it; None if the queue is empty."""
        serial = self._words[HEAD]
        return self._read(serial) if serial < self._words[TAIL] else None

    def take(self, item: QueueItem, member: int) -> None:
        """Take the item that `first` returned; `member` now holds its blocks."""
        for block in item.blocks:
            self._shelf.hold(member, block)
        self._words[HEAD] = item.tag[1] + 1
        self._shelf.refer(item.blocks, -1)

    def set_epoch_apart(self) -> None:
        """Change the tag, so that descriptors of items never put are recognized."""
        self._words[EPOCH] += 1

    def recover(self) -> None:
        """Restore everything after a process was killed while it changed something."""
        self.set_epoch_apart()
        self._shelf.rebuild([block for item in self.items() for block in item.blocks])

    def items(self) -> Iterator[QueueItem]:
        """Yield all items, in order."""
        for serial in range(self._words[HEAD], self._words[TAIL]):
            yield self._read(serial)

    def _read(self, serial: int) -> QueueItem:
        at = self._slot(serial)
        body_bytes, count, descriptors, epoch, is_outside = _RECORD.unpack_from(
            self._octets, at
        )
        at += _RECORD.size
        if is_outside:
            (last,) = struct.unpack_from("<I", self._octets, at)
            at = self._layout.start_of(last)
        blocks = struct.unpack_from(f"<{count}I", self._octets, at) if count else ()
        at += _NUMBER_BYTES * count
        body = None if is_outside else bytes(self._octets[at : at + body_bytes])
        return QueueItem((epoch, serial), blocks, descriptors, body, at, body_bytes)

    def _slot(self, serial: int) -> int:
        return self._layout.ring_at + serial % self._layout.items_max * SLOT_BYTES

"""The slabs of one worker: the holders of their blocks, and the tensors in them."""

from __future__ import annotations

import ctypes
from bisect import bisect_right, insort
from collections.abc import Iterable

from asyncrpc.shm.machine.pool import PAGE_BYTES, Block, SlabPool
from asyncrpc.shm.slab import Slab


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

    def add(self, made: Slab) -> int:
        """Add a slab whose size has been reserved; return its id."""
        slab = self.pool.add(made.size_bytes)
        self.by_id[slab] = made
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
        self._tensors = [one for one in self._tensors if one[2].location not in gone]

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

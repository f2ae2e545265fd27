"""The blocks of a worker's slabs: which are free, which are held, and when to grow.

Only the creator of a slab divides it.  A block is free again when nothing *holds* it: a
holder is a peer that was told of a place in it, by a message, or this worker itself,
for a tensor that it made there.  A place may be told more than once, and is given back
as often.

Blocks are taken from the lowest address that fits: what was used last is used again
first, and is still in the cache; copying into memory that was never touched takes ten
times as long.

Invariants: blocks do not overlap; free extents are sorted, and no two of them touch;
a slab without a held block is one free extent.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Hashable, Iterable
from typing import Final

from asyncrpc.errors import LocalProtocolError, MalformedError

PAGE_BYTES: Final = 4096  # blocks are whole pages: no two share a cache line
HUGE_PAGE_BYTES: Final = 2 << 20  # slabs are whole huge pages
OFFSET_BITS: Final = 48  # of a location; the slab's id is above them
OFFSET_MASK: Final = (1 << OFFSET_BITS) - 1
SLABS_MAX: Final = 1 << 10

# The first slab holds four payloads like the one that asked for it, within these.
SLAB_BYTES_MIN: Final = 4 << 20
SLAB_BYTES_USUAL: Final = 64 << 20


class Block:
    """A part of a slab that is held.

    Attributes:
        slab: the slab's id.
        start: offset of its first byte.
        stop: offset after its last.
        holds: how many times it is held.
    """

    __slots__ = ("holds", "slab", "start", "stop")

    def __init__(self, slab: int, start: int, stop: int) -> None:
        self.slab = slab
        self.start = start
        self.stop = stop
        self.holds = 0

    @property
    def location(self) -> int:
        """Return where it begins, as peers are told."""
        return self.slab << OFFSET_BITS | self.start


class _SlabExtents:
    """The free extents of one slab."""

    __slots__ = ("size_bytes", "starts", "stops", "uses", "uses_seen")

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.starts = [0]
        self.stops = [size_bytes]
        self.uses = 0
        self.uses_seen = -1  # at the last sweep

    @property
    def is_free(self) -> bool:
        return self.starts == [0] and self.stops == [self.size_bytes]

    def has_room(self, nbytes: int) -> bool:
        return any(
            stop - start >= nbytes
            for start, stop in zip(self.starts, self.stops, strict=True)
        )

    def take(self, nbytes: int) -> int:
        """Take the lowest extent that fits; return its offset, or -1."""
        starts, stops = self.starts, self.stops
        for index, start in enumerate(starts):
            if stops[index] - start >= nbytes:
                self.uses += 1
                if stops[index] - start == nbytes:
                    del starts[index], stops[index]
                else:
                    starts[index] = start + nbytes
                return start
        return -1

    def give(self, start: int, stop: int) -> None:
        """Put an extent back, and join it to its neighbours."""
        starts, stops = self.starts, self.stops
        index = bisect_left(starts, start)
        joins_left = index > 0 and stops[index - 1] == start
        joins_right = index < len(starts) and starts[index] == stop
        if joins_left and joins_right:
            stops[index - 1] = stops[index]
            del starts[index], stops[index]
        elif joins_left:
            stops[index - 1] = stop
        elif joins_right:
            starts[index] = start
        else:
            starts.insert(index, start)
            stops.insert(index, stop)


class SlabPool:
    """All slabs of one worker."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.size_bytes = 0  # of all slabs, those being made included
        self._slabs: dict[int, _SlabExtents] = {}
        self._held: dict[Hashable, dict[int, tuple[Block, int]]] = {}

    # --- growing and shrinking -------------------------------------------------------

    def reserve(self, payload_bytes: int) -> int:
        """Decide on a new slab for payloads of a size."""
        if payload_bytes > self.limit_bytes // 2 or len(self._slabs) >= SLABS_MAX:
            return 0  # one payload must not crowd out all others
        wanted = min(4 * payload_bytes, SLAB_BYTES_USUAL)
        # As much again as there is: the number of slabs stays small.
        wanted = max(
            wanted, payload_bytes, SLAB_BYTES_MIN, min(self.size_bytes, 1 << 28)
        )
        unused_bytes = self.limit_bytes - self.size_bytes
        size = min(
            _round_up(wanted, HUGE_PAGE_BYTES), unused_bytes - unused_bytes % PAGE_BYTES
        )
        if size < _round_up(payload_bytes, PAGE_BYTES):
            return 0
        self.size_bytes += size
        return size

    def cancel(self, size_bytes: int) -> None:
        """The slab that was reserved could not be made."""
        self.size_bytes -= size_bytes

    def add(self, size_bytes: int) -> int:
        """The slab that was reserved is made; return its id."""
        slab = next(id_ for id_ in range(SLABS_MAX + 1) if id_ not in self._slabs)
        self._slabs[slab] = _SlabExtents(size_bytes)
        return slab

    def sweep(self, keep: Container[int] = ()) -> list[int]:
        """Forget the slabs that have been unused since the last sweep; return them."""
        idle = []
        for slab_id, slab in tuple(self._slabs.items()):
            is_idle = slab.is_free and slab.uses == slab.uses_seen
            if is_idle and slab_id not in keep:
                idle.append(slab_id)
                self.size_bytes -= slab.size_bytes
                del self._slabs[slab_id]
            slab.uses_seen = slab.uses
        return idle

    # --- blocks ----------------------------------------------------------------------

    def find_room(self, nbytes: int, without: Container[int]) -> int | None:
        """Return a slab that could take so many bytes and is not among `without`."""
        for slab_id, slab in self._slabs.items():
            if slab_id not in without and slab.has_room(nbytes):
                return slab_id
        return None

    def allocate(self, nbytes: int, slabs: Iterable[int]) -> Block | None:
        """Take a block out of one of these slabs.

        It must be held, or given back by `free`.
        """
        size = _round_up(nbytes, PAGE_BYTES)
        for slab_id in slabs:
            start = self._slabs[slab_id].take(size)
            if start >= 0:
                return Block(slab_id, start, start + size)
        return None

    def free(self, block: Block) -> None:
        """Give back a block without holders."""
        if block.holds:
            raise LocalProtocolError(
                f"a block was freed that is held {block.holds} times"
            )
        block.holds = -1
        self._slabs[block.slab].give(block.start, block.stop)

    def hold(self, holder: Hashable, block: Block, location: int) -> None:
        """Record that a holder has been told of a place in a block."""
        held = self._held.setdefault(holder, {})
        known = held.get(location)
        held[location] = (block, 1 if known is None else known[1] + 1)
        block.holds += 1

    def release(self, holder: Hashable, location: int) -> None:
        """Take back one hold."""
        held = self._held.get(holder)
        known = held.get(location) if held else None
        if held is None or known is None:
            raise MalformedError(f"memory at {location:#x} was freed but is not held")
        block, count = known
        if count == 1:
            del held[location]
        else:
            held[location] = (block, count - 1)
        self._let_go(block, 1)

    def release_all(self, holder: Hashable) -> None:
        """Take back all holds of a holder that is gone."""
        for block, count in self._held.pop(holder, {}).values():
            self._let_go(block, count)

    def _let_go(self, block: Block, count: int) -> None:
        block.holds -= count
        if not block.holds:
            self.free(block)


def _round_up(nbytes: int, unit: int) -> int:
    return (nbytes + unit - 1) // unit * unit

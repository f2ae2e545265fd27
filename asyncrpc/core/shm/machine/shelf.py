"""Blocks that several processes take from one piece of memory: who may use which.

All of the state lies in the memory itself, as numbers, so every process that has it
mapped can decide; they do it one at a time, under a lock that this module knows
nothing of.  A *member* is a process, known by the number of its row.

Blocks have sizes that are powers of two, and each size has a stretch of addresses to
itself, long enough for as many blocks as the limit allows.  Addresses cost nothing:
only pages that were written to are memory.  So a block's place follows from its number,
nothing is ever fragmented, and a block that comes back is used again first, its pages
there and warm.

A block is in use while an item of the ring refers to it, or a member *holds* it, having
a tensor over it.  A hold is one byte that only its member writes, without the lock; so
letting go of memory is one store, which a process can do at any time.  A process that
needs memory looks for blocks that are not in use any more.

Invariants: `USED` is the size that was asked for of all blocks in use, and at most the
limit; `TOUCHED` is the size of all pages that may exist, and at most the limit; a block
is on the free list of its size exactly if its payload is 0.  A process may be killed
between any two stores: `rebuild` restores all of it from the ring and the holds.

Source: the size classes are those of a buddy allocator (Knowlton, 1965) without its
merging.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias

import numpy as np

PAGE_BYTES: Final = 4096
PAGE_BITS: Final = 12
MEMBERS_MAX: Final = 256  # processes that use one queue at a time
# Of one size; for small ones the limit of memory would allow millions, and each has an
# entry to be looked through.
BLOCKS_PER_KIND_MAX: Final = 1 << 16
NONE: Final = -1

# --- words of the head, by index -----------------------------------------------------
DIRTY: Final = 16  # a process is changing something, or was killed while doing it
HEAD: Final = 17  # serial number of the next item to be taken
TAIL: Final = 18  # serial number of the next item to be put
EPOCH: Final = 19  # how often the state was rebuilt
USED: Final = 20  # bytes
TOUCHED: Final = 21  # bytes
STARVING: Final = 22  # a member waits for room
ROWS: Final = 23  # rows of members that were ever in use
SIGNALLED: Final = 24  # processes that wait for an item have been, or are being, woken
MEMBERS_AT: Final = 32  # from here on, a word a member: 1 while it is one
# From here on, a word a member: how often it has let go of a block.  Only it writes it.
_DROPS_AT: Final = MEMBERS_AT + MEMBERS_MAX
_KINDS_AT: Final = _DROPS_AT + MEMBERS_MAX  # some words a size of blocks:
_MADE: Final = 0  # how many there are
_FREE: Final = 1  # number of the first free one, plus 1
_SEEN: Final = 2  # the drops of all members when it was last looked for free ones
_KIND_WORDS: Final = 3

# --- words of a block's entry --------------------------------------------------------
_NEXT: Final = 0  # number of the next free block, plus 1
_REFERENCES: Final = 1  # by items of the ring
_PAYLOAD: Final = 2  # bytes it was taken for, in whole pages; 0: it is free
_PAGES: Final = 3  # bytes from its start that may be memory
_ENTRY_WORDS: Final = 4
_WORD: Final = 8
SLOT_BYTES: Final = 512  # of the ring: a record, and a body of a few hundred bytes
_HUGE: Final = 2 << 20

Discard: TypeAlias = Callable[[int, int], None]
Numbers: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class Layout:
    """Where in the memory everything lies, computed from the two limits.

    Attributes:
        limit_bytes: of all blocks in use together.
        ring_at: offset of the ring's slots, in bytes.
        control_bytes: what the state takes; blocks begin after it.
        size_bytes: of the whole.
        kinds: how many sizes of blocks there are.
    """

    def __init__(self, limit_bytes: int, items_max: int) -> None:
        self.limit_bytes = limit_bytes = _round_up(limit_bytes, PAGE_BYTES)
        self.items_max = items_max
        self.kinds = (limit_bytes - 1).bit_length() - PAGE_BITS + 1
        # The payload of a block is more than half of it, unless it is a page.
        self.quotas = [
            min(BLOCKS_PER_KIND_MAX, -(-2 * limit_bytes // (PAGE_BYTES << kind)))
            for kind in range(self.kinds)
        ]
        self.firsts = [sum(self.quotas[:kind]) for kind in range(self.kinds)]
        self.blocks = sum(self.quotas)
        self.entries_at = _round_up(
            (_KINDS_AT + _KIND_WORDS * self.kinds) * _WORD, PAGE_BYTES
        )
        self.ring_at = self.entries_at + self.blocks * _ENTRY_WORDS * _WORD
        self.holds_at = self.ring_at + items_max * SLOT_BYTES
        holds_bytes = MEMBERS_MAX * self.blocks
        self.control_bytes = _round_up(self.holds_at + holds_bytes, _HUGE)
        self.bases: list[int] = []
        base = self.control_bytes
        for kind, quota in enumerate(self.quotas):
            self.bases.append(base)
            base = _round_up(base + quota * (PAGE_BYTES << kind), _HUGE)
        self.size_bytes = base

    def start_of(self, block: int) -> int:
        """Return the offset of a block's first byte."""
        kind = bisect_right(self.firsts, block) - 1
        return self.bases[kind] + ((block - self.firsts[kind]) << (PAGE_BITS + kind))

    def block_at(self, offset: int) -> int:
        """Return the block that an offset behind the state lies in."""
        kind = bisect_right(self.bases, offset) - 1
        return self.firsts[kind] + ((offset - self.bases[kind]) >> (PAGE_BITS + kind))


class Shelf:
    """The blocks of one memory, as one process sees them."""

    def __init__(self, layout: Layout, memory: memoryview, discard: Discard) -> None:
        """Use a memory, which is all zeros if it is new.

        Args:
            discard: gives pages back to the kernel; takes an offset and a number of
                bytes, both of whole pages.
        """
        self.layout = layout
        self._octets = memory
        self._words = memory.cast("Q")
        self._discard = discard
        self._entries_at = layout.entries_at // _WORD
        self._entries: Numbers = np.frombuffer(
            memory, np.uint64, layout.blocks * _ENTRY_WORDS, layout.entries_at
        ).reshape(-1, _ENTRY_WORDS)
        self._holds: Numbers = np.frombuffer(
            memory, np.uint8, MEMBERS_MAX * layout.blocks, layout.holds_at
        ).reshape(MEMBERS_MAX, layout.blocks)

    # --- taking and giving back ------------------------------------------------------

    def allocate(self, member: int, nbytes: int) -> tuple[int, bool]:
        """Take a block; `member` holds it from now on."""
        words, size = self._words, _round_up(nbytes, PAGE_BYTES)
        if words[USED] + size > self.layout.limit_bytes:
            self.sweep()
            if words[USED] + size > self.layout.limit_bytes:
                return NONE, False
        block = NONE
        for kind in range((size - 1).bit_length() - PAGE_BITS, self.layout.kinds):
            block = self._take(kind)
            if block != NONE:
                break
        else:
            return NONE, False
        self.hold(member, block)
        entry = self._entries_at + block * _ENTRY_WORDS
        words[entry + _PAYLOAD] = size
        words[USED] += size
        new = size - words[entry + _PAGES]
        if new > 0:
            self._make_room(new)
            words[entry + _PAGES] = size
            words[TOUCHED] += new
        return block, new > 0

    def hold(self, member: int, block: int) -> None:
        """Let a member use a block.  Idempotent."""
        self._octets[self.layout.holds_at + member * self.layout.blocks + block] = 1

    def let_go(self, member: int, block: int) -> None:
        """Take a hold back: the only change that needs no lock."""
        self._octets[self.layout.holds_at + member * self.layout.blocks + block] = 0
        self._words[_DROPS_AT + member] += 1

    def refer(self, blocks: Iterable[int], step: int) -> None:
        """Count references of an item, up (1) or down (-1)."""
        for block in blocks:
            entry = self._entries_at + block * _ENTRY_WORDS
            self._words[entry + _REFERENCES] += step

    def sweep(self) -> None:
        """Find blocks that are not in use any more."""
        drops = self._drops()
        for kind in range(self.layout.kinds):
            self._sweep(kind, drops)

    def _take(self, kind: int) -> int:
        words, at = self._words, _KINDS_AT + _KIND_WORDS * kind
        if not words[at + _FREE]:
            drops = self._drops()
            if drops != words[at + _SEEN]:
                self._sweep(kind, drops)
        free, first = words[at + _FREE], self.layout.firsts[kind]
        if free:
            block: int = free - 1
            words[at + _FREE] = words[self._entries_at + block * _ENTRY_WORDS + _NEXT]
            return block
        touched: int = words[at + _MADE]
        if touched == self.layout.quotas[kind]:
            return NONE
        words[at + _MADE] = touched + 1
        return first + touched

    def _drops(self) -> int:
        return sum(self._words[_DROPS_AT : _DROPS_AT + self._words[ROWS]])

    def _sweep(self, kind: int, drops: int) -> None:
        at = _KINDS_AT + _KIND_WORDS * kind
        self._words[at + _SEEN] = drops
        count, first = self._blocks_of(kind)
        if not count:
            return
        entries = self._entries[first : first + count]
        idle = (entries[:, _PAYLOAD] != 0) & (entries[:, _REFERENCES] == 0)
        if not idle.any():
            return
        idle &= ~self._is_held(first, count)
        # Backwards, so that the lowest address is used first.
        for index in np.flatnonzero(idle)[::-1].tolist():
            block = first + index
            entry = self._entries_at + block * _ENTRY_WORDS
            self._words[USED] -= self._words[entry + _PAYLOAD]
            self._words[entry + _PAYLOAD] = 0
            self._words[entry + _NEXT] = self._words[at + _FREE]
            self._words[at + _FREE] = block + 1

    def _blocks_of(self, kind: int) -> tuple[int, int]:
        """Return how many blocks of a size there are, and the number of the first."""
        count = self._words[_KINDS_AT + _KIND_WORDS * kind + _MADE]
        return count, self.layout.firsts[kind]

    def _is_held(self, first: int, count: int) -> Numbers:
        rows = self._holds[: self._words[ROWS], first : first + count]
        held: Numbers = np.logical_or.reduce(rows)
        return held

    def _make_room(self, new_bytes: int) -> None:
        """Give back pages that hold nothing until so many new ones fit the limit."""
        words = self._words
        for kind in reversed(range(self.layout.kinds)):
            if words[TOUCHED] + new_bytes <= self.layout.limit_bytes:
                return
            count, first = self._blocks_of(kind)
            entries = self._entries[first : first + count]
            wasted = entries[:, _PAGES] > entries[:, _PAYLOAD]
            for index in np.flatnonzero(wasted)[::-1].tolist():
                entry = self._entries_at + (first + index) * _ENTRY_WORDS
                kept, pages = words[entry + _PAYLOAD], words[entry + _PAGES]
                self._discard(self.layout.start_of(first + index) + kept, pages - kept)
                words[entry + _PAGES] = kept
                words[TOUCHED] -= pages - kept

    # --- members ---------------------------------------------------------------------

    def admit(self, is_alive: Callable[[int], bool]) -> int:
        """Give a new member its row."""
        for member in range(MEMBERS_MAX):
            if self._words[MEMBERS_AT + member] and not is_alive(member):
                self.dismiss(member)
            if not self._words[MEMBERS_AT + member]:
                self._words[ROWS] = max(self._words[ROWS], member + 1)
                self._words[MEMBERS_AT + member] = 1
                return member
        return NONE

    def dismiss(self, member: int) -> None:
        """Take back all holds of a member that has ended."""
        self._holds[member] = 0
        self._words[_DROPS_AT + member] += 1
        self._words[MEMBERS_AT + member] = 0

    def members(self) -> list[int]:
        """Return the rows in use."""
        rows = range(self._words[ROWS])
        return [row for row in rows if self._words[MEMBERS_AT + row]]

    def set_holds(self, member: int, blocks: Iterable[int]) -> None:
        """Let a member hold exactly these blocks."""
        self._holds[member] = 0
        self._words[_DROPS_AT + member] += 1
        for block in blocks:
            self.hold(member, block)

    # --- after a death ---------------------------------------------------------------

    def rebuild(self, references: Iterable[int]) -> None:
        """Restore the entries after a process was killed while it changed them."""
        counts = np.zeros(self.layout.blocks, np.uint64)
        np.add.at(counts, np.fromiter(references, np.int64), 1)
        self._words[USED] = self._words[TOUCHED] = 0
        for kind in range(self.layout.kinds):
            count, first = self._blocks_of(kind)
            entries = self._entries[first : first + count]
            entries[:, _REFERENCES] = counts[first : first + count]
            is_used = (entries[:, _REFERENCES] != 0) | self._is_held(first, count)
            entries[~is_used, _PAYLOAD] = 0
            # Killed between hold and payload: the pages say no less.
            unknown = is_used & (entries[:, _PAYLOAD] == 0)
            pages = entries[unknown, _PAGES]
            entries[unknown, _PAYLOAD] = np.maximum(pages, PAGE_BYTES)
            self._words[USED] += int(entries[:, _PAYLOAD].sum())
            self._words[TOUCHED] += int(entries[:, _PAGES].sum())
            self._chain(kind, (first + np.flatnonzero(~is_used)).tolist())

    def _chain(self, kind: int, free: list[int]) -> None:
        after = 0
        for block in reversed(free):
            self._words[self._entries_at + block * _ENTRY_WORDS + _NEXT] = after
            after = block + 1
        self._words[_KINDS_AT + _KIND_WORDS * kind + _FREE] = after


def _round_up(nbytes: int, unit: int) -> int:
    return (nbytes + unit - 1) // unit * unit

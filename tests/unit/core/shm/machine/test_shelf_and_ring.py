"""Blocks and items in one memory: who may use what, also after a death at any store."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from asyncrpc.core.shm.machine import shelf as s
from asyncrpc.core.shm.machine.ring import QueueRing, fits_slot
from asyncrpc.core.shm.machine.shelf import NONE, PAGE_BYTES, Layout, Shelf

# ruff: noqa: SLF001  (what lies in the memory is to be checked)

LIMIT_BYTES = 64 * PAGE_BYTES
ITEMS_MAX = 8
ME, OTHER = 0, 1


class Killed(BaseException):
    """The process ends here."""


class Mortal:
    """Words or octets whose writer is killed after so many stores."""

    def __init__(self, memory: memoryview, stores: list[int]) -> None:
        self.memory = memory
        self.stores = stores

    def __getitem__(self, index: Any) -> Any:
        return self.memory[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        if not self.stores[0]:
            raise Killed
        self.stores[0] -= 1
        self.memory[index] = value


class BlockState(NamedTuple):
    """What the memory says of a block; one that is free is on the list of free ones."""

    block: int
    references: int
    payload_bytes: int
    pages_bytes: int
    is_free: bool


class Part:
    """One process's part of a queue, without the process."""

    def __init__(self, memory: memoryview, layout: Layout) -> None:
        self.memory = memory
        self.layout = layout
        self.discarded: list[tuple[int, int]] = []
        self.shelf = Shelf(
            layout,
            memory[: layout.control_bytes],
            lambda start, nbytes: self.discarded.append((start, nbytes)),
        )
        self.ring = QueueRing(layout, memory, self.shelf)
        self.words = memory[: layout.entries_at].cast("Q")

    def kill_after(self, stores: int) -> None:
        left = [stores]
        for fields in (vars(self.shelf), vars(self.ring)):
            fields["_words"] = Mortal(fields["_words"], left)
        vars(self.shelf)["_octets"] = Mortal(vars(self.shelf)["_octets"], left)

    def put(self, member: int, sizes: list[int], body: bytes) -> bool:
        """As a producer does it: hold, copy, put, let go."""
        if self.ring.is_full:
            return False
        blocks: list[int] = []
        for size in sizes:
            block, _ = self.shelf.allocate(member, size)
            if block == NONE:
                for member_block in blocks:
                    self.shelf.let_go(member, member_block)
                return False
            blocks.append(block)
        self.ring.put(blocks, body)
        for block in blocks:
            self.shelf.let_go(member, block)
        return True

    def take(self, member: int) -> tuple[tuple[int, ...], bytes] | None:
        item = self.ring.first()
        if item is None:
            return None
        self.ring.take(item, member)
        assert item.body is not None
        return item.blocks, item.body

    def states(self) -> Iterator[BlockState]:
        """Yield the state of every block that was ever taken."""
        for kind in range(self.layout.kinds):
            started, first = self.shelf._blocks_of(kind)
            free = set(self.free(kind))
            for block in range(first, first + started):
                _, references, payload, pages = self.shelf._entries[block].tolist()
                yield BlockState(block, references, payload, pages, block in free)

    def free(self, kind: int) -> Iterator[int]:
        at = self.words[s._KINDS_AT + s._KIND_WORDS * kind + s._FREE]
        while at:
            yield at - 1
            at = self.shelf._entries[at - 1].tolist()[s._NEXT]

    def check(self) -> None:
        """Compare everything with what the ring and the holds say."""
        used: dict[int, int] = {}
        for item in self.ring.items():
            for block in item.blocks:
                used[block] = used.get(block, 0) + 1
        total, touched = 0, 0
        for state in self.states():
            assert state.references == used.get(state.block, 0)
            assert state.is_free == (state.payload_bytes == 0)
            assert state.payload_bytes or not state.references
            total, touched = total + state.payload_bytes, touched + state.pages_bytes
        assert self.words[s.USED] == total <= LIMIT_BYTES
        assert self.words[s.TOUCHED] == touched <= LIMIT_BYTES

    def bodies(self) -> list[bytes | None]:
        return [item.body for item in self.ring.items()]


@pytest.fixture
def part() -> Part:
    layout = Layout(LIMIT_BYTES, ITEMS_MAX)
    part = Part(memoryview(bytearray(layout.control_bytes)), layout)
    assert part.shelf.admit(lambda _: True) == ME
    assert part.shelf.admit(lambda _: True) == OTHER
    return part


def test_blocks_of_all_sizes_are_disjoint_and_found_by_address() -> None:
    layout = Layout(1 << 30, 1024)
    for kind, (first, quota) in enumerate(
        zip(layout.firsts, layout.quotas, strict=True)
    ):
        size = PAGE_BYTES << kind
        for block in (first, first + quota - 1):
            start = layout.start_of(block)
            assert start >= layout.control_bytes
            assert start % min(size, 2 << 20) == 0
            assert layout.block_at(start) == layout.block_at(start + size - 1) == block
    assert layout.start_of(layout.blocks - 1) + (1 << 30) <= layout.size_bytes


def test_free_block_is_reused_first(part: Part) -> None:
    first, is_new = part.shelf.allocate(ME, 5000)
    assert is_new
    part.shelf.let_go(ME, first)
    assert part.shelf.allocate(ME, 8000) == (first, False)
    part.check()


def test_block_is_in_use_while_a_member_or_an_item_has_it(part: Part) -> None:
    assert part.put(ME, [5000], b"x")
    item = part.take(OTHER)
    assert item is not None
    ((block,), _) = item
    part.ring.put([block], b"sent on")
    part.shelf.let_go(OTHER, block)
    part.shelf.sweep()
    part.check()
    assert part.words[s.USED] == 2 * PAGE_BYTES  # the item still has it
    assert part.take(ME) is not None
    part.shelf.let_go(ME, block)
    part.shelf.sweep()
    part.check()
    assert part.words[s.USED] == 0


def test_shelf_allocates_exactly_its_limit(part: Part) -> None:
    taken = [part.shelf.allocate(ME, PAGE_BYTES)[0] for _ in range(64)]
    assert NONE not in taken
    assert len(set(taken)) == 64
    assert part.shelf.allocate(ME, 1)[0] == NONE
    part.shelf.let_go(ME, taken[10])
    assert part.shelf.allocate(ME, 1)[0] == taken[10]
    part.check()


def test_pages_return_when_other_sizes_need_them(part: Part) -> None:
    for size in (PAGE_BYTES, 4 * PAGE_BYTES, 16 * PAGE_BYTES, 64 * PAGE_BYTES):
        taken = []
        while (block := part.shelf.allocate(ME, size)[0]) != NONE:
            taken.append(block)
        assert len(taken) == LIMIT_BYTES // size
        part.check()
        for block in taken:
            part.shelf.let_go(ME, block)
    assert sum(nbytes for _, nbytes in part.discarded) == 3 * LIMIT_BYTES


def test_dead_member_frees_its_blocks_and_its_row(part: Part) -> None:
    assert part.put(ME, [LIMIT_BYTES], b"x")
    assert part.take(OTHER) is not None
    assert part.shelf.allocate(ME, 1)[0] == NONE
    assert part.shelf.admit(lambda member: member != OTHER) == OTHER
    assert part.shelf.allocate(ME, 1)[0] != NONE
    part.check()


def test_items_come_in_order_and_wrap_around(part: Part) -> None:
    for turn in range(3 * ITEMS_MAX):
        assert part.put(ME, [], b"%d" % turn)
        assert part.take(OTHER) == ((), b"%d" % turn)
    for turn in range(ITEMS_MAX):
        assert part.put(ME, [], b"%d" % turn)
    assert part.ring.is_full
    assert not part.put(ME, [], b"one more")
    assert len(part.ring) == ITEMS_MAX


def test_item_too_long_for_the_ring_is_in_its_last_block() -> None:
    layout = Layout(1 << 20, ITEMS_MAX)
    part = Part(memoryview(bytearray(layout.size_bytes)), layout)
    member = part.shelf.admit(lambda _: True)
    blocks = [part.shelf.allocate(member, 4096)[0] for _ in range(200)]
    body = bytes(range(256))
    assert not fits_slot(len(blocks), len(body))
    part.ring.write_outside(blocks, body)
    part.ring.put(blocks, body)
    item = part.ring.first()
    assert item is not None
    assert item.blocks == tuple(blocks)
    assert item.body is None
    assert part.memory[item.body_at : item.body_at + item.body_bytes] == body


def grow_old(part: Part, chance: random.Random) -> set[int]:
    """Live through a random history; return the blocks that `OTHER` holds then."""
    held: list[tuple[int, int]] = []
    for serial in range(60):
        member = chance.choice([ME, OTHER])
        if chance.random() < 0.6:
            pages = [chance.choice([1, 2, 5, 9]) for _ in range(chance.randrange(3))]
            part.put(member, [page * PAGE_BYTES for page in pages], b"%d" % serial)
        elif (item := part.take(member)) is not None:
            held += [(member, block) for block in item[0]]
        while len(held) > chance.randrange(8):
            owner, block = held.pop(chance.randrange(len(held)))
            if (owner, block) not in held:
                part.shelf.let_go(owner, block)
        part.check()
    return {block for owner, block in held if owner == OTHER}


def put(part: Part) -> None:
    part.put(ME, [PAGE_BYTES, 3 * PAGE_BYTES], b"new")


def take(part: Part) -> None:
    part.take(ME)


@pytest.mark.parametrize("operation", [put, take])
@pytest.mark.parametrize("seed", range(20))
def test_process_killed_at_any_store_leaves_the_memory_consistent(
    part: Part, seed: int, operation: Callable[[Part], None]
) -> None:
    """An item is put or not, taken or not; everything else is repaired."""
    kept = grow_old(part, random.Random(seed))
    for stores in range(100):
        victim = Part(memoryview(bytearray(part.memory)), part.layout)
        before = victim.bodies()
        victim.kill_after(stores)
        is_over = True
        try:
            operation(victim)
        except Killed:
            is_over = False
        saved = Part(victim.memory, victim.layout)
        saved.shelf.dismiss(ME)
        saved.ring.recover()
        saved.check()
        assert saved.bodies() in (before, [*before, b"new"], before[1:])
        free = {state.block for state in saved.states() if state.is_free}
        assert not free & kept
        empty(saved)
        if is_over:
            return
    pytest.fail("it needs over 100 stores")


def empty(part: Part) -> None:
    """`OTHER` takes everything and ends: nothing is in use any more."""
    while part.take(OTHER):
        pass
    part.shelf.dismiss(OTHER)
    part.shelf.sweep()
    part.check()
    assert part.words[s.USED] == 0

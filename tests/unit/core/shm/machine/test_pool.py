"""When a worker's slabs grow and shrink, and which memory is used first."""

from __future__ import annotations

import pytest

from asyncrpc.core.shm.machine.pool import OFFSET_BITS, PAGE_BYTES, Block, SlabPool
from asyncrpc.errors import LocalProtocolError, MalformedError
from tests.inner_state import held_bytes, slabs_of

MIB = 1 << 20


def pool_of(*sizes_mib: int, limit_mib: int = 1024) -> SlabPool:
    pool = SlabPool(limit_mib * MIB)
    for size_mib in sizes_mib:
        pool.size_bytes += size_mib * MIB
        pool.add(size_mib * MIB)
    return pool


def take(pool: SlabPool, nbytes: int, holder: str = "b") -> Block:
    block = pool.allocate(nbytes, slabs_of(pool))
    assert block is not None
    pool.hold(holder, block, block.location)
    return block


def test_last_used_block_is_used_next() -> None:
    pool = pool_of(16)
    first, second = take(pool, MIB), take(pool, MIB)
    pool.release("b", first.location)
    assert take(pool, MIB).start == first.start
    assert take(pool, MIB).start == second.stop


def test_free_neighbours_are_merged() -> None:
    pool = pool_of(16)
    blocks = [take(pool, 4 * MIB) for _ in range(4)]
    assert pool.allocate(1, slabs_of(pool)) is None
    for block in (blocks[0], blocks[2], blocks[1]):
        pool.release("b", block.location)
    assert take(pool, 12 * MIB).start == 0


def test_block_lives_until_every_hold_is_released() -> None:
    pool = pool_of(16)
    block = take(pool, MIB)
    pool.hold("c", block, block.location)
    pool.hold("c", block, block.location)
    pool.release("b", block.location)
    pool.release("c", block.location)
    assert held_bytes(pool) == MIB
    pool.release("c", block.location)
    assert held_bytes(pool) == 0
    with pytest.raises(MalformedError):
        pool.release("c", block.location)
    with pytest.raises(LocalProtocolError):
        pool.free(block)


def test_lost_holder_holds_nothing() -> None:
    pool = pool_of(16)
    take(pool, MIB), take(pool, MIB)
    mine = take(pool, MIB, "c")
    pool.release_all("b")
    pool.release_all("b")
    assert held_bytes(pool) == mine.stop - mine.start


def test_location_names_the_slab_above_the_offset() -> None:
    pool = pool_of(2, 2)
    take(pool, 2 * MIB)
    take(pool, PAGE_BYTES)
    assert take(pool, PAGE_BYTES).location == 1 << OFFSET_BITS | PAGE_BYTES


def test_allocation_uses_the_given_slabs_only() -> None:
    pool = pool_of(16, 16)
    block = pool.allocate(MIB, (1,))
    assert block is not None
    assert block.slab == 1
    assert pool.find_room(MIB, without=(0,)) == 1
    assert pool.find_room(MIB, without=(0, 1)) is None


@pytest.mark.parametrize(
    ("payload_mib", "first_mib", "second_mib"),
    [(1, 4, 4), (16, 64, 64), (100, 100, 100), (256, 256, 256)],
)
def test_slab_fits_several_payloads_and_doubles_the_pool(
    payload_mib: int, first_mib: int, second_mib: int
) -> None:
    pool = SlabPool(1024 * MIB)
    sizes = []
    for _ in range(2):
        sizes.append(pool.reserve(payload_mib * MIB))
        pool.add(sizes[-1])
    assert sizes == [first_mib * MIB, second_mib * MIB]


def test_payload_takes_half_of_the_limit_at_most() -> None:
    pool = SlabPool(64 * MIB)
    assert pool.reserve(32 * MIB + 1) == 0
    assert pool.reserve(32 * MIB) == 64 * MIB
    assert pool.reserve(1) == 0


def test_reservation_counts_until_it_is_cancelled() -> None:
    pool = SlabPool(4 * MIB)
    size_bytes = pool.reserve(MIB)
    assert pool.reserve(MIB) == 0
    pool.cancel(size_bytes)
    assert pool.reserve(MIB) == size_bytes


def test_slab_unused_between_two_sweeps_is_removed() -> None:
    pool = pool_of(16, 16, 16)
    assert pool.sweep() == []  # they are new
    take(pool, 16 * MIB)
    pool.release("b", take(pool, MIB).location)
    assert pool.sweep(keep={2}) == []
    assert pool.sweep() == [1, 2]
    assert slabs_of(pool) == (0,)
    assert pool.add(pool.reserve(MIB)) == 1  # the number is free again

"""A pool of slabs under every order of taking, telling, giving back and losing peers.

Blocks never overlap; what is free and what is held make up the whole; when all is given
back, every slab is one extent again.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asyncrpc.core.shm.machine.pool import PAGE_BYTES, Block, SlabPool
from asyncrpc.errors import LocalProtocolError, MalformedError
from tests.inner_state import held_bytes, slab_bytes, slabs_of

LIMIT_BYTES = 64 << 20
PEERS = ("b", "c")


class Pool(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = SlabPool(LIMIT_BYTES)
        self.held: list[tuple[str, int, Block]] = []

    @property
    def live(self) -> set[Block]:
        return {block for _, _, block in self.held}

    @rule(nbytes=st.integers(1, 32 << 20))
    def grow(self, nbytes: int) -> None:
        size_bytes = self.pool.reserve(nbytes)
        if size_bytes:
            assert size_bytes >= nbytes
            slab = self.pool.add(size_bytes)
            assert slab_bytes(self.pool, slab) == size_bytes

    @rule(nbytes=st.integers(1, 8 << 20), peer=st.sampled_from(PEERS))
    def take(self, nbytes: int, peer: str) -> None:
        block = self.pool.allocate(nbytes, slabs_of(self.pool))
        if block is None:
            assert self.pool.find_room(nbytes + PAGE_BYTES, without=()) is None
            return
        assert block.stop - block.start >= nbytes
        assert block.start % PAGE_BYTES == 0
        self.pool.hold(peer, block, block.location)
        self.held.append((peer, block.location, block))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), peer=st.sampled_from(PEERS), offset=st.integers(0, 4095))
    def tell_again(self, data: st.DataObject, peer: str, offset: int) -> None:
        block = data.draw(st.sampled_from(self.held))[2]
        self.pool.hold(peer, block, block.location + offset)
        self.held.append((peer, block.location + offset, block))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        peer, location, _ = self.held.pop(index)
        self.pool.release(peer, location)

    @rule(peer=st.sampled_from(PEERS))
    def lose(self, peer: str) -> None:
        self.pool.release_all(peer)
        self.held = [hold for hold in self.held if hold[0] != peer]

    @rule(peer=st.sampled_from(PEERS), location=st.integers(0, 1 << 63))
    def give_back_an_unknown_block(self, peer: str, location: int) -> None:
        if (peer, location) not in {hold[:2] for hold in self.held}:
            with pytest.raises(MalformedError):
                self.pool.release(peer, location)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free_a_held_block(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))[2]
        with pytest.raises(LocalProtocolError):
            self.pool.free(block)

    @rule()
    def sweep(self) -> None:
        in_use = {block.slab for block in self.live}
        assert not in_use & set(self.pool.sweep())

    @invariant()
    def blocks_do_not_overlap(self) -> None:
        spans = sorted((block.slab, block.start, block.stop) for block in self.live)
        for (slab, _, stop), (other, start, _) in pairwise(spans):
            assert slab != other or stop <= start

    @invariant()
    def held_and_free_bytes_add_up(self) -> None:
        live_bytes = sum(block.stop - block.start for block in self.live)
        assert held_bytes(self.pool) == live_bytes
        assert live_bytes <= self.pool.size_bytes <= LIMIT_BYTES

    def teardown(self) -> None:
        for peer in PEERS:
            self.pool.release_all(peer)
        assert held_bytes(self.pool) == 0
        self.pool.sweep()
        self.pool.sweep()
        assert slabs_of(self.pool) == ()
        assert self.pool.size_bytes == 0


TestPool = Pool.TestCase

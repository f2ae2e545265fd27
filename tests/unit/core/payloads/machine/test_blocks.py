"""What is kept is bounded, fits what takes it, and goes when nobody needs it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrpc.core.payloads.machine.blocks import IdleBlocks, size_class

MIB = 1 << 20


class TestSizes:
    @given(st.integers(8, 1 << 45))
    def test_block_is_an_eighth_too_long_at_most(self, nbytes: int) -> None:
        assert nbytes <= size_class(nbytes) < nbytes * 1.125 + 1

    @given(st.integers(8, 1 << 45))
    def test_size_class_of_a_class_size_is_itself(self, nbytes: int) -> None:
        assert size_class(size_class(nbytes)) == size_class(nbytes)

    @given(st.integers(8, 1 << 45), st.integers(8, 1 << 45))
    def test_block_size_never_falls_with_the_request(self, a: int, b: int) -> None:
        assert (size_class(a) <= size_class(b)) or a > b

    def test_power_of_two_has_eight_steps(self) -> None:
        sizes = {size_class(nbytes) for nbytes in range(MIB + 1, 2 * MIB, 4096)}
        assert sorted(sizes) == [MIB + step * MIB // 8 for step in range(1, 9)]


class TestTaking:
    def test_last_returned_block_is_taken_first(self) -> None:
        idle: IdleBlocks[str] = IdleBlocks(10 * MIB)
        assert idle.take(MIB) is None
        for at_s, block in enumerate("abc"):
            assert idle.give_back(block, MIB, float(at_s))
        assert [idle.take(MIB) for _ in range(4)] == ["c", "b", "a", None]
        assert idle.idle_bytes == 0

    @pytest.mark.parametrize(
        ("nbytes", "fits"),
        [(1024, True), (1000, True), (820, True), (810, False), (1025, False)],
    )
    def test_block_serves_requests_up_to_a_fifth_smaller(
        self, nbytes: int, *, fits: bool
    ) -> None:
        idle: IdleBlocks[str] = IdleBlocks(10 * MIB)
        idle.give_back("it", 1024 * 1024, 0.0)
        assert (idle.take(nbytes * 1024) == "it") is fits

    def test_tightest_block_is_taken_first(self) -> None:
        idle: IdleBlocks[str] = IdleBlocks(10 * MIB)
        idle.give_back("loose", size_class(MIB * 9 // 8), 0.0)
        idle.give_back("tight", MIB, 1.0)
        assert idle.take(MIB) == "tight"
        assert idle.take(MIB) == "loose"


class TestBounds:
    def test_oldest_block_is_dropped_over_the_limit(self) -> None:
        idle: IdleBlocks[str] = IdleBlocks(3 * MIB)
        idle.give_back("old", MIB, 0.0)
        idle.give_back("mid", 2 * MIB, 1.0)
        idle.give_back("new", MIB, 2.0)
        assert idle.idle_bytes == 3 * MIB
        assert idle.take(MIB) == "new"
        assert idle.take(MIB) is None

    def test_block_longer_than_the_limit_is_never_kept(self) -> None:
        idle: IdleBlocks[str] = IdleBlocks(MIB)
        idle.give_back("small", MIB, 0.0)
        assert not idle.give_back("large", MIB + 1, 1.0)
        assert idle.take(MIB) == "small"

    def test_fresh_and_idle_blocks_stay_within_the_limit(self) -> None:
        idle: IdleBlocks[str] = IdleBlocks(4 * MIB)
        idle.give_back("old", MIB, 0.0)
        idle.give_back("new", MIB, 1.0)
        assert idle.take(3 * MIB) is None
        assert idle.idle_bytes == MIB
        assert idle.take(1 << 30) is None
        assert not idle
        assert idle.idle_bytes == 0

    def test_alternating_sizes_do_not_evict_each_other(self) -> None:
        idle: IdleBlocks[str] = IdleBlocks(4 * MIB)
        for _ in range(3):
            for nbytes in (MIB, 3 * MIB):
                idle.give_back(idle.take(nbytes) or f"fresh {nbytes}", nbytes, 0.0)
        assert idle.take(MIB) == f"fresh {MIB}"
        assert idle.take(3 * MIB) == f"fresh {3 * MIB}"


class TestTime:
    def test_old_blocks_are_dropped_and_later_ones_stay(self) -> None:
        idle: IdleBlocks[str] = IdleBlocks(10 * MIB)
        idle.give_back("a", MIB, 1.0)
        idle.give_back("b", 2 * MIB, 2.0)
        idle.give_back("c", MIB, 3.0)
        assert idle.oldest_s == 1.0
        idle.drop_older(2.0)
        assert (idle.oldest_s, idle.idle_bytes) == (3.0, MIB)
        assert idle.take(MIB) == "c"
        assert not idle

    def test_dropping_the_last_block_leaves_nothing(self) -> None:
        idle: IdleBlocks[str] = IdleBlocks(10 * MIB)
        idle.give_back("a", MIB, 1.0)
        idle.drop_older(1.0)
        assert not idle
        idle.drop_older(9.0)
        assert idle.take(MIB) is None


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(1, 40)),
        max_size=60,
    ),
    st.integers(0, 64),
)
def test_block_is_never_taken_twice_and_the_limit_holds(
    steps: list[tuple[bool, int]], limit: int
) -> None:
    idle: IdleBlocks[int] = IdleBlocks(limit * 1024)
    out: dict[int, int] = {}
    kept: set[int] = set()
    fresh = 0
    for now_s, (take, size) in enumerate(steps):
        if take:
            block = idle.take(size * 1024)
            if block is None:
                block, fresh = fresh, fresh + 1
                out[block] = size_class(size * 1024)
            else:
                assert block in kept
                kept.remove(block)
                assert size * 1024 <= out[block] <= 1.25 * size * 1024
        elif out.keys() - kept:
            block = min(out.keys() - kept)
            if idle.give_back(block, out[block], float(now_s)):
                kept.add(block)
        assert 0 <= idle.idle_bytes <= max(0, limit * 1024)

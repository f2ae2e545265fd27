"""Buckets are filled and reduced in one order; parameters are shared as by torch."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

from asyncrpc.parallel.ddp.machine import ParameterSpec, Readiness, assign
from asyncrpc.parallel.ddp.optimizers.shards import Partition


def sizes(*nbytes: int, kind: str = "float") -> list[ParameterSpec]:
    return [ParameterSpec(size, kind) for size in nbytes]


class TestAssign:
    def test_bucket_is_full_once_it_exceeds_its_cap(self) -> None:
        items = sizes(4, 4, 4, 4, 4, 4)
        buckets = assign(items, range(6), first_cap_bytes=4, cap_bytes=10)
        assert buckets == [[0], [1, 2, 3], [4, 5]]

    def test_buckets_follow_the_given_order(self) -> None:
        buckets = assign(sizes(1, 1, 1), [2, 0, 1], first_cap_bytes=2, cap_bytes=9)
        assert buckets == [[2, 0], [1]]

    def test_each_kind_has_its_own_buckets(self) -> None:
        items = [
            ParameterSpec(4, "a"),
            ParameterSpec(4, "b"),
            ParameterSpec(4, "a"),
            ParameterSpec(4, "b"),
        ]
        buckets = assign(items, range(4), first_cap_bytes=8, cap_bytes=8)
        assert buckets == [[0, 2], [1, 3]]

    def test_buckets_are_ordered_by_when_they_fill(self) -> None:
        items = [ParameterSpec(1, "a"), ParameterSpec(8, "b"), ParameterSpec(8, "a")]
        assert assign(items, range(3), first_cap_bytes=8, cap_bytes=8) == [[1], [0, 2]]

    def test_parameters_marked_alone_have_their_own_bucket(self) -> None:
        items = [
            ParameterSpec(1, "a"),
            ParameterSpec(1, "a", is_alone=True),
            ParameterSpec(1, "a"),
        ]
        assert assign(items, range(3), first_cap_bytes=9, cap_bytes=9) == [[1], [0, 2]]

    @pytest.mark.parametrize("seed", range(30))
    def test_each_parameter_is_in_one_bucket_of_its_kind(self, seed: int) -> None:
        draw = random.Random(seed)
        items = [
            ParameterSpec(draw.randint(0, 50), draw.choice("ab"), draw.random() < 0.1)
            for _ in range(draw.randint(1, 40))
        ]
        order = draw.sample(range(len(items)), len(items))
        buckets = assign(items, order, first_cap_bytes=20, cap_bytes=90)
        assert sorted(itertools.chain(*buckets)) == list(range(len(items)))
        for bucket in buckets:
            assert len({items[number].kind for number in bucket}) == 1
            assert len(bucket) == 1 or not any(items[n].is_alone for n in bucket)
            # One less, and it is not full.
            assert sum(items[number].nbytes for number in bucket[:-1]) < 90


class TestReadiness:
    def test_bucket_waits_for_earlier_buckets(self) -> None:
        readiness = Readiness([[0, 1], [2]], [1, 1, 1])
        assert readiness.arrive(2)
        assert readiness.ready(2) == 0
        assert readiness.arrive(0)
        assert readiness.ready(0) == 0
        assert readiness.missing() == [1]
        assert readiness.arrive(1)
        assert readiness.ready(1) == 2
        assert readiness.order == [2, 0, 1]

    def test_gradient_may_come_several_times(self) -> None:
        readiness = Readiness([[0]], [2])
        assert not readiness.arrive(0)
        assert readiness.missing() == [0]
        assert readiness.arrive(0)
        assert not readiness.is_expected(0)
        assert readiness.ready(0) == 1

    def test_bucket_without_gradients_is_not_awaited(self) -> None:
        readiness = Readiness([[0], [1]], [0, 1])
        assert readiness.reduced == 1
        assert not readiness.is_expected(0)
        assert readiness.missing() == [1]

    def test_gradient_may_be_ready_without_having_arrived(self) -> None:
        readiness = Readiness([[0]], [1])
        assert readiness.ready(0) == 1
        assert not readiness.is_expected(0)
        assert readiness.missing() == []
        assert readiness.order == []

    def test_held_gradients_are_counted_and_wait_for_release(self) -> None:
        readiness = Readiness([[0], [1], [2]], [1, 1, 1], is_held=True)
        for number in (1, 0, 1):
            assert readiness.is_expected(number)
            assert not readiness.arrive(number)
        assert readiness.reduced == 0
        assert readiness.release() == [1, 0]
        assert readiness.counts == [1, 2, 0]
        assert readiness.ready(1) == 0
        assert readiness.ready(0) == 2
        assert readiness.missing() == [2]

    def test_release_returns_held_gradients_only(self) -> None:
        readiness = Readiness([[0]], [1])
        readiness.arrive(0)
        assert readiness.release() == []

    @pytest.mark.parametrize("seed", range(50))
    def test_every_arrival_order_reduces_all_buckets(self, seed: int) -> None:
        draw = random.Random(seed)
        uses = [draw.randint(0, 3) for _ in range(draw.randint(1, 12))]
        cuts = sorted(draw.sample(range(len(uses) + 1), min(2, len(uses))))
        parts = [0, *cuts, len(uses)]
        buckets = [list(range(a, b)) for a, b in itertools.pairwise(parts)]
        readiness = Readiness(buckets, uses)
        events = [number for number, count in enumerate(uses) for _ in range(count)]
        draw.shuffle(events)
        reduced = readiness.reduced
        complete: set[int] = {number for number, count in enumerate(uses) if not count}
        for number in events:
            assert readiness.is_expected(number)
            if readiness.arrive(number):
                complete.add(number)
                readiness.ready(number)
            # As many as are full from the first on, and never fewer than before.
            full = itertools.takewhile(complete.issuperset, buckets)
            assert readiness.reduced == len(list(full)) >= reduced
            reduced = readiness.reduced
        assert readiness.reduced == len(buckets)
        assert readiness.missing() == []


GROUPS = st.lists(st.lists(st.integers(0, 9), max_size=12), min_size=1, max_size=4)


def torchs_owners(groups: list[list[int]], size: int) -> list[list[int]]:
    """Ask torch's own method, which needs no processes for it."""
    zero: Any = object.__new__(TorchZero)
    zero.world_size = size
    zero.param_groups = [
        {"params": [torch.empty(numel) for numel in numels]} for numels in groups
    ]
    zero._partition_parameters_cache = []  # noqa: SLF001  (torch's, for itself)
    parts = zero._partition_parameters()  # noqa: SLF001  (likewise)
    owner_of = {
        id(parameter): rank
        for rank, part in enumerate(parts)
        for group in part
        for parameter in group["params"]
    }
    return [
        [owner_of[id(parameter)] for parameter in group["params"]]
        for group in zero.param_groups
    ]


@given(groups=GROUPS, size=st.integers(1, 6))
def test_parameter_owners_are_those_of_torch(
    groups: list[list[int]], size: int
) -> None:
    partition = Partition(size)
    assert [partition.add(numels) for numels in groups] == torchs_owners(groups, size)


@given(groups=GROUPS, size=st.integers(1, 6))
def test_rank_exceeds_its_share_by_one_parameter_at_most(
    groups: list[list[int]], size: int
) -> None:
    partition = Partition(size)
    owners = [partition.add(numels) for numels in groups]
    loads = [0] * size
    for numels, listed in zip(groups, owners, strict=True):
        for numel, owner in zip(numels, listed, strict=True):
            loads[owner] += numel
    assert partition.loads == loads
    largest = max((numel for numels in groups for numel in numels), default=0)
    assert max(loads) <= sum(loads) / size + largest

"""Parameters are shared out as torch does it, and none is forgotten."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

from asyncrpc.parallel.ddp.optimizers.shards import Partition

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
    owners = [partition.add(numels) for numels in groups]
    assert owners == torchs_owners(groups, size)


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

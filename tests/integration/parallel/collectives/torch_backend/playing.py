"""What each rank does in a test: torch's functions over asyncrpc, and over gloo beside.

Both process groups are of the same processes, and get the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from asyncrpc.torch_backend import AsyncRpcProcessGroup

Scenario = Callable[..., None]


def play(_rank: int, scenario: Scenario, *args: Any) -> None:
    """Play a scenario at this rank, with a process group of gloo to compare with."""
    dist.init_process_group("asyncrpc")
    gloo = dist.new_group(backend="gloo")
    try:
        scenario(gloo, *args)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def world() -> AsyncRpcProcessGroup:
    """The default process group."""
    group = dist.group.WORLD
    assert isinstance(group, AsyncRpcProcessGroup)
    return group


def drawn(*shape: int, seed: int | None = None) -> torch.Tensor:
    """A tensor of small whole numbers: their sums are exact in any order and dtype."""
    draw = torch.Generator().manual_seed(dist.get_rank() if seed is None else seed)
    return torch.randint(0, 4, shape, generator=draw).float()


def same(left: Any, right: Any) -> None:
    """Fail if tensors, or lists of them, differ in a bit."""
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        left, right = left.detach().contiguous(), right.detach().contiguous()
        assert torch.equal(
            left.view(-1).view(torch.uint8), right.view(-1).view(torch.uint8)
        ), (left, right)
        return
    assert len(left) == len(right)
    for value, other in zip(left, right, strict=True):
        same(value, other)

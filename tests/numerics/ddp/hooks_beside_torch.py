"""The same gradients through our hooks and torch's, in the same processes.

Each process is a rank of a `Group` and of torch's default group, over gloo.  torch's
hooks ask nothing of a bucket but its methods, so they are given ours.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)

from asyncrpc import Group
from asyncrpc.ddp import GradBucket
from asyncrpc.parallel.ddp.hooks import local_sgd, plain, powersgd
from asyncrpc.parallel.ddp.hooks.compression import PowerSGDState
from tests.numerics.ddp.beside import both

Shape = tuple[int, ...]
Ours = Callable[[Any, GradBucket], Awaitable[torch.Tensor]]

DEFAULT: dict[str, tuple[Ours, Any]] = {
    "allreduce": (plain.allreduce_hook, default_hooks.allreduce_hook),
    "fp16": (plain.fp16_compress_hook, default_hooks.fp16_compress_hook),
    "bf16": (plain.bf16_compress_hook, default_hooks.bf16_compress_hook),
    "fp16(allreduce)": (
        plain.fp16_compress_wrapper(plain.allreduce_hook),
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
    ),
    "bf16(allreduce)": (
        plain.bf16_compress_wrapper(plain.allreduce_hook),
        default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook),
    ),
    "noop": (plain.noop_hook, debugging_hooks.noop_hook),
}
POWER: dict[str, tuple[Ours, Any]] = {
    "powerSGD": (powersgd.powerSGD_hook, powerSGD_hook.powerSGD_hook),
    "batched": (powersgd.batched_powerSGD_hook, powerSGD_hook.batched_powerSGD_hook),
    "fp16(powerSGD)": (
        plain.fp16_compress_wrapper(powersgd.powerSGD_hook),
        default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
    ),
    "bf16(powerSGD)": (
        plain.bf16_compress_wrapper(powersgd.powerSGD_hook),
        default_hooks.bf16_compress_wrapper(powerSGD_hook.powerSGD_hook),
    ),
}
# Shapes by bucket: a convolution, layers with and without their biases, a vector alone.
BUCKETS: tuple[tuple[Shape, ...], ...] = (
    ((10,), (10, 64), (64,), (64, 33)),
    ((16, 3, 5, 5), (16,), (7,), (12, 9), (12, 9), (9, 12)),
    ((5,),),
)
# More than is done on the event loop, or sent in a slot.
LARGE: tuple[tuple[Shape, ...], ...] = (((400, 500), (500,)), ((300, 301),))


@dataclass(frozen=True)
class Case:
    """One way to use a hook, and how close the results are."""

    hook: str
    options: dict[str, Any] = field(default_factory=dict)
    buckets: tuple[tuple[Shape, ...], ...] = BUCKETS
    dtype: torch.dtype = torch.float32
    steps: int = 6
    tolerance: float = 1e-5


def parameters_of(case: Case) -> list[list[torch.Tensor]]:
    return [
        [torch.empty(shape, dtype=case.dtype) for shape in shapes]
        for shapes in case.buckets
    ]


def gradients(case: Case, rank: int, step: int, bucket: int) -> torch.Tensor:
    """What a rank has for a bucket: the ranks have something in common."""
    numel = sum(torch.Size(shape).numel() for shape in case.buckets[bucket])

    def drawn(seed: int) -> torch.Tensor:
        return torch.randn(numel, generator=torch.Generator().manual_seed(seed))

    common, own = drawn(100 * step + bucket), drawn(10_000 * (rank + 1) + step)
    return (common + 0.3 * own).to(case.dtype)


def buckets_of(
    case: Case, parameters: list[list[torch.Tensor]], rank: int, step: int
) -> list[GradBucket]:
    last = len(case.buckets) - 1
    return [
        GradBucket(
            index,
            gradients(case, rank, step, index),
            parameters[index],
            is_last=index == last,
        )
        for index in range(last + 1)
    ]


async def theirs(hook: Any, state: Any, bucket: GradBucket) -> torch.Tensor:
    """Run one of torch's hooks; it waits, so in a thread."""
    gradient = await asyncio.to_thread(lambda: hook(state, bucket).wait())
    assert isinstance(gradient, torch.Tensor)
    return gradient


def relative(ours: torch.Tensor, wanted: torch.Tensor) -> float:
    """How far apart they are, beside the largest element."""
    assert ours.shape == wanted.shape
    if not wanted.numel():
        return 0.0
    ours, wanted = ours.double(), wanted.double()
    assert torch.isfinite(wanted).all()
    scale = float(wanted.abs().max()) or 1.0
    return float((ours - wanted).abs().max()) / scale


async def compare_default(group: Group, case: Case) -> float:
    """The largest difference between one of our plain hooks and torch's."""
    ours, their = DEFAULT[case.hook]
    parameters = parameters_of(case)
    largest = 0.0
    for step in range(case.steps):
        for mine, other in zip(
            buckets_of(case, parameters, group.rank, step),
            buckets_of(case, parameters, group.rank, step),
            strict=True,
        ):
            wanted = (await theirs(their, None, other)).to(case.dtype)
            buffer = mine.buffer()
            got = await ours(group, mine)
            assert got.dtype == case.dtype
            assert got.data_ptr() == buffer.data_ptr()
            assert mine.buffer() is buffer
            if case.tolerance == 0.0:
                assert torch.equal(got, wanted)
            largest = max(largest, relative(got, wanted))
    assert largest <= case.tolerance, f"{case}: {largest}"
    return largest


async def compare_power(group: Group, case: Case) -> float:
    """The largest difference between PowerSGD's results, errors or Qs and torch's."""
    ours, their = POWER[case.hook]
    mine = PowerSGDState(group, **case.options)
    other = powerSGD_hook.PowerSGDState(None, **case.options)
    parameters = parameters_of(case)
    largest = 0.0
    for step in range(case.steps):
        for left, right in zip(
            buckets_of(case, parameters, group.rank, step),
            buckets_of(case, parameters, group.rank, step),
            strict=True,
        ):
            wanted = (await theirs(their, other, right)).to(case.dtype)
            got = await ours(mine, left)
            assert got.dtype == case.dtype
            largest = max(largest, relative(got, wanted))
            bits = got.clone().view(torch.uint8)
            lowest, highest = bits.clone(), bits.clone()
            await group.all_reduce(lowest, "min")
            await group.all_reduce(highest, "max")
            assert torch.equal(lowest, highest)  # the same bits at every rank
        check_states(case, mine, other)
    assert largest <= case.tolerance, f"{case}: {largest}"
    return largest


def check_states(case: Case, mine: PowerSGDState, other: Any) -> None:
    """Counts and draws are the same; what is kept is close."""
    assert mine.iter == other.iter
    assert mine.compression_stats() == other.compression_stats()
    assert mine.next_stats_report == other.next_stats_report
    assert mine.rng.randint(10**9) == other.rng.randint(10**9)
    assert mine.error_dict.keys() == other.error_dict.keys()
    assert mine.q_memory_dict.keys() == other.q_memory_dict.keys()
    for index, error in mine.error_dict.items():
        difference = relative(error, other.error_dict[index])
        assert difference <= case.tolerance, f"{case}: error {index}: {difference}"
    for index, q in mine.q_memory_dict.items():
        difference = relative(q, other.q_memory_dict[index])
        assert difference <= case.tolerance, f"{case}: Q {index}: {difference}"


async def compare_local(group: Group, case: Case) -> float:
    """The largest difference between post-local SGD and torch's, by even and odd."""
    size = group.size
    members = [[*range(0, size, 2)], [*range(1, size, 2)]]
    their_groups = [await asyncio.to_thread(dist.new_group, ranks) for ranks in members]
    own = group.rank % 2
    subgroup = group.subgroup(members[own], name=f"{case.options}")
    mine = local_sgd.PostLocalSGDState(group, subgroup, **case.options)
    other = post_localSGD_hook.PostLocalSGDState(  # type: ignore[no-untyped-call]  # torch's
        None, their_groups[own], **case.options
    )
    parameters = parameters_of(case)
    largest = 0.0
    for step in range(case.steps):
        for left, right in zip(
            buckets_of(case, parameters, group.rank, step),
            buckets_of(case, parameters, group.rank, step),
            strict=True,
        ):
            wanted = await theirs(post_localSGD_hook.post_localSGD_hook, other, right)
            got = await local_sgd.post_localSGD_hook(mine, left)
            largest = max(largest, relative(got, wanted))
        assert mine.iter == other.iter
    subgroup.close()
    assert largest <= case.tolerance, f"{case}: {largest}"
    return largest


COMPARE = {"default": compare_default, "power": compare_power, "local": compare_local}


async def play(
    rank: int, folder: str, which: str, cases: Sequence[Case]
) -> list[float]:
    """Play cases at one rank; what every process runs."""
    torch_batched_works_again()
    async with both(rank, folder) as group:
        return [await COMPARE[which](group, case) for case in cases]


def torch_batched_works_again() -> None:
    """Let torch's batched hook pass its own check.

    Since its `_orthogonalize` takes many matrices at a time, the batched hook, which
    gives it one, fails at an assertion.  Its arithmetic is what we compare with.
    """
    original = powerSGD_hook._orthogonalize  # noqa: SLF001

    def orthogonalize(matrices: torch.Tensor, epsilon: float = 0) -> None:
        original(  # type: ignore[no-untyped-call]  # torch's
            matrices if matrices.dim() == 3 else matrices.unsqueeze(0), epsilon
        )

    powerSGD_hook._orthogonalize = orthogonalize  # noqa: SLF001

"""The communication hooks of PowerSGD: one step of one bucket, with its two sums.

The computation runs in a thread, the sums on the event loop.

Source: torch/distributed/algorithms/ddp_comm_hooks/powerSGD_hook.py.
"""

from __future__ import annotations

import torch

from asyncrpc.errors import UsageError
from asyncrpc.parallel.ddp.argument_checks import check_hook
from asyncrpc.parallel.ddp.bucket import GradBucket
from asyncrpc.parallel.ddp.hooks.compression import PowerSGDState
from asyncrpc.parallel.ddp.hooks.low_rank import Layers, Square, side_of
from asyncrpc.parallel.ddp.hooks.plain import average
from asyncrpc.parallel.ddp.threads import in_thread


async def powerSGD_hook(  # noqa: N802  torch's name
    state: PowerSGDState, bucket: GradBucket
) -> torch.Tensor:
    """Reduce a bucket to about its mean over all ranks, each gradient compressed.

    A gradient of several dimensions is a matrix of its first by all others.  Gradients
    that would not get smaller by more than `min_compression_rate`, such as all vectors,
    are reduced as they are.

    Args:
        state: options, and the memory from step to step.
        bucket: the bucket to reduce, in place; the same at all ranks.

    Returns:
        The bucket's buffer, with the same bits at every rank.

    Raises:
        CollectiveError: a rank failed or was lost; all ranks fail; see `PowerSGDState`.
        UsageError: the state has no group, or is that of another module; or the bucket
            has no real numbers.

    Cancellation:
        The call fails on all ranks; see `PowerSGDState`.

    Example:
        >>> state = PowerSGDState(None, matrix_approximation_rank=2)
        >>> model.register_comm_hook(state, powerSGD_hook)

    Source: torch's `powerSGD_hook`, whose results are the same but for rounding.
    """
    _check(state, bucket)
    if state.iter < state.start_powerSGD_iter:
        return await _plainly(state, bucket)
    step = await in_thread(lambda: _begin_layers(state, bucket))
    return await _reduced(state, bucket, step)


def _begin_layers(state: PowerSGDState, bucket: GradBucket) -> Layers:
    plan = state.begin(bucket)
    state.count(bucket, plan.numel, plan.sent_numel)
    buffer = bucket.buffer()
    error = state.error_for(bucket, plan.numel)
    if error is not None:
        buffer.add_(error)
    qs = state.qs_for(bucket, plan)
    step = Layers(plan, buffer, qs, error, state.orthogonalization_epsilon)
    step.first()
    return step


async def batched_powerSGD_hook(  # noqa: N802  torch's name
    state: PowerSGDState, bucket: GradBucket
) -> torch.Tensor:
    """Reduce a bucket to about its mean over all ranks, compressed as one matrix.

    All gradients of the bucket, with zeros after them, make up one square matrix.  That
    is faster than `powerSGD_hook`, but further from the mean: use it where a rank of 1
    is good enough.

    Args:
        state: options, and the memory from step to step.
        bucket: the bucket to reduce, in place; the same at all ranks.

    Returns:
        The bucket's buffer, with the same bits at every rank.

    Raises:
        CollectiveError: a rank failed or was lost; all ranks fail; see `PowerSGDState`.
        UsageError: the state has no group, or is that of another module; or the bucket
            has no real numbers.

    Cancellation:
        The call fails on all ranks; see `PowerSGDState`.

    Source: torch's `batched_powerSGD_hook`.
    """
    _check(state, bucket)
    if state.iter < state.start_powerSGD_iter or not bucket.buffer().numel():
        return await _plainly(state, bucket)
    step = await in_thread(lambda: _begin_square(state, bucket))
    return await _reduced(state, bucket, step)


def _begin_square(state: PowerSGDState, bucket: GradBucket) -> Square:
    buffer = bucket.buffer()
    numel = state.begin(bucket).numel
    side = side_of(numel)
    rank = min(state.matrix_approximation_rank, side)
    state.count(bucket, numel, 2 * side * rank)
    padded = state.error_for(bucket, side * side)
    if padded is not None:
        padded[:numel].add_(buffer)
    elif side * side == numel:
        padded = buffer
    else:
        padded = buffer.new_zeros(side * side)
        padded[:numel].copy_(buffer)
    step = Square(buffer, padded, state.q_for(bucket, side, rank))
    step.first()
    return step


def _check(state: PowerSGDState, bucket: GradBucket) -> None:
    check_hook(state, PowerSGDState, bucket)
    dtype = bucket.buffer().dtype
    if not dtype.is_floating_point:
        raise UsageError(
            f"PowerSGD compresses real numbers, but the bucket has {dtype}: "
            "register another hook, such as allreduce_hook"
        )


async def _reduced(
    state: PowerSGDState, bucket: GradBucket, step: Layers | Square
) -> torch.Tensor:
    group = state.group
    await group.all_reduce(step.sent)
    await in_thread(step.second)
    await group.all_reduce(step.qs)
    await in_thread(lambda: step.finish(group.size))
    state.warn_of_zeros(step.zeros)
    state.maybe_increase_iter(bucket)
    return bucket.buffer()


async def _plainly(state: PowerSGDState, bucket: GradBucket) -> torch.Tensor:
    await average(state.group, bucket.buffer())
    state.maybe_increase_iter(bucket)
    return bucket.buffer()

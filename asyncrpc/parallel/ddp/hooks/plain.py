"""Communication hooks without a state: means over all ranks, in full or half precision.

Half precision takes no memory of its own: the halves lie where the gradients were, so
that the group reduces them in place, and are made into gradients again from the end.

Source: torch/distributed/algorithms/ddp_comm_hooks/default_hooks.py and
debugging_hooks.py.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, TypeAlias, TypeVar

import torch

from asyncrpc.core.arguments import check_callable, check_kind, shown
from asyncrpc.errors import UsageError
from asyncrpc.parallel.collectives.group import Group
from asyncrpc.parallel.ddp.argument_checks import check_bucket
from asyncrpc.parallel.ddp.bucket import GradBucket
from asyncrpc.parallel.ddp.threads import run_beside

S = TypeVar("S")
Hook: TypeAlias = Callable[[S, GradBucket], Awaitable[torch.Tensor]]

# Elements of one step of a conversion: with fewer, starting the operations takes longer
# (3.2 million of float32 to float16: 13 ms by 16 Ki, 5.7 by 64 Ki, 4.2 by 256 Ki).
_STEP: Final = 1 << 18
_HALVES: Final = (torch.float16, torch.bfloat16)


async def allreduce_hook(state: Group | None, bucket: GradBucket) -> torch.Tensor:
    """Reduce a bucket to its mean over all ranks, as without a hook.

    Args:
        state: the ranks; a module gives its own in place of None.
        bucket: the bucket to reduce, in place.

    Returns:
        The bucket's buffer.

    Raises:
        CollectiveError: a rank failed or was lost; all ranks fail.
        UsageError: `state` is None, or torch cannot divide in the bucket's dtype.

    Cancellation:
        The call fails on all ranks; the buffer's content is undefined.

    Source: torch's `allreduce_hook`.  Sums in full precision are divided here, not
    gradients: over two, four or eight ranks the bits are the same.
    """
    return await average(_group_of(state, bucket), bucket.buffer())


async def fp16_compress_hook(state: Group | None, bucket: GradBucket) -> torch.Tensor:
    """Reduce a bucket to its mean over all ranks, added up in float16.

    A gradient of more than 65,504 becomes infinite, and one of less than 6e-8 zero.

    Args:
        state: the ranks; a module gives its own in place of None.
        bucket: the bucket to reduce, in place.

    Returns:
        The bucket's buffer, in its own dtype.

    Raises:
        CollectiveError: a rank failed or was lost; all ranks fail.
        UsageError: `state` is None, or the bucket has no real numbers.

    Cancellation:
        The call fails on all ranks; the buffer's content is undefined.

    Source: torch's `fp16_compress_hook`.
    """
    return await _compress(_group_of(state, bucket), bucket.buffer(), torch.float16)


async def bf16_compress_hook(state: Group | None, bucket: GradBucket) -> torch.Tensor:
    """Reduce a bucket to its mean over all ranks, added up in bfloat16.

    bfloat16 has the range of float32, and eight bits of precision.

    Args:
        state: the ranks; a module gives its own in place of None.
        bucket: the bucket to reduce, in place.

    Returns:
        The bucket's buffer, in its own dtype.

    Raises:
        CollectiveError: a rank failed or was lost; all ranks fail.
        UsageError: `state` is None, or the bucket has no real numbers.

    Cancellation:
        The call fails on all ranks; the buffer's content is undefined.

    Source: torch's `bf16_compress_hook`.
    """
    return await _compress(_group_of(state, bucket), bucket.buffer(), torch.bfloat16)


def fp16_compress_wrapper(hook: Hook[S]) -> Hook[S]:
    """Return a hook that gives another one its buckets in float16.

    Args:
        hook: a coroutine function; it is given a bucket of float16.

    Returns:
        A hook with the same state, whose result has the dtype of the bucket.

    Raises:
        UsageError: `hook` cannot be called.

    Example:
        >>> model.register_comm_hook(state, fp16_compress_wrapper(powerSGD_hook))

    Source: torch's `fp16_compress_wrapper`, whose result stays in float16.
    """
    return _wrapped(hook, torch.float16)


def bf16_compress_wrapper(hook: Hook[S]) -> Hook[S]:
    """Return a hook that gives another one its buckets in bfloat16.

    Args:
        hook: a coroutine function; it is given a bucket of bfloat16.

    Returns:
        A hook with the same state, whose result has the dtype of the bucket.

    Raises:
        UsageError: `hook` cannot be called.

    Example:
        >>> model.register_comm_hook(state, bf16_compress_wrapper(powerSGD_hook))

    Source: torch's `bf16_compress_wrapper`, whose result stays in bfloat16.
    """
    return _wrapped(hook, torch.bfloat16)


async def noop_hook(_state: Any, bucket: GradBucket) -> torch.Tensor:
    """Reduce nothing: every rank goes on with its own gradients.

    The ranks drift apart: use it only to find out how much time communication takes.

    Args:
        _state: not used.
        bucket: unchanged.

    Returns:
        The bucket's buffer.

    Raises:
        UsageError: `bucket` is not a GradBucket.

    Cancellation:
        It never waits.

    Source: torch's `noop_hook`.
    """
    check_bucket(bucket)
    return bucket.buffer()


async def average(group: Group, tensor: torch.Tensor) -> torch.Tensor:
    """Make a tensor the mean over all ranks, in place.

    In half precision it is divided before it is added up, so that sums stay finite.
    """
    if tensor.dtype not in _HALVES:
        return await group.all_reduce(tensor, "avg")
    await _convert(tensor, lambda: tensor.div_(group.size))
    return await group.all_reduce(tensor)


# --- half precision ------------------------------------------------------------------


async def _compress(
    group: Group, buffer: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    _check_real(buffer)
    half = await _convert(buffer, lambda: narrow(buffer, dtype, group.size))
    await group.all_reduce(half)
    return await _convert(buffer, lambda: widen(half, buffer))


def _wrapped(hook: Hook[S], dtype: torch.dtype) -> Hook[S]:
    check_callable("hook", hook)

    @functools.wraps(hook)
    async def wrapper(state: S, bucket: GradBucket) -> torch.Tensor:
        check_bucket(bucket)
        buffer = bucket.buffer()
        _check_real(buffer)
        bucket.set_buffer(await _convert(buffer, lambda: narrow(buffer, dtype)))
        try:
            result = await _called(hook, state, bucket)
        finally:
            bucket.set_buffer(buffer)
        return await _convert(buffer, lambda: widen(result, buffer))

    return wrapper


async def _called(hook: Hook[S], state: S, bucket: GradBucket) -> torch.Tensor:
    running = hook(state, bucket)
    if not inspect.isawaitable(running):
        raise UsageError(
            f"hook must be a coroutine function, but {shown(hook)} returned a "
            f"{type(running).__name__}"
        )
    result = await running
    numel = bucket.buffer().numel()
    if not isinstance(result, torch.Tensor) or result.numel() != numel:
        raise UsageError(
            f"hook {shown(hook)} must return the {numel} elements of its bucket in "
            "one tensor"
        )
    return result


async def _convert(
    buffer: torch.Tensor, convert: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """Run a conversion of a buffer, in a thread unless it is small."""
    # A conversion takes about eight times as long as a copy of as many bytes.
    return await run_beside(convert, 8 * buffer.numel())


def _group_of(state: Group | None, bucket: GradBucket) -> Group:
    wanted = "a Group; a module that has this hook passes its own in place of None"
    check_kind("state", state, Group, wanted)
    check_bucket(bucket)
    assert state is not None  # checked above
    return state


def narrow(buffer: torch.Tensor, dtype: torch.dtype, divisor: int = 1) -> torch.Tensor:
    """Convert a buffer to half precision, in its own memory, and divide it.

    Args:
        buffer: `(elements,)`, contiguous; its own content is lost.
        dtype: of the result; of at most as many bytes as the buffer's.
    """
    if buffer.dtype is dtype:
        return buffer if divisor == 1 else buffer.div_(divisor)
    half = buffer.view(dtype)[: buffer.numel()]
    passed = torch.empty(min(_STEP, buffer.numel()), dtype=dtype, device=buffer.device)
    for low, high in _steps(buffer.numel()):
        piece = passed[: high - low].copy_(buffer[low:high])
        if divisor != 1:
            piece.div_(divisor)
        half[low:high].copy_(piece)  # over elements that have been converted
    return half


def widen(half: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """Convert half precision back into a buffer, in whose first bytes it may lie."""
    half = half.detach().view(-1)
    if half.data_ptr() != buffer.data_ptr():
        return buffer.copy_(half)
    if half.dtype is buffer.dtype:
        return buffer
    passed = torch.empty(
        min(_STEP, buffer.numel()), dtype=half.dtype, device=buffer.device
    )
    for low, high in reversed(list(_steps(buffer.numel()))):
        buffer[low:high].copy_(passed[: high - low].copy_(half[low:high]))
    return buffer


def _steps(numel: int) -> Iterator[tuple[int, int]]:
    for low in range(0, numel, _STEP):
        yield low, min(low + _STEP, numel)


def _check_real(buffer: torch.Tensor) -> None:
    if not buffer.dtype.is_floating_point or buffer.dtype.itemsize == 1:
        raise UsageError(
            f"{buffer.dtype} gradients cannot be converted to half precision; use "
            "another hook, such as allreduce_hook"
        )

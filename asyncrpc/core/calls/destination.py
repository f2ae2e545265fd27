"""The caller's own tensor that the result of a call is received into: `out=`.

A result whose bytes lie as the tensor's do lands in its memory, with no copy; any other
is copied there.  Nothing is written to it any more once the call has ended, however it
ended: what is still on its way then lands elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from asyncrpc.core.serde.encoded import view_memory
from asyncrpc.core.serde.tensors import has_its_memory
from asyncrpc.errors import Outcome, OutMismatchError, UsageError

if TYPE_CHECKING:
    from asyncrpc.core.calls.futures import CallFuture
    from asyncrpc.core.calls.ports import CallConnection

# Copied in one turn of the loop: 0.2 ms at 10 GB/s.
COPY_BYTES_PER_TURN: Final = 2 << 20


class Destination:
    """The tensor that one call's result goes to."""

    __slots__ = ("_call_id", "_connection", "_memory", "out")

    def __init__(self, out: torch.Tensor) -> None:
        check(out)
        self.out = out
        self._connection: CallConnection | None = None
        self._call_id = 0
        self._memory: memoryview | None = None

    def claim(self, connection: CallConnection, call_id: int) -> None:
        """Let the response of a call land in the tensor's memory, if that is dense."""
        out = self.out
        if out.nbytes and out.is_contiguous() and has_its_memory(out):
            storage = out.untyped_storage()
            self._memory = view_memory(storage, out.data_ptr(), out.nbytes)
            self._connection, self._call_id = connection, call_id
            connection.claim(call_id, self._memory)

    def release(self) -> None:
        """Stop receiving into the tensor: the call has ended."""
        if self._connection is not None:
            self._connection.release_claim(self._call_id)
            self._connection = None
            _note_written(self.out)

    def deliver(
        self, call: CallFuture[Any], value: Any, buffers: list[memoryview]
    ) -> None:
        """End a call with this tensor, or with an error if the value does not fit."""
        problem = mismatch(value, self.out)
        if problem:
            error = OutMismatchError(
                problem, function=call.function, to=call.to, outcome=Outcome.EXECUTED
            )
            call.fail(error)
            return
        is_here = len(buffers) == 1 and buffers[0] is self._memory
        if is_here and _lies_like(value, self.out):
            call.succeed(self.out)
            return
        source = value.detach()
        if is_here:  # in another order: it must not be read while it is written over
            source = source.clone()
            call.stats.bytes_copied += self.out.nbytes
        _ChunkedCopy(call, self.out, source).step()


class _ChunkedCopy:
    """A result on its way into a tensor, in pieces between which the loop goes on.

    A call given up meanwhile is done, and then no more is written.
    """

    __slots__ = ("_at", "_call", "_out", "_rest")

    def __init__(
        self, call: CallFuture[Any], out: torch.Tensor, source: torch.Tensor
    ) -> None:
        self._call = call
        self._out = out
        self._rest = _pieces(out, source)
        self._at = 0

    def step(self) -> None:
        if self._call.done():
            return
        target, source = self._rest[self._at]
        try:
            target.copy_(source)
        except RuntimeError as error:  # the tensor has been changed meanwhile
            call = self._call
            problem = f"the result could not be copied to out=: {error}"
            failed = OutMismatchError(
                problem, function=call.function, to=call.to, outcome=Outcome.EXECUTED
            )
            call.fail(failed)
            return
        self._call.stats.bytes_copied += target.nbytes
        self._at += 1
        if self._at < len(self._rest):
            self._call.get_loop().call_soon(self.step)
        else:
            self._call.succeed(self._out)


def _pieces(
    out: torch.Tensor, source: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Cut a copy into pieces if both tensors are dense; any other copy stays whole."""
    if out.nbytes <= COPY_BYTES_PER_TURN:
        return [(out, source)]
    if not (out.is_contiguous() and source.is_contiguous()):
        return [(out, source)]
    to, step = out.view(-1), COPY_BYTES_PER_TURN // out.itemsize
    flat_source = source.view(-1)
    starts = range(0, to.numel(), step)
    return [(to[at : at + step], flat_source[at : at + step]) for at in starts]


def check(out: Any) -> None:
    """Refuse an `out` that cannot receive a result."""
    if not isinstance(out, torch.Tensor):
        raise UsageError(f"out= must be a tensor, not a {type(out).__name__}")
    if out.layout is not torch.strided or out.is_quantized or out.is_nested:
        raise UsageError(
            "out= must be a dense tensor, not a sparse, quantized or nested one"
        )
    if not out.is_cpu:
        raise UsageError(
            f"out= must be a tensor in host memory, not on {out.device}; "
            "receive without it and copy the result there"
        )
    if out.requires_grad:
        raise UsageError(
            "out= must not require a gradient: it is written to outside "
            "of autograd; give `tensor.detach()`, which has the same memory"
        )
    if out.is_conj() or out.is_neg():
        raise UsageError(
            "out= must not be a conjugate or negative view; give `resolve_conj()`'s or "
            "`resolve_neg()`'s result"
        )
    if not has_its_memory(out):
        raise UsageError(
            f"out= must not be a tensor whose storage was resized to less than its "
            f"{out.nbytes} bytes; give one that has its memory"
        )
    if not _is_disjoint(out):
        raise UsageError(
            f"out= must not have elements that share memory, such as an expanded "
            f"one: its shape is {tuple(out.shape)}, its strides are {out.stride()}; "
            "give `tensor.contiguous()`"
        )


def _is_disjoint(out: torch.Tensor) -> bool:
    """Return whether every dimension steps over all that the smaller ones reach."""
    reach = 0
    for stride, size in sorted(zip(out.stride(), out.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return False
            reach += stride * (size - 1)
    return True


def mismatch(value: Any, out: torch.Tensor) -> str:
    """Return why a result cannot go into a tensor; empty if it can."""
    if not isinstance(value, torch.Tensor):
        return f"the result is a {type(value).__name__}, and out= takes a tensor"
    if value.layout is not torch.strided or value.is_quantized or value.is_meta:
        return "the result is not a dense tensor; call without out="
    if value.shape != out.shape or value.dtype != out.dtype:
        return f"the result is {_described(value)}, and out= is {_described(out)}"
    if value.grad_fn is not None:
        return (
            "the result belongs to an autograd graph, and out= cannot: call without "
            "out=, or outside the autograd context"
        )
    return ""


def put(value: Any, out: torch.Tensor, *, function: str, to: str) -> torch.Tensor:
    """Copy a value of this worker into a tensor, and return that."""
    check(out)
    problem = mismatch(value, out)
    if problem:
        raise OutMismatchError(
            problem, function=function, to=to, outcome=Outcome.EXECUTED
        )
    if value is not out:
        out.copy_(value.detach())
    return out


def _lies_like(value: torch.Tensor, out: torch.Tensor) -> bool:
    return (
        value.is_contiguous()
        and value.data_ptr() == out.data_ptr()
        and not value.is_conj()
        and not value.is_neg()
    )


def _note_written(out: torch.Tensor) -> None:
    """Tell autograd that a tensor has changed, since it may have saved it."""
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)


def _described(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} of shape {tuple(tensor.shape)}"

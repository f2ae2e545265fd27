"""Tensors as collectives take them: checked, and flat."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from asyncrpc.errors import UsageError


def check(tensor: torch.Tensor) -> None:
    """Refuse what no collective can move.

    Raises:
        UsageError: it is no dense tensor in host memory.
    """
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(
            f"a collective takes tensors, and got a {type(tensor).__name__}"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized:
        kind = (
            "quantized"
            if tensor.is_quantized
            else str(tensor.layout).removeprefix("torch.")
        )
        raise UsageError(
            f"a collective takes dense tensors, and got a {kind} one: convert it first"
        )
    if not tensor.is_cpu:
        raise UsageError(
            f"a collective takes tensors in host memory, and got one on "
            f"{str(tensor.device)!r}: move it first"
        )


def text(tensor: torch.Tensor) -> str:
    """Return how a tensor is called in errors."""
    return f"a {tensor.dtype} tensor of shape {tuple(tensor.shape)}"


def copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy, which nobody else has."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.clone(memory_format=torch.contiguous_format)


def packed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in contiguous memory, which may be its own."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def cut(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Cut a tensor along its first dimension into parts of the same length."""
    length = len(tensor) // count
    return [tensor[part * length : (part + 1) * length] for part in range(count)]


def split(flat: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Cut a flat tensor into as many parts as there are ranks, as even as can be."""
    least, more = divmod(flat.numel(), size)
    lengths = [least + (rank < more) for rank in range(size)]
    parts: list[torch.Tensor] = list(flat.split(lengths))  # type: ignore[no-untyped-call]
    return parts


@contextmanager
def flat(tensor: torch.Tensor, *, write: bool = True) -> Iterator[torch.Tensor]:
    """Give a tensor as one dimension of contiguous memory.

    What is written there is in the tensor when the block has ended well.
    """
    plain = tensor.detach()
    is_plain = plain.is_contiguous() and not plain.is_conj() and not plain.is_neg()
    if is_plain:
        yield plain.view(-1)
        return
    other = packed(plain)
    yield other.view(-1)
    if write:
        plain.copy_(other)

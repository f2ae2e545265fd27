"""Many tensors as one: each has its part of one memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch


def cut(flat: torch.Tensor, shapes: Iterable[Sequence[int]]) -> list[torch.Tensor]:
    """Return views of a memory `(elements,)`, one after the other, in these shapes."""
    views, end = [], 0
    for shape in shapes:
        start, end = end, end + math.prod(shape)
        views.append(flat[start:end].view(tuple(shape)))
    return views


def gather(memory: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Copy tensors into a memory `(elements,)`, one after the other; return it."""
    parts = cut(memory, [tensor.shape for tensor in tensors])
    for part, tensor in zip(parts, tensors, strict=True):
        part.copy_(tensor.detach())
    return memory


def scatter(memory: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy the parts of a memory `(elements,)` into tensors."""
    parts = cut(memory, [tensor.shape for tensor in tensors])
    for part, tensor in zip(parts, tensors, strict=True):
        tensor.detach().copy_(part)


def cut_like(
    flat: torch.Tensor, parameters: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return views of a memory `(elements,)`, one for each parameter, in its shape.

    If the parameter's elements lie side by side in another order, such as channels
    last, the view has the same order, as autograd's gradients do.
    """
    parts = cut(flat, [(parameter.numel(),) for parameter in parameters])
    return [
        part.as_strided(parameter.shape, parameter.stride())
        if _is_dense(parameter)
        else part.view(parameter.shape)
        for part, parameter in zip(parts, parameters, strict=True)
    ]


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether elements lie side by side, without overlap or holes."""
    expected = 1
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    for size, stride in sorted(sizes, key=lambda dimension: dimension[1]):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def one_of_each(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor that has each element of an expanded one once."""
    for dim, (size, stride) in enumerate(
        zip(tensor.shape, tensor.stride(), strict=True)
    ):
        if not stride and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of tensors, one after the other: uint8, in host memory."""
    return torch.cat([_bytes_of(one_of_each(tensor.detach())) for tensor in tensors])


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    # One element may have any stride, which `view` does not take.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def cut_packed(
    packed: torch.Tensor, like: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the tensors whose bytes `pack` made, of these dtypes and shapes."""
    targets = [one_of_each(tensor.detach()) for tensor in like]
    sizes = [target.numel() * target.element_size() for target in targets]
    tensors = []
    for part, target in zip(cut(packed, [(n,) for n in sizes]), targets, strict=True):
        # A view of a dtype needs memory that is aligned for its elements.
        is_aligned = part.storage_offset() % target.element_size() == 0
        aligned = part if is_aligned else part.clone()
        tensors.append(aligned.view(target.dtype).view(target.shape))
    return tensors


def unpack(packed: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    """Copy the bytes that `pack` made into tensors of the same dtypes and shapes."""
    for target, values in zip(targets, cut_packed(packed, targets), strict=True):
        one_of_each(target.detach()).copy_(values)

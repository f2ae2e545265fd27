"""Many tensors as one: where each has its part of one memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch


def parts(
    memory: torch.Tensor, tensors: Iterable[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each part of a memory `(elements,)`, in the shape of its tensor, and it."""
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.numel()
        yield memory[start:end].view(tensor.shape), tensor

"""The memory of buckets: one tensor for all of them, which the group reduces in place.

It is host memory, even where the parameters are on devices.

The gradients of a bucket lie side by side.  Each parameter has a view of its own, in
the parameter's shape and strides, so that a kernel copies straight into it.

Source: torch/csrc/distributed/c10d/reducer.cpp, `initialize_bucket_views`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from asyncrpc.parallel.ddp.flat import cut_like

_ALIGN: Final = 64  # bytes: a cache line, and enough for vector instructions


class Buckets:
    """Buckets, and where the gradients of their parameters go.

    Attributes:
        flats: `(elements,)` of each; None for a sparse gradient, which has no memory.
        views: by number of the parameter, in its shape.
    """

    def __init__(
        self,
        numbers: Sequence[Sequence[int]],
        parameters: Sequence[torch.Tensor],
        dtypes: Sequence[torch.dtype],
        is_sparse: Sequence[bool],
        memory: torch.Tensor,
    ) -> None:
        self.numbers = numbers
        self.flats: list[torch.Tensor | None] = []
        self.views: dict[int, torch.Tensor] = {}
        at = 0
        for bucket in numbers:
            if is_sparse[bucket[0]]:
                self.flats.append(None)
                continue
            dtype = dtypes[bucket[0]]
            count = sum(parameters[number].numel() for number in bucket)
            nbytes = count * dtype.itemsize
            flat = memory[at : at + nbytes].view(dtype)
            at += _aligned(nbytes)
            self.flats.append(flat)
            views = cut_like(flat, [parameters[number] for number in bucket])
            self.views.update(zip(bucket, views, strict=True))

    def holds(self, number: int, grad: torch.Tensor | None) -> bool:
        """Return whether a gradient is the view of its parameter."""
        view = self.views.get(number)
        return (
            view is not None
            and grad is not None
            and grad.is_cpu
            and grad.data_ptr() == view.data_ptr()
            and grad.dtype == view.dtype
            and grad.stride() == view.stride()
        )


def bytes_for(parameters: Sequence[torch.Tensor], is_sparse: Sequence[bool]) -> int:
    """Return how much memory is enough for these parameters, in any buckets."""
    return sum(
        _aligned(parameter.nbytes) + _ALIGN
        for parameter, sparse in zip(parameters, is_sparse, strict=True)
        if not sparse
    )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN

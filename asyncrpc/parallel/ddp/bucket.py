"""`GradBucket`: the gradients that a communication hook is given.

A bucket holds the gradients of some parameters, of one dtype and device, one after the
other in one flat tensor, so that a hook has one tensor to reduce and compress.

Source: torch.distributed.GradBucket.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncrpc.errors import UsageError
from asyncrpc.parallel.collectives.tensors import check
from asyncrpc.parallel.ddp.flat import cut_like


class GradBucket:
    """Gradients that are reduced together, as a communication hook sees them.

    Source: torch.distributed.GradBucket, whose methods these are.
    """

    __slots__ = ("_buffer", "_index", "_is_last", "_parameters")

    def __init__(
        self,
        index: int,
        buffer: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        *,
        is_last: bool,
    ) -> None:
        """Make a bucket; only the reducer calls this.

        Args:
            index: of the bucket; buckets are reduced in this order.
            buffer: `(elements,)`, the gradients one after the other.
            parameters: of these gradients, in the order of the buffer.
            is_last: no bucket of this backward pass follows.

        Raises:
            UsageError: the buffer does not hold one element for each of the parameters.
        """
        self._index = index
        self._parameters = list(parameters)
        self._is_last = is_last
        self._buffer = buffer
        self.set_buffer(buffer)

    def index(self) -> int:
        """Return which bucket this is: 0 is reduced first."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """Return the gradients in one tensor `(elements,)`, which may be changed."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return views of the buffer, each in the shape of its parameter."""
        return cut_like(self._buffer, self._parameters)

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters of these gradients, in the same order."""
        return list(self._parameters)

    def is_last(self) -> bool:
        """Return whether no bucket of this backward pass comes after this one."""
        return self._is_last

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replace the buffer by another tensor, as a hook that wraps another one does.

        Args:
            buffer: `(elements,)`, of any dtype.

        Raises:
            UsageError: `buffer` has another number of elements, or is not a dense
                tensor.
        """
        check(buffer, "buffer")
        numel = sum(parameter.numel() for parameter in self._parameters)
        if buffer.dim() != 1 or buffer.numel() != numel:
            raise UsageError(
                f"the buffer of a bucket must be of shape ({numel},), not "
                f"{tuple(buffer.shape)}"
            )
        self._buffer = buffer

    def __repr__(self) -> str:
        last = ", the last" if self._is_last else ""
        return (
            f"<GradBucket {self._index}{last}: {len(self._parameters)} parameters, "
            f"{self._buffer.numel()} elements of {self._buffer.dtype}>"
        )

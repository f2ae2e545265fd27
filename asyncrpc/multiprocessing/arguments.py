"""What a new process is called with, on its way there: tensors in shared memory.

torch's own reductions move a tensor's memory to where both processes have it, and leave
its gradient behind.  Here the gradient goes along, so that what one process adds to it
the others see; a tensor without one gets its own in each process, later.

Source: torch/multiprocessing/reductions.py, which this builds on; the notes of
torch.multiprocessing say that gradients are shared.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions

from asyncrpc.errors import UsageError


class Arguments:
    """Arrives in a new process as the value that it was made of.

    It is pickled while a process starts, and only then: descriptors go along.
    """

    def __init__(self, value: Any) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Any, ...]:
        file = io.BytesIO()
        _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(self._value)
        return pickle.loads, (file.getvalue(),)  # noqa: S301  for our own child


class _Pickler(ForkingPickler):
    """Takes gradients along."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        refuse_graph(value)
        if not value.is_leaf or value.grad is None:
            return NotImplemented
        rebuild, args = reductions.reduce_tensor(value)  # type: ignore[no-untyped-call]  # torch's
        return _with_gradient, (rebuild, args, value.grad)


def refuse_graph(tensor: torch.Tensor) -> None:
    """Refuse a tensor whose gradient belongs to a graph of this process.

    Raises:
        UsageError: it requires a gradient and was computed from others.
    """
    if tensor.requires_grad and not tensor.is_leaf:
        raise UsageError(
            "a tensor that requires a gradient and was computed from others cannot go "
            "to another process, because its graph stays here; send tensor.detach()"
        )


def _with_gradient(
    rebuild: Callable[..., torch.Tensor], args: tuple[Any, ...], gradient: torch.Tensor
) -> torch.Tensor:
    tensor = rebuild(*args)
    tensor.grad = gradient
    return tensor

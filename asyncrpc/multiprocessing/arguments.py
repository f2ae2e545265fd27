"""The arguments of a new process, on their way there: tensors in shared memory.

torch's own reductions move a tensor's memory to where both processes have it, and leave
its gradient behind.  Here the gradient goes along, so that all processes see changes to
it; a tensor without a gradient gets one of its own in each process, later.

Source: torch/multiprocessing/reductions.py, which this builds on; the notes of
torch.multiprocessing say that gradients are shared.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions

from asyncrpc.errors import UsageError


class Arguments:
    """Arrives in a new process as the value that it was made of.

    It can only be pickled while a process starts, because descriptors go along.
    """

    def __init__(self, fn: Callable[..., Any], args: Sequence[Any]) -> None:
        self._fn = fn
        self._args = tuple(args)

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            pickled = _pickled((self._fn, self._args))
        except UsageError:
            self._blame()
            raise
        return pickle.loads, (pickled,)  # noqa: S301  for our own child

    def _blame(self) -> None:
        """Raise a UsageError that names the value that cannot be pickled."""
        _pickled(self._fn, "fn", "; define it at the top level of a module")
        for number, one in enumerate(self._args):
            _pickled(one, f"args[{number}]")


def _pickled(value: Any, name: str = "args", advice: str = "") -> bytes:
    """Return the pickle of a value for a new process."""
    file = io.BytesIO()
    with refusing(f"{name} cannot be sent to a new process{advice}"):
        _GradientPickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


@contextmanager
def refusing(problem: str) -> Iterator[None]:
    """Turn an error raised while a value is pickled into one that blames the value.

    Raises:
        UsageError: pickle, or the value's own code, has raised an error.
        OSError: the system has run out of a resource.
        MemoryError: the system has run out of memory.
    """
    try:
        yield
    except (OSError, MemoryError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise UsageError(f"{problem}: {error}") from error


class _GradientPickler(ForkingPickler):
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
        UsageError: the tensor requires a gradient and was computed from others.
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

"""The arguments of a new process, on their way there: tensors in shared memory.

torch's own reductions move each tensor's memory to where both processes have it, behind
a descriptor of its own, and leave its gradient behind.  Here all tensors of the host
move together, behind one descriptor, and gradients go along, so that all processes see
changes to them; a tensor without a gradient gets one of its own in each process, later.

Source: torch/multiprocessing/reductions.py, which this builds on; the notes of
torch.multiprocessing say that gradients are shared.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions

from asyncrpc.core.serde.encoded import key_of, mark
from asyncrpc.core.serde.shared import MappedFiles, move_together, place_of
from asyncrpc.core.shm.passing import close_all
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
            pickled, storages = _pickled((self._fn, self._args))
        except UsageError:
            self._blame()
            raise
        move_together(storages)
        descriptors: dict[int, Any] = {}
        parts = []
        for storage in storages:
            descriptor, start = place_of(storage)
            if descriptor not in descriptors:
                descriptors[descriptor] = DupFd(descriptor)
            where = descriptors[descriptor], start, storage.nbytes()
            parts.append((*where, key_of(storage)))
        return _arrived, (pickled, parts)

    def _blame(self) -> None:
        """Raise a UsageError that names the value that cannot be pickled."""
        _pickled(self._fn, "fn", "; define it at the top level of a module")
        for number, argument in enumerate(self._args):
            _pickled(argument, f"args[{number}]")


def _pickled(
    value: Any, name: str = "args", advice: str = ""
) -> tuple[bytes, list[torch.UntypedStorage]]:
    """Return the pickle of a value for a new process, and the storages outside it."""
    file = io.BytesIO()
    pickler = _ArgumentsPickler(file, pickle.HIGHEST_PROTOCOL)
    with refusing(f"{name} cannot be sent to a new process{advice}"):
        pickler.dump(value)
    return file.getvalue(), pickler.storages


def _arrived(pickled: bytes, parts: list[tuple[Any, int, int, bytes | None]]) -> Any:
    """Return the value of a pickle in the new process."""
    mapped = MappedFiles()
    descriptors = {id(sent): sent.detach() for sent, *_ in parts}
    storages = []
    try:
        for sent, start, nbytes, key in parts:
            storage = mapped.storage_at(descriptors[id(sent)], start, nbytes)
            if key is not None:
                mark(storage, key)
            storages.append(storage)
    finally:
        close_all(list(descriptors.values()))
    return _ArgumentsUnpickler(pickled, storages).load()


@contextmanager
def refusing(problem: str) -> Iterator[None]:
    """Turn an error raised while a value is pickled into one that blames the value."""
    try:
        yield
    except (OSError, MemoryError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise UsageError(f"{problem}: {error}") from error


class _ArgumentsPickler(ForkingPickler):
    """Takes gradients along, and leaves the memory of the host's tensors out.

    Attributes:
        storages: those that were left out; the pickle has their numbers.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.storages: list[torch.UntypedStorage] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if type(value) is not torch.UntypedStorage or value.device.type != "cpu":
            return None
        if not value.nbytes():
            return None
        number = self._numbers.setdefault(value._cdata, len(self.storages))  # noqa: SLF001
        if number == len(self.storages):
            self.storages.append(value)
        return number

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        refuse_graph(value)
        if not value.is_leaf or value.grad is None:
            return NotImplemented
        rebuild, args = reductions.reduce_tensor(value)  # type: ignore[no-untyped-call]  # torch's
        return _with_gradient, (rebuild, args, value.grad)


class _ArgumentsUnpickler(pickle.Unpickler):  # noqa: S301  for our own child
    def __init__(self, pickled: bytes, storages: list[torch.UntypedStorage]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._storages = storages

    def persistent_load(self, number: Any) -> Any:
        return self._storages[number]


def refuse_graph(tensor: torch.Tensor) -> None:
    """Refuse a tensor whose gradient belongs to a graph of this process."""
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

"""The tensors of one call in host memory, with copies of those on devices.

The inputs of a collective are copied at the call, and its outputs are copied back when
a thread waits for it, both in the calling thread: where a device must not be used by
two threads at once, the calling thread is the one that may use it.  So neither the loop
nor the worker's threads see a tensor of a device, with one exception: a future on a
device that any thread may use is completed by a thread of the worker, which copies
first.

Tensors of the host are used as they are; each costs one check.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from asyncrpc.core.devices.backends import Backend, backend_of
from asyncrpc.errors import UsageError
from asyncrpc.parallel.collectives import tensors as shapes
from asyncrpc.parallel.collectives.torch_backend.work import error_for_torch

Tensors: TypeAlias = Sequence[torch.Tensor]


class _WriteBack(NamedTuple):
    """A tensor to copy back to its device.

    Attributes:
        host: filled by the collective.
        mark: the point in the device's work that the call was made at.
    """

    tensor: torch.Tensor
    host: torch.Tensor
    backend: Backend
    mark: Any


class StagedTensors:
    """The tensors of one call.

    Attributes:
        is_to_be_put_back: whether a tensor on a device is filled.
        is_exclusive: whether only the calling thread may use that device.
    """

    # On the class until a tensor is on a device, for speed: each call makes an object.
    is_to_be_put_back = False
    is_exclusive = False
    _targets: Sequence[_WriteBack] = ()

    def __init__(self, by_option: bool | None = None) -> None:  # noqa: FBT001  (hot)
        """Begin without tensors.

        Args:
            by_option: `DeviceOptions.exclusive`; None: as each device needs it.
        """
        self._by_option = by_option

    # --- at the call -----------------------------------------------------------------

    def read(self, tensors: Tensors) -> Tensors:
        """Return tensors that a collective reads."""
        for tensor in tensors:
            if not tensor.is_cpu:
                return [each if each.is_cpu else _copy(each) for each in tensors]
        return tensors

    def filled(self, tensors: Tensors) -> Tensors:
        """Return tensors that it fills; their present content does not count."""
        for tensor in tensors:
            if not tensor.is_cpu:
                return [
                    each if each.is_cpu else self._to_fill(each, _empty(each))
                    for each in tensors
                ]
        return tensors

    def changed(self, tensors: Tensors) -> Tensors:
        """Return tensors that it reads and fills."""
        for tensor in tensors:
            if not tensor.is_cpu:
                return [
                    each if each.is_cpu else self._to_fill(each, _copy(each))
                    for each in tensors
                ]
        return tensors

    def add(self, other: StagedTensors) -> None:
        """Take over the copies that another call must still make."""
        self._targets = [*self._targets, *other._targets]
        self.is_to_be_put_back = self.is_to_be_put_back or other.is_to_be_put_back
        self.is_exclusive = self.is_exclusive or other.is_exclusive

    def _to_fill(self, tensor: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
        backend = backend_of(tensor.device.type)
        is_exclusive = self._by_option
        if is_exclusive is None:
            is_exclusive = backend.is_exclusive
        self.is_exclusive = self.is_exclusive or is_exclusive
        self.is_to_be_put_back = True
        target = _WriteBack(tensor, host, backend, backend.mark(tensor.device))
        self._targets = [*self._targets, target]
        return host

    # --- when it has ended well ------------------------------------------------------

    def put_back(self) -> None:
        """Fill the tensors of devices, in this thread; complete when this returns."""
        for target in self._targets:
            try:
                _fill(target)
            except RuntimeError as error:
                host, device = target.host, target.tensor.device
                _blame(error, f"{shapes.text(host)} was copied to {device}")
                raise


def _fill(target: _WriteBack) -> None:
    tensor, host, backend, mark = target
    backend.reach(mark)  # a stream of another thread may still use it
    if tensor.layout is not torch.strided:
        host = host.to(tensor.device)  # torch copies these only from where they are
    # A tensor of inference mode is written in that alone, and this may be any thread.
    # Leaving the mode turns gradients on: they are turned off after it.
    with torch.inference_mode(mode=tensor.is_inference()), torch.no_grad():
        tensor.copy_(host)


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    """Return host memory for a tensor of a device."""
    _check(tensor)
    # The device is given because a program may have another default device.  A tensor
    # made in inference mode could not be filled by other threads.
    with torch.inference_mode(mode=False):
        return torch.empty(
            tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda
        )


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor of a device in host memory; complete."""
    try:
        with torch.no_grad():
            if tensor.layout is torch.sparse_coo:
                return _copy_of_sparse(tensor.detach())
            host = _empty(tensor)
            host.copy_(tensor.detach())
            return host
    except RuntimeError as error:
        _blame(error, f"{shapes.text(tensor)} was copied from {tensor.device}")
        raise


def _copy_of_sparse(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory, by its parts: TorchTPU's own cannot be summed."""
    return torch.sparse_coo_tensor(
        tensor._indices().to("cpu"),  # noqa: SLF001  the others want it summed first
        tensor._values().to("cpu"),  # noqa: SLF001  likewise
        tensor.shape,
        device="cpu",
        check_invariants=True,
    )


def _check(tensor: torch.Tensor) -> None:
    """Refuse a tensor that cannot be moved, or would come back changed."""
    try:
        shapes.check(tensor)
        _check_kept(tensor)
    except UsageError as error:
        raise error_for_torch(error) from error


def _check_kept(tensor: torch.Tensor) -> None:
    type_ = tensor.device.type
    if tensor.dtype in backend_of(type_).spoilt:
        raise UsageError(
            f"{shapes.text(tensor)} on {tensor.device}: {type_} does not keep its "
            "dtype; use another dtype, or a tensor of the host"
        )


def _blame(error: RuntimeError, doing: str) -> None:
    """Add a note to an error; keep its type, which programs check."""
    error.add_note(f"while {doing} for a collective")

"""A device in host memory: code for accelerators can be tested without an accelerator.

`install()` gives this process two devices, `fake:0` and `fake:1`.  To torch they are
devices like any other: tensors must be moved there, operations on tensors of two
devices fail, autograd and optimizers work (on `fake:0`: torch's engine assumes that
there is one).  Every operation is done by the host, and recorded: which thread used
which device, and whether two threads did at the same time, or the thread of an event
loop did, which breaks real accelerators with lazy graphs.

It needs torch 2.10 or later, where a device can be written in Python, and must be
installed before the first backward pass of the process, when torch counts devices.
Errors in a backward pass on it end the process (torch 2.13: `terminate called`).

Example:
    >>> ledger = fake_device.install()
    >>> (torch.ones(2, device="fake:0") + 1).cpu()
    tensor([2., 2.])
    >>> ledger.threads["fake:0"]
    {139872}
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import torch

__all__ = ["Ledger", "in_shared_memory", "install"]

TYPE: Final = "fake"
COUNT: Final = 2

# DLPack's type of a device that extends the framework.
_EXTENSION: Final = 12
_DEVICE_OFFSET: Final = 8  # in a DLTensor, after the pointer to its data

_aten = torch.ops.aten
_ON_HOST: Final = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)  # noqa: SLF001


@dataclass
class Ledger:
    """The operations done on the devices of this process.

    Attributes:
        threads: by device: identifiers of the threads that used it.
        on_loop: names of operations that ran in a thread whose event loop was running.
        overlaps: names of operations that began while another thread was in one on the
            same device.
        operations: how many there were.
    """

    threads: dict[str, set[int]] = field(default_factory=dict)
    on_loop: list[str] = field(default_factory=list)
    overlaps: list[str] = field(default_factory=list)
    operations: int = 0
    _busy: dict[str, list[int]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def clear(self) -> None:
        """Forget all records."""
        with self._lock:
            self.threads.clear()
            self.on_loop.clear()
            self.overlaps.clear()
            self.operations = 0

    @contextmanager
    def noting(self, operation: str, device: str) -> Iterator[None]:
        """Record the operation that the block does."""
        me = threading.get_ident()
        is_on_loop = False
        with suppress(RuntimeError):
            is_on_loop = asyncio.get_running_loop() is not None
        with self._lock:
            self.operations += 1
            busy = self._busy.setdefault(device, [])
            if any(other != me for other in busy):
                self.overlaps.append(operation)
            busy.append(me)
            self.threads.setdefault(device, set()).add(me)
            if is_on_loop:
                self.on_loop.append(operation)
        try:
            yield
        finally:
            with self._lock:
                busy.remove(me)


class _Module:
    """The module `torch.fake`."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return COUNT

    def synchronize(self, _device: Any = None) -> None:
        """Do nothing: every operation has ended when it returns."""

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing: the host's generator is the only one."""

    def ipc_collect(self) -> None:
        """Do nothing; its presence tells that processes can share this memory."""

    def export_storage(self, storage: torch.UntypedStorage) -> list[Any]:
        """Return the handle by which another process opens shared memory."""
        host: torch.UntypedStorage | None = getattr(storage, _IN_SHARED, None)
        if host is None:
            raise RuntimeError("only memory of in_shared_memory can be shared")
        return [os.getpid(), host._share_fd_cpu_()[0]]

    def open_storage(
        self, handle: list[Any], index: int, nbytes: int
    ) -> torch.UntypedStorage:
        """Return memory of another process."""
        pid, number = handle
        descriptor = os.open(f"/proc/{int(pid)}/fd/{int(number)}", os.O_RDWR)
        try:
            kind: Any = torch.UntypedStorage
            host = kind._new_shared_fd_cpu(descriptor, nbytes)  # noqa: SLF001
        finally:
            os.close(descriptor)
        flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(host)
        return _fake(flat, index).untyped_storage()

    def _is_in_bad_fork(self) -> bool:
        return False


_IN_SHARED: Final = "_in_shared_memory"  # attribute of a storage: its host storage


def in_shared_memory(host: torch.Tensor, index: int = 0) -> torch.Tensor:
    """Return a copy of a tensor on a device, in memory that `asyncrpc.share` takes."""
    copy = host.clone(memory_format=torch.contiguous_format)
    copy.untyped_storage()._share_fd_cpu_()
    fake = _fake(copy, index)
    setattr(fake.untyped_storage(), _IN_SHARED, copy.untyped_storage())
    return fake


_installed: list[Any] = []  # torch has one such device per process, until its end


def install() -> Ledger:
    """Make the devices of this process, unless they exist; return their ledger.

    Raises:
        RuntimeError: this torch is too old, or already has another device in Python.
    """
    if _installed:
        ledger: Ledger = _installed[0]
        return ledger
    try:
        from torch.utils.backend_registration import (  # noqa: PLC0415
            _setup_privateuseone_for_python_backend as set_up,
        )
    except ImportError as error:
        raise RuntimeError(
            f"torch {torch.__version__} has no devices written in Python; 2.10 has them"
        ) from error
    set_up(TYPE, backend_module=_Module())
    ledger = Ledger()
    library: Any = torch.library.Library  # torch does not declare its types
    anything = library("_", "IMPL")
    anything.fallback(_Fallback(ledger), "PrivateUse1")
    special = library("aten", "IMPL")
    special.impl("_copy_from", _copying(ledger), "PrivateUse1")
    special.impl("resize_", _resize, "PrivateUse1")
    special.impl("set_.source_Storage_storage_offset", _set, "PrivateUse1")
    forward, backward = _convolutions(_Fallback(ledger))
    special.impl("convolution_overrideable", forward, "PrivateUse1")
    special.impl("convolution_backward_overrideable", backward, "PrivateUse1")
    _installed.extend((ledger, anything, special))
    return ledger


# --- between the two sides -----------------------------------------------------------


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a fake tensor as a tensor of the host (any shape, dtype)."""
    storage = tensor.untyped_storage()
    address, size_bytes = storage.data_ptr(), storage.nbytes()
    host = torch._C._construct_storage_from_data_pointer(  # noqa: SLF001
        address, torch.device("cpu"), size_bytes
    )
    place = tensor.storage_offset(), tensor.shape, tensor.stride()
    view = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(host, *place)
    view.kept = storage  # type: ignore[attr-defined]  # it owns the memory
    return view


def _fake(host: torch.Tensor, index: int) -> torch.Tensor:
    """Return a tensor of a device over the memory of one of the host."""
    flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(host.untyped_storage())
    capsule = torch._C._to_dlpack(flat)  # noqa: SLF001
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = (
        ctypes.c_void_p,
        [ctypes.py_object, ctypes.c_char_p],
    )
    device = pointer(capsule, b"dltensor") + _DEVICE_OFFSET
    (ctypes.c_int32 * 2).from_address(device)[:] = [_EXTENSION, index]
    return _view_like(torch._C._from_dlpack(capsule), host)  # noqa: SLF001


def _view_like(fake: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
    """Return a view of a fake tensor's storage with the layout of a host tensor."""
    as_strided = _aten.as_strided.default.redispatch
    if fake.dtype != host.dtype:
        size_bytes = fake.untyped_storage().nbytes() // fake.dtype.itemsize
        whole = as_strided(_ON_HOST, fake, [size_bytes], [1], 0)
        whole_items = size_bytes * fake.dtype.itemsize // host.dtype.itemsize
        used = whole_items * host.dtype.itemsize // fake.dtype.itemsize
        whole = as_strided(_ON_HOST, whole, [used], [1], 0)
        fake = _aten.view.dtype.redispatch(_ON_HOST, whole, host.dtype)
    place = host.shape, host.stride(), host.storage_offset()
    view: torch.Tensor = as_strided(_ON_HOST, fake, *place)
    if host.is_conj():
        view = view.conj()
    return view


def _is_fake(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == TYPE


class _HostArguments:
    """The arguments of one operation, in their form for the host."""

    def __init__(self) -> None:
        self.index: int | None = None
        self._by_address: dict[int, torch.Tensor] = {}
        self._replaced: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._outs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def lower(self, value: Any) -> Any:
        """Return the host's form of an argument."""
        if _is_fake(value):
            if self.index is not None and self.index != value.device.index:
                if value.dim():
                    raise RuntimeError(
                        "Expected all tensors to be on the same device, but found at "
                        f"least two devices, {TYPE}:{self.index} and {value.device}!"
                    )
            else:
                self.index = value.device.index
            host = host_view(value)
            self._by_address.setdefault(host.untyped_storage().data_ptr(), value)
            self._replaced.append((host, value))
            return host
        if isinstance(value, torch.device) and value.type == TYPE:
            self.index = value.index or 0
            return torch.device("cpu")
        if isinstance(value, list | tuple):
            return type(value)(map(self.lower, value))
        return value

    def lower_out(self, value: Any) -> Any:
        """Return the host tensor for a result, which may still change its size."""
        if not _is_fake(value):
            return self.lower(value)
        self.index = value.device.index
        host = torch.empty(0, dtype=value.dtype, device="cpu")
        self._replaced.append((host, value))
        self._outs.append((host, value))
        return host

    def write_outs(self) -> None:
        """Copy the written results into the output tensors."""
        for host, fake in self._outs:
            if host.shape == fake.shape:
                host_view(fake).copy_(host)
            else:
                fake.data = _fake(host, fake.device.index)

    def lift(self, value: Any) -> Any:
        """Return torch's form of a result of the host."""
        if isinstance(value, list | tuple):
            return type(value)(map(self.lift, value))
        if not isinstance(value, torch.Tensor):
            return value
        for host, fake in self._replaced:
            if value is host:
                return fake
        address = value.untyped_storage().data_ptr()
        base = self._by_address.get(address) if address else None
        if base is not None:
            return _view_like(base, value)
        return _fake(value, self.index or 0)


class _Fallback:
    """Runs the operations of a device on the host."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def __call__(self, operation: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = _HostArguments()
        host_args = [arguments.lower(argument) for argument in args]
        schema = operation._schema  # noqa: SLF001
        outs = {argument.name for argument in schema.arguments if argument.is_out}
        host_kwargs = {
            key: arguments.lower_out(argument)
            if key in outs
            else arguments.lower(argument)
            for key, argument in kwargs.items()
        }
        device = f"{TYPE}:{arguments.index or 0}"
        with self._ledger.noting(str(operation), device):
            result = operation(*host_args, **host_kwargs)
            arguments.write_outs()
            return arguments.lift(result)


def _convolutions(fallback: _Fallback) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return a convolution and its backward, which torch leaves to devices."""

    def forward(*args: Any) -> Any:
        return fallback(_aten.convolution.default, *args)

    def backward(gradient: Any, inputs: Any, weight: Any, *how: Any) -> Any:
        sizes = [gradient.shape[1]]  # of the bias
        plain = _aten.convolution_backward.default
        return fallback(plain, gradient, inputs, weight, sizes, *how)

    return forward, backward


def _copying(ledger: Ledger) -> Callable[..., torch.Tensor]:
    def copy_from(
        source: torch.Tensor,
        target: torch.Tensor,
        non_blocking: bool = False,  # noqa: ARG001, FBT001, FBT002
    ) -> torch.Tensor:
        device = target if _is_fake(target) else source
        with ledger.noting("copy_", str(device.device)):
            host_to = host_view(target) if _is_fake(target) else target
            host_from = host_view(source) if _is_fake(source) else source
            host_to.copy_(host_from)
        return target

    return copy_from


def _set(
    tensor: torch.Tensor, storage: Any, offset: int, size: Any, stride: Any = ()
) -> torch.Tensor:
    """Move a tensor to another storage of its device."""
    plain = _aten.set_.source_Storage_storage_offset.redispatch
    moved: torch.Tensor = plain(_ON_HOST, tensor, storage, offset, size, stride)
    return moved


def _resize(
    tensor: torch.Tensor, size: Any, *, memory_format: Any = None
) -> torch.Tensor:
    """Give a tensor another shape, and other memory."""
    _ = memory_format
    host = host_view(tensor)
    bigger = torch.zeros(size, dtype=tensor.dtype, device="cpu")
    kept = min(host.numel(), bigger.numel())
    bigger.view(-1)[:kept] = host.reshape(-1)[:kept]
    fake = _fake(bigger, tensor.device.index)
    tensor.data = fake
    return tensor

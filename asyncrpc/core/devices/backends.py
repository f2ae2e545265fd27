"""What a type of device can do: one class each.  Imported when used, and not before.

All methods but `mark` and `empty` run in a thread of the device, see `staging`.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch

from asyncrpc.core.devices import pjrt
from asyncrpc.core.devices.names import DeviceName
from asyncrpc.core.devices.streams import carried_mark
from asyncrpc.core.serde import Copy

_cuda: Any = torch.cuda  # torch does not annotate it


class Backend:
    """A type of device whose tensors are complete when an operation returns.

    Also for types that are registered with torch: TorchTPU's `tpu`, and any other
    device that takes the place of `PrivateUse1`.

    Attributes:
        type: as torch names it.
        threads: how many copies run at once, per device that is not exclusive.
        is_exclusive: whether only one thread may use the device at a time, for any
            purpose.
        spoilt: dtypes that it accepts, but does not preserve.
    """

    threads = 2
    is_exclusive = False
    spoilt: frozenset[torch.dtype] = frozenset()

    def __init__(self, type_: str) -> None:
        self.type = type_

    def count(self) -> int:
        """Return how many devices of the type this process has."""
        if not is_loaded(self.type):
            return 0
        module = getattr(torch, self.type)
        if hasattr(module, "is_available") and not module.is_available():
            return 0
        return int(module.device_count())

    def empty(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return memory on the host that a tensor of the device can be copied to."""
        return torch.empty_strided(
            tensor.shape, _dense_strides(tensor), dtype=tensor.dtype, device="cpu"
        )

    def mark(self, device: torch.device) -> Any:
        """Return a mark that the device reaches once all tensors of now are ready.

        None: they are ready already.
        """
        _ = device

    def reach(self, mark: Any) -> None:
        """Wait until the device has reached a mark."""

    def to_host(self, copies: Sequence[Copy]) -> None:
        """Fill the targets; complete when this returns."""
        with torch.no_grad():
            for copy in copies:
                copy.target.copy_(copy.source.detach())

    def to_device(
        self, tensors: Sequence[torch.Tensor], index: int
    ) -> list[torch.Tensor]:
        """Return copies of host tensors on a device; ready for the receiver."""
        for tensor in tensors:
            if tensor.dtype in self.spoilt:
                raise TypeError(f"{self.type} does not preserve {tensor.dtype}")
        placed = [tensor.to(f"{self.type}:{index}") for tensor in tensors]
        for tensor in placed:
            if tensor.is_cpu:  # torch_xla leaves quantized ones where they are
                raise TypeError(f"{self.type} does not support {tensor.dtype}")
        return placed

    def choose(self, index: int) -> None:
        """Make a device the default of this thread."""

    def settle(self, index: int) -> None:
        """Prepare to release a device: leave no work that could disturb others."""

    def write(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Fill tensors on a device from those of the host; complete on return."""
        with torch.no_grad():
            for target, source in pairs:
                target.copy_(source)

    # --- memory that processes share, of types that have it --------------------------

    def export(self, storage: torch.UntypedStorage) -> list[Any]:
        """Return a handle by which another process can open a storage, once."""
        return list(getattr(torch, self.type).export_storage(storage))

    def open(self, handle: list[Any], index: int, nbytes: int) -> torch.UntypedStorage:
        """Return a storage over memory of another process."""
        storage: torch.UntypedStorage = getattr(torch, self.type).open_storage(
            handle, index, nbytes
        )
        return storage

    def end(self, handle: list[Any]) -> None:
        """The process that opened exported memory has let go of it, or has ended."""


class Cuda(Backend):
    """CUDA: copies on a stream of their own, which waits for the program's.

    Received tensors belong to the default stream, like those that a program makes; a
    program that uses them on another stream must do what torch asks for
    (`record_stream`).
    """

    def __init__(self, type_: str) -> None:
        super().__init__(type_)
        self._streams = threading.local()

    def count(self) -> int:
        """Return how many GPUs this process has, without starting CUDA in it."""
        return int(_cuda.device_count())

    def _stream(self, index: int) -> Any:
        """Return this thread's stream for copies, on a device."""
        name = f"of_{index}"
        if not hasattr(self._streams, name):
            setattr(self._streams, name, _cuda.Stream(index))
        return getattr(self._streams, name)

    def empty(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return pinned memory: torch keeps a pool of it."""
        return torch.empty_strided(
            tensor.shape,
            _dense_strides(tensor),
            dtype=tensor.dtype,
            pin_memory=True,
            device="cpu",
        )

    def mark(self, device: torch.device) -> Any:
        """Return events behind the work that streams have been given so far.

        The streams are the default one, on which functions run and received tensors
        are; the current one here, which may be that of a waiting coroutine; and that of
        the thread in which a call was made.
        """
        default, current = _cuda.default_stream(device), _cuda.current_stream(device)
        events = [default.record_event()]
        if current != default:
            events.append(current.record_event())
        if (carried := carried_mark(device)) is not None:
            events.append(carried)
        return events

    def reach(self, mark: Any) -> None:
        """Wait for events."""
        for event in mark:
            event.synchronize()

    def to_host(self, copies: Sequence[Copy]) -> None:
        """Fill the targets, each when its source is ready."""
        for copy in copies:
            side = self._stream(copy.source.device.index)
            with torch.no_grad(), _cuda.stream(side):
                for event in copy.mark:
                    side.wait_event(event)
                copy.target.copy_(copy.source.detach(), non_blocking=True)
        for index in {copy.source.device.index for copy in copies}:
            self._stream(index).synchronize()

    def to_device(
        self, tensors: Sequence[torch.Tensor], index: int
    ) -> list[torch.Tensor]:
        """Return copies in memory of the default stream."""
        where = f"cuda:{index}"
        with _cuda.device(index):
            placed = [
                torch.empty_like(tensor, device=where)
                if _is_block(tensor)
                else tensor.to(where)  # on this thread's stream: the default one
                for tensor in tensors
            ]
        pairs = zip(placed, tensors, strict=True)
        self._fill([pair for pair in pairs if _is_block(pair[0])], index)
        return placed

    def write(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Fill tensors after what the default stream does with them."""
        for target, source in pairs:
            self._fill([(target, source)], target.device.index)

    def export(self, storage: torch.UntypedStorage) -> list[Any]:
        """Return this process's id and torch's handles, which it cannot open itself."""
        shared: Any = storage
        return [os.getpid(), *shared._share_cuda_()]

    def open(self, handle: list[Any], index: int, nbytes: int) -> torch.UntypedStorage:
        """Open torch's handles on the device where the memory is."""
        pid, device, *rest = handle
        if pid == os.getpid():
            raise RuntimeError("CUDA does not open memory in the process that made it")
        _cuda.init()
        kind: Any = torch.UntypedStorage
        storage: torch.UntypedStorage = kind._new_shared_cuda(device, *rest)  # noqa: SLF001
        if storage.device.index != index or storage.nbytes() != nbytes:
            raise RuntimeError(
                f"{storage.nbytes()} bytes on {storage.device} came instead"
            )
        return storage

    def end(self, handle: list[Any]) -> None:
        """Count down for a process that may have been killed before it did.

        torch keeps memory until the process that opened it has counted down; a killed
        process never does.  One count too many is harmless: each handle has its own.
        """
        _, device, _, _, _, counter, offset, *_ = handle
        kind: Any = torch.UntypedStorage
        kind._release_ipc_counter(counter, offset, device=device)  # noqa: SLF001

    def _fill(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], index: int
    ) -> None:
        side = self._stream(index)
        # Their memory may have had another use, which may still be under way.
        side.wait_stream(_cuda.default_stream(index))
        with torch.no_grad(), _cuda.stream(side):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        side.synchronize()


class Tpu(Backend):
    """TorchTPU: eager, and safe to use from several threads."""

    def count(self) -> int:
        """Return how many TPUs this process has."""
        # It counts PCI devices, and may find 0: with the plugin of a CPU, for example,
        # there is one device all the same.
        module = getattr(torch, "tpu", None)
        return 0 if module is None else max(int(torch.accelerator.device_count()), 1)


class Xla(Backend):
    """torch_xla: lazy, and not to be used by two threads at a time."""

    is_exclusive = True
    spoilt = frozenset({torch.complex128})  # torch_xla 2.9 loses the imaginary parts

    def __init__(self, type_: str) -> None:
        super().__init__(type_)
        self._of_thread = threading.local()

    def count(self) -> int:
        """Return how many XLA devices this process can use."""
        pjrt.set_up()
        runtime = importlib.import_module("torch_xla.runtime")
        return int(runtime.addressable_runtime_device_count())

    def choose(self, index: int) -> None:
        """Make torch_xla use a device by default."""
        xla: Any = sys.modules.get("torch_xla")
        if xla is None or index == getattr(self._of_thread, "index", 0):
            return
        if index < self.count():  # else the worker is about to raise that it lacks it
            xla._XLAC._xla_set_default_device(f"xla:{index}")  # noqa: SLF001
            self._of_thread.index = index

    def settle(self, index: int) -> None:
        """Begin to compute all that is pending on a device.

        While another thread does this, not even the shape of a tensor may be read;
        afterwards it may.
        """
        xla = sys.modules.get("torch_xla")
        if xla is not None:
            self.choose(index)
            xla.sync()


_BUILT_IN: dict[str, type[Backend]] = {"cuda": Cuda, "tpu": Tpu, "xla": Xla}


def backend_of(type_: str) -> Backend:
    """Return the backend of a type of device."""
    return _BUILT_IN.get(type_, Backend)(type_)


class DeviceLockHooks:
    """What the device lock of one worker does at its begin and end."""

    def __init__(self, devices: Sequence[DeviceName]) -> None:
        """Name the devices.

        Args:
            devices: of types that are exclusive; without an index: all of the type.
        """
        self._devices = [(backend_of(device.type), device.index) for device in devices]
        self._counts: dict[str, int] = {}

    def begin(self) -> None:
        """Make the worker's only device of a type the default of this thread."""
        for backend, index in self._devices:
            backend.choose(index or 0)

    def end(self) -> None:
        """Leave nothing pending on any of the devices."""
        for backend, index in self._devices:
            if index is not None:
                backend.settle(index)
            elif is_loaded(backend.type):
                for device_index in reversed(range(self._count(backend))):
                    backend.settle(device_index)  # the first is the thread's own again

    def _count(self, backend: Backend) -> int:
        if backend.type not in self._counts:
            self._counts[backend.type] = backend.count()
        return self._counts[backend.type]


def is_loaded(type_: str) -> bool:
    """Return whether this process can use devices of a type, without importing it.

    A peer's message must not make a process import an accelerator's runtime.
    """
    if type_ == "xla":
        return "torch_xla" in sys.modules
    module = getattr(torch, type_, None)
    return type_ not in _NO_DEVICES and hasattr(module, "device_count")


_NO_DEVICES = frozenset({"cpu", "meta"})


def _is_block(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized


def _dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a dense copy: as the tensor's, if it has no holes."""
    shape, strides = tensor.shape, tensor.stride()
    order = list(range(len(shape) - 1, -1, -1))
    if not tensor.is_contiguous() and all(strides):
        order.sort(key=lambda at: strides[at])
    dense, step = [0] * len(shape), 1
    for at in order:
        dense[at] = step
        step *= max(shape[at], 1)
    return tuple(dense)

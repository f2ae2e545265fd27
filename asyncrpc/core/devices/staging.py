"""The devices of one worker: copies to the host and from it, in threads.

A message with tensors on devices is encoded at once, over host memory that is still
being filled; it is sent when the memory is filled.  A received message with tensors for
devices is read when they are there.  To the rest of the runtime both are like large
messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from asyncrpc.core.devices.backends import Backend, backend_of, is_loaded
from asyncrpc.core.devices.names import CPU, DeviceName
from asyncrpc.core.loop.threads import ThreadPool, outcome_to
from asyncrpc.core.serde import Copy
from asyncrpc.errors import (
    AsyncRpcError,
    DecodeError,
    EncodeError,
    Outcome,
    RejectedError,
    UsageError,
)

Placed = dict[int, torch.Tensor]
Wanted = dict[int, tuple[torch.Tensor, str]]  # in host memory, and its device


class Devices:
    """A `serde.Stager`, and what fills and empties the memory that it names."""

    def __init__(
        self,
        name: str,
        loop: asyncio.AbstractEventLoop,
        pool: ThreadPool,
        declared: Sequence[DeviceName] | None,
    ) -> None:
        """Prepare.

        Args:
            name: of the worker.
            pool: its threads.
            declared: its devices; None: those that the process has.
        """
        self._name = name
        self._loop = loop
        self._own_pool = pool
        self._backends: dict[str, Backend] = {}
        self._pools: dict[str, ThreadPool] = {}
        self._counts: dict[str, int] = {}
        self._declared = declared

    # --- the devices -----------------------------------------------------------------

    async def start(self) -> None:
        """Find the devices that the options name."""
        for name in self._declared or ():
            backend = self._backend(name.type)
            if not name.is_cpu:
                await self._run(self._counted(backend), backend, name.index)
                if self._absence(backend, name.index or 0):
                    here = ", ".join(map(str, self._present_devices()))
                    raise UsageError(
                        f"DeviceOptions.names lists {name}, which this process does "
                        f"not have; it has {here}"
                    )

    def _present_devices(self) -> list[DeviceName]:
        """Return the devices that are known to be in this process, `cpu` first."""
        devices = [DeviceName(CPU)]
        for type_, count in self._counts.items():
            devices += (DeviceName(type_, at) for at in range(count))
        return devices

    @property
    def names(self) -> list[str]:
        """The devices that are known to be this worker's, `cpu` first."""
        return [
            str(device)
            for device in self._present_devices()
            if self._is_allowed(device)
        ]

    def require(self, name: str) -> str:
        """Return the name of a device of this worker, as torch takes it.

        To be called in a thread of the worker: it may have to ask the device.
        """
        device = DeviceName.parse(name)
        if device.is_cpu:
            return CPU
        if not self._is_allowed(device):
            raise UsageError(self._lacks(device))
        backend = self._backend(device.type)
        self._counted(backend)()
        problem = self._absence(backend, device.index or 0)
        if problem:
            raise UsageError(problem)
        return device.whole

    def _is_allowed(self, device: DeviceName) -> bool:
        if device.is_cpu:
            return True
        if self._declared is None:
            return (
                is_loaded(device.type) and not self._backend(device.type).is_exclusive
            )
        return any(
            declared.type == device.type and declared.index in (None, device.index or 0)
            for declared in self._declared
        )

    def _backend(self, type_: str) -> Backend:
        backend = self._backends.get(type_)
        if backend is None:
            backend = self._backends[type_] = backend_of(type_)
        return backend

    def _counted(self, backend: Backend) -> Callable[[], None]:
        """Return a function that counts the devices of a type in one of its threads."""

        def count() -> None:
            if backend.type not in self._counts:
                self._counts[backend.type] = backend.count()

        return count

    def _absence(self, backend: Backend, index: int) -> str:
        """Return why a device is not available; empty if it is."""
        count = self._counts.get(backend.type, 0)
        if index < count:
            return ""
        return (
            f"worker {self._name!r} has no device {backend.type}:{index}; it "
            f"has {', '.join(self.names)}"
        )

    def _pool(self, backend: Backend, index: int) -> ThreadPool:
        """Return the threads of a device."""
        if backend.is_exclusive or self._own_pool.is_exclusive:
            return self._own_pool  # whatever uses the device has its lock there
        name = f"{backend.type}:{index}"
        pool = self._pools.get(name)
        if pool is None:
            pool = ThreadPool(f"{self._name}-{name}", backend.threads, self._loop)
            self._pools[name] = pool
        return pool

    # --- memory that processes share -------------------------------------------------

    def marks(self, devices: Iterable[torch.device]) -> list[tuple[torch.device, Any]]:
        """Return marks that devices reach once all tensors of now are ready."""
        marks = (
            (device, self._backend(device.type).mark(device)) for device in set(devices)
        )
        return [pair for pair in marks if pair[1] is not None]

    async def reach(self, marks: Sequence[tuple[torch.device, Any]]) -> None:
        """Wait until the devices have reached their marks."""
        for device, mark in marks:
            backend = self._backend(device.type)
            await self._run(partial(backend.reach, mark), backend, device.index)

    async def export(self, storage: torch.UntypedStorage) -> list[Any]:
        """Return a handle by which another process can open a storage, once."""
        device = storage.device
        backend = self._backend(device.type)
        try:
            job = partial(backend.export, storage)
            handle: list[Any] = await self._run(job, backend, device.index)
        except (AttributeError, RuntimeError) as error:
            raise EncodeError(
                f"memory on {device} cannot be shared: {error}",
                outcome=Outcome.NOT_EXECUTED,
            ) from error
        return handle

    async def open(
        self, where: str, handle: list[Any], nbytes: int
    ) -> torch.UntypedStorage:
        """Return a storage over memory of another process."""
        try:
            device = DeviceName.parse(where)
        except UsageError as error:
            raise DecodeError(str(error)) from error
        if not self._is_allowed(device):
            raise DecodeError(self._lacks(device))
        backend, index = self._backend(device.type), device.index or 0
        try:
            job = partial(backend.open, handle, index, nbytes)
            storage: torch.UntypedStorage = await self._run(job, backend, index)
        except (AttributeError, OSError, RuntimeError, TypeError, ValueError) as error:
            raise DecodeError(
                f"memory on {device} cannot be opened: {error}"
            ) from error
        return storage

    def end(self, device: torch.device, handle: list[Any]) -> None:
        """The process that opened one of our storages no longer uses it."""
        self._backend(device.type).end(handle)

    async def _run(
        self, job: Callable[[], Any], backend: Backend, index: int | None
    ) -> Any:
        done: asyncio.Future[Any] = self._loop.create_future()
        self._pool(backend, index or 0).submit(job, outcome_to(done))
        return await done

    # --- to the host -----------------------------------------------------------------

    def to_host(self, tensor: torch.Tensor) -> Copy:
        """Return the copy to make of a tensor's bytes; see `serde.Stager`."""
        device = tensor.device
        if not self._is_allowed(DeviceName(device.type, device.index)):
            raise EncodeError(
                f"a tensor on device {str(device)!r} cannot be sent by worker "
                f"{self._name!r}: {self._undeclared(device.type)}",
                outcome=Outcome.NOT_EXECUTED,
            )
        backend = self._backend(device.type)
        if tensor.dtype in backend.spoilt:
            raise EncodeError(
                f"a tensor of {tensor.dtype} on {device} cannot be sent: "
                f"{device.type} does not preserve that dtype",
                outcome=Outcome.NOT_EXECUTED,
            )
        return Copy(tensor, backend.empty(tensor), backend.mark(tensor.device))

    def _lacks(self, device: DeviceName) -> str:
        text = f"worker {self._name!r} has no device {device}"
        return f"{text}: {self._undeclared(device.type)}"

    def _undeclared(self, type_: str) -> str:
        if self._declared is None:
            return f'declare it with DeviceOptions(names=("{type_}",))'
        declared = ", ".join(map(str, self._declared)) or "none"
        return f"its DeviceOptions.names are {declared}"

    async def fetched(self, copies: Sequence[Copy]) -> None:
        """Wait until host memory has been filled."""
        ended = self._loop.create_future()
        self.fill(copies, partial(outcome_to(ended), None))
        await ended

    def fill(
        self, copies: Iterable[Copy], done: Callable[[AsyncRpcError | None], None]
    ) -> None:
        """Copy tensors to the host, then call `done`, with the error if any."""
        groups: dict[tuple[str, int], list[Copy]] = {}
        for copy in copies:
            device = copy.source.device
            groups.setdefault((device.type, device.index or 0), []).append(copy)

        def ended(error: BaseException | None) -> None:
            done(_unsendable(error))

        together = _Together(len(groups), ended)
        for (type_, index), group in groups.items():
            backend = self._backend(type_)
            job = partial(backend.to_host, group)
            self._submit(self._pool(backend, index), job, together.on_done)

    @staticmethod
    def _submit(
        pool: ThreadPool,
        job: Callable[[], Any],
        done: Callable[[Any, BaseException | None], None],
    ) -> None:
        try:
            pool.submit(job, done)
        except RejectedError as error:  # the worker is closing
            done(None, error)

    async def copies_of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return tensors in host memory; only those on devices are copied."""
        copies = {
            index: self.to_host(tensor)
            for index, tensor in enumerate(tensors)
            if not tensor.is_cpu
        }
        if copies:
            await self.fetched(list(copies.values()))
        return [
            copies[index].target if index in copies else tensor
            for index, tensor in enumerate(tensors)
        ]

    # --- from the host ---------------------------------------------------------------

    async def write(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Fill a tensor of a device with one of the host, of the same shape."""
        device = target.device
        backend = self._backend(device.type)
        await self._run(
            partial(backend.write, [(target, source)]), backend, device.index
        )

    async def placed(self, wanted: Wanted) -> Placed:
        """Move tensors of the host to their devices."""
        ended = self._loop.create_future()
        self.place(wanted, outcome_to(ended))
        placed: Placed = await ended
        return placed

    def place(
        self, wanted: Wanted, done: Callable[[Placed, BaseException | None], None]
    ) -> None:
        """Move tensors of the host to their devices, then hand them over."""
        placed: Placed = {}
        groups: dict[DeviceName, list[int]] = {}
        for index, (tensor, where) in wanted.items():
            if where == CPU:
                placed[index] = tensor
            else:
                try:
                    device = DeviceName.parse(where)
                except UsageError as error:
                    done({}, error)
                    return
                groups.setdefault(device, []).append(index)
        if not groups:
            done(placed, None)
            return
        together = _Together(len(groups), lambda error: done(placed, error))
        for device, indices in groups.items():
            self._place_on(device, indices, wanted, placed, together)

    def _place_on(
        self,
        device: DeviceName,
        indices: list[int],
        wanted: Wanted,
        placed: Placed,
        together: _Together,
    ) -> None:
        if not self._is_allowed(device):
            problem = f"{self._lacks(device)}; send tensor.cpu(), or map the device"
            together.on_done(None, DecodeError(problem))
            return
        backend, at = self._backend(device.type), device.index or 0
        count = self._counted(backend)

        def job() -> None:
            count()
            problem = self._absence(backend, at)
            if problem:
                raise DecodeError(f"{problem}; send tensor.cpu(), or map the device")
            tensors = [wanted[index][0] for index in indices]
            placed.update(
                zip(indices, _copy_to_device(backend, tensors, at), strict=True),
            )

        self._submit(self._pool(backend, at), job, together.on_done)

    async def close(self, timeout_s: float) -> list[str]:
        """Let the threads end; return the names of those that have not in time."""
        pools = list(self._pools.values())
        unended = await asyncio.gather(*(pool.close(timeout_s) for pool in pools))
        return [name for names in unended for name in names]


class _Together:
    """Counts jobs; calls back once all have ended, with the first error if any."""

    def __init__(
        self, count: int, done: Callable[[BaseException | None], None]
    ) -> None:
        self._open_count = count
        self._done = done
        self._error: BaseException | None = None

    def on_done(self, _result: object, error: BaseException | None) -> None:
        """Count one as ended."""
        self._error = self._error or error
        self._open_count -= 1
        if not self._open_count:
            self._done(self._error)


def _copy_to_device(
    backend: Backend, tensors: list[torch.Tensor], index: int
) -> list[torch.Tensor]:
    try:
        return backend.to_device(tensors, index)
    except (RuntimeError, TypeError, ValueError) as error:
        names = ", ".join(sorted({_described(tensor) for tensor in tensors})[:4])
        # The first sentence: torch's text may be pages long.
        why = str(error).partition("\n")[0].partition(". ")[0]
        raise DecodeError(
            f"{names} could not be put on {backend.type}:{index}: {why}"
        ) from error


def _described(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    layout = str(tensor.layout).removeprefix("torch.")
    kind = "tensor" if layout == "strided" else f"{layout} tensor"
    return f"a {kind} of {dtype} and shape {tuple(tensor.shape)}"


def _unsendable(error: BaseException | None) -> AsyncRpcError | None:
    if error is None or isinstance(error, AsyncRpcError):
        return error
    return EncodeError(
        f"a tensor could not leave its device: {type(error).__name__}: {error}",
        outcome=Outcome.NOT_EXECUTED,
    )

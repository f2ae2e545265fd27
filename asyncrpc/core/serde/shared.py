"""Storages that are sent by reference: `share` marks them, codecs look for the mark.

A mark is 16 random bytes on the storage itself, the *key*, so every view of a shared
tensor has it, and it ends with the memory.  The runtime knows which memory a key stands
for in another process (`FindStorage`).

Storages that are shared together lie in one `MemoryFile`: one descriptor for a whole
module, where torch takes one for each storage.  A storage that is shared alone is
torch's as well, so that its own queues can send it.

All of it is sealed: memory that its sender can shrink would end with SIGBUS whoever
touches it.

Source: memfd_create(2), mmap(2).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeAlias, TypeVar

import torch
from torch import nn
from torch._C import DispatchKey

from asyncrpc.core.arguments import check_kind
from asyncrpc.core.host.shortage import shortage_of
from asyncrpc.core.serde.encoded import key_of, mark
from asyncrpc.errors import UsageError

KEY_BYTES: Final = 16
_ERROR_NUMBER: Final = re.compile(r"\(([0-9]+)\)\s*\Z")
_PLACE: Final = "_asyncrpc_place"  # of a storage in a MemoryFile

# Not named by every Python that we support.
_F_ADD_SEALS: Final = 1033
_F_GET_SEALS: Final = 1034
_SEALS: Final = 0x1 | 0x2 | 0x4  # no more seals, no shrinking, no growing
_MAP_FIXED: Final = 0x10

# Without both, torch moves each storage to memory with a descriptor of its own.
_shares_files: Final = hasattr(os, "memfd_create") and hasattr(
    torch.UntypedStorage, "_swap_data_ptr_"
)

Shareable = TypeVar("Shareable", bound=torch.Tensor | nn.Module)


# Returns a shared storage that a peer refers to, by its key.
FindStorage: TypeAlias = Callable[[bytes], torch.UntypedStorage]


def share(value: Shareable) -> Shareable:
    """Move a tensor, or a module's state, into memory shared with peers on this host.

    From now on it is sent by reference between the workers of one host: the cost of a
    call does not depend on its size, and every process sees a write of any other, as
    threads would: at once, and without a lock.  So one process can train a model that
    others use (Hogwild, A3C).

    Views of a shared tensor, and tensors made over it, are shared too; results computed
    from it are not.  Passed on to a third worker it stays the same memory; sent back to
    its first worker, it is that worker's own memory.  The memory lives until no process
    uses it, and some seconds more.

    Memory of a CUDA device stays where it is, and is used there by the other processes.
    Only the worker that shares it can send it on.  It lives as long as another process
    has a tensor over it, also if that process is killed meanwhile; and no longer than
    the process that made it.

    A process that could shrink host memory would end all that use it: this memory is
    sealed.  What `torch.Tensor.share_memory_` has moved before is not, and is refused
    by workers under `Policy.STRICT`; share a clone of it.

    Args:
        value: a dense tensor (any shape and dtype), or a module, in host memory or on a
            device whose memory processes can share.  In host memory the tensor and its
            gradient, or the module's parameters, buffers and gradients, are moved and
            stay the same objects; together they take one descriptor.  A numpy array
            over the former memory is then separate from the tensor.

    Returns:
        `value` itself.

    Raises:
        UsageError: `value` is not a tensor or a module, or one of its tensors is
            sparse, is made of other tensors (a DTensor, say), has no memory yet, or is
            on a device whose memory processes cannot share.  Nothing was moved.
        OSError: the system has no memory or no descriptor left.  Nothing was moved.

    Thread safety: no other thread may use `value` meanwhile.

    Example:
        >>> model = asyncrpc.share(nn.Linear(4, 2))
        >>> await worker.peer("trainer").call(train, model)  # trains this very model

    Source: torch.Tensor.share_memory_; unlike there, a tensor that is only in shared
    memory is still sent by value.  torch.multiprocessing can send a tensor that was
    shared alone; what was shared in a module goes by `launch`, `Queue` and calls.
    """
    check_kind("value", value, (torch.Tensor, nn.Module), "a tensor or a module")
    tensors = list(_tensors_of(value))
    for tensor in tensors:
        _check_memory(tensor)
    storages = [tensor.untyped_storage() for tensor in tensors]
    fresh = [
        storage for storage in storages if storage.nbytes() and key_of(storage) is None
    ]
    move_together([storage for storage in fresh if storage.device.type == "cpu"])
    for storage in fresh:
        if key_of(storage) is None:
            mark(storage, os.urandom(KEY_BYTES))
    return value


def _check_memory(tensor: torch.Tensor) -> None:
    """Refuse a tensor that has no memory of its own, or none that can be shared."""
    if torch.nn.parameter.is_lazy(tensor):
        raise UsageError(
            "value must have its memory; a parameter of a lazy module has none before"
            " the module's first forward pass"
        )
    if _is_wrapper(tensor):
        raise UsageError(
            "value must be a tensor with memory of its own, or a module of such; a"
            f" {type(tensor).__qualname__} is computed from other tensors and cannot be"
            " shared: share those, such as DTensor.to_local()"
        )
    if tensor.layout is not torch.strided or not can_share(tensor.device):
        layout = str(tensor.layout).removeprefix("torch.")
        raise UsageError(
            "value must be dense, and in host memory or that of a CUDA device; a"
            f" {layout} tensor on {str(tensor.device)!r} cannot be shared"
        )


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether other code stands behind a tensor's operations than memory.

    The storage of such a tensor has a length and no memory: to touch it would end the
    process by SIGSEGV.
    """
    return (
        torch._C._dispatch_keys(tensor).has(DispatchKey.Python)  # noqa: SLF001
        or torch._is_functional_tensor(tensor)  # noqa: SLF001
        or torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # noqa: SLF001
        or tensor.is_nested
    )


def can_share(device: torch.device) -> bool:
    """Return whether processes can share memory of a device, or of the host."""
    if device.type == "cpu":
        return True
    # torch shares the memory of CUDA devices only, by this method.
    return hasattr(getattr(torch, device.type, None), "ipc_collect")


class MemoryFile:
    """Memory of one descriptor, in which several storages lie.

    Attributes:
        descriptor: open as long as this object or one of the storages lives.
        identity: the file's, the same in every process.
    """

    __slots__ = ("__weakref__", "descriptor", "identity", "nbytes")

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor).atexit = False
        status = os.fstat(descriptor)
        self.identity = status.st_dev, status.st_ino
        self.nbytes = status.st_size

    @classmethod
    def create(cls, nbytes: int) -> MemoryFile:
        """Make memory without a name."""
        return cls(_sealed_file(nbytes))

    def storage(self, start: int, nbytes: int) -> torch.UntypedStorage:
        """Return a storage over a part that begins with a page."""
        if start % mmap.PAGESIZE or start + nbytes > self.nbytes:
            raise OSError(f"no part of {nbytes} bytes at {start} of {self.nbytes}")
        name = f"/proc/self/fd/{self.descriptor}"
        try:
            kind: Any = torch.UntypedStorage  # torch's own method is untyped
            part: torch.UntypedStorage = kind.from_file(name, True, nbytes)  # noqa: FBT003
        except RuntimeError as error:
            why = shortage_of(error) or error
            raise OSError(f"shared memory cannot be mapped: {why}") from error
        if start:  # torch maps the file's beginning
            rights, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED
            address = part.data_ptr()
            mapped = _LIBC.mmap(
                address, nbytes, rights, flags | _MAP_FIXED, self.descriptor, start
            )
            if mapped != address:
                number = ctypes.get_errno()
                raise OSError(number, f"cannot map memory: {os.strerror(number)}")
        setattr(part, _PLACE, (self, start))
        return part


class MappedFiles:
    """What this process has mapped for one receiver: each file and each part once."""

    def __init__(self) -> None:
        self._files = weakref.WeakValueDictionary[tuple[int, int], MemoryFile]()
        self._storages = weakref.WeakValueDictionary[
            tuple[int, int, int], torch.UntypedStorage
        ]()

    def add(self, storage: torch.UntypedStorage) -> tuple[int, int]:
        """Add a storage that is sent; return its descriptor and its start there."""
        descriptor, start = place_of(storage)
        place = getattr(storage, _PLACE, None)
        if place is not None:
            self._files[place[0].identity] = place[0]
        self._storages[*_identity(descriptor), start] = storage
        return descriptor, start

    def storage_at(
        self, descriptor: int, start: int, nbytes: int
    ) -> torch.UntypedStorage:
        """Return the storage over a part of a file that another process shares.

        Args:
            descriptor: of the file; stays the caller's.
            nbytes: length of the part; the file must have it.
        """
        identity = _identity(descriptor)
        storage = self._storages.get((*identity, start))
        if storage is not None and storage.nbytes() == nbytes:
            return storage
        is_whole = not start and os.fstat(descriptor).st_size == nbytes
        if is_whole or not is_sealed(descriptor):
            storage = storage_over(descriptor, None, nbytes)
        else:
            file = self._files.get(identity)
            if file is None:
                file = self._files[identity] = MemoryFile(os.dup(descriptor))
            storage = file.storage(start, nbytes)
        self._storages[*identity, start] = storage
        return storage


def move_together(storages: Iterable[torch.UntypedStorage]) -> None:
    """Move storages of the host to shared memory, under all their views.

    All or none are moved; those in shared memory stay.
    """
    unshared = {
        storage._cdata: storage  # noqa: SLF001
        for storage in storages
        if storage.nbytes() and not storage.is_shared()
    }
    moving = list(unshared.values())
    if not _shares_files:
        for storage in moving:
            place_of(storage)
        return
    if len(moving) < 2:  # noqa: PLR2004
        for storage in moving:
            _move_alone(storage)
        return
    starts, end = _side_by_side(moving)
    file = MemoryFile.create(end)
    parts = [
        file.storage(start, storage.nbytes())
        for start, storage in zip(starts, moving, strict=True)
    ]
    for part, storage in zip(parts, moving, strict=True):
        part.copy_(storage)
    for part, storage, start in zip(parts, moving, starts, strict=True):
        storage._swap_data_ptr_(part)  # type: ignore[attr-defined]
        setattr(storage, _PLACE, (file, start))


def _move_alone(storage: torch.UntypedStorage) -> None:
    """Move a storage to shared memory that torch can send, too."""
    descriptor = _sealed_file(storage.nbytes())
    try:
        moved = storage_over(descriptor, None, storage.nbytes())
    except RuntimeError as error:
        why = shortage_of(error) or error
        raise OSError(f"shared memory cannot be mapped: {why}") from error
    finally:
        os.close(descriptor)
    moved.copy_(storage)
    storage._swap_data_ptr_(moved)  # type: ignore[attr-defined]


def _side_by_side(storages: Sequence[torch.UntypedStorage]) -> tuple[list[int], int]:
    """Return where each begins, with a page of its own, and where the last one ends."""
    starts, end = [], 0
    for storage in storages:
        starts.append(end)
        end += -(-storage.nbytes() // mmap.PAGESIZE) * mmap.PAGESIZE
    return starts, end


def place_of(storage: torch.UntypedStorage) -> tuple[int, int]:
    """Return the descriptor of a storage's memory, and where in it the storage begins.

    The storage keeps owning the descriptor.  Memory that is not shared yet is moved.
    """
    place = getattr(storage, _PLACE, None)
    if place is not None:
        return place[0].descriptor, place[1]
    try:
        descriptor: int = storage._share_fd_cpu_()[0]
    except RuntimeError as error:
        # torch tells the number of the error at the end of its text.
        match = _ERROR_NUMBER.search(str(error))
        number = 0 if match is None else int(match[1])
        why = shortage_of(OSError(number, "")) or error
        if number == errno.ENOSPC:
            why = "no space is left in /dev/shm: mount it with a larger size"
        raise OSError(number, f"memory cannot be shared: {why}") from error
    return descriptor, 0


def storage_over(
    descriptor: int, key: bytes | None, nbytes: int
) -> torch.UntypedStorage:
    """Return a storage over memory that another process shares.

    Args:
        descriptor: of the memory; the caller still owns and closes it.
        key: of the memory; None if it is not sent by reference between workers.
        nbytes: length of the memory; the file must have at least this length.
    """
    kind: Any = torch.UntypedStorage  # torch's own method is untyped
    storage: torch.UntypedStorage = kind._new_shared_fd_cpu(descriptor, nbytes)  # noqa: SLF001
    if key is not None:
        mark(storage, key)
    return storage


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _sealed_file(nbytes: int) -> int:
    """Return the descriptor of new memory without a name."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    descriptor = -1
    try:
        descriptor = os.memfd_create("asyncrpc-share", flags)
        os.posix_fallocate(descriptor, 0, nbytes)  # else a lack of memory is SIGBUS
        seal(descriptor)
    except OSError as error:
        if descriptor != -1:
            os.close(descriptor)
        why = shortage_of(error) or error
        raise OSError(error.errno, f"memory cannot be shared: {why}") from error
    return descriptor


def seal(descriptor: int) -> None:
    """Make sure that no process changes the size of memory any more."""
    fcntl.fcntl(descriptor, _F_ADD_SEALS, _SEALS)


def is_sealed(descriptor: int) -> bool:
    """Return whether memory can neither shrink nor lack pages when it is touched."""
    if not _shares_files:
        return False
    seals: int = fcntl.fcntl(descriptor, _F_GET_SEALS)
    # A file of huge pages has them only if there are some left.
    is_of_pages = os.fstatvfs(descriptor).f_bsize == mmap.PAGESIZE
    return is_of_pages and seals & _SEALS == _SEALS


def users_of(storage: torch.UntypedStorage) -> int:
    """Return how many tensors use a storage, plus one for the Python object."""
    count: int = torch._C._storage_Use_Count(storage._cdata)  # noqa: SLF001
    return count


def _tensors_of(value: torch.Tensor | nn.Module) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield from _with_gradient(value)
        return
    for tensor in (*value.parameters(), *value.buffers()):
        yield from _with_gradient(tensor)


def _with_gradient(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    yield tensor
    # Only a leaf has a gradient; torch warns if others are asked for theirs.
    if tensor.is_leaf and tensor.grad is not None:
        yield tensor.grad


def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.mmap.argtypes = [address, size, number, number, number, ctypes.c_long]
    library.mmap.restype = address
    return library


_LIBC: Final = _libc()  # it holds nothing but the names of functions

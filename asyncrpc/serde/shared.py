"""Storages that are sent by reference: `share` marks them, codecs look for the mark.

A mark is 16 random bytes on the storage itself, the *key*, so every view of a shared
tensor has it, and it ends with the memory.  The runtime knows which memory a key stands
for in another process (`SharedStorages`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Final, Protocol, TypeVar

import torch
from torch import nn

from asyncrpc.arguments import check_kind
from asyncrpc.errors import UsageError

KEY_BYTES: Final = 16
_MARK: Final = "_asyncrpc_shared"

Shareable = TypeVar("Shareable", bound=torch.Tensor | nn.Module)


class SharedStorages(Protocol):
    """The shared storages that one worker knows."""

    def find(self, key: bytes) -> torch.UntypedStorage:
        """Return a storage that a peer refers to.

        Raises:
            DecodeError: this worker does not have the storage.
        """
        ...


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

    Args:
        value: a dense tensor (any shape and dtype), or a module, in host memory or on a
            device whose memory processes can share.  In host memory the tensor and its
            gradient, or the module's parameters, buffers and gradients, are moved and
            stay the same objects.  A numpy array over the former memory is then
            separate from the tensor.

    Returns:
        `value` itself.

    Raises:
        UsageError: `value` is not a tensor or a module, or one of its tensors is
            sparse, or on a device whose memory processes cannot share.

    Thread safety: no other thread may use `value` meanwhile.

    Example:
        >>> model = asyncrpc.share(nn.Linear(4, 2))
        >>> await worker.peer("trainer").call(train, model)  # trains this very model

    Source: torch.Tensor.share_memory_, which makes the memory; unlike there, a tensor
    that is only in shared memory is still sent by value.
    """
    check_kind("value", value, (torch.Tensor, nn.Module), "a tensor or a module")
    tensors = list(_tensors_of(value))
    for tensor in tensors:
        if tensor.layout is not torch.strided or not can_share(tensor.device):
            layout = str(tensor.layout).removeprefix("torch.")
            raise UsageError(
                "value must be dense, and in host memory or that of a CUDA device; a"
                f" {layout} tensor on {str(tensor.device)!r} cannot be shared"
            )
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and key_of(storage) is None:
            if tensor.is_cpu:
                descriptor_of(storage)  # moves it
            mark(storage, os.urandom(KEY_BYTES))
    return value


def can_share(device: torch.device) -> bool:
    """Return whether processes can share memory of a device, or of the host."""
    if device.type == "cpu":
        return True
    # torch shares the memory of CUDA devices only, by this method.
    return hasattr(getattr(torch, device.type, None), "ipc_collect")


def key_of(storage: torch.UntypedStorage) -> bytes | None:
    """Return the key of a storage; None if it is not sent by reference."""
    return getattr(storage, _MARK, None)


def mark(storage: torch.UntypedStorage, key: bytes) -> None:
    """Send a storage by reference from now on."""
    setattr(storage, _MARK, key)


def descriptor_of(storage: torch.UntypedStorage) -> int:
    """Return the descriptor of a storage's memory; the storage keeps owning it.

    Memory that is not shared yet is moved, under all its views.
    """
    descriptor: int = storage._share_fd_cpu_()[0]
    return descriptor


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

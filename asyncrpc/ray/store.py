"""Tensors in Ray's object store: one copy in, none out.

Ray pickles a tensor's storage, which copies it twice more on the way in and once on
the way out.  Here a tensor travels as a numpy array of its bytes, which Ray copies once
into the shared memory of the node; `get` makes a tensor of that very memory.

The memory belongs to every process that has the object.  Ray maps it so that it can be
written, and torch has no tensor that cannot, so nothing stops a write, and every other
reader would see it: whoever wants to write takes a copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from asyncrpc.arguments import check_flag
from asyncrpc.ray.cluster import in_thread, library
from asyncrpc.ray.references import StoredValue

Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"

_CONTAINERS: Final = (list, tuple)


@dataclass(frozen=True, slots=True)
class _TensorBytes:
    """A tensor as it lies in the store."""

    content: Bytes
    dtype: torch.dtype
    shape: tuple[int, ...]


async def put(value: Any) -> StoredValue:
    """Put a value into Ray's object store, tensors with a single copy.

    Args:
        value: a tensor, or lists, tuples and dictionaries of tensors; all else in them
            goes as Ray pickles it.  A tensor of any shape and dtype; it is copied once
            more if it is not contiguous or not on the CPU.  Gradients and their
            history stay behind.

    Returns:
        A reference; the object lives as long as references to it do.

    Raises:
        UsageError: Ray is not installed, or not initialized in this process.

    Cancellation:
        The value may have been stored; nothing refers to it then.

    Example:
        >>> stored = await asyncrpc.ray.put({"weights": weights})
    """
    ray = library()
    return StoredValue(await in_thread(lambda: ray.put(_mapped(value, _to_bytes))))


async def get(stored: Any, *, copy: bool = False) -> Any:
    """Return a value that `put` stored, tensors without a copy.

    Args:
        stored: what `put` returned, or Ray's reference in it.
        copy: whether tensors get memory of their own.

    Returns:
        The value.  Without `copy`, its tensors are the node's shared memory: **do not
        write to them**; every process of the node that has the object would see it.
        An object of another node is copied to this one first.

    Raises:
        UsageError: Ray is not installed, or not initialized in this process.
        ray.exceptions.ObjectLostError: the process that stored the value, or the node
            that held it, is gone.

    Cancellation:
        Only the waiting ends.

    Example:
        >>> weights = (await asyncrpc.ray.get(stored))["weights"]
    """
    check_flag("copy", copy)
    library()
    found = await (stored.ref if isinstance(stored, StoredValue) else stored)
    return _mapped(found, _copied if copy else _shared)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a value with its leaves changed; other containers are leaves."""
    if type(value) in _CONTAINERS:
        return type(value)(_mapped(one, change) for one in value)
    if type(value) is dict:
        return {key: _mapped(one, change) for key, one in value.items()}
    return change(value)


def _to_bytes(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not _is_plain(value):
        return value
    tensor = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    content = tensor.reshape(-1).view(torch.uint8).numpy()
    return _TensorBytes(content, value.dtype, tuple(value.shape))


def _is_plain(tensor: torch.Tensor) -> bool:
    is_own = type(tensor) in {torch.Tensor, torch.nn.Parameter}
    return is_own and tensor.layout is torch.strided and not tensor.is_quantized


def _shared(value: Any) -> Any:
    """Return a tensor in the memory of the store."""
    if not isinstance(value, _TensorBytes):
        return value
    content = value.content
    if not content.nbytes:
        return torch.empty(value.shape, dtype=value.dtype)
    # numpy marks the memory read-only, and torch warns of such an array, once and for
    # the whole process.  The buffer holds the array, and so the object in the store.
    buffer: Any = (ctypes.c_ubyte * content.nbytes).from_address(content.ctypes.data)
    buffer.content = content
    return torch.frombuffer(buffer, dtype=value.dtype).view(value.shape)


def _copied(value: Any) -> Any:
    found = _shared(value)
    return found.clone() if isinstance(value, _TensorBytes) else found

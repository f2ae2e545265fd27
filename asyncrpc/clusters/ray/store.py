"""Tensors in Ray's object store: one copy on the way in, none on the way out.

Ray pickles a tensor by default, which copies it on the way in and out.  Here a tensor
travels as a numpy array of its bytes, which Ray copies once into the shared memory of
the node; `get` makes a tensor of that very memory.

The memory is shared by all processes that have the object.  Ray maps it writable, and
torch has no read-only tensors, so nothing prevents a write, which all other readers
would see: to write, take a copy.

Tensors as bytes for Ray's object store, and back, without a copy.

Ray copies an array of numpy once, into the shared memory of the node, and reads it in
place.  So a tensor is stored as an array over its memory, and read as a tensor over the
array's memory.  This module does not know Ray.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from asyncrpc.clusters.ray.bundles import library
from asyncrpc.clusters.ray.references import StoredValue
from asyncrpc.clusters.threads import in_thread
from asyncrpc.core.arguments import check_flag, wrong
from asyncrpc.errors import EncodeError, Outcome

Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"

_CONTAINERS: Final = (list, tuple)


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """A tensor in the form in which it is stored.

    Attributes:
        content: its elements, one after the other.
    """

    content: Bytes
    dtype: torch.dtype
    shape: tuple[int, ...]


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a value with its leaves changed; other containers are leaves."""
    if type(value) in _CONTAINERS:
        return type(value)(mapped(item, change) for item in value)
    if type(value) is dict:
        return {key: mapped(item, change) for key, item in value.items()}
    return change(value)


def to_bytes(value: Any) -> Any:
    """Return a tensor as bytes; any other value unchanged."""
    if not isinstance(value, torch.Tensor) or not _is_plain(value):
        return value
    tensor = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    content = tensor.reshape(-1).view(torch.uint8).numpy()
    return TensorBytes(content, value.dtype, tuple(value.shape))


def _is_plain(tensor: torch.Tensor) -> bool:
    is_own = type(tensor) in {torch.Tensor, torch.nn.Parameter}
    return is_own and tensor.layout is torch.strided and not tensor.is_quantized


def shared(value: Any) -> Any:
    """Return bytes as a tensor in the same memory; any other value unchanged."""
    if not isinstance(value, TensorBytes):
        return value
    content = value.content
    if not content.nbytes:
        return torch.empty(value.shape, dtype=value.dtype, device="cpu")
    # numpy marks the memory read-only, and torch would warn about such an array once in
    # the process.  The buffer holds the array, and with it the object in the store.
    buffer: Any = (ctypes.c_ubyte * content.nbytes).from_address(content.ctypes.data)
    buffer.content = content
    return torch.frombuffer(buffer, dtype=value.dtype).view(value.shape)


def copied(value: Any) -> Any:
    """Return bytes as a tensor in new memory; any other value unchanged."""
    tensor = shared(value)
    return tensor.clone() if isinstance(value, TensorBytes) else tensor


async def put(value: Any) -> StoredValue:
    """Put a value into Ray's object store, tensors with a single copy.

    Args:
        value: a tensor, or lists, tuples and dictionaries of tensors; other values in
            them are pickled by Ray.  A tensor may have any shape and dtype; it is
            copied once more if it is not contiguous or not on the CPU.  Gradients and
            their history are not stored.

    Returns:
        A reference; the object lives as long as references to it do.

    Raises:
        EncodeError: the value, or something in it, cannot be pickled.
        UsageError: Ray is not installed, or not initialized in this process.

    Cancellation:
        The value may have been stored, but nothing refers to it.

    Example:
        >>> stored = await asyncrpc.ray.put({"weights": weights})
    """
    ray = library()
    return StoredValue(await in_thread(_put, ray, value))


def _put(ray: Any, value: Any) -> Any:
    """Let Ray store a value.  Pickling runs the value's own code, which may raise."""
    try:
        return ray.put(mapped(value, to_bytes))
    except (ray.exceptions.RayError, KeyboardInterrupt):
        raise
    except BaseException as error:
        problem = f"value cannot be stored: {type(error).__name__}: {error}"
        raise EncodeError(problem, outcome=Outcome.NOT_EXECUTED) from error


async def get(stored: Any, *, copy: bool = False) -> Any:
    """Return a value that `put` stored, tensors without a copy.

    Args:
        stored: the result of `put`, or Ray's reference in it.
        copy: whether tensors get their own memory.

    Returns:
        The value.  Without `copy`, its tensors are the node's shared memory: **do not
        write to them**; all processes of the node that have the object would see it.
        An object of another node is copied to this one first.

    Raises:
        UsageError: `stored` is something else; or Ray is not installed, or not
            initialized in this process.
        ray.exceptions.ObjectLostError: the process that stored the value, or the node
            that held it, is gone.

    Cancellation:
        Only the waiting ends.

    Example:
        >>> weights = (await asyncrpc.ray.get(stored))["weights"]
    """
    check_flag("copy", copy)
    ray = library()
    ref = stored.ref if isinstance(stored, StoredValue) else stored
    if not isinstance(ref, ray.ObjectRef):
        raise wrong("stored", "what `asyncrpc.ray.put` returned", stored)
    value = await ref
    return mapped(value, copied if copy else shared)

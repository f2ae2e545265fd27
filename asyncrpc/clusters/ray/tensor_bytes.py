"""Tensors as bytes for Ray's object store, and back, without a copy.

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

"""How many bytes an item has: of its tensors, arrays and byte strings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

_DEPTH_MAX: Final = 8  # nested containers; deeper items do not count


def bytes_of(item: Any, *, depth: int = _DEPTH_MAX) -> int:
    """Return the bytes of the tensors, arrays and byte strings in an item.

    It looks into lists, tuples and dicts.  Everything else counts as 0: it is small
    compared with a model's data, or its size is unknown.
    """
    if isinstance(item, torch.Tensor):
        return item.numel() * item.element_size()
    if isinstance(item, bytes | bytearray):
        return len(item)
    if isinstance(item, memoryview):
        return item.nbytes
    if isinstance(item, list | tuple | Mapping):
        if not depth:
            return 0
        parts = item.values() if isinstance(item, Mapping) else item
        return sum(bytes_of(part, depth=depth - 1) for part in parts)
    nbytes = getattr(item, "nbytes", 0)  # of arrays
    return nbytes if type(nbytes) is int else 0

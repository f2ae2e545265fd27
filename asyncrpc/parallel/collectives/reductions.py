"""How two tensors become one: the operations that a reduction may use.

Sums are made in the dtype of the tensors, one after the other.

Tensors are combined as *pieces*: numpy arrays for the dtypes that numpy has, since its
operations begin within a microsecond and never use other threads; else tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from asyncrpc.core.arguments import wrong
from asyncrpc.errors import UsageError

# `combine(a, b, out)`; `out` may be either.
Combine = Callable[[Any, Any, Any], Any]


class Reduction(NamedTuple):
    """A reduction of one dtype.

    Attributes:
        combine: puts two pieces together: `combine(a, b, out)`.
        is_array: whether pieces are numpy arrays.
    """

    how: str
    combine: Combine
    is_array: bool

    def piece(self, tensor: torch.Tensor) -> Any:
        """Return a tensor as a piece, over the same memory."""
        return tensor.numpy() if self.is_array else tensor

    def finish(self, tensor: torch.Tensor, size: int) -> None:
        """Turn the combined tensor into the result, in place."""
        if self.how == "avg":
            tensor.div_(size)


def reduction_for(how: str, dtype: torch.dtype) -> Reduction:
    """Return the reduction for tensors of a dtype."""
    if type(how) is not str or how not in _COMBINE:
        raise wrong("op", f"one of {', '.join(map(repr, _COMBINE))}", how)
    return _reduction_for(how, dtype)


@functools.cache
def _reduction_for(how: str, dtype: torch.dtype) -> Reduction:
    kind = _kind(dtype)
    if how in _NOT_FOR[kind]:
        raise UsageError(
            f"{how!r} is not defined for {dtype}, a {kind} dtype; "
            + _INSTEAD.get(kind, "use another reduction, or convert the tensor")
        )
    array, tensor = _COMBINE[how]
    if dtype in _ARRAYS:
        return Reduction(how, _of_arrays(array), is_array=True)
    return Reduction(how, _of_tensors(tensor), is_array=False)


def _of_arrays(function: Any) -> Combine:
    def combine(a: Any, b: Any, out: Any) -> None:
        # Infinities and nans are results like others, as with tensors.
        with np.errstate(all="ignore"):
            function(a, b, out=out)

    return combine


def _of_tensors(function: Any) -> Combine:
    return lambda a, b, out: function(a, b, out=out)


# Of numpy and of torch; both propagate nan, and round the same way.
_COMBINE: Final[Mapping[str, tuple[Any, Any]]] = {
    "sum": (np.add, torch.add),
    "avg": (np.add, torch.add),  # divided by the number of ranks at the end
    "product": (np.multiply, torch.mul),
    "min": (np.minimum, torch.minimum),
    "max": (np.maximum, torch.maximum),
    "band": (np.bitwise_and, torch.bitwise_and),
    "bor": (np.bitwise_or, torch.bitwise_or),
    "bxor": (np.bitwise_xor, torch.bitwise_xor),
}
# Not float16, which numpy adds one by one: 64 KiB in 373 us, where torch takes 15 (and
# 16 for bfloat16, which numpy does not have; 40 by way of float32).
_ARRAYS: Final = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.bool,
    }
)
_BITS: Final = frozenset({"band", "bor", "bxor"})
_ORDER: Final = frozenset({"min", "max"})
_NOT_FOR: Final[Mapping[str, frozenset[str]]] = {
    "floating": _BITS,
    "complex": _BITS | _ORDER,
    "integer": frozenset({"avg"}),
    "boolean": frozenset({"avg"}),
    "storage": frozenset(_COMBINE),
}
_INSTEAD: Final = {
    "integer": "use 'sum', or convert the tensor to a floating dtype",
    "storage": "torch cannot calculate with it: convert the tensor first",
}
_STORED_BITS: Final = 8  # of floating dtypes: these and smaller ones torch only stores


def _kind(dtype: torch.dtype) -> str:
    if dtype is torch.bool:
        return "boolean"
    if dtype.is_complex:
        return "storage" if dtype is torch.complex32 else "complex"
    if dtype.is_floating_point:
        is_stored = torch.finfo(dtype).bits <= _STORED_BITS
        return "storage" if is_stored else "floating"
    try:
        torch.iinfo(dtype)
    except TypeError:  # quantized, bits
        return "storage"
    return "integer"

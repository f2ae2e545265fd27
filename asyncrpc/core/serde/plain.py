"""Small values without behaviour that msgpack does not know.

For each type: its ExtType code, how it becomes a tree of values that msgpack knows (and
of other such values), and how it is rebuilt.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from asyncrpc.core.serde import kinds
from asyncrpc.core.serde.arrays import describe_dtype, read_dtype
from asyncrpc.core.serde.bounds import filled
from asyncrpc.core.serde.tensors import DTYPES, NAMES
from asyncrpc.errors import DecodeError

BIG_INT_BYTES_MAX: Final = 1 << 20  # arithmetic on longer ones is an attack


class Recipe(NamedTuple):
    """How values of one type are sent and rebuilt."""

    code: int
    to_tree: Callable[[Any], Any]
    from_tree: Callable[[Any], Any]


def _int_to_bytes(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


def _int_from_bytes(tree: bytes) -> int:
    if len(tree) > BIG_INT_BYTES_MAX:
        raise DecodeError(f"an integer of {len(tree)} bytes arrived")
    return int.from_bytes(tree, "little", signed=True)


def _bytearray_from_tree(tree: Any) -> bytearray:
    if type(tree) is not bytes:  # bytearray(1 << 40) would allocate
        raise DecodeError(f"a bytearray of a {type(tree).__name__} arrived")
    return bytearray(tree)


def _set_from_tree(tree: Any) -> set[Any]:
    if type(tree) is not list:
        raise DecodeError(f"the elements of a set are a {type(tree).__name__}")
    return filled(set(), tree, lambda element: element)


def _named(kind: str, values: dict[str, Any]) -> Callable[[Any], Any]:
    def from_tree(tree: Any) -> Any:
        if type(tree) is not str:
            raise DecodeError(f"the name of a {kind} is a {type(tree).__name__}")
        if tree not in values:
            raise DecodeError(f"{kind} {tree!r:.40} is unknown to this worker's torch")
        return values[tree]

    return from_tree


def _members(kind: type) -> dict[str, Any]:
    return {str(value): value for value in vars(torch).values() if type(value) is kind}


def scalar_to_tree(value: np.generic) -> list[Any] | None:
    """Return the tree of a numpy scalar, or None if it holds an object."""
    description = describe_dtype(value.dtype)
    return None if description is None else [description, value.tobytes()]


def _scalar_from_tree(tree: Any) -> Any:
    description, data = tree
    dtype = read_dtype(description)
    if dtype.itemsize != len(data):
        raise DecodeError(f"{len(data)} bytes arrived for a numpy {dtype}")
    scalar: np.ndarray[Any, np.dtype[Any]] = np.ndarray((), dtype, bytes(data))
    return scalar[()]


RECIPES: Final[dict[type, Recipe]] = {
    int: Recipe(kinds.BIG_INT, _int_to_bytes, _int_from_bytes),
    tuple: Recipe(kinds.TUPLE, list, tuple),
    set: Recipe(kinds.SET, list, _set_from_tree),
    frozenset: Recipe(
        kinds.FROZENSET, list, lambda tree: frozenset(_set_from_tree(tree))
    ),
    complex: Recipe(
        kinds.COMPLEX, lambda z: [z.real, z.imag], lambda tree: complex(*tree)
    ),
    bytearray: Recipe(kinds.BYTEARRAY, bytes, _bytearray_from_tree),
    slice: Recipe(
        kinds.SLICE, lambda s: [s.start, s.stop, s.step], lambda tree: slice(*tree)
    ),
    range: Recipe(
        kinds.RANGE, lambda r: [r.start, r.stop, r.step], lambda tree: range(*tree)
    ),
    type(...): Recipe(kinds.ELLIPSIS, lambda _: None, lambda _: ...),
    type(NotImplemented): Recipe(
        kinds.NOT_IMPLEMENTED, lambda _: None, lambda _: NotImplemented
    ),
    torch.dtype: Recipe(kinds.TORCH_DTYPE, NAMES.__getitem__, _named("dtype", DTYPES)),
    torch.device: Recipe(kinds.TORCH_DEVICE, str, torch.device),
    torch.Size: Recipe(kinds.TORCH_SIZE, list, torch.Size),
    torch.layout: Recipe(
        kinds.TORCH_LAYOUT, str, _named("layout", _members(torch.layout))
    ),
    torch.memory_format: Recipe(
        kinds.TORCH_MEMORY_FORMAT,
        str,
        _named("memory format", _members(torch.memory_format)),
    ),
    np.generic: Recipe(kinds.NUMPY_SCALAR, scalar_to_tree, _scalar_from_tree),
    np.dtype: Recipe(kinds.NUMPY_DTYPE, describe_dtype, read_dtype),
    dt.datetime: Recipe(
        kinds.DATETIME,
        lambda at: [at.isoformat(), at.fold],
        lambda tree: dt.datetime.fromisoformat(tree[0]).replace(fold=tree[1]),
    ),
    dt.date: Recipe(kinds.DATE, dt.date.isoformat, dt.date.fromisoformat),
    dt.time: Recipe(
        kinds.TIME,
        lambda at: [at.isoformat(), at.fold],
        lambda tree: dt.time.fromisoformat(tree[0]).replace(fold=tree[1]),
    ),
    dt.timedelta: Recipe(
        kinds.TIMEDELTA,
        lambda d: [d.days, d.seconds, d.microseconds],
        lambda tree: dt.timedelta(*tree),
    ),
}
FROM_TREE: Final = {recipe.code: recipe.from_tree for recipe in RECIPES.values()}


def is_plain(value: Any) -> bool:
    """Return whether `RECIPES` keeps all of a value; not so for most time zones."""
    if isinstance(value, (dt.datetime, dt.time)):
        return value.tzinfo is None or value.tzinfo is dt.UTC
    return True

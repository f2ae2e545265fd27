"""numpy arrays <-> an entry of the table and a buffer.

`[ARRAY, dtype, shape, order, buffer]`.  An array that is contiguous in C or Fortran
order is sent without a copy; any other is gathered, in the order of its strides.  It
arrives writable.  An array is pickled if its dtype holds objects, or if the dtype
cannot be rebuilt from its description.
"""

from __future__ import annotations

import re
from typing import Any, Final

import numpy as np
from numpy.lib import format as npy

from asyncrpc.core.serde.encoded import OutgoingBuffers
from asyncrpc.core.serde.kinds import ENTRY_ARRAY, NO_BUFFER
from asyncrpc.errors import DecodeError

Array = np.ndarray[Any, np.dtype[Any]]

# The forms of `dtype.str`.  numpy reads many more, some ("3i8") by compiling them as
# Python.
_TYPE: Final = re.compile(
    r"[<>|=][a-zA-Z]\d{0,10}(\[\d{0,10}[a-zA-Z]{1,7}\])?", re.ASCII
)


def describe_dtype(dtype: np.dtype[Any]) -> Any | None:
    """Return a description for msgpack; None if the dtype cannot be described."""
    if dtype.hasobject:
        return None
    if dtype.names is None and dtype.subdtype is None:
        text = dtype.str
        return text if np.dtype(text) == dtype else None  # not so for extension dtypes
    fields = npy.dtype_to_descr(dtype)
    return fields if read_dtype(_as_lists(fields)) == dtype else None


def read_dtype(description: Any) -> np.dtype[Any]:
    """Return the dtype of a description."""
    try:
        if isinstance(description, str):
            dtype = np.dtype(_checked(description))
        else:
            dtype = npy.descr_to_dtype(_as_tuples(description))
    except Exception as error:
        raise DecodeError(f"{_shown(description)} is not a numpy dtype") from error
    if dtype.hasobject:
        raise DecodeError(f"numpy dtype {_shown(description)} holds objects")
    return dtype


def write_array(array: Array, outbox: OutgoingBuffers) -> list[Any] | None:
    """Return the entry of an array, or None if its dtype cannot be described."""
    description = describe_dtype(array.dtype)
    if description is None:
        return None
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        array = array.copy(order="K")
        outbox.bytes_copied += array.nbytes
        if not (array.flags.c_contiguous or array.flags.f_contiguous):
            array = np.ascontiguousarray(array)  # three dimensions, permuted
    order = "C" if array.flags.c_contiguous else "F"
    buffer = NO_BUFFER
    if array.nbytes:
        flat = array.reshape(-1, order=order)  # type: ignore[call-overload]
        buffer = outbox.add(memoryview(flat.view(np.uint8)))
    return [ENTRY_ARRAY, description, list(array.shape), order, buffer]


def read_array(entry: list[Any], buffer: memoryview | None) -> Array:
    """Return the array of an entry, over `buffer`."""
    _, description, shape, order, _index = entry
    dtype = read_dtype(description)
    if order not in ("C", "F"):
        raise DecodeError(f"an array's order must be C or F, not {order!r:.20}")
    if buffer is None:
        array: Array = np.ndarray(shape, dtype, b"", order=order)
        return array.copy(order="K")
    array = np.ndarray(shape, dtype, buffer, order=order)
    if array.nbytes != buffer.nbytes:
        raise DecodeError(f"{buffer.nbytes} bytes arrived for an array of {shape}")
    return array.copy(order="K") if buffer.readonly else array


def _shown(description: Any) -> str:
    """Return the description as text, without the `repr` of a peer's object."""
    if isinstance(description, str):
        return f"{description!r:.60}"
    return f"of a {type(description).__name__}"


def _checked(text: str) -> str:
    if _TYPE.fullmatch(text) is None:
        raise ValueError("the dtype is not in numpy's own short form")
    return text


def _as_lists(description: Any) -> Any:
    if isinstance(description, (list, tuple)):
        return [_as_lists(part) for part in description]
    return description


def _as_tuples(description: Any) -> Any:
    """Turn msgpack's lists into tuples again: each field, and its shape."""
    if isinstance(description, str):
        return _checked(description)
    return [
        (
            tuple(field[0]) if isinstance(field[0], list) else field[0],
            _as_tuples(field[1]),
            *(tuple(shape) for shape in field[2:]),
        )
        for field in description
    ]

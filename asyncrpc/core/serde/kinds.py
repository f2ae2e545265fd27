"""The codes of values that msgpack does not know.

A control part has three parts in a row: a little-endian u32, the length of the table
(its highest bit says that the tree's root is a tuple: calls have one, and it saves 1.5
us; another, that tensors must be put on devices before it is read); the *table*, a
msgpack array with one entry per object that has identity or power (tensors, functions,
pickles, references); and the *tree*, one msgpack value.  In the tree an object is an
ExtType REFERENCE, the index of its entry; the same index twice is the same object
twice.  Entries refer only to entries before them.

Every other ExtType is plain: it rebuilds a value and can do nothing else.  So a user's
own `msgpack.ExtType` inside an argument, say one that a web client sent, can at worst
turn into such a value or into an object that was in the message anyway; it cannot
smuggle in a pickle.

Codes are never reused.  Source: docs/reference/wire-protocol.md.
"""

from __future__ import annotations

from typing import Final

LENGTH_BYTES: Final = 4
ROOT_IS_TUPLE: Final = 1 << 31
PACKED: Final = 1 << 30  # `compression` describes what follows
STAGED: Final = 1 << 29
FLAGS: Final = ROOT_IS_TUPLE | STAGED
FLAT: Final = bytes(LENGTH_BYTES)  # the length of the table, if there is no table
FLAT_TUPLE: Final = ROOT_IS_TUPLE.to_bytes(LENGTH_BYTES, "little")

# --- ExtType codes in a tree ---------------------------------------------------------
REFERENCE: Final = 0
TUPLE: Final = 1
SET: Final = 2
FROZENSET: Final = 3
BIG_INT: Final = 4
COMPLEX: Final = 5
BYTEARRAY: Final = 6
SLICE: Final = 7
RANGE: Final = 8
ELLIPSIS: Final = 9
NOT_IMPLEMENTED: Final = 10
TORCH_DTYPE: Final = 11
TORCH_DEVICE: Final = 12
TORCH_SIZE: Final = 13
TORCH_LAYOUT: Final = 14
TORCH_MEMORY_FORMAT: Final = 15
NUMPY_SCALAR: Final = 16
NUMPY_DTYPE: Final = 17
DATETIME: Final = 18
DATE: Final = 19
TIME: Final = 20
TIMEDELTA: Final = 21

EMPTY: Final = frozenset({ELLIPSIS, NOT_IMPLEMENTED})  # there is only one of each

# --- first elements of entries -------------------------------------------------------
ENTRY_TENSOR: Final = 0
ENTRY_SPARSE_COO: Final = 1
ENTRY_SPARSE_COMPRESSED: Final = 2
ENTRY_QUANTIZED: Final = 3
ENTRY_ARRAY: Final = 4
ENTRY_BYTES: Final = 5
ENTRY_BYTEARRAY: Final = 6
ENTRY_PICKLE: Final = 7
ENTRY_FUNCTION: Final = 8
ENTRY_METHOD: Final = 9
ENTRY_PARTIAL: Final = 10
ENTRY_ENUM: Final = 11
ENTRY_EXCEPTION: Final = 12
ENTRY_EXTERNAL: Final = 13
ENTRY_SHARED: Final = 14

# --- flags of a tensor ---------------------------------------------------------------
REQUIRES_GRAD: Final = 1
PARAMETER: Final = 2
LEAF: Final = 4  # inside a pickled object: a leaf, not part of the sender's graph
CONJUGATE: Final = 8
NEGATIVE: Final = 16
META: Final = 32

NO_BUFFER: Final = -1  # the buffer of a tensor without bytes


def as_tuple(control: bytes) -> bytes:
    """Return the control part of a list as that of a tuple."""
    return control[:3] + bytes((control[3] | ROOT_IS_TUPLE >> 24,)) + control[4:]

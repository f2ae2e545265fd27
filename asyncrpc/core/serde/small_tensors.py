"""Small tensors of one pickle, gathered: one entry and one buffer for each shape.

A list of transitions holds thousands of tensors of a few numbers.  An entry and a
buffer for each take 15 us; a row of a tensor that holds all of one dtype and shape
takes 4 us.  The reader takes the rows in the order of the pickle, each as a tensor with
memory of its own: nothing tells that they came together.

A tensor is gathered if it is plain, the whole of a storage that nothing else of the
message uses, and requires no gradient.  The first ones of a message are sent as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch

from asyncrpc.core.serde.encoded import key_of

if TYPE_CHECKING:
    from asyncrpc.core.serde.encoding import Encoder

# Entries of a message before its small tensors are gathered.
ENTRIES_MAX: Final = 32
# Of one tensor: a copy at both ends takes less than a buffer.
_ROW_BYTES_MAX: Final = 4 << 10
_DIMENSIONS_MAX: Final = 16
_ROWS_BYTES_MAX: Final = 64 << 20  # of one gathered tensor
_DTYPES: Final = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)
_unbind_copy: Any = torch.unbind_copy  # its stub is of another overload
_STRIDED: Final = torch.strided


class SmallTensors:
    """The gathered tensors of one pickle; used once."""

    def __init__(self, encoder: Encoder, refer: Callable[[int], object]) -> None:
        self._encoder = encoder
        self._refer = refer
        self._rows: list[_Rows] = []
        self._latest: dict[tuple[torch.dtype, torch.Size], _Rows] = {}
        self._is_on = encoder.gathers

    def reduce(self, value: torch.Tensor) -> tuple[Any, ...] | None:
        """Gather a tensor if it may be; return what the pickle has in its place."""
        if not self._is_on or not is_small(value) or value.__dict__:
            return None
        storage, nbytes = value.untyped_storage(), value.nbytes
        if storage.nbytes() != nbytes or value.storage_offset() or not nbytes:
            return None
        if key_of(storage) is not None or self._encoder.knows(value):
            return None
        rows = self._latest.get((value.dtype, value.shape))
        if rows is None or len(rows.tensors) * nbytes >= _ROWS_BYTES_MAX:
            rows = self._new_rows(value)
            if rows is None:
                return None
        rows.tensors.append(value)
        return rows.reduced

    def _new_rows(self, value: torch.Tensor) -> _Rows | None:
        if len(self._encoder.table) < ENTRIES_MAX or value.dim() > _DIMENSIONS_MAX:
            return None
        rows = self._latest[value.dtype, value.shape] = _Rows()
        rows.index = self._encoder.reserve(rows)
        rows.place = self._refer(rows.index)
        self._rows.append(rows)
        return rows

    def finish(self) -> bool:
        """Write the gathered tensors; return whether the pickle is right with them.

        It is not if two of them, or one and another tensor, share memory.
        """
        if not self._rows:
            return True
        tensors = [tensor for rows in self._rows for tensor in rows.tensors]
        addresses = {tensor.data_ptr() for tensor in tensors}
        if len(addresses) < len(tensors) or self._encoder.uses_memory_at(addresses):
            self.give_up()
            return False
        for rows in self._rows:
            gathered = torch.stack(rows.tensors)
            self._encoder.fill(rows.index, gathered)
            self._encoder.outbox.bytes_copied += gathered.nbytes
        return True

    def give_up(self) -> None:
        """Gather nothing: the pickle is written once more."""
        for rows in self._rows:
            self._encoder.fill(
                rows.index, torch.empty(0, dtype=torch.uint8, device="cpu")
            )
        self._rows.clear()
        self._is_on = False


def is_small(value: torch.Tensor) -> bool:
    """Return whether a tensor is one of those that are gathered if there are many."""
    return (
        not value.requires_grad
        and value.dtype in _DTYPES
        and value.is_cpu
        and value.layout is _STRIDED
        and not value.is_nested
        and value.nbytes <= _ROW_BYTES_MAX
        and value.is_contiguous()
    )


class _Rows:
    """Tensors of one dtype and shape; in a pickle, what returns the next of them."""

    __slots__ = ("index", "place", "reduced", "tensors")

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.index = -1
        self.place: object = None
        self.reduced = self, ()

    def __call__(self) -> None:
        """Do nothing: the pickler demands what can be called."""

    def __reduce__(self) -> tuple[Any, ...]:
        return rows_of, (self.place,)


def rows_of(gathered: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return what returns the next row of a tensor, each with memory of its own."""
    rows: tuple[torch.Tensor, ...] = _unbind_copy(gathered)
    return iter(rows).__next__

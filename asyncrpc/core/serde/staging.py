"""Serde's part in staging: device memory becomes host memory, and back.

Serde handles host bytes only, and never waits.  A tensor on a device is sent as a host
buffer that `asyncrpc.core.devices` fills before it leaves; `Encoded.copies` lists
those buffers.  Tensors for a device of the receiver are copied there before the message
is read: `DevicePlacement` lists them, and `Staged` carries them to the decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from asyncrpc.core.serde import kinds
from asyncrpc.core.serde.bounds import entries_of
from asyncrpc.core.serde.encoded import Encoded
from asyncrpc.core.serde.layouts import parts_of, put_together
from asyncrpc.core.serde.policy import Limits
from asyncrpc.core.serde.tensors import DEVICE_AT, TensorReader
from asyncrpc.errors import DecodeError

_STAGED_IN_BYTE: Final = kinds.STAGED >> 24
_UNPREPARED_IN_BYTE: Final = (kinds.STAGED | kinds.PACKED) >> 24


class Staged(list[memoryview]):
    """The buffers of a message whose device tensors are placed.

    Attributes:
        tensors: the tensors on devices, by the index of their entry.
    """

    def __init__(
        self, buffers: Sequence[memoryview], tensors: dict[int, torch.Tensor]
    ) -> None:
        super().__init__(buffers)
        self.tensors = tensors


def is_staged(control: bytes | memoryview) -> bool:
    """Return whether tensors of a message must be on devices before it is read."""
    return len(control) >= kinds.LENGTH_BYTES and bool(control[3] & _STAGED_IN_BYTE)


def is_unprepared(control: bytes | memoryview) -> bool:
    """Return whether a message is packed, or `is_staged`."""
    return len(control) >= kinds.LENGTH_BYTES and bool(control[3] & _UNPREPARED_IN_BYTE)


def stage(encoded: Encoded) -> None:
    """Tell the receiver to place the tensors of a message before reading it."""
    control = encoded.control
    header = int.from_bytes(control[: kinds.LENGTH_BYTES], "little")
    if header & ~kinds.FLAGS == 0:
        return  # it holds no objects
    header |= kinds.STAGED
    rest = control[kinds.LENGTH_BYTES :]
    encoded.control = header.to_bytes(kinds.LENGTH_BYTES, "little") + rest
    if not encoded.buffers:
        encoded.buffers = [memoryview(b"\0")]


class DevicePlacement:
    """The tensors of one message, and the device for each.

    Attributes:
        wanted: by index of the entry, the tensor in host memory and its device.
    """

    def __init__(
        self,
        control: bytes | memoryview,
        buffers: Sequence[memoryview],
        limits: Limits,
        device_of: Callable[[str], str],
    ) -> None:
        self._reader = TensorReader(buffers, limits.dimensions_max)
        self.wanted: dict[int, tuple[torch.Tensor, str]] = {}
        try:
            self._table = _table(control, limits)
            for index, entry in enumerate(self._table):
                if entry[0] == kinds.ENTRY_TENSOR:
                    self._take(index, entry, device_of)
                elif parts := parts_of(entry):
                    self._take_composite(index, entry, parts)
        except DecodeError:
            raise
        except Exception as error:
            raise DecodeError(
                f"the message is not a value: {type(error).__name__}: {error}"
            ) from error

    def _take(
        self, index: int, entry: list[Any], device_of: Callable[[str], str]
    ) -> None:
        came_from = str(entry[DEVICE_AT]) if len(entry) > DEVICE_AT else "cpu"
        device = device_of(came_from)
        if (device != "cpu" or came_from != "cpu") and not entry[1] & kinds.META:
            self.wanted[index] = self._reader.read(entry), device

    def _take_composite(self, index: int, entry: list[Any], parts: list[int]) -> None:
        """Move a tensor as a whole, if its parts belong on a device.

        The tensor is rebuilt, and its indices are checked, on the host: on a device
        that would happen when the message is read, on the event loop.
        """
        moved = [part for part in parts if part in self.wanted]
        if not moved:
            return
        device = self.wanted[moved[-1]][1]
        whole = put_together(entry, self._part)
        for part in moved:
            self.wanted[part] = self.wanted[part][0], "cpu"
        self.wanted[index] = whole, device

    def _part(self, index: int) -> torch.Tensor:
        if type(index) is not int or not 0 <= index < len(self._table):
            raise DecodeError(
                f"a tensor refers to object {index!r:.20} of {len(self._table)}"
            )
        wanted = self.wanted.get(index)
        return self._reader.read(self._table[index]) if wanted is None else wanted[0]


def _table(control: bytes | memoryview, limits: Limits) -> list[Any]:
    view = memoryview(control)
    header = int.from_bytes(view[: kinds.LENGTH_BYTES], "little")
    stop = kinds.LENGTH_BYTES + (header & ~kinds.FLAGS)
    if stop > view.nbytes or stop > limits.control_bytes_max:
        raise DecodeError(f"a table ends at byte {stop} of {view.nbytes}")
    if stop == kinds.LENGTH_BYTES:
        return []
    return list(entries_of(view[kinds.LENGTH_BYTES : stop], limits))

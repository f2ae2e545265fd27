"""Tensors that are not one strided block: sparse and quantized ones, as their parts.

A part is an ordinary tensor with an entry of its own, so that it too is sent without a
copy.  `torch` checks the invariants of the tensor rebuilt from them, indices included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from asyncrpc.core.serde.kinds import (
    ENTRY_QUANTIZED,
    ENTRY_SPARSE_COMPRESSED,
    ENTRY_SPARSE_COO,
)
from asyncrpc.core.serde.tensors import DTYPES, NAMES
from asyncrpc.core.serde.unsendable import Unsendable
from asyncrpc.errors import DecodeError

AddPart = Callable[[torch.Tensor], int]  # returns the index of the part's entry
GetPart = Callable[[int], torch.Tensor]

_COMPRESSED: Final = {
    str(layout): layout
    for layout in (
        torch.sparse_csr,
        torch.sparse_csc,
        torch.sparse_bsr,
        torch.sparse_bsc,
    )
}
_BY_ROW: Final = (torch.sparse_csr, torch.sparse_bsr)
# The integer dtype of each quantized dtype's bytes.  Sub-byte dtypes have no strides
# that we could keep: they are pickled.
_CARRIERS: Final = {
    torch.qint8: torch.int8,
    torch.quint8: torch.uint8,
    torch.qint32: torch.int32,
}
_PER_TENSOR_LENGTH: Final = 6  # of the entry of a tensor with one scale
_PER_CHANNEL: Final = (
    torch.per_channel_affine,
    torch.per_channel_affine_float_qparams,
)


def is_known(tensor: torch.Tensor) -> bool:
    """Return whether a tensor that is not plainly strided can be sent as its parts."""
    if tensor.is_quantized:
        return tensor.is_cpu and tensor.dtype in _CARRIERS
    if tensor.layout is torch.sparse_coo:
        return True
    # Other libraries make such tensors and do not expose their parts (torch 2.13).
    has_parts = tensor.is_cpu or tensor.is_cuda or tensor.is_meta
    return has_parts and str(tensor.layout) in _COMPRESSED


def is_strided(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is one block of elements, as nearly all are."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
    )


def has_entry(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is sent as elements or parts, not pickled."""
    if is_strided(tensor) or is_known(tensor):
        return True
    if not tensor.is_cpu:
        raise Unsendable(tensor, refusal(tensor))
    return False


def refusal(tensor: torch.Tensor) -> str:
    """Return why a tensor on a device that is not `is_known` cannot be sent."""
    kind = str(tensor.layout).removeprefix("torch.")
    if tensor.is_quantized:
        kind = "quantized"
    elif tensor.is_nested:
        kind = "nested"
    return f"a {kind} tensor on {str(tensor.device)!r} cannot travel; send tensor.cpu()"


def take_apart(tensor: torch.Tensor, flags: int, add: AddPart) -> list[Any]:
    """Return the entry of a tensor that `is_known`; its parts go to `add`."""
    tensor = tensor.detach()
    if tensor.is_quantized:
        return _quantized(tensor, flags, add)
    shape = list(tensor.shape)
    if tensor.layout is torch.sparse_coo:
        parts = [add(tensor._indices()), add(tensor._values())]  # noqa: SLF001
        return [ENTRY_SPARSE_COO, flags, shape, *parts, tensor.is_coalesced()]
    by_row = tensor.layout in _BY_ROW
    outer = tensor.crow_indices() if by_row else tensor.ccol_indices()
    inner = tensor.col_indices() if by_row else tensor.row_indices()
    parts = [add(outer), add(inner), add(tensor.values())]
    return [ENTRY_SPARSE_COMPRESSED, flags, shape, *parts, str(tensor.layout)]


def _quantized(tensor: torch.Tensor, flags: int, add: AddPart) -> list[Any]:
    carrier = torch.empty(0, dtype=_CARRIERS[tensor.dtype], device=tensor.device)
    carrier.set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )
    entry = [ENTRY_QUANTIZED, flags, NAMES[tensor.dtype], add(carrier)]
    if tensor.qscheme() not in _PER_CHANNEL:
        return [*entry, tensor.q_scale(), tensor.q_zero_point()]
    scales = add(tensor.q_per_channel_scales())
    zero_points = add(tensor.q_per_channel_zero_points())
    return [*entry, scales, zero_points, tensor.q_per_channel_axis()]


def parts_of(entry: list[Any]) -> list[int]:
    """Return the indices of the entries of its parts; empty if it has no parts."""
    kind = entry[0]
    if kind == ENTRY_SPARSE_COO:
        return entry[3:5]
    if kind == ENTRY_SPARSE_COMPRESSED:
        return entry[3:6]
    if kind == ENTRY_QUANTIZED:
        is_per_tensor = len(entry) == _PER_TENSOR_LENGTH
        return entry[3:4] if is_per_tensor else entry[3:6]
    return []


def put_together(entry: list[Any], get: GetPart) -> torch.Tensor:
    """Return the tensor of an entry that `take_apart` made."""
    kind, _flags, *fields = entry
    if kind == ENTRY_QUANTIZED:
        return _from_quantized(fields, get)
    if kind == ENTRY_SPARSE_COO:
        shape, indices, values, coalesced = fields
        elements = get(values)
        return torch.sparse_coo_tensor(
            get(indices),
            elements,
            shape,
            is_coalesced=coalesced is True,
            check_invariants=True,
            device=elements.device,
        )
    shape, outer, inner, values, layout = fields
    if layout not in _COMPRESSED:
        raise DecodeError(f"sparse layout {layout!r:.40} is unknown")
    elements = get(values)
    return torch.sparse_compressed_tensor(
        get(outer),
        get(inner),
        elements,
        shape,
        layout=_COMPRESSED[layout],
        check_invariants=True,
        device=elements.device,
    )


def _from_quantized(fields: list[Any], get: GetPart) -> torch.Tensor:
    name, carrier_index, *parameters = fields
    dtype, carrier = DTYPES.get(name), get(carrier_index)
    if dtype is None or _CARRIERS.get(dtype) != carrier.dtype:
        raise DecodeError(f"quantized dtype {name!r:.40} does not fit its bytes")
    empty = _empty_quantized(dtype, carrier, parameters, get)
    return empty.set_(
        carrier.untyped_storage(),
        carrier.storage_offset(),
        carrier.shape,
        carrier.stride(),
    )


def _empty_quantized(
    dtype: torch.dtype, carrier: torch.Tensor, parameters: list[Any], get: GetPart
) -> torch.Tensor:
    if len(parameters) == 2:  # noqa: PLR2004 - per tensor
        scale, zero_point = float(parameters[0]), int(parameters[1])
        return torch._empty_affine_quantized(  # noqa: SLF001
            [0], scale=scale, zero_point=zero_point, dtype=dtype
        )
    scales, zero_points, axis = get(parameters[0]), get(parameters[1]), parameters[2]
    if not 0 <= axis < carrier.dim() or scales.shape != carrier.shape[axis : axis + 1]:
        raise DecodeError(f"{list(scales.shape)} scales arrived for axis {axis!r}")
    if zero_points.shape != scales.shape:
        raise DecodeError(
            f"there must be a zero point for each scale, not {list(zero_points.shape)}"
        )
    return torch._empty_per_channel_affine_quantized(  # noqa: SLF001
        [0] * carrier.dim(),
        scales=scales,
        zero_points=zero_points,
        axis=axis,
        dtype=dtype,
    )

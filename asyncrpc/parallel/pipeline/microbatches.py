"""Cutting a batch into micro-batches, and joining their outputs.

A value may be a tensor, or tuples, lists and dictionaries of tensors.  Every tensor is
cut along its first dimension, its rows; any other value goes unchanged to each
micro-batch.  The parts differ by one row at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from asyncrpc.core.arguments import shown
from asyncrpc.errors import UsageError

DIMS_MAX: Final = 64  # that can travel


def rows_of(value: Any, name: str) -> int:
    """Return how many rows the tensors in a value have."""
    rows: int | None = None
    for leaf in _leaves(value, name):
        if not isinstance(leaf, torch.Tensor):
            continue
        if not leaf.dim():
            raise UsageError(
                f"{name} has a tensor without dimensions, which cannot be cut into "
                "micro-batches; pass a number instead"
            )
        if leaf.layout is not torch.strided or leaf.is_meta or leaf.dim() > DIMS_MAX:
            raise UsageError(
                f"{name} must hold dense tensors with values, of at most {DIMS_MAX} "
                f"dimensions, not {shown(leaf)} {leaf.layout}, on {leaf.device}"
            )
        if rows not in (None, leaf.shape[0]):
            raise UsageError(
                f"the tensors of {name} must have the same size in the first "
                f"dimension, along which they are cut, not {rows} and {leaf.shape[0]}"
            )
        rows = leaf.shape[0]
    if rows is None:
        raise UsageError(f"{name} must have at least one tensor to cut")
    return rows


def _leaves(value: Any, name: str) -> list[Any]:
    try:
        leaves: list[Any] = pytree.tree_leaves(value)
    except RecursionError:
        raise UsageError(
            f"{name} is nested too deep, or contains itself: pass lists of tensors"
        ) from None
    return leaves


def split(value: Any, parts: int) -> list[Any]:
    """Cut a value into micro-batches: views of its tensors."""
    leaves, form = pytree.tree_flatten(value)
    columns = [
        torch.tensor_split(leaf, parts)
        if isinstance(leaf, torch.Tensor)
        else [leaf] * parts
        for leaf in leaves
    ]
    return [
        pytree.tree_unflatten([column[index] for column in columns], form)
        for index in range(parts)
    ]


def sizes(rows: int, parts: int) -> list[int]:
    """Return how many rows each part of `split` has."""
    small, larger = divmod(rows, parts)
    return [small + (index < larger) for index in range(parts)]


def join(parts: Sequence[Any]) -> Any:
    """Join the outputs of micro-batches: tensors along the first dimension.

    Of other values, that of the first part is kept.
    """
    flattened = [pytree.tree_flatten(part) for part in parts]
    first, form = flattened[0]
    if any(other != form for _, other in flattened):
        raise UsageError("the outputs of micro-batches have different forms")
    joined = [
        _join_leaf([leaves[i] for leaves, _ in flattened]) for i in range(len(first))
    ]
    return pytree.tree_unflatten(joined, form)


def _join_leaf(parts: Sequence[Any]) -> Any:
    if not isinstance(parts[0], torch.Tensor):
        return parts[0]
    if not parts[0].dim():
        raise UsageError(
            "the last stage returned a tensor without dimensions for each "
            "micro-batch, which cannot be joined; return at least one row each"
        )
    return torch.cat(list(parts))

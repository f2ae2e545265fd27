"""An optimizer's state, divided among ranks, and put together again.

torch numbers parameters group by group.  A rank's optimizer numbers its own; a saved
state has the numbers among all, which are called places here.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from asyncrpc.core.param_groups import check_fits, places_of, renumbered
from asyncrpc.errors import OptimizerError, UsageError

State: TypeAlias = dict[str, Any]


def with_places(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return copies of groups, with places for parameters."""
    sizes = [len(group["params"]) for group in groups]
    copies = []
    for group, places in zip(groups, places_of(sizes), strict=True):
        others = {name: group[name] for name in group if name != "params"}
        copies.append({**copy.deepcopy(others), "params": list(places)})
    return copies


def copied(
    optimizer: torch.optim.Optimizer, places: Sequence[int]
) -> dict[int, dict[str, Any]]:
    """Return a copy of the state of an optimizer."""
    return {
        place: pytree.tree_map_only(
            torch.Tensor, lambda tensor: tensor.cpu().clone(), value
        )
        for place, value in _by_places(optimizer, places)
    }


def to_bytes(optimizer: torch.optim.Optimizer, places: Sequence[int]) -> torch.Tensor:
    """Return the state of an optimizer as `from_bytes` reads it: uint8."""
    buffer = io.BytesIO()
    torch.save(
        {
            place: pytree.tree_map_only(torch.Tensor, _alone, value)
            for place, value in _by_places(optimizer, places)
        },
        buffer,
    )
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def from_bytes(saved: torch.Tensor, who: str) -> dict[int, dict[str, Any]]:
    """Return the value that `to_bytes` got; no code in it is run."""
    try:
        state: dict[int, dict[str, Any]] = torch.load(
            io.BytesIO(saved.numpy().tobytes()), weights_only=True
        )
    except pickle.UnpicklingError as error:
        raise OptimizerError(
            f"the state of {who} must have only tensors, numbers, strings and "
            f"containers of these: {error}"
        ) from error
    return state


def part_of(
    state: Mapping[str, Any], sizes: Sequence[int], places: Sequence[int]
) -> State:
    """Return a copy of one rank's part of a state."""
    check_fits(state, sizes)
    number_of = {place: number for number, place in enumerate(places)}
    groups = copy.deepcopy(renumbered(state["param_groups"], sizes, number_of))
    own = {
        number: pytree.tree_map_only(
            torch.Tensor, lambda tensor: tensor.detach().clone(), state["state"][place]
        )
        for place, number in number_of.items()
        if place in state["state"]
    }
    return {"state": own, "param_groups": groups}


def _by_places(
    optimizer: torch.optim.Optimizer, places: Sequence[int]
) -> list[tuple[int, Any]]:
    pairs = []
    for number, value in optimizer.state_dict()["state"].items():
        if type(number) is not int:
            raise UsageError(
                f"the optimizer keeps {number!r}, which belongs to no parameter, so "
                "its state cannot be put together"
            )
        pairs.append((places[number], value))
    return pairs


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory holds nothing else, as all of it is saved.

    It is in host memory: the rank that reads it may not have the device.
    """
    host = tensor.cpu()
    is_alone = host.untyped_storage().nbytes() == host.nbytes
    return host if is_alone else host.clone()

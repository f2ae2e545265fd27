"""A copy of the values that a step may change, so that they can be put back."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree


class Snapshot:
    """A copy of parameters, and of an optimizer's state and options.

    Values that a user's optimizer keeps elsewhere, in attributes of its own, are not
    copied.  Make and restore it under the lock over the parameters.
    """

    __slots__ = ("_groups", "_optimizer", "_parameters", "_state", "_values")

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self._parameters = list(parameters)
        self._values = [parameter.detach().clone() for parameter in parameters]
        self._optimizer = optimizer
        self._state: dict[Any, Any] = {}
        self._groups: list[tuple[dict[str, Any], dict[str, Any], list[Any]]] = []
        if optimizer is not None:
            self._state = {
                key: _copied(value) for key, value in optimizer.state.items()
            }
            self._groups = [
                (group, _options_of(group), list(group["params"]))
                for group in optimizer.param_groups
            ]

    def restore(self) -> None:
        """Put the values back.

        For graphs that hold the parameters this is one more change: a graph may have
        been made of the values that are undone here, and must not go backward with
        other values.
        """
        with torch.no_grad():
            for parameter, value in zip(self._parameters, self._values, strict=True):
                parameter.copy_(value)
        if self._optimizer is None:
            return
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        # A user's step may also have added or removed groups.
        self._optimizer.param_groups[:] = [group for group, *_ in self._groups]
        for group, options, parameters in self._groups:
            group.clear()
            group.update(options, params=parameters)


def _copied(state: Any) -> Any:
    """Return a copy; tensors of devices are copied by their device's own operation.

    A deep copy would copy their storages, which not every device can.
    """
    known = {
        id(leaf): leaf.clone()
        for leaf in pytree.tree_leaves(state)
        if type(leaf) is torch.Tensor and not leaf.is_cpu and not leaf.requires_grad
    }
    return copy.deepcopy(state, known)


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    return {key: copy.deepcopy(group[key]) for key in group if key != "params"}

"""The base of communication hooks' states: a group, and a module's parameters.

A state may be made before its module, and is saved without its group.  So the module
tells it, by `bound`, which group the module has and which parameters it reduces; a
group that the program has given comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from asyncrpc.errors import UsageError
from asyncrpc.parallel.collectives.group import Group
from asyncrpc.parallel.ddp.argument_checks import check_group


class HookState:
    """The memory of a communication hook from bucket to bucket, for one module.

    Attributes:
        process_group: the ranks, as given; None: those of the module.
    """

    def __init__(self, process_group: Group | None) -> None:
        """Create a state that is not bound to a module yet.

        Raises:
            UsageError: `process_group` is neither a group nor None.
        """
        if process_group is not None:
            check_group(process_group, "process_group")
        self.process_group = process_group
        self._forget_module()

    def _forget_module(self) -> None:
        """Unbind the state from its module, as after it is made or loaded."""
        self._module_group: Group | None = None
        self._parameters: list[torch.Tensor] = []
        self._number_of: dict[int, int] = {}  # by id of a parameter, which is kept

    @property
    def group(self) -> Group:
        """The ranks that the hook reduces over.

        Raises:
            UsageError: neither the program nor a module has given a group yet.
        """
        group = self.process_group or self._module_group
        if group is None:
            raise UsageError(
                f"this {type(self).__name__} has no group: register it with a module, "
                "or set its `process_group`"
            )
        return group

    def bind(self, group: Group, parameters: Sequence[torch.Tensor]) -> None:
        """Bind the state to a module; idempotent.

        Args:
            group: of the module; a `process_group` that was given comes first.
            parameters: of the module, in its own order, which identifies them in a
                saved state.
        """
        self._module_group = group
        known = self._parameters
        if len(known) != len(parameters) or any(
            mine is not theirs for mine, theirs in zip(known, parameters, strict=True)
        ):
            self._parameters = list(parameters)
            self._number_of = {
                id(parameter): n for n, parameter in enumerate(self._parameters)
            }

    def numbers_of(self, parameters: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Return the numbers of these parameters in the module.

        Without a module they are numbered in their order.
        """
        for parameter in parameters:
            if id(parameter) not in self._number_of:
                self._number_of[id(parameter)] = len(self._parameters)
                self._parameters.append(parameter)
        return tuple(self._number_of[id(parameter)] for parameter in parameters)

    def parameter(self, number: int) -> torch.Tensor:
        """Return the parameter that has a number."""
        return self._parameters[number]


def bound(state: Any, group: Group, parameters: Sequence[torch.Tensor]) -> Any:
    """Return the form of a state that its hook gets."""
    if state is None:
        return group
    if isinstance(state, HookState):
        state.bind(group, parameters)
    return state

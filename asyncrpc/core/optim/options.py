"""The options of groups, such as the learning rate, and of one step.

torch's schedulers set those of groups on the optimizer's worker; each step tells the
owners the changes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch

from asyncrpc.core.arguments import check_above, check_flags
from asyncrpc.core.autograd.contexts import Context
from asyncrpc.core.param_groups import options_in
from asyncrpc.core.services.schema import Count
from asyncrpc.errors import UsageError

Options: TypeAlias = dict[str, Any]


class GroupChange(NamedTuple):
    """The options of one group that differ from what an owner knows.

    Attributes:
        options: the options that differ, no others.
    """

    group: Count
    options: Options


Changes: TypeAlias = list[GroupChange]  # of some groups


class GroupOptions(torch.optim.Optimizer):
    """The groups of a distributed optimizer without their parameters.

    torch's schedulers take it for an optimizer, and change its options only.
    """

    def __init__(self, groups: Sequence[Options], defaults: Options) -> None:
        super().__init__([{**group, "params": []} for group in groups], dict(defaults))
        self._now: list[Options] = []
        self._seen: list[Options] | None = None  # the groups at the last copy

    def now(self) -> list[Options]:
        """Return a copy of the options; the same one while they do not change."""
        groups = self.param_groups
        if self._seen != groups:
            self._now = options_of(self)
            is_plain = all(
                _is_constant(option) for group in groups for option in group.values()
            )
            self._seen = [dict(group) for group in groups] if is_plain else None
        return self._now

    def step(self, closure: Any = None) -> NoReturn:
        """Refuse: the parameters are not here."""
        raise UsageError(
            "these are the options of a DistributedOptimizer, for schedulers only; "
            "step with `await optimizer.step(ctx)`"
        )

    def note_step(self) -> None:
        """Tell schedulers that a step was taken: they warn otherwise."""
        self._opt_called = True  # where LRScheduler looks


def options_of(optimizer: torch.optim.Optimizer) -> list[Options]:
    """Return a copy of the options of each group that can travel."""
    return [
        {
            key: _copied(value)
            for key, value in options_in(group).items()
            if can_travel(value)
        }
        for group in optimizer.param_groups
    ]


def _is_constant(value: Any) -> bool:
    """Return whether comparing a value shows a change, and only we change it."""
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    if type(value) is list:  # the parameters, which this copy does not have
        return not value
    return value is None or isinstance(value, bool | int | float | complex | str)


def can_travel(value: Any) -> bool:
    """Return whether an option means the same on another worker."""
    if isinstance(value, tuple | list):
        return all(can_travel(part) for part in value)
    plain = bool | int | float | complex | str | torch.Tensor
    return value is None or isinstance(value, plain)


def changes(now: Sequence[Options], known: Sequence[Options]) -> Changes:
    """Return the options that differ from those that an owner knows."""
    group_changes: Changes = []
    if now is known:
        return group_changes
    for index, (group, known_group) in enumerate(zip(now, known, strict=True)):
        differing = {
            key: value
            for key, value in group.items()
            if key not in known_group or not _is_same(value, known_group[key])
        }
        if differing:
            group_changes.append(GroupChange(index, differing))
    return group_changes


def is_harmless(differing: Changes) -> bool:
    """Return whether options differ by numbers only: no step of torch refuses those."""
    return all(
        _is_number(option) for _, values in differing for option in values.values()
    )


def _is_number(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_number(part) for part in value)
    return isinstance(value, float | int | torch.Tensor) and type(value) is not bool


def set_options(optimizer: torch.optim.Optimizer, differing: Changes) -> None:
    """Set options; a tensor keeps its identity, as torch's schedulers do."""
    for index, values in differing:
        group = optimizer.param_groups[index]
        for key, value in values.items():
            current = group.get(key)
            if isinstance(current, torch.Tensor):
                with torch.no_grad():
                    current.copy_(torch.as_tensor(value, device=current.device))
            else:
                group[key] = value


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _is_same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        return (
            isinstance(first, torch.Tensor)
            and isinstance(second, torch.Tensor)
            and torch.equal(first, second)
        )
    return bool(first == second)


Closure: TypeAlias = Callable[[Context], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one step.

    Attributes:
        is_applied: False if it was skipped, as `skip_nonfinite` asks.
        gradients: number of parameters, over all owners, that had a gradient in the
            context; of several evaluations, in the first.
        grad_norm: of all gradients together, before clipping; None if neither
            `clip_grad_norm` nor `skip_nonfinite` needed it; of the first evaluation.
        loss: the first result of the closure; None without a closure.
    """

    is_applied: bool
    gradients: int
    grad_norm: float | None
    loss: Any = None


@dataclass(frozen=True, slots=True)
class StepOptions:
    """The options of one step.

    Attributes:
        clip_norm: the largest norm of all gradients together; None: any.
        skip_nonfinite: apply nothing if a gradient is infinite or NaN.
        allow_stale: hide the change from graphs that hold the parameters.
    """

    clip_norm: float | None
    skip_nonfinite: bool
    allow_stale: bool

    @property
    def needs_norm(self) -> bool:
        """Return whether the norm of the gradients is needed."""
        return self.clip_norm is not None or self.skip_nonfinite

    def check(self) -> None:
        """Refuse options that are out of range."""
        check_clipping(self.clip_norm)
        check_flags(skip_nonfinite=self.skip_nonfinite, allow_stale=self.allow_stale)


def check_clipping(clip_grad_norm: float | None) -> None:
    """Raise UsageError unless gradients can be scaled to at most this norm."""
    if clip_grad_norm is not None:
        check_above("clip_grad_norm", clip_grad_norm, 0)

"""The options of one step, and its result."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from asyncrpc.core.arguments import check_above, check_flags
from asyncrpc.core.autograd.context import Context

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

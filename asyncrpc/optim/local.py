"""The part of a distributed optimizer that one owner runs: torch's own, on its values.

A step takes the gradients of one autograd context.  `.grad` is theirs for the time of
the step only, and only on the parameters of this optimizer: what was not reached in
this context has none, so a gradient of an earlier step is never applied again, and a
`.grad` that the program keeps there for itself is put back.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch.autograd import (  # type: ignore[attr-defined]
    _unsafe_preserve_version_counter as graph_versions_kept,
)

from asyncrpc.autograd.engine import gradients_set_aside
from asyncrpc.errors import OptimizerError

Gradients = Mapping[torch.Tensor, torch.Tensor]

_SMALLEST_NORM: Final = 1e-6  # as torch.nn.utils.clip_grad_norm_ adds to the norm


class LocalOptimizer:
    """An optimizer, the schedulers of its learning rates, and the lock of its steps.

    Every method may block, on the lock that backward passes of this worker take too:
    to be called in a thread.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, lock: threading.Lock) -> None:
        self._optimizer = optimizer
        self._lock = lock  # over `.grad` of every parameter here
        self._schedulers: list[Any] = []

    def gradients(self, gathered: Gradients) -> dict[torch.Tensor, torch.Tensor]:
        """Return those of the gradients that are of our parameters."""
        return {one: gathered[one] for one in self._parameters() if one in gathered}

    def step(self, gradients: Gradients, scale: float, *, allow_stale: bool) -> None:
        """Step with these gradients times `scale`, which they are not changed by.

        Args:
            gradients: by parameter.
            scale: what each is multiplied by.
            allow_stale: hide the change from graphs that hold the parameters, so that
                their backward passes are not refused.
        """
        parameters = self._parameters()
        with self._lock, gradients_set_aside(parameters):
            for parameter, gradient in gradients.items():
                parameter.grad = gradient if scale == 1.0 else gradient * scale
            with _versions_kept(parameters if allow_stale else ()):
                self._optimizer.step()

    def add_group(self, group: dict[str, Any]) -> None:
        """Take in one more group of parameters."""
        with self._lock:
            self._optimizer.add_param_group(group)

    def state(self) -> dict[str, Any]:
        """Return a copy of the state, and of the schedulers': of one moment."""
        with self._lock:
            own = copy.deepcopy(self._optimizer.state_dict())
            schedulers = [copy.deepcopy(one.state_dict()) for one in self._schedulers]
        return {"optimizer": own, "schedulers": schedulers}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take up a state that `state` returned.

        Raises:
            ValueError: it is of other groups of parameters, or schedulers.
        """
        with self._lock:
            self._optimizer.load_state_dict(state["optimizer"])
            for one, saved in zip(self._schedulers, state["schedulers"], strict=True):
                one.load_state_dict(saved)

    def learning_rates(self) -> list[float]:
        """Return the learning rate of each group."""
        with self._lock:
            return [float(group["lr"]) for group in self._optimizer.param_groups]

    def set_learning_rate(self, rate: float, index: int | None) -> None:
        """Set the learning rate of one group, or of all."""
        with self._lock:
            groups = self._optimizer.param_groups
            for group in groups if index is None else [groups[index]]:
                if isinstance(group["lr"], torch.Tensor):  # as `capturable` wants it
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate

    def add_scheduler(
        self, cls: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> int:
        """Make a scheduler of the learning rates; return its index."""
        with self._lock:
            self._schedulers.append(cls(self._optimizer, *args, **kwargs))
            return len(self._schedulers) - 1

    def step_scheduler(self, index: int, args: Sequence[Any]) -> None:
        """Step a scheduler."""
        with self._lock:
            self._schedulers[index].step(*args)

    def _parameters(self) -> list[torch.Tensor]:
        groups = self._optimizer.param_groups
        return [parameter for group in groups for parameter in group["params"]]


def _versions_kept(
    parameters: Sequence[torch.Tensor],
) -> AbstractContextManager[None]:
    """Return a context in which changes in place do not count as such."""
    if not parameters:
        return nullcontext()
    kept: AbstractContextManager[None] = graph_versions_kept(tuple(parameters))
    return kept


def check_parameters(values: Sequence[Any]) -> None:
    """Refuse what an optimizer could not change.

    Raises:
        OptimizerError: a value is no tensor, or no leaf that requires a gradient.
    """
    for index, value in enumerate(values):
        if not isinstance(value, torch.Tensor):
            kind = type(value).__name__
            raise OptimizerError(
                f"parameter {index} is a {kind}, not a tensor; give RRefs to parameters"
            )
        if not value.requires_grad or not value.is_leaf:
            raise OptimizerError(
                f"parameter {index} of shape {tuple(value.shape)} is no leaf tensor "
                "that requires a gradient; make it one with requires_grad_()"
            )


def squared_norm(gradients: Gradients) -> float:
    """Return the sum of the squares of all elements, in double precision.

    In the gradients' own, squares of half precision would overflow at a norm of 256.
    """
    return math.fsum(_norm(gradient) ** 2 for gradient in gradients.values())


def _norm(gradient: torch.Tensor) -> float:
    dense = gradient.coalesce().values() if gradient.is_sparse else gradient
    real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    return float(torch.linalg.vector_norm(real, dtype=torch.float64))


def scale_for(
    norm: float | None, clip_norm: float | None, *, skip_nonfinite: bool
) -> float | None:
    """Return what gradients of this norm are multiplied by; None skips the step.

    Source: torch.nn.utils.clip_grad_norm_.
    """
    if norm is None or (skip_nonfinite and not math.isfinite(norm)):
        return None if norm is not None else 1.0
    if clip_norm is None:
        return 1.0
    scale = clip_norm / (norm + _SMALLEST_NORM)
    return min(scale, 1.0)  # in this order a NaN stays one

"""Steps of torch's optimizers: which call no user code, and without torch's wrapper.

torch wraps `step` of every class of optimizers in a range for profilers, and in the
calls of hooks.  Without either, the wrapper is half of a small SGD step: 6 of 12 us.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, Final

import torch
from torch.autograd import profiler
from torch.optim import optimizer as for_all

from asyncrpc.autograd.torch_only import PLAIN, are_operators_torchs, is_plain

_observed: Callable[[], bool] = torch._C._autograd._profiler_enabled  # noqa: SLF001
_wrap: Any = torch.optim.Optimizer.profile_hook_step
_WRAPPER: Final = _wrap(lambda _optimizer: None).__code__


def plain_step_of(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """Return a function that does `optimizer.step()`.

    Hooks, profilers and wrappers may be added at any time: each call looks for them.
    """
    mine: Any = optimizer
    wrapped: Any = type(mine).step
    bare = _unwrapped(wrapped)

    def step() -> None:
        if (
            bare is wrapped  # not torch's wrapper
            or type(mine).step is not wrapped
            or "step" in vars(mine)  # a scheduler of learning rates has wrapped it
            or mine._optimizer_step_pre_hooks  # noqa: SLF001
            or mine._optimizer_step_post_hooks  # noqa: SLF001
            or for_all._global_optimizer_pre_hooks  # noqa: SLF001
            or for_all._global_optimizer_post_hooks  # noqa: SLF001
            or profiler._is_profiler_enabled  # noqa: SLF001
            or _observed()
        ):
            mine.step()
        else:
            bare(mine)

    return step


def _unwrapped(step: Any) -> Any:
    """Return what torch has wrapped, else `step` itself."""
    is_wrapper = type(step) is FunctionType and step.__code__ is _WRAPPER
    return step.__wrapped__ if is_wrapper else step


# torch wraps the step of a class when its first optimizer is made.
_STEPS: Final[dict[type, Any]] = {
    kind: _unwrapped(kind.step)
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
}
_METHODS: Final = {kind: frozenset(dir(kind)) for kind in _STEPS}
_HOOKS: Final = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
# Of options and state.  What else they hold may have methods of the user's.
_VALUES: Final = PLAIN | {bool, int, float, str, type(None)}


def steps_torch_only(optimizer: Any, gradients: Iterable[Any]) -> bool:
    """Return whether a step calls torch's own code only, now.

    Args:
        optimizer: to step.
        gradients: of its parameters; None for a missing gradient.
    """
    kind = type(optimizer)
    step = _STEPS.get(kind)
    if step is None or _unwrapped(kind.step) is not step or not are_operators_torchs():
        return False
    own = vars(optimizer)
    return (
        _METHODS[kind].isdisjoint(own)  # a scheduler replaces `step`
        and not any(own[name] for name in _HOOKS)
        and not for_all._global_optimizer_pre_hooks  # noqa: SLF001
        and not for_all._global_optimizer_post_hooks  # noqa: SLF001
        and all(gradient is None or is_plain(gradient) for gradient in gradients)
        and type(own["param_groups"]) is list
        and all(map(_is_plain_group, own["param_groups"]))
        and _is_plain_state(own["state"])
    )


def _is_plain_group(group: Any) -> bool:
    return (
        type(group) is dict
        and type(group["params"]) is list
        and all(map(is_plain, group["params"]))
        and all(
            _is_plain_value(value) for name, value in group.items() if name != "params"
        )
    )


def _is_plain_value(value: Any) -> bool:
    if type(value) is tuple:  # betas
        return all(map(_is_plain_value, value))
    return type(value) in _VALUES


def _is_plain_state(state: Any) -> bool:
    return (
        type(state) is defaultdict
        and state.default_factory is dict
        and all(
            is_plain(parameter)
            and type(values) is dict
            and all(map(_is_plain_value, values.values()))
            for parameter, values in state.items()
        )
    )

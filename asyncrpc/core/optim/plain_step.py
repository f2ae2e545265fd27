"""Steps of torch's optimizers: which call no user code, and without torch's wrapper.

torch wraps `step` of every class of optimizers in a range for profilers, and in the
calls of hooks.  Without either, the wrapper is half of a small SGD step: 6 of 12 us.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, Final

import torch
from torch.autograd import profiler
from torch.optim import optimizer as for_all

from asyncrpc.core.autograd.torch_only import PLAIN, are_operators_torchs

_observed: Callable[[], bool] = torch._C._autograd._profiler_enabled  # noqa: SLF001
_wrap: Any = torch.optim.Optimizer.profile_hook_step
_WRAPPER: Final = _wrap(lambda _optimizer: None).__code__


def plain_step_of(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """Return a function that does `optimizer.step()`.

    Hooks, profilers and wrappers may be added at any time: each call looks for them.
    """
    untyped: Any = optimizer
    wrapped: Any = type(untyped).step
    bare = _unwrapped(wrapped)

    def step() -> None:
        if (
            bare is wrapped  # not torch's wrapper
            or type(untyped).step is not wrapped
            or "step" in vars(untyped)  # a scheduler of learning rates has wrapped it
            or untyped._optimizer_step_pre_hooks  # noqa: SLF001
            or untyped._optimizer_step_post_hooks  # noqa: SLF001
            or for_all._global_optimizer_pre_hooks  # noqa: SLF001
            or for_all._global_optimizer_post_hooks  # noqa: SLF001
            or profiler._is_profiler_enabled  # noqa: SLF001
            or _observed()
        ):
            untyped.step()
        else:
            bare(untyped)

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
_HOOKS: Final = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
# Of options and state.  What else they hold may have methods of the user's.
_PLAIN_OR_NONE: Final = PLAIN | {type(None)}
_VALUES: Final = _PLAIN_OR_NONE | {bool, int, float, str}
_SEQUENCES: Final = frozenset((tuple, list))  # betas, and the parameters of a group
_OWN: Final = _VALUES | {dict, list, OrderedDict, defaultdict}  # of an optimizer
_NAMES: Final = frozenset((str,))


def steps_torch_only(optimizer: Any, gradients: Iterable[Any]) -> bool:
    """Return whether a step calls torch's own code only, now.

    Args:
        gradients: of its parameters; None for a missing gradient.
    """
    kind = type(optimizer)
    step = _STEPS.get(kind)
    if step is None or _unwrapped(kind.step) is not step or not are_operators_torchs():
        return False
    own = vars(optimizer)
    return (
        _has_plain_names(own)
        # A scheduler replaces `step`; a GradScaler sets tensors that a step reads.
        and _OWN.issuperset(map(type, own.values()))
        and not any(own[name] for name in _HOOKS)
        and not for_all._global_optimizer_pre_hooks  # noqa: SLF001
        and not for_all._global_optimizer_post_hooks  # noqa: SLF001
        and _PLAIN_OR_NONE.issuperset(map(type, gradients))
        and type(own["defaults"]) is dict
        and _has_plain_names(own["defaults"])  # a step reads one
        and type(own["defaults"].get("differentiable")) is bool
        and all(map(_is_plain_dict, own["param_groups"]))
        and _is_plain_state(own["state"])
    )


def _has_plain_names(values: dict[Any, Any]) -> bool:
    """Return whether looking a name up calls no `__eq__` of the user's."""
    return _NAMES.issuperset(map(type, values))


def _is_plain_dict(values: Any) -> bool:
    if type(values) is not dict or not _has_plain_names(values):
        return False
    for value in values.values():
        kind = type(value)
        if kind not in _VALUES and not (
            kind in _SEQUENCES and _VALUES.issuperset(map(type, value))
        ):
            return False
    return True


def _is_plain_state(state: Any) -> bool:
    return (
        type(state) is defaultdict
        and state.default_factory is dict
        and PLAIN.issuperset(map(type, state))
        and all(map(_is_plain_dict, state.values()))
    )

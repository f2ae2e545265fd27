"""Steps of optimizers without torch's wrapper for profilers and hooks.

torch wraps `step` of every class of optimizers in a range for profilers, and in the
calls of hooks.  Without either, the wrapper is half of a small SGD step: 6 of 12 us.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, Final

import torch
from torch.autograd import profiler
from torch.optim import optimizer as for_all

_observed: Callable[[], bool] = torch._C._autograd._profiler_enabled  # noqa: SLF001
_wrap: Any = torch.optim.Optimizer.profile_hook_step
_WRAPPER: Final = _wrap(lambda _optimizer: None).__code__


def plain_step_of(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """Return a function that does `optimizer.step()`.

    Hooks, profilers and wrappers may be added at any time: each call looks for them.
    """
    mine: Any = optimizer
    wrapped: Any = type(mine).step
    is_torchs = type(wrapped) is FunctionType and wrapped.__code__ is _WRAPPER
    bare = wrapped.__wrapped__ if is_torchs else None

    def step() -> None:
        if (
            bare is None
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

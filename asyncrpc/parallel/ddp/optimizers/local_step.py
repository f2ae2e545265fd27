"""The step of a torch optimizer, within a coroutine.

torch takes the wrapped step for a plain function, so it would call the hooks that
follow a step before the coroutine has begun: they are called here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from asyncrpc.core.torch_modes import modes_here, surrounded
from asyncrpc.errors import UsageError
from asyncrpc.parallel.ddp.threads import Threads, in_thread, user_of

# It computes the loss and its gradients, and returns the loss; plain, or a coroutine.
Closure: TypeAlias = Callable[[], Any]


def call_hooks_before(
    optimizer: torch.optim.Optimizer, closure: Closure | None
) -> Closure | None:
    """Call the hooks that were registered with `register_step_pre_hook`."""
    args, kwargs = _arguments(optimizer, closure)
    hooks: dict[int, Any] = optimizer._optimizer_step_pre_hooks  # noqa: SLF001  (as torch's own step does)
    for hook in hooks.values():
        changed = hook(optimizer, args, kwargs)
        if changed is None:
            continue
        if not isinstance(changed, tuple) or len(changed) != 2:  # noqa: PLR2004
            raise UsageError(
                f"a hook before a step must return None, or arguments and keyword "
                f"arguments; {hook!r} returned {changed!r}"
            )
        args, kwargs = changed
    return args[1] if len(args) > 1 else kwargs.get("closure")


def call_hooks_after(optimizer: torch.optim.Optimizer, closure: Closure | None) -> None:
    """Call the hooks that were registered with `register_step_post_hook`."""
    args, kwargs = _arguments(optimizer, closure)
    hooks: dict[int, Any] = optimizer._optimizer_step_post_hooks  # noqa: SLF001  (likewise)
    for hook in hooks.values():
        hook(optimizer, args, kwargs)


def _arguments(
    optimizer: torch.optim.Optimizer, closure: Closure | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((optimizer,) if closure is None else (optimizer, closure)), {}


def with_modes_here(closure: Closure | None) -> Closure | None:
    """Return a closure that has torch's modes of its caller, wherever it runs."""
    if closure is None:
        return None
    inner = surrounded(closure, modes_here())
    if not _is_coroutine_function(closure):
        return inner

    async def compute() -> Any:
        return await inner()

    return compute


def _is_coroutine_function(closure: Closure) -> bool:
    call = type(closure).__call__  # of an object that is called like a function
    return any(map(inspect.iscoroutinefunction, (closure, call)))


async def step_in_thread(
    optimizer: torch.optim.Optimizer, closure: Closure | None, threads: Threads
) -> Any:
    """Step one of torch's optimizers in a thread; when this ends, it has ended.

    Args:
        closure: a coroutine function is called before the step, once; a plain function
            is passed to the optimizer.
    """
    step: Callable[..., Any] = optimizer.step
    parameters = [
        parameter for group in optimizer.param_groups for parameter in group["params"]
    ]
    user = user_of(threads, parameters)
    if closure is None:
        return await in_thread(step, user)
    if not _is_coroutine_function(closure):
        return await in_thread(lambda: step(closure), user)
    loss = await closure()
    await in_thread(step, user)
    return loss

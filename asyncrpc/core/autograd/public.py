"""The functions of `asyncrpc.autograd`, on the current worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from asyncrpc.core.arguments import (
    UNSET,
    check_call_timeout,
    check_choice,
    check_flags,
    check_kind,
    check_sequence,
    listed,
)
from asyncrpc.core.autograd.contexts import Context, current_context_var
from asyncrpc.core.autograd.engine import Keeping
from asyncrpc.core.autograd.service import AutogradService
from asyncrpc.core.worker import current_worker
from asyncrpc.errors import InvalidContextError, UsageError


def context() -> Context:
    """Return a new autograd context of the current worker; enter it with `async with`.

    Every call made inside, by this task and by those it starts, records which tensors
    it takes across; functions on other workers join the context.  Contexts of different
    tasks never mix.  On exit the context ends on every worker that it reached.

    Returns:
        The context, to be given to `backward`, `get_gradients` and
        `DistributedOptimizer.step`.

    Raises:
        NotStartedError: there is no running worker here.

    Source: torch.distributed.autograd.context; an id per task instead of per thread.
    """
    return _service().new_context()


def current_context() -> Context:
    """Return the context of this task, or of the call that this function serves.

    Raises:
        InvalidContextError: no context is open here.
    """
    context = current_context_var.get()
    if context is None:
        raise InvalidContextError(
            "there is no autograd context here; use `async with "
            "asyncrpc.autograd.context() as ctx:`"
        )
    return context


async def backward(
    context: Context,
    roots: torch.Tensor | Sequence[torch.Tensor],
    retain_graph: bool = False,  # noqa: FBT001, FBT002  (torch's signature)
    *,
    create_graph: bool = False,
    gradients: Sequence[torch.Tensor | None] | None = None,
    mode: Literal["smart", "fast"] = "smart",
    timeout_s: Any = UNSET,
) -> None:
    """Compute exact gradients on every worker that took part.

    The gradients gather in the context, per worker; `.grad` is untouched.  They equal
    those of the same program in one process; results that the roots do not depend on
    cost nothing.  Local graphs run on torch's engine, in threads; hooks fire.

    Args:
        context: the context in which the roots were computed.
        roots: tensors of this worker that require grad: scalars, or any shape if
            `gradients` gives their gradients.
        retain_graph: keep the graphs for another pass in this context.
        create_graph: make the gradients differentiable, also across workers, for
            another pass in this context; keeps the graphs.
        gradients: for each root a tensor of its shape, or None for a scalar's 1.
        mode: `"smart"` finds out which results take part; `"fast"` assumes that all
            results that were sent in the context do, as torch does, and fails if one
            does not.
        timeout_s: seconds that the pass may take, None for no limit; by default
            `Options.rpc_timeout_s`.  An enclosing `asyncrpc.deadline` counts as well.

    Raises:
        BackwardFailedError: the pass failed on a worker, and has been undone on all;
            `worker` names it, and the cause says why.  Or the pass took too long, and
            the text says what it waited for.
        NoGradientPathError: a root does not require grad.
        InvalidContextError: the context has ended.
        NotStartedError: the context's worker has been shut down.
        UsageError: a root that is not a scalar has no gradient, or a gradient has a
            different shape than its root; an argument has the wrong type; or this is
            not the worker's event loop.

    Cancellation:
        The pass is undone on every worker; they are not waited for.

    Source: torch.distributed.autograd.backward, whose FAST mode waits forever if a
    result is not used.
    """
    root_tensors = checked_roots(context, roots, gradients, timeout_s)
    check_flags(retain_graph=retain_graph, create_graph=create_graph)
    check_choice("mode", mode, ("smart", "fast"))
    service = context.service
    service.check_on_loop("autograd.backward")
    await service.backward(
        context,
        root_tensors,
        gradients,
        Keeping(retain_graph, create_graph),
        service.deadline_of(timeout_s),
        is_fast=mode == "fast",
    )


def get_gradients(context: Context) -> dict[torch.Tensor, torch.Tensor]:
    """Return the gradients that gathered on this worker, by their tensors.

    Args:
        context: the context of the backward passes.

    Returns:
        A new dictionary; each gradient has the shape and dtype of its key.  The
        gradients of several passes on an XLA device are added up here: then call it by
        `asyncrpc.devices.run`, as it uses the device.

    Raises:
        InvalidContextError: the context has ended, or no call brought it here.
        UsageError: `context` is not a context or an id.

    Source: torch.distributed.autograd.get_gradients.
    """
    check_context(context)
    return dict(context.service.state(context).gradients)


def checked_roots(
    context: object,
    roots: torch.Tensor | Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None] | None,
    timeout_s: Any,
) -> Sequence[torch.Tensor]:
    """Return the roots of a pass in a list."""
    check_context(context)
    if not isinstance(roots, torch.Tensor):
        roots = listed("roots", roots, "a tensor, or a list of tensors")
    if gradients is not None:
        check_sequence("gradients", gradients, "a list of tensors, one for each root")
    check_call_timeout("timeout_s", timeout_s)
    return [roots] if isinstance(roots, torch.Tensor) else roots


def check_context(context: object) -> None:
    """Raise UsageError unless an argument is an autograd context."""
    wanted = "a context of `async with asyncrpc.autograd.context()`"
    check_kind("context", context, Context, wanted)


def _service() -> AutogradService:
    worker = current_worker().parts
    for propagator in worker.propagators:
        if isinstance(propagator, AutogradService):
            return propagator
    raise UsageError(f"worker {worker.name!r} was made without autograd")

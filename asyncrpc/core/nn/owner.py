"""The functions of a remote module on the worker that owns it.

Each is called there with a reference to the module, which is local there.
"""

from __future__ import annotations

import contextvars
import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from asyncrpc.core.autograd.service import AutogradService
from asyncrpc.core.nn import interface as interfaces
from asyncrpc.core.rref.handle import RRef
from asyncrpc.core.worker import current_worker
from asyncrpc.errors import UsageError

T = TypeVar("T")


def create(
    module_cls: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: str,
) -> nn.Module:
    """Make a module on a device of this worker."""
    current_worker().parts.functions.check(module_cls)
    module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        name = getattr(module_cls, "__name__", repr(module_cls))
        raise UsageError(
            f"module_cls must make a torch.nn.Module, but {name} made a "
            f"{type(module).__name__}"
        )
    where = current_worker().parts.devices.require(device)
    if where == "cpu":
        return module
    try:
        return module.to(where)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(
            f"worker {current_worker().name!r} cannot put a module on {device!r}: "
            f"{error}"
        ) from error


async def ready(rref: RRef[nn.Module]) -> None:
    """Return when the module has been made; raise if it could not be."""
    await rref


async def parameters(
    rref: RRef[nn.Module],
    recurse: bool,  # noqa: FBT001  (travels in a call)
) -> list[RRef[nn.Parameter]]:
    """Return a reference to each parameter."""
    module = await rref
    return [RRef(parameter) for parameter in module.parameters(recurse)]


async def named_parameters(
    rref: RRef[nn.Module],
    recurse: bool,  # noqa: FBT001  (travels in a call)
) -> list[tuple[str, RRef[nn.Parameter]]]:
    """Return a reference to each parameter, with its name."""
    module = await rref
    parameters = module.named_parameters(recurse=recurse)
    return [(name, RRef(parameter)) for name, parameter in parameters]


async def check(
    rref: RRef[nn.Module], interface: str, shapes: Sequence[interfaces.Shape]
) -> None:
    """Return if a module has the methods of an interface."""
    problems = list(interfaces.problems_of(await rref, shapes))
    if problems:
        raise UsageError(f"the module is not a {interface}: {'; '.join(problems)}")


async def cast(rref: RRef[nn.Module], dtype: torch.dtype) -> None:
    """Cast the module's floating-point parameters and buffers, in place."""
    module = await rref

    def job() -> None:
        with _steps_held_off():
            module.to(dtype)

    await _in_thread(job)


async def train(
    rref: RRef[nn.Module],
    mode: bool,  # noqa: FBT001  (travels in a call)
) -> None:
    """Set the mode."""
    (await rref).train(mode)


async def state(rref: RRef[nn.Module]) -> dict[str, Any]:
    """Return a copy of the state, of one moment, in the host's memory."""
    module = await rref

    def job() -> dict[str, Any]:
        with _steps_held_off():
            return {name: _copied(value) for name, value in module.state_dict().items()}

    return await _in_thread(job)


def _copied(value: Any) -> Any:
    """Copy a tensor, or a value of a module's `get_extra_state`."""
    if isinstance(value, torch.Tensor):
        return value.to("cpu", copy=True)
    return copy.deepcopy(value)


async def load_state(
    rref: RRef[nn.Module],
    state_dict: Mapping[str, Any],
    strict: bool,  # noqa: FBT001  (travels in a call)
) -> tuple[list[str], list[str]]:
    """Load a state; return the missing and the unexpected keys."""
    module = await rref

    def load() -> tuple[list[str], list[str]]:
        with _steps_held_off():
            mismatch = module.load_state_dict(state_dict, strict=strict)
        return list(mismatch.missing_keys), list(mismatch.unexpected_keys)

    return await _in_thread(load)


async def run_method(  # noqa: PLR0917  (travels in a call)
    rref: RRef[nn.Module],
    device: str,
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    stays: bool = False,  # noqa: FBT001, FBT002  (travels in a call)
) -> Any:
    """Run a plain method of a module on a device: values go there first, and back."""
    module = await rref
    current_worker().parts.functions.check_method(type(module), name)
    method = getattr(module, name)
    if inspect.iscoroutinefunction(method):
        raise UsageError(
            f"{type(module).__name__}.{name} is a coroutine function; on {device!r} "
            "methods run in a thread, which also moves their tensors: make it plain"
        )
    devices = current_worker().parts.devices

    def run() -> Any:
        placed = devices.require(device)
        here, named = pytree.tree_map_only(
            torch.Tensor, lambda value: value.to(placed), (tuple(args), dict(kwargs))
        )
        result = method(*here, **named)
        if stays:
            return result
        return pytree.tree_map_only(torch.Tensor, lambda value: value.cpu(), result)

    return await _in_thread(run)


async def _in_thread(job: Callable[[], T]) -> T:
    """Run a job in a thread, in this call's worker, autograd context and deadline."""
    context = contextvars.copy_context()
    ran: T = await current_worker().parts.run_in_thread(lambda: context.run(job))
    return ran


def _steps_held_off() -> AbstractContextManager[Any]:
    """Return a context in which no optimizer step of this worker changes parameters."""
    # Only this package makes services of the name.
    service: Any = current_worker().parts.service(AutogradService.name)
    autograd: AutogradService = service
    return autograd.engine.lock

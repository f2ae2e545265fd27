"""asyncrpc's data parallel training under torch's names, for PyTorch's own tests.

asyncrpc's module is awaited once, and then takes the `loss.backward()` that the tests
call.  So an adapter translates arguments, runs coroutines on the loop of the process
group, and raises errors of the classes that torch raises.  It does no more: what
asyncrpc's module cannot do, a test sees.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from asyncrpc import ddp
from asyncrpc.errors import AsyncRpcError
from asyncrpc.parallel.collectives.torch_backend.process_group import (
    AsyncRpcProcessGroup,
)

IGNORED: Final = "_ddp_params_and_buffers_to_ignore"  # torch's attribute of a module
MODULE: Final = "DistributedDataParallel"
HOOKS: Final = "torch.distributed.algorithms.ddp_comm_hooks"
AVERAGING: Final = "torch.distributed.algorithms.model_averaging"
# Where PyTorch's tests find what stands in their place.  Of the names in these modules,
# those that asyncrpc has too are replaced.
PLACES: Final = (
    "torch.nn.parallel",
    "torch.nn.parallel.distributed",
    f"{HOOKS}.default_hooks",
    f"{HOOKS}.debugging_hooks",
    f"{HOOKS}.powerSGD_hook",
    f"{HOOKS}.post_localSGD_hook",
    f"{AVERAGING}.averagers",
    f"{AVERAGING}.hierarchical_model_averager",
    "torch.distributed.optim.post_localSGD_optimizer",
)
# A test that uses one of these names, itself or by its helpers, is one of them.
NAMES: Final = frozenset({MODULE, *(n for n in ddp.__all__ if n[0].isupper())})


class TorchError(RuntimeError, ValueError):
    """An error of asyncrpc, of the classes that torch's module raises."""


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except AsyncRpcError as error:
        raise TorchError(f"{type(error).__name__}: {error}") from error


def _thread() -> Any:
    world: Any = dist.group.WORLD
    return world.participant.thread


def _translated(value: Any) -> Any:
    """Return asyncrpc's group of torch's process group; else what is given."""
    return value.group if isinstance(value, AsyncRpcProcessGroup) else value


@contextmanager
def _blocking(context: Any) -> Iterator[None]:
    """Enter an async context on the loop, from a thread that waits for it."""
    with _errors():
        _thread().run(context.__aenter__())
    try:
        yield
    except BaseException as error:
        _thread().run(context.__aexit__(type(error), error, error.__traceback__))
        raise
    with _errors():
        _thread().run(context.__aexit__(None, None, None))


class DistributedDataParallel(ddp.DistributedDataParallel):
    """asyncrpc's module with torch's constructor and methods."""

    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: Any = None,
        device_mesh: Any = None,
        forward_sync_buffers: bool | None = None,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = False,
        **options: Any,
    ) -> None:
        """Wrap a module, and meet the other ranks."""
        if forward_sync_buffers is not None:
            options["broadcast_buffers"] = forward_sync_buffers
        if bucket_cap_mb is not None:
            options["bucket_cap_mb"] = bucket_cap_mb
        options["gradient_as_bucket_view"] = gradient_as_bucket_view
        named = {*dict(module.named_parameters()), *dict(module.named_buffers())}
        ignored = set(getattr(module, IGNORED, ()))
        if device_mesh is not None:
            process_group = device_mesh.get_group()
        process_group = process_group or dist.group.WORLD
        group = _translated(process_group)
        options_here = {**options, "ignored": named & ignored}
        init: Any = super().__init__
        with _errors():
            _thread().do_at_once(lambda: init(module, group, **options_here))
            _thread().run(self._meet())
        self.process_group = process_group
        self.device_mesh = device_mesh
        self.forward_sync_buffers = options.get("broadcast_buffers", True)
        self._keywords = options
        self._join: Any = None

    def join(self, *, enable: bool = True, **options: bool) -> Any:
        """Return a context for uneven inputs."""
        if not enable:
            return self._alone()
        self._join = super().join(**options)
        return _blocking(self._join)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        yield

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Register a hook: one of asyncrpc's with its group, torch's with torch's."""
        if inspect.iscoroutinefunction(hook):
            state = _translated(state)
        elif state is None:
            hook = functools.partial(_of_world, hook)
        with _errors():
            super().register_comm_hook(state, hook)

    # What torch's module keeps to itself, where asyncrpc's knows the same.

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: Any, names: Any) -> None:
        setattr(module, IGNORED, names)

    @property
    def _authoritative_rank(self) -> Any:
        return self._join._last  # noqa: SLF001

    def _get_ddp_logging_data(self) -> dict[str, int]:
        return {
            "has_rebuilt_buckets": int(self._gradients.is_ordered),
            "join_uneven_inputs": int(self._join is not None),
        }

    def __reduce_ex__(self, _protocol: Any) -> Any:
        """Save the module inside; whoever loads it wraps it again."""
        return _wrapped, (self.module, self._keywords)


def _wrapped(module: nn.Module, options: dict[str, Any]) -> DistributedDataParallel:
    return DistributedDataParallel(module, **options)


def _of_world(hook: Any, _: object, bucket: Any) -> Any:
    return hook(None, bucket)


def _adapted(base: Any) -> type:
    """Return a class that takes torch's arguments, and whose coroutines block."""
    takes_group = "group" in inspect.signature(base).parameters

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if takes_group:  # torch's default is all ranks
            kwargs["group"] = kwargs.pop("process_group", None) or dist.group.WORLD
        args = tuple(map(_translated, args))
        kwargs = {name: _translated(value) for name, value in kwargs.items()}
        with _errors():
            _thread().do_at_once(lambda: base.__init__(self, *args, **kwargs))

    coroutines = inspect.getmembers(base, inspect.iscoroutinefunction)
    methods = {name: _on_loop(method) for name, method in coroutines if name[0] != "_"}
    return type(base.__name__, (base,), {"__init__": init, **methods})


def _on_loop(method: Any) -> Any:
    """Return a method that waits for a coroutine; on the loop, the coroutine."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        work = method(*args, **kwargs)
        if _thread().is_here:
            return work
        with _errors():
            return _thread().run(work)

    return call


def put_in_place() -> None:
    """Let whatever asks torch for data parallel training have asyncrpc's."""
    for place in map(importlib.import_module, PLACES):
        for name in set(ddp.__all__) & set(vars(place)):
            ours = getattr(ddp, name)
            if name == MODULE:
                ours = DistributedDataParallel
            elif isinstance(ours, type):
                ours = _adapted(ours)
            setattr(place, name, ours)
    # An error of autograd's thread is one of asyncrpc's.
    backward: Any = torch.autograd.backward
    autograd: Any = torch.autograd
    autograd.backward = _errors()(backward)

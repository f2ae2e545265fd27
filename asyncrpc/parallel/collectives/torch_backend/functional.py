"""Functional collectives on torch_xla: refused for our process groups.

torch_xla does `torch.distributed._functional_collectives` itself, between the replicas
that its own runtime knows, whatever group is given: where each process is one replica
(PJRT on the CPU), nothing is reduced, and no error is raised.  Functional collectives
of other groups, and on other devices, are left as they are.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]  # unlisted
    _resolve_process_group,
)

from asyncrpc.errors import UsageError
from asyncrpc.parallel.collectives.torch_backend.process_group import (
    AsyncRpcProcessGroup,
)
from asyncrpc.parallel.collectives.torch_backend.work import error_for_torch

_NAMES: Final = (
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "all_reduce",
    "all_reduce_",
    "all_reduce_coalesced",
    "all_reduce_coalesced_",
    "all_to_all_single",
    "broadcast",
    "broadcast_",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
)
# Calls with tensors of torch_xla pass through here before they reach it.
_KEY: Final = "AutogradXLA"
_BELOW: Any = torch._C._after_autograd_keyset  # noqa: SLF001  unlisted


def guard() -> Any:
    """Intercept torch_xla's functional collectives, if torch_xla is installed."""
    if importlib.util.find_spec("torch_xla") is None:
        return None
    make: Any = torch.library.Library  # torch does not annotate it
    library = make("_c10d_functional", "IMPL")
    for name in _NAMES:
        operation = getattr(torch.ops._c10d_functional, name).default  # noqa: SLF001
        library.impl(name, _guarded(operation), _KEY, with_keyset=True)
    return library


def _guarded(operation: Any) -> Callable[..., Any]:
    at = [argument.name for argument in operation._schema.arguments].index("group_name")  # noqa: SLF001
    return partial(_pass_on, operation, at)


def _pass_on(operation: Any, at: int, keys: Any, *args: Any, **others: Any) -> Any:
    """Pass a call on to torch_xla, unless the process group is asyncrpc's."""
    name = args[at] if at < len(args) else others["group_name"]
    if isinstance(_resolve_process_group(name), AsyncRpcProcessGroup):
        problem = (
            f"functional {operation.name()} on an XLA device does not use the process "
            f"group {name!r} of asyncrpc: torch_xla runs it between the replicas of "
            "its own runtime; use the functions of torch.distributed, or tensors of "
            "the host"
        )
        raise error_for_torch(UsageError(problem))
    return operation.redispatch(keys & _BELOW, *args, **others)

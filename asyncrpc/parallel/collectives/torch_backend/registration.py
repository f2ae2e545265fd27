"""The registration of the backend and of `asyncrpc://` with torch, at import.

Functional collectives on torch_xla: refused for our process groups.

torch_xla does `torch.distributed._functional_collectives` itself, between the replicas
that its own runtime knows, whatever group is given: where each process is one replica
(PJRT on the CPU), nothing is reduced, and no error is raised.  Functional collectives
of other groups, and on other devices, are left as they are.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # unlisted
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]  # unlisted
    _get_default_group,
    _resolve_process_group,
)
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

from asyncrpc.core.membership.launched_store import find_store, given_in
from asyncrpc.core.membership.store_places import GivenStore
from asyncrpc.core.options import Options
from asyncrpc.errors import AsyncRpcError, UsageError
from asyncrpc.parallel.collectives.torch_backend.process_group import (
    NAME,
    AsyncRpcProcessGroup,
)
from asyncrpc.parallel.collectives.torch_backend.rank_runtime import (
    RankRuntime,
    StoreMeeting,
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


_SCHEME: Final = "asyncrpc"


def _create(group_options: Any, options: Options | None) -> AsyncRpcProcessGroup:
    """Make a process group; torch calls this at every rank that is in it.

    Args:
        options: of the worker, `pg_options` of `init_process_group`; None: defaults.
    """
    if getattr(group_options, "enable_reconfigure", False):
        raise ValueError(
            f"the backend {NAME!r} cannot be reconfigured: leave out "
            "enable_reconfigure=True; elastic groups are in asyncrpc.ElasticGroup"
        )
    try:
        participant, ranks = _participant(group_options, options)
        try:
            return AsyncRpcProcessGroup(
                participant,
                ranks,
                group_options.group_rank,
                store=group_options.store,
                name=group_options.group_id,
                timeout=group_options.timeout,
            )
        finally:
            participant.close_if_unused()
    except AsyncRpcError as error:
        raise error_for_torch(error) from error


def _participant(
    group_options: Any, options: Options | None
) -> tuple[RankRuntime, Sequence[int]]:
    """Return the worker of a process group, and the ranks of the members with it.

    It is that of the default process group, if that is asyncrpc's; else a new one.
    """
    members: Sequence[int] = group_options.global_ranks_in_group  # empty: all
    if members and dist.is_initialized():
        default = _get_default_group()
        if isinstance(default, AsyncRpcProcessGroup) and default.participant.is_open:
            if options is not None:
                raise TypeError(
                    "pg_options are those of the worker, which all process groups of a "
                    "process share: give them to init_process_group"
                )
            return default.participant, members
    return _start(group_options, options), range(group_options.group_size)


def _start(group_options: Any, options: Options | None) -> RankRuntime:
    """Start a worker for this process; it meets the others at torch's store."""
    if options is None:
        options = Options()
    if not isinstance(options, Options):
        raise TypeError(
            f"the backend {NAME!r} takes asyncrpc.Options as pg_options, not a "
            f"{type(options).__name__}"
        )
    rank, size = group_options.group_rank, group_options.group_size
    # The same store may see several process groups, one after the other.
    turn = group_options.store.add(f"asyncrpc/turn/{rank}", 1)
    store = PrefixStore(f"asyncrpc/{turn}", group_options.store)
    ranks = group_options.global_ranks_in_group or range(size)
    return RankRuntime(
        StoreMeeting(GivenStore(lambda: store, is_host=rank == 0), rank, size),
        [f"rank{number}" for number in ranks],
        rank,
        replace(
            options,
            membership="static",
            rendezvous_timeout_s=group_options.timeout.total_seconds(),
        ),
    )


# A process group of ours serves every device, also ones that torch learns of later:
# the list only says for which devices torch makes one by default.  The host alone is
# listed, because torch has set its default, gloo, before; so no default changes.
dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
_GUARD = guard()


def _meet(url: str, timeout: timedelta, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """Meet where the launcher says, for `init_method="asyncrpc://"`."""
    place = given_in(url)
    launch = find_store(place.rank, place.world_size)
    meeting = rendezvous(launch.url, launch.rank, launch.world_size, timeout=timeout)
    store, rank, world_size = next(meeting)
    yield PrefixStore(f"restart{launch.restart}", store), rank, world_size
    # As torch's own handlers do.
    raise RuntimeError("asyncrpc:// cannot perform another rendezvous")


register_rendezvous_handler(_SCHEME, _meet)  # type: ignore[no-untyped-call]

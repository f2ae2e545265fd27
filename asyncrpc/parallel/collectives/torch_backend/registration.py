"""The registration of the backend and of `asyncrpc://` with torch, at import."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # unlisted
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

from asyncrpc.core.membership.launched_store import find_store, given_in
from asyncrpc.core.membership.store_places import GivenStore
from asyncrpc.core.options import Options
from asyncrpc.errors import AsyncRpcError
from asyncrpc.parallel.collectives.torch_backend.functional import guard
from asyncrpc.parallel.collectives.torch_backend.process_group import (
    NAME,
    AsyncRpcProcessGroup,
)
from asyncrpc.parallel.collectives.torch_backend.rank_runtime import (
    RankRuntime,
    StoreMeeting,
)
from asyncrpc.parallel.collectives.torch_backend.work import error_for_torch

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

"""Actors are made: on which workers, and all or none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from asyncrpc import Peer, RRef, Worker
from asyncrpc.clusters.actors.actor import Actor, ActorClass
from asyncrpc.clusters.actors.actors import Actors
from asyncrpc.clusters.actors.orders import ActorOrder, Remaking
from asyncrpc.clusters.actors.scatter import split
from asyncrpc.core.arguments import check_count, check_flag, check_kind, listed, wrong

if TYPE_CHECKING:
    from asyncrpc.clusters.cluster import Cluster

T = TypeVar("T")

PER_WORKER_MAX: Final = 4096


async def spawn_in(  # noqa: PLR0917
    cluster: Cluster,
    cls: type[T],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    on: Sequence[str | Peer] | None,
    per_worker: int,
    remake: bool,  # noqa: FBT001
) -> Actors[T]:
    """Make actors on workers of a cluster; see `Cluster.spawn`."""
    check_kind("cls", cls, type, "a class")
    check_count("per_worker", per_worker, at_least=1, at_most=PER_WORKER_MAX)
    check_flag("remake", remake)
    workers = [worker for worker in _workers(cluster, on) for _ in range(per_worker)]
    remaking = partial(Remaking, cluster) if remake else None
    return await spawn_on(cluster.worker, workers, cls, args, kwargs, remaking=remaking)


async def spawn_on(
    here: Worker,
    workers: Sequence[str],
    cls: type[T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] = MappingProxyType({}),
    *,
    remaking: Callable[[ActorOrder], Remaking] | None = None,
) -> Actors[T]:
    """Make an actor for each name of a worker; all or none."""
    orders = [
        ActorOrder(cls, index, worker, *arguments)
        for index, (worker, arguments) in enumerate(
            zip(workers, split(len(workers), args, kwargs), strict=True)
        )
    ]
    references = await make_all(here, orders)
    interface = ActorClass(cls)
    actors = [
        Actor(here, interface, order.index, rref, remaking and remaking(order))
        for order, rref in zip(orders, references, strict=True)
    ]
    return Actors(interface, actors)


def _workers(cluster: Cluster, on: Sequence[str | Peer] | None) -> list[str]:
    """Return the names of the workers that get actors."""
    if on is None:
        names = [peer.name for peer in cluster.peers]
    else:
        entries = listed("on", on, "a list of names or peers of the cluster")
        for entry in entries:
            check_kind("each of on", entry, (str, Peer), "a name or a Peer")
        peers = [
            cluster[entry.name if isinstance(entry, Peer) else entry]
            for entry in entries
        ]
        names = [peer.name for peer in peers]
    if not names:
        raise wrong("on", "at least one worker that runs", on)
    return names


async def make_all(here: Worker, orders: Sequence[ActorOrder]) -> list[RRef[Any]]:
    """Make all actors or none; the first error is raised."""
    tasks: list[asyncio.Task[RRef[Any]]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(order.make(here)) for order in orders]
    except BaseException as error:
        for task in tasks:  # those of the others, which the error's frames would keep
            if not task.cancelled() and task.exception() is None:
                task.result().release()
        if isinstance(error, BaseExceptionGroup):
            raise error.exceptions[0] from None
        raise
    return [task.result() for task in tasks]

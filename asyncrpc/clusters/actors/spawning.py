"""Actors are made: on which workers, all or none, and again when a worker was lost."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from asyncrpc import Peer, RRef, Worker
from asyncrpc.clusters.actors import owner
from asyncrpc.clusters.actors.actor import Actor, ActorClass, Actors
from asyncrpc.clusters.actors.scatter import split
from asyncrpc.clusters.changes import ClusterChanges
from asyncrpc.clusters.machine import ClusterWorkerState
from asyncrpc.core.arguments import check_count, check_flag, check_kind, listed, wrong
from asyncrpc.errors import (
    CallError,
    DeadlineExceededError,
    NotStartedError,
    Outcome,
    OwnerLostError,
    RemoteError,
    WorkerLostError,
)
from asyncrpc.extend import host_of

if TYPE_CHECKING:
    from asyncrpc.clusters.cluster import Cluster

T = TypeVar("T")

PER_WORKER_MAX = 4096


async def spawn_in(
    cluster: Cluster,
    cls: type[T],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    on: Sequence[str | Peer] | None,
    per_worker: int,
    remake: bool,
) -> Actors[T]:
    """Make actors on workers of a cluster; see `Cluster.spawn`."""
    check_kind("cls", cls, type, "a class")
    check_count("per_worker", per_worker, at_least=1, at_most=PER_WORKER_MAX)
    check_flag("remake", remake)
    workers = [worker for worker in _workers(cluster, on) for _ in range(per_worker)]
    orders = [
        ActorOrder(cls, index, worker, *arguments)
        for index, (worker, arguments) in enumerate(
            zip(workers, split(len(workers), args, kwargs), strict=True)
        )
    ]
    here = cluster.worker
    references = await make_all(here, orders)
    interface = ActorClass(cls)
    return Actors(
        interface,
        [
            Actor(
                here,
                interface,
                order.index,
                rref,
                Remaking(cluster, order).make if remake else None,
            )
            for order, rref in zip(orders, references, strict=True)
        ],
    )


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


@dataclass(frozen=True, slots=True)
class ActorOrder:
    """An actor that is to be made.

    Attributes:
        index: among those that are made with it.
        worker: name of the worker that gets it.
        args, kwargs: of the class.
    """

    cls: type
    index: int
    worker: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def label(self) -> str:
        """What tells it from the others."""
        return f"{self.cls.__name__}[{self.index}]"

    async def make(self, here: Worker) -> RRef[Any]:
        """Make it now; return the reference to it."""
        peer = here.peer(self.worker)
        try:
            return await peer.call(owner.make, self.cls, self.args, self.kwargs)
        except CallError as error:
            error.function = f"{self.label}.__init__"
            error.add_note(f"Actor {self.label} on {self.worker!r} was not made")
            raise


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


class Remaking:
    """How a lost actor is made again: by the arguments that it was made with."""

    def __init__(self, cluster: Cluster, order: ActorOrder) -> None:
        self._cluster = cluster
        self._order = order

    async def make(self) -> RRef[Any]:
        """Make it once its worker runs again; return the reference to it."""
        timeout_s = host_of(self._cluster.worker).options.rpc_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._once_it_runs()
        except TimeoutError as error:
            if isinstance(error, CallError) or timeout_s is None:
                raise
            raise DeadlineExceededError(
                function=f"{self._order.label}.__init__",
                to=self._order.worker,
                outcome=Outcome.NOT_EXECUTED,
                timeout_s=timeout_s,
            ) from error

    async def _once_it_runs(self) -> RRef[Any]:
        cluster, worker = self._cluster, self._order.worker
        changes = cluster.changes()
        while True:
            _ = cluster[worker]  # raises if it does not run, and will not
            if cluster.state(worker) is ClusterWorkerState.RUNNING:
                try:
                    return await self._order.make(cluster.worker)
                except (WorkerLostError, OwnerLostError) as error:
                    if isinstance(error, RemoteError):
                        raise  # of another worker
            await self._change(changes)  # a lost worker's, which is to come

    async def _change(self, changes: ClusterChanges) -> None:
        """Wait for a change of the worker."""
        async for change in changes:
            if change.worker == self._order.worker:
                return
        raise NotStartedError(f"the cluster {self._cluster.name!r} has ended")

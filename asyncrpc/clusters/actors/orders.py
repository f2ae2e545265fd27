"""How one actor is made, and made again once its lost worker has started again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asyncrpc import RRef, Worker
from asyncrpc.clusters.actors import owner
from asyncrpc.clusters.changes import ClusterChanges
from asyncrpc.clusters.machine import ClusterWorkerState
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


class Remaking:
    """How a lost actor is made again: by the arguments that it was made with."""

    def __init__(self, cluster: Cluster, order: ActorOrder) -> None:
        self._cluster = cluster
        self._order = order

    @property
    def worker_is_gone(self) -> bool:
        """Return whether the worker has ended or will, and the actor with it."""
        state = self._cluster.state(self._order.worker)
        return state is not ClusterWorkerState.RUNNING

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

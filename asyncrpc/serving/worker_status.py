"""The state of a worker, as load balancers and people ask for it.

The state of the peers does not count: a lost peer is not a reason to take this process
out of service.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from asyncrpc.core.arguments import check_kind
from asyncrpc.core.worker import Worker


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker at one moment.

    Attributes:
        name: the worker's name.
        world_size: number of workers in the group; 0 if it is not fixed.
        ready: whether it has joined the group and does not drain.
        draining: whether its shutdown has begun.
        peers: names of the workers it is connected to, sorted.
        calls_in_flight: calls that it has made and that are not yet answered.
        calls_served: calls from others that are running here.
    """

    name: str
    rank: int
    world_size: int
    ready: bool
    draining: bool
    peers: tuple[str, ...]
    calls_in_flight: int
    calls_served: int


def status_of(worker: Worker) -> WorkerStatus:
    """Return the state of a worker, started or not, without waiting.

    Raises:
        UsageError: `worker` is not a Worker.
    """
    check_kind("worker", worker, Worker, "a Worker")
    links = [] if worker.is_closed else worker.parts.directory.links
    return WorkerStatus(
        name=worker.name,
        rank=worker.rank,
        world_size=worker.world_size,
        ready=worker.parts.lifecycle.is_running,
        draining=worker.is_draining,
        peers=tuple(sorted({link.peer.name for link in links} - {worker.name})),
        calls_in_flight=sum(len(link.pending) for link in links),
        calls_served=worker.parts.active,
    )


def ready_body(workers: Sequence[Worker | None]) -> tuple[int, dict[str, Any]]:
    """Return the status and the JSON answer of the readiness check.

    Args:
        workers: the workers that must be ready; None: one that does not exist yet.
    """
    states = [status_of(worker) for worker in workers if worker is not None]
    is_ready = None not in workers and all(state.ready for state in states)
    shown = [dataclasses.asdict(state) for state in states]
    return 200 if is_ready else 503, {"ready": is_ready, "workers": shown}

"""Health of the workers of an aiohttp application, for load balancers and people.

`/healthz` says that the event loop answers: restart the process if it does not.
`/readyz` says whether requests should come here: not before every worker runs, and not
once one has begun to shut down.  Whether the peers are well is not asked: a lost peer
is no reason to take this process away.
"""

from __future__ import annotations

import dataclasses

from aiohttp import web

from asyncrpc.arguments import check_kind, wrong
from asyncrpc.runtime.worker import Worker
from asyncrpc.serving.app import WORKER, WorkerKey, check_key


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker at one moment.

    Attributes:
        name: the worker's name.
        world_size: number of workers in the group; 0 if it is not fixed.
        ready: whether it runs and does not drain.
        draining: whether its shutdown has begun.
        peers: names of the workers it is connected to, sorted.
        calls_in_flight: calls that it has made and that are not answered yet.
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
    """Return the state of a worker, started or not.  Waits for nothing.

    Raises:
        UsageError: `worker` is not a Worker.
    """
    check_kind("worker", worker, Worker, "a Worker")
    links = [] if worker.is_closed else worker.parts.directory.links
    return WorkerStatus(
        name=worker.name,
        rank=worker.rank,
        world_size=worker.world_size,
        ready=not worker.is_closed and not worker.is_draining,
        draining=worker.is_draining,
        peers=tuple(sorted({link.peer.name for link in links} - {worker.name})),
        calls_in_flight=sum(len(link.pending) for link in links),
        calls_served=worker.parts.active,
    )


def health_routes(
    *keys: WorkerKey, live: str = "/healthz", ready: str = "/readyz"
) -> list[web.RouteDef]:
    """Return the routes of the two checks, for `app.add_routes`.

    Both answer GET and HEAD.  `ready` answers 200 or 503, with JSON
    `{"ready": bool, "workers": [...]}`: the fields of `WorkerStatus` of each worker.

    Args:
        *keys: the workers that must be ready; `WORKER` if none is given.
        live: path of the check that the process lives.
        ready: path of the check that it takes requests.

    Returns:
        Two routes.

    Raises:
        UsageError: an argument is of another kind.
    """
    for number, key in enumerate(keys):
        check_key(f"keys[{number}]", key)
    _check_path("live", live)
    _check_path("ready", ready)
    watched = keys or (WORKER,)

    async def get_live(_: web.Request) -> web.Response:
        return web.json_response({"live": True})

    async def get_ready(request: web.Request) -> web.Response:
        found = [request.config_dict.get(key) for key in watched]
        states = [status_of(worker) for worker in found if worker is not None]
        is_ready = None not in found and all(state.ready for state in states)
        workers = [dataclasses.asdict(state) for state in states]
        body = {"ready": is_ready, "workers": workers}
        return web.json_response(body, status=200 if is_ready else 503)

    return [web.get(live, get_live), web.get(ready, get_ready)]


def _check_path(name: str, path: object) -> None:
    if not isinstance(path, str) or not path.startswith("/"):
        raise wrong(name, "a path that begins with '/'", path)

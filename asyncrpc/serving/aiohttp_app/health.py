"""Health of the workers of an aiohttp application, for load balancers and people.

`/healthz` tells that the event loop answers: restart the process if it does not.
`/readyz` tells whether requests should be sent here: not before every worker runs, and
not once one has begun to shut down.  The state of the peers does not count: a lost peer
is not a reason to take this process out of service.

A program that is not a web application answers the checks by `serve_health`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from aiohttp import web

from asyncrpc.core.arguments import check_kind
from asyncrpc.core.loop.loops import loop_for
from asyncrpc.core.worker import Worker
from asyncrpc.errors import UsageError
from asyncrpc.serving.aiohttp_app.app import WORKER, WorkerKey, check_key
from asyncrpc.serving.listening import check_where, listening
from asyncrpc.serving.paths import check_path
from asyncrpc.serving.worker_status import ready_body


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
        UsageError: an argument has the wrong type.
    """
    for number, key in enumerate(keys):
        check_key(f"keys[{number}]", key)
    check_path("live", live)
    check_path("ready", ready)
    watched = keys or (WORKER,)

    def find(request: web.Request) -> Sequence[Worker | None]:
        return [request.config_dict.get(key) for key in watched]

    return _routes(find, live, ready)


def _routes(
    find: Callable[[web.Request], Sequence[Worker | None]], live: str, ready: str
) -> list[web.RouteDef]:
    async def get_live(_: web.Request) -> web.Response:
        return web.json_response({"live": True})

    async def get_ready(request: web.Request) -> web.Response:
        status, body = ready_body(find(request))
        return web.json_response(body, status=status)

    return [web.get(live, get_live), web.get(ready, get_ready)]


@asynccontextmanager
async def serve_health(
    *workers: Worker, port: int, host: str = ""
) -> AsyncIterator[int]:
    """Answer `/healthz` and `/readyz` as long as the block runs.

    Enter it before the workers: a worker that waits for the others is not ready, but it
    lives.

    Args:
        *workers: the workers that must be ready; at least one, started or not.
        port: to listen at; 0: a free one.
        host: address of the interface to listen at; an empty string: all of them.

    Returns:
        A context with the port.

    Raises:
        UsageError: an argument has the wrong type, the port cannot be listened at, or
            no event loop runs here.

    Cancellation:
        The port is closed.

    Example:
        >>> worker = Worker("trainer0")
        >>> async with serving.serve_health(worker, port=8080), worker:
        ...     await train()
    """
    loop_for("serve_health")
    check_where(host, port)
    if not workers:
        raise UsageError("serve_health needs at least one worker")
    for number, worker in enumerate(workers):
        check_kind(f"workers[{number}]", worker, Worker, "a Worker")
    app = web.Application()
    # The workers get no keys: an `AppKey` can only be made in the main thread.
    app.add_routes(_routes(lambda _: workers, "/healthz", "/readyz"))
    async with listening("serve_health", app, host, port) as bound_port:
        yield bound_port

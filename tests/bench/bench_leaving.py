"""How soon is a place free whose client has left?

200 clients in a process of their own ask an application.  Each leaves at a random
moment of the 3 seconds after its first event, or, where there is none, after a second
for all to come, by closing its connection or by resetting it.  The model is on
another worker, in a process of its own.  Measured from the moment before the client
closes its socket:

- *remote finally*: to the `finally` of the remote generator that a stream of
  server-sent events reads;
- *slot of the model*: to the moment at which the model's sequence has left its
  `ContinuousBatcher`, which is between two steps, of 10 ms each;
- *place in the queue*: to the moment at which a request that waits in a `Batcher` of
  the application is no longer there.

The aim is 50 ms at p99.

    $ make bench ONLY=leaving
    $ python -m tests.bench.bench_leaving --starts 5 --update-docs
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, NamedTuple

from aiohttp import web
from starlette.applications import Starlette
from starlette.requests import Request

import asyncrpc
from asyncrpc import Worker, current_worker, serving
from asyncrpc.core.loop.clock import now_s
from asyncrpc.serving import Batcher, asgi
from asyncrpc.testing import ProcessCluster
from tests.bench import pages
from tests.bench.harness import p50_p99_us
from tests.bench.processes import say
from tests.bench.sides import leaving_model
from tests.integration.serving.doors import servers

CLIENTS: Final = 200
AIM_MS: Final = 50.0
ENDS_WITHIN_S: Final = 30.0

Predict = Callable[[str], Any]


class BenchDoor(NamedTuple):
    # Of the worker, and what a request waits for, the application.
    make: Callable[[Worker, Predict], Any]
    # Serves it; the value of the context is the port.
    run: Callable[[Any], AbstractAsyncContextManager[int]]


def aiohttp_app(worker: Worker, predict: Predict) -> web.Application:
    async def get_tokens(request: web.Request) -> web.StreamResponse:
        peer = current_worker().peer("model")
        stream = peer.stream(leaving_model.tokens, request.query["name"])
        return await serving.sse_response(request, stream)

    async def get_answer(request: web.Request) -> web.StreamResponse:
        return web.json_response(await predict(request.query["name"]))

    app = web.Application(middlewares=[serving.middleware()])
    app.cleanup_ctx.append(serving.worker_context(worker))
    app.router.add_get("/tokens", get_tokens)
    app.router.add_get("/queue", get_answer)
    return app


def starlette_app(worker: Worker, predict: Predict) -> Starlette:
    async def get_tokens(request: Request) -> Any:
        peer = current_worker().peer("model")
        name = request.query_params["name"]
        return asgi.sse_response(peer.stream(leaving_model.tokens, name))

    async def get_answer(request: Request) -> Any:
        await predict(request.query_params["name"])

    app = Starlette(lifespan=asgi.lifespan(worker))
    app.add_middleware(asgi.WorkerMiddleware)
    app.add_route("/tokens", get_tokens)
    app.add_route("/queue", get_answer)
    return app


DOORS: Final = {
    "aiohttp": BenchDoor(aiohttp_app, servers.run_aiohttp),
    "Starlette on uvicorn": BenchDoor(
        starlette_app, lambda app: servers.run_uvicorn(app, http="httptools")
    ),
}


async def clients(port: int, path: str, seed: int) -> dict[str, float]:
    """Run the clients of a start; return when each of them left."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.bench.sides.leaving_clients",
        *("--port", str(port), "--path", path),
        *("--count", str(CLIENTS), "--seed", str(seed)),
        stdout=asyncio.subprocess.PIPE,
    )
    written, _ = await process.communicate()
    left_s: dict[str, float] = json.loads(written)
    return left_s


async def measure(door: BenchDoor, seed: int) -> dict[str, list[float]]:
    """Return the seconds from each leaving to what follows, by what that is."""
    dequeued_s: dict[str, float] = {}

    async def never(_: list[str]) -> list[str]:
        await asyncio.Event().wait()
        raise AssertionError

    async with ProcessCluster(["model"], name="front") as worker:
        model = worker.peer("model")
        await model.call(leaving_model.begin)
        async with Batcher(never, 1, 0.0, waiting_max=2 * CLIENTS) as batched:
            holder = asyncio.create_task(batched("holder"))  # of the batch that runs

            async def predict(name: str) -> str:
                try:
                    return await batched(name)
                finally:
                    dequeued_s[name] = now_s()

            async with door.run(door.make(worker, predict)) as port:
                streams = await clients(port, "/tokens", seed)
                await until(lambda: worker.parts.active == 0)
                queue = await clients(port, "/queue", seed + 1)
                await until(lambda: len(dequeued_s) == len(queue))
            closed_s, freed_s = await model.call(leaving_model.end)
            holder.cancel()
            await asyncio.wait([holder])
        await model.call(leaving_model.unload)
    return {
        "remote finally": differences(streams, closed_s),
        "slot of the model": differences(streams, freed_s),
        "place in the queue": differences(queue, dequeued_s),
    }


async def until(is_over: Callable[[], bool]) -> None:
    """Wait until something is over; what never ends is left out of the figures."""
    end_s = now_s() + ENDS_WITHIN_S
    while not is_over() and now_s() < end_s:  # noqa: ASYNC110  (nothing tells)
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)  # for what is on its way


def differences(
    left_s: Mapping[str, float], after_s: Mapping[str, float]
) -> list[float]:
    missing = set(left_s) - set(after_s)
    if missing:
        say(f"{len(missing)} of {len(left_s)} never came to an end")
    return [after_s[name] - at_s for name, at_s in left_s.items() if name in after_s]


def table(results: Mapping[tuple[str, str], list[list[float]]]) -> str:
    """Return a line per door and thing."""
    heads = ("ms after the client left", "p50", "p99", "p99 of starts", "slowest")
    lines = [f"{heads[0]:44}{heads[1]:>8}{heads[2]:>8}{heads[3]:>16}{heads[4]:>9}"]
    for (door, thing), starts in results.items():
        together = [took_s for start in starts for took_s in start]
        p50, p99 = (figure / 1e3 for figure in p50_p99_us(together))
        of_starts = [p50_p99_us(start)[1] / 1e3 for start in starts]
        spread = f"{min(of_starts):.1f}-{max(of_starts):.1f}"
        slowest = max(together) * 1e3
        name = f"{door}: {thing}"
        lines.append(f"{name:44}{p50:>8.1f}{p99:>8.1f}{spread:>16}{slowest:>9.1f}")
    count = statistics.median(len(starts) for starts in results.values())
    about = f"{CLIENTS} clients a start, starts: {count:g}; aim: p99 <= {AIM_MS:g} ms"
    return "\n".join([*lines, "", about])


def main() -> None:
    parser = pages.parser(__doc__, 3)
    options = parser.parse_args()
    results: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
    for start in range(options.starts):
        for name, door in DOORS.items():
            say(f"start {start + 1} of {options.starts}: {name}")
            figures = asyncrpc.run(measure(door, 2 * start))
            for thing, seconds in figures.items():
                results[name, thing].append(seconds)
    text = table(dict(sorted(results.items())))
    pages.show("leaving", text, options)


if __name__ == "__main__":
    main()

"""The server that `bench_overload` floods: a model behind a `Batcher`, with two doors.

    $ python -m tests.bench.overload_server --policy oldest --http 10001 --meeting 10002

The model is a device: a batch takes it a fixed time, and no processor.  It answers HTTP
at one port, and calls of the worker `load` that meets it at the other.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any, Final

from aiohttp import web

import asyncrpc
from asyncrpc import Worker, serving
from asyncrpc.serving import Batcher
from tests.bench import overload_server

SIZE: Final = 8
TAKES_S: Final = 0.08
CAPACITY_PER_S: Final = SIZE / TAKES_S
# What a request may wait: for the batch that runs, and a little.
AGE_S: Final = TAKES_S
POLICIES: Final[dict[str, dict[str, Any]]] = {
    "oldest": {"max_queue_age_s": AGE_S, "overflow": "oldest"},
    "newest": {"max_queue_age_s": AGE_S, "overflow": "newest"},
    "none": {},  # but for `waiting_max`, 1,024
}


async def compute(numbers: list[int]) -> list[int]:
    """Be the device."""
    await asyncio.sleep(TAKES_S)
    return numbers


batchers: list[Batcher[int, int]] = []


@asyncrpc.expose
async def predict(number: int) -> int:
    return await batchers[-1](number)


async def serve(policy: str, http_port: int, meeting_port: int) -> None:
    """Serve until the worker `load` has gone."""
    worker = Worker(
        "server", rank=0, world_size=2, rendezvous=f"tcp://127.0.0.1:{meeting_port}"
    )
    batched = Batcher(compute, SIZE, 0.0, name="predict", **POLICIES[policy])
    batchers.append(batched)

    async def enter(app: web.Application) -> AsyncIterator[None]:
        async with batched:
            yield

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=str(await batched(1)))

    app = web.Application(middlewares=[serving.middleware()])
    app.cleanup_ctx.extend([serving.worker_context(worker), enter])
    app.router.add_get("/", answer)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    try:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", http_port, backlog=1024).start()
        await worker.barrier()
        await worker.barrier()
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # the middleware logs each refusal
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", choices=POLICIES, required=True)
    parser.add_argument("--http", type=int, required=True)
    parser.add_argument("--meeting", type=int, required=True)
    options = parser.parse_args()
    # Not as `__main__`: calls come by the module's name.
    asyncrpc.run(overload_server.serve(options.policy, options.http, options.meeting))

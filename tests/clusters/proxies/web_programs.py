"""A web worker that calls replicas, behind a proxy, until SIGTERM."""

from __future__ import annotations

import asyncio
import signal

from aiohttp import web

import asyncrpc
from asyncrpc import serving
from tests.integration.serving.replica_programs import options_at, work

AT_ONCE = serving.ReplicaOptions(warm_s=0.0, ready_timeout_s=60.0)


class Ending:
    """The end of a web worker: first the proxy is told, then it stops to listen."""

    def __init__(self, checks: int) -> None:
        self.requested = asyncio.Event()
        self.seen = asyncio.Event()
        self._checks = checks
        if not checks:
            self.seen.set()

    async def readyz(self, _: web.Request) -> web.Response:
        if not self.requested.is_set():
            return web.Response()
        self._checks -= 1
        if self._checks < 0:  # the answer before this one has been taken in
            self.seen.set()
        return web.Response(status=503)


async def serve(name: str, folder: str, port: int, checks: int) -> None:
    """Serve until SIGTERM; then end without a failed request."""
    ending = Ending(checks)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, ending.requested.set)
    worker = asyncrpc.Worker(
        name,
        rendezvous=f"join://{folder}/web",
        options=options_at(f"uds://{folder}/{name}"),
    )
    async with worker, serving.Replicas(worker, "model-*", options=AT_ONCE) as models:

        async def predict(_: web.Request) -> web.Response:
            return web.Response(text=await models.call(work, 0.005))

        app = web.Application()
        app.add_routes(
            [
                web.get("/readyz", ending.readyz),
                web.get("/predict", predict),
                web.post("/predict", predict),
            ]
        )
        await models.wait_ready(1)
        runner = web.AppRunner(app, shutdown_timeout=60.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", port, reuse_port=True).start()
            await ending.requested.wait()
            await ending.seen.wait()  # the proxy's checks, ten a second, set it
        finally:
            await runner.cleanup()


def program(name: str, folder: str, port: int, checks: int) -> str:
    """Return the source of a web worker's main module."""
    return f"""
import asyncio
from tests.clusters.proxies import web_programs
asyncio.run(web_programs.serve({name!r}, {folder!r}, {port}, {checks}))
print("ended in order", flush=True)
"""

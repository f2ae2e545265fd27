"""Serve a language model to a page, while it still learns.

    $ python -m examples.language_server          # then open http://127.0.0.1:8080

The page streams what a model of characters writes.  Two replicas write many texts at
once, a character of each in a step; a trainer goes on learning from `data/alice.txt`,
and publishes a version every second or two.  Each text is written to its end by the
version that began it.  A client that stops, or leaves, frees its place at once.

    $ kill -9 ...                                 # a replica: the other one goes on

A replica that is lost is started again, and gets the version that the other one serves.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from aiohttp import web

import asyncrpc
from asyncrpc import serving
from examples.language_server.front import Front
from examples.language_server.workers import (
    FRONT,
    REPLICAS,
    TRAINER,
    run_worker,
    told_to_end,
)

REPLICA_NAMES = ("model-0", "model-1")
START_S, END_S = 60.0, 10.0


class Processes:
    """The processes of the other workers; one that is lost is started again."""

    def __init__(self, contact: str) -> None:
        self._contact = contact
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([run_worker.__module__])
        self._running: dict[str, ForkServerProcess] = {}
        self._is_ending = False

    def start(self, name: str) -> None:
        """Start a worker."""
        process = self._context.Process(target=run_worker, args=(name, self._contact))
        process.start()
        self._running[name] = process
        print(f"{name}: process {process.pid}", flush=True)
        loop = asyncio.get_running_loop()
        loop.add_reader(process.sentinel, self._on_ended, name, process)

    def _on_ended(self, name: str, process: ForkServerProcess) -> None:
        asyncio.get_running_loop().remove_reader(process.sentinel)
        process.join()  # it has ended
        if not self._is_ending:
            print(f"{name}: exit code {process.exitcode}", flush=True)
            self.start(name)

    async def end(self) -> None:
        """End all, replicas after what they write."""
        self._is_ending = True
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            await asyncio.to_thread(process.join, END_S)
            process.kill()


@asynccontextmanager
async def listening(app: web.Application, port: int) -> AsyncIterator[str]:
    """Serve an application on loopback; yield its URL."""
    runner = web.AppRunner(app, handler_cancellation=True)
    try:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def joined(changes: asyncrpc.MemberChanges, name: str) -> None:
    """Wait until a worker has joined."""
    async for change in changes:
        if change.member.name == name:
            return


async def serve(port: int) -> None:
    """Be the front until this process is told to end."""
    ending = told_to_end()
    with tempfile.TemporaryDirectory() as folder:
        contact = f"uds://{Path(folder) / 'front'}"
        network = asyncrpc.NetworkOptions(listen=(contact,))
        worker = asyncrpc.Worker(
            FRONT,
            rendezvous={FRONT: contact},
            options=asyncrpc.Options(network=network),
        )
        async with worker, serving.Replicas(worker, REPLICAS) as replicas:
            changes = worker.members_changed()
            processes, front = Processes(contact), Front(worker, replicas)
            app = web.Application(middlewares=[serving.middleware()])
            app.cleanup_ctx.append(serving.worker_context(worker))
            app.add_routes(front.routes())
            try:
                for name in (*REPLICA_NAMES, TRAINER):
                    processes.start(name)
                await replicas.wait_ready(len(REPLICA_NAMES), START_S)
                async with asyncio.timeout(START_S):
                    await joined(changes, TRAINER)
                async with listening(app, port) as url:
                    looking = asyncio.create_task(front.look())
                    print(f"serving {url}", flush=True)
                    await ending.wait()
                    looking.cancel()
                    await asyncio.wait([looking])
            finally:
                await processes.end()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Serve a model that still learns.")
    parser.add_argument("--port", type=int, default=8080, help="0: one that is free")
    arguments = parser.parse_args()
    sys.exit(asyncrpc.run(serve(arguments.port)))

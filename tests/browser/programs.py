"""Groups of real workers, in processes, whose dashboard the tests look at.

    $ python -m tests.browser.programs KIND FOLDER

The program serves the dashboard of its worker at a prefix of a port of loopback, writes
what the tests need to know into `FOLDER/told.json`, and ends when its input does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import torch
from aiohttp import web
from torch import nn

import asyncrpc
from asyncrpc import Options, Worker, serving
from asyncrpc.ddp import DistributedDataParallel
from asyncrpc.testing import Cluster, ProcessCluster

SECRET: Final = "the secret of this test's group"
TOKEN: Final = "the-token-of-this-test"
PREFIX: Final = "/some/prefix"
EVERY_S: Final = 0.5
AFTER_S: Final = 1.0
# A name that would be markup, if a page took it for that.
ODD: Final = "<img src=x onerror=alert(1)>"
HELD: Final = 40  # calls that are under way for as long as the group lives
TRAINERS: Final = ("web", "ps", "trainer")


# --- what workers run ----------------------------------------------------------------


class Table:
    """A value that others hold references to."""


async def double(value: torch.Tensor) -> torch.Tensor:
    return 2 * value


async def fail() -> None:
    raise KeyError("it is what this function does")


async def never() -> None:
    await asyncio.Event().wait()


async def wait_oddly() -> None:
    """Be a call that waits for a task with an odd name."""
    await asyncio.create_task(asyncio.Event().wait(), name=ODD)


table: Final = asyncio.Lock()


async def evict() -> None:
    async with table:
        await asyncrpc.rpc_async("web", rows, timeout_s=None)


async def rows() -> None:
    await asyncrpc.rpc_async("ps", apply, timeout_s=None)


async def apply() -> None:
    async with table:
        pass


async def train() -> None:
    """Be one rank of a data parallel module, until the call is cancelled."""
    worker = asyncrpc.current_worker()
    async with asyncrpc.Group(worker, TRAINERS, name="all") as group:
        model = await DistributedDataParallel(nn.Linear(4, 1), group)
        while True:
            await model.backward(model(torch.ones(2, 4)).sum())
            await asyncio.sleep(0.05)  # it is not a benchmark


async def work(worker: Worker) -> None:
    """Call, fail, and train a pipeline, on and on."""
    stages = [
        asyncrpc.nn.RemoteModule(name, nn.Linear, (4, 4)) for name in ("ps", "trainer")
    ]
    pipeline = await asyncrpc.nn.Pipeline(stages, chunks=3)
    optimizer = asyncrpc.optim.DistributedOptimizer(
        torch.optim.SGD, await pipeline.remote_parameters(), lr=0.01
    )
    x, y = torch.ones(6, 4), torch.zeros(6, 4)
    loss = nn.functional.mse_loss
    layer = asyncrpc.nn.RemoteModule("ps", nn.Linear, (4, 1))
    while True:
        async with asyncrpc.autograd.context() as context:
            output = await layer.forward_async(torch.ones(2, 4))
            await asyncrpc.autograd.backward(context, [output.sum()])
        await worker.peer("ps").call(double, torch.ones(1 << 12))
        with contextlib.suppress(KeyError):
            await worker.peer("trainer").call(fail)
        async with asyncrpc.autograd.context() as context:
            await pipeline.forward_backward(x, y, loss_fn=loss)
            await optimizer.step(context)
        await asyncio.sleep(0.02)  # nor is this


# --- groups --------------------------------------------------------------------------

Run = Callable[[Worker, asyncio.TaskGroup], Awaitable[Any]]


async def without_end(to: str, function: Callable[[], Awaitable[None]]) -> None:
    await asyncrpc.rpc_async(to, function, timeout_s=None)


async def busy(worker: Worker, tasks: asyncio.TaskGroup) -> list[Any]:
    """Do something of every kind that the dashboard shows."""
    for name in ("ps", "trainer"):
        tasks.create_task(without_end(name, train))
    tasks.create_task(train())
    tasks.create_task(work(worker))
    tasks.create_task(without_end(ODD, wait_oddly))
    for _ in range(HELD):
        tasks.create_task(without_end("ps", never))
    return [worker.peer("ps").remote(Table), worker.peer(ODD).remote(Table)]


async def calm(worker: Worker, tasks: asyncio.TaskGroup) -> None:
    """Do nothing."""


async def hanging(worker: Worker, tasks: asyncio.TaskGroup) -> None:
    """Wait in a cycle of two calls and a lock."""
    tasks.create_task(without_end("ps", evict), name="evicting")


# By name: the workers in processes of their own, and what the group does.
KINDS: Final[dict[str, tuple[list[str], Run]]] = {
    "busy": (["ps", "trainer", ODD], busy),
    "calm": (["ps", "trainer"], calm),
    "hanging": (["ps"], hanging),
}


# By name: how many workers, all of them here, and whether the group has a secret.
CROWDS: Final = {"dozen": (12, True), "crowd": (40, False)}
NEIGHBOURS: Final = 3  # that each worker of a crowd calls


async def crowded(workers: list[Worker], tasks: asyncio.TaskGroup) -> None:
    """Let each call its neighbours, on and on; one call is under way for good."""

    async def call(place: int) -> None:
        while True:
            for more in range(1, NEIGHBOURS + 1):
                to = workers[(place + more) % len(workers)].name
                await workers[place].peer(to).call(double, torch.ones(1 << more))
            await asyncio.sleep(0.5)  # that is enough to be seen

    for place in range(len(workers)):
        tasks.create_task(call(place))
    tasks.create_task(workers[0].peer(workers[1].name).call(never))


async def show_crowd(kind: str, folder: Path) -> None:
    """Serve the dashboard of a group whose workers are all in this process."""
    count, has_secret = CROWDS[kind]
    names = [f"w{number:02}" for number in range(count)]
    if not has_secret:
        os.environ.pop("ASYNCRPC_SECRET", None)
    options = Options(secret=SECRET if has_secret else None, drain_timeout_s=5.0)
    async with AsyncExitStack() as stack:
        cluster = Cluster(names=names, options=options)
        workers = list(await stack.enter_async_context(cluster))
        token = TOKEN if has_secret else None
        url = await stack.enter_async_context(served(workers[0], token))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        await crowded(workers, tasks)
        tell(folder, url, workers[0], dict.fromkeys(names, os.getpid()))
        await until_told()
        raise OverError


@asynccontextmanager
async def served(worker: Worker, token: str | None = TOKEN) -> AsyncIterator[str]:
    """Serve the dashboard; yield its address."""
    app = web.Application()
    dashboard = serving.dashboard(worker, token=token, every_s=EVERY_S, after_s=AFTER_S)
    app.add_subapp(PREFIX, dashboard)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        yield f"http://127.0.0.1:{port}{PREFIX}/"
    finally:
        await runner.cleanup()


async def main(kind: str, folder: Path) -> None:
    if kind in CROWDS:
        await show_crowd(kind, folder)
        return
    names, run = KINDS[kind]
    options = Options(secret=SECRET, drain_timeout_s=0.0)
    multiprocessing.set_forkserver_preload(["asyncrpc.testing", "torch._dynamo"])
    cluster = ProcessCluster(names, name="web", options=options, method="forkserver")
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(cluster)
        url = await stack.enter_async_context(served(worker))
        async with asyncio.TaskGroup() as tasks:
            held = await run(worker, tasks)
            pids = {name: cluster.pid(name) for name in names}
            for name in names:
                cluster.expect_death(name)  # a test may kill it
            tell(folder, url, worker, pids | {"web": os.getpid()})
            await until_told()
            raise OverError(held)


async def until_told() -> None:
    """Wait until the input of this program ends."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    await reader.read()


class OverError(Exception):
    """The test has ended."""


def tell(folder: Path, url: str, worker: Worker, pids: dict[str, int]) -> None:
    """Write what the tests need to know, as a whole."""
    writing = folder / "writing"
    report = {"url": url, "address": worker.addresses[0], "pids": pids}
    writing.write_text(json.dumps(report), encoding="utf-8")
    writing.rename(folder / "told.json")


if __name__ == "__main__":
    try:
        asyncrpc.run(main(sys.argv[1], Path(sys.argv[2])))
    except* OverError:
        pass

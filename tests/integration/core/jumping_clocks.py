"""A program, and processes that it starts, whose wall clocks jump.

$ LD_PRELOAD=wall_clock.so python -m tests.integration.core.jumping_clocks LOOP DIR

It prints nothing; what fails raises.
"""

from __future__ import annotations

import asyncio
import ctypes
import datetime as dt
import itertools
import logging
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from queue import Empty
from typing import Any, Final
from urllib.parse import urlsplit

import asyncrpc
from asyncrpc import LivenessOptions, NetworkOptions, Options, Worker
from asyncrpc.core.loop.loops import loop_factory
from asyncrpc.errors import AuthenticationError
from asyncrpc.multiprocessing import Queue
from asyncrpc.testing import acting_as
from tests.certificates import Authority
from tests.integration.core import company
from tests.integration.core.company import LIMIT_S
from tests.integration.core.groups import alone, logged, processes, started, until
from tests.integration.core.loops_of_processes import kind_of_loop, processes_on
from tests.integration.core.proxied import proxied
from tests.ports import free_port

HOUR_S: Final = 3600
JUMPS: Final = (HOUR_S, -HOUR_S, 0)  # from one to the next, and back
HERE: Final = NetworkOptions(listen=("tcp://127.0.0.1:0",))
# What would be too late by the wall clock is noticed within a second or so.
OPTIONS: Final = Options(
    liveness=LivenessOptions(heartbeat_s=0.2, lost_after_s=1.0),
    drain_timeout_s=2.0,
    secret="0123456789abcdef0123456789abcdef",
)
SILENT_S: Final = 1.3  # longer than what makes a silent peer lost


@asyncrpc.on_loop
def jump_to(ahead_s: int) -> int:
    """Let the wall clock of this process be ahead; return by how much it jumped."""
    before_s = time.time() - time.monotonic()
    ctypes.CDLL(None).jump_to(ctypes.c_long(ahead_s))
    return round(time.time() - time.monotonic() - before_s)


async def refused(worker: Worker, name: str) -> str:
    """Start a worker that calls another; return how its certificate was refused."""
    try:
        async with worker:
            await worker.peer(name).call(len, "ab")
    except AuthenticationError as error:
        return str(error)
    return ""


async def work_across(worker: Worker, jump: Callable[[], Any]) -> None:
    """Have calls, streams, deadlines and a collective in flight while a clock jumps."""
    b = worker.peer("b")
    link = await worker.parts.link_to("b")
    deadline = b.using(timeout_s=SILENT_S).call(company.hold, "for ever")
    patient = asyncio.ensure_future(
        b.using(timeout_s=LIMIT_S).call(company.hold, "patient")
    )
    rows = b.stream(company.count)
    assert await anext(rows) == 0
    reduced = asyncio.ensure_future(company.reduce_here(1.0))
    await b.call(len, "ab")  # what is above has been sent
    await jump()
    assert await b.call(company.reduce_here, 2.0) == 3.0
    assert await reduced == 3.0
    assert await anext(rows) == 1
    await rows.aclose()
    try:
        await deadline
    except asyncrpc.DeadlineExceededError:
        pass
    else:
        raise AssertionError("its deadline has passed")
    await b.call(company.let_go, "patient")
    assert await patient == "patient"
    assert await worker.parts.link_to("b") is link
    assert not worker.counters.workers_lost


async def calls(folder: Path) -> None:
    """Either end's clock jumps, or that of both."""
    tls = Authority(folder).tls()
    cluster = processes("b", transport="tcp", options=replace(OPTIONS, tls=tls))
    async with cluster as a:
        there = a.peer("b").call
        with acting_as(a):
            for here, ahead_s in itertools.product(("a", "b", "ab"), JUMPS[:2]):

                async def jump(where: str = here, ahead_s: int = ahead_s) -> None:
                    jumped = [jump_to(ahead_s)] if "a" in where else []
                    jumped += [await there(jump_to, ahead_s)] if "b" in where else []
                    assert all(jumped), jumped

                await work_across(a, jump)
            await there(company.close_group)
            company.close_group()


async def resuming(_folder: Path) -> None:
    """A connection breaks, and the clock jumps before it is resumed."""
    options = replace(OPTIONS, secret=None, membership="static")
    async with proxied("me", "ps", options=options) as (workers, proxies):
        me, peer = workers["me"], workers["me"].peer("ps")
        link = await me.parts.link_to("ps")
        for count, ahead_s in enumerate(JUMPS, 1):
            call = asyncio.ensure_future(peer.call(company.hold, "cut"))
            await until(lambda: workers["ps"].parts.active == 1)
            await proxies["ps"].refuse()
            for proxy in proxies.values():
                proxy.cut()
            jump_to(ahead_s)
            await proxies["ps"].accept()
            await peer.call(company.let_go, "cut")
            assert await call == "cut"
            assert await me.parts.link_to("ps") is link
            assert me.counters.connections_resumed >= count


@asynccontextmanager
async def gateway() -> AsyncIterator[Worker]:
    options = replace(OPTIONS, network=HERE)
    async with alone("gateway", options) as inside:
        yield inside


async def tokens(_folder: Path) -> None:
    """They are valid for seconds that pass, whatever the clock shows."""
    async with gateway() as inside:

        def guest(token: str) -> Worker:
            options = replace(OPTIONS, secret=None, token=token)
            door = "join://" + inside.addresses[0].removeprefix("tcp://")
            return Worker("laptop", rendezvous=door, options=options)

        for ahead_s in JUMPS:
            long = inside.tokens.issue(valid_s=LIMIT_S * 2, name="laptop")
            short = inside.tokens.issue(valid_s=0.1, name="laptop")
            jump_to(ahead_s)
            async with guest(long) as laptop:
                assert await laptop.peer("gateway").call(len, "ab") == 2
            await asyncio.sleep(0.2)  # what it counts are these seconds
            assert "it has expired" in await refused(guest(short), "gateway")


async def logs(_folder: Path) -> None:
    """A line that comes once a second comes again after a jump."""
    async with gateway() as inside:
        url = urlsplit(inside.addresses[0])
        for ahead_s in JUMPS:
            for _ in range(2):
                with logged("refused") as line:
                    async with asyncio.timeout(LIMIT_S):
                        while not line.is_set():
                            where = url.hostname, url.port
                            with socket.create_connection(where) as stranger:
                                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                            await asyncio.sleep(0.01)
                jump_to(ahead_s)


async def meetings(_folder: Path) -> None:
    """Who waits for others at a store waits for them still."""
    for ahead_s in JUMPS:
        where = f"tcp://127.0.0.1:{free_port()}"
        a, b = (
            Worker(name, rank=rank, world_size=2, rendezvous=where, options=OPTIONS)
            for rank, name in enumerate("ab")
        )
        first = asyncio.ensure_future(a.__aenter__())
        await asyncio.sleep(0.3)  # it waits at the store
        assert not first.done()
        jump_to(ahead_s)
        await asyncio.gather(first, b.__aenter__())
        assert await a.peer("b").call(len, "ab") == 2
        await asyncio.gather(a.shutdown(), b.shutdown())


async def queues(_folder: Path) -> None:
    """Who waits for an item waits for so many seconds."""
    queue: Queue[str] = Queue(1)
    for ahead_s in JUMPS:
        got = asyncio.ensure_future(asyncio.to_thread(queue.get, LIMIT_S))
        await asyncio.sleep(0.1)  # it waits
        jump_to(ahead_s)
        await asyncio.sleep(0.1)
        await queue.put_async("an item")
        assert await got == "an item"
        short = asyncio.ensure_future(asyncio.to_thread(queue.get, 0.3))
        await asyncio.sleep(0.1)
        jump_to(-ahead_s)
        try:
            await short
        except Empty:
            continue
        raise AssertionError("its time has passed")
    queue.close()


async def certificates(folder: Path) -> None:
    """They are valid by the wall clock: open connections stay, newcomers hear of it."""
    now = dt.datetime.now(dt.UTC)
    tls = Authority(folder).tls(
        begun=now - dt.timedelta(minutes=30), until=now + dt.timedelta(minutes=30)
    )
    options = replace(OPTIONS, tls=tls, network=HERE)
    where = asyncrpc.LocalRendezvous(2)
    a, b = (Worker(name, rendezvous=where, options=options) for name in "ab")
    async with started(a, b):
        assert await a.peer("b").call(len, "ab") == 2
        link = await a.parts.link_to("b")

        def newcomer() -> Worker:
            known = {"n": "tcp://127.0.0.1:9", "a": a.addresses}
            return Worker("n", rendezvous=known, options=options)

        for ahead_s, problem in (
            (HOUR_S, "has expired"),
            (-HOUR_S, "is not valid yet"),
        ):
            jump_to(ahead_s)
            text = await refused(newcomer(), "a")
            assert problem in text, text
            assert "set the clocks" in text, text
            assert await a.peer("b").call(len, "ab") == 2
            jump_to(0)
            assert not await refused(newcomer(), "a")
        assert await a.parts.link_to("b") is link


PARTS: Final = (calls, resuming, tokens, logs, meetings, queues, certificates)


async def main(folder: Path) -> None:
    with processes_on(kind_of_loop()):
        for part in PARTS:
            part_folder = folder / part.__name__
            part_folder.mkdir()
            await asyncio.wait_for(part(part_folder), 4 * LIMIT_S)
            jump_to(0)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    factory = loop_factory() if sys.argv[1] == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main(Path(sys.argv[2])))

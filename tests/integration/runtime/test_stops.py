"""Processes that are stopped and go on: what has come meanwhile counts first.

Each side of a call is stopped in turn, for longer than its deadline or than makes a
peer lost.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import pytest

from asyncrpc import Options, current_worker, on_loop
from asyncrpc.testing import ProcessCluster
from tests.integration.runtime.company import LIMIT_S, PATIENT

TIMEOUT_S = 3.0  # of the caller that is stopped while its answer comes
_asked: list[asyncio.Task[str]] = []
_held: list[asyncio.Event] = []


async def held() -> str:
    _held.append(asyncio.Event())
    await _held[-1].wait()
    return "answered"


@on_loop
def count_held() -> int:
    return len(_held)


@on_loop
def let_go() -> None:
    _held.pop().set()


async def ask(name: str) -> None:
    """Ask for what is answered once it is let go, within a time."""
    peer = current_worker().peer(name).using(timeout_s=TIMEOUT_S)
    _asked.append(asyncio.ensure_future(peer.call(held)))
    while not await peer.call(count_held):
        pass


async def answer() -> str:
    try:
        return await _asked.pop()
    except TimeoutError as error:
        return str(error)


@contextmanager
def stopped(cluster: ProcessCluster, name: str) -> Iterator[None]:
    cluster.kill(name, signal.SIGSTOP)
    try:
        yield
    finally:
        cluster.kill(name, signal.SIGCONT)


@pytest.mark.parametrize("transport", ["uds", "tcp"])
async def test_an_answer_that_came_while_its_caller_was_stopped_is_taken(
    transport: Literal["uds", "tcp"],
) -> None:
    """Its deadline has passed by then, too."""
    options = Options(liveness=PATIENT)
    cluster = ProcessCluster(
        ["b", "c"], transport=transport, method="forkserver", options=options
    )
    async with cluster as a:
        b, c = a.peer("b"), a.peer("c")
        for _ in range(3):
            begun_s = asyncio.get_running_loop().time()
            await c.call(ask, "b")
            with stopped(cluster, "c"):
                await b.call(let_go)
                passed_s = asyncio.get_running_loop().time() - begun_s
                await asyncio.sleep(TIMEOUT_S + 0.5 - passed_s)
            async with asyncio.timeout(LIMIT_S):
                assert await c.call(answer) == "answered"

"""Threads that wait in the facade are told when what they wait for is gone."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Final

from asyncrpc import DeviceOptions, Options
from asyncrpc.compat import rpc
from asyncrpc.compat.rpc import api
from asyncrpc.compat.rpc.agent import Agent
from asyncrpc.compat.rpc.options import RpcBackendOptions
from asyncrpc.runtime.hosting import LoopThread
from asyncrpc.testing import Cluster

LIMIT_S: Final = 60.0  # which only a hang takes


def take_part(rank: int, store: str, told: Connection, waits: Event) -> None:
    """Gather with another; rank 0 dies when the other waits for what it passes on."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}")
    rpc.init_rpc(f"w{rank}", None, rank, 2, rpc_backend_options=options)
    if rank == 0:
        waits.wait(LIMIT_S)
        os._exit(0)
    await_signal = api._await_signal  # noqa: SLF001

    def await_it(
        signal: threading.Event, names: set[str], wait_s: float | None
    ) -> None:
        waits.set()
        await_signal(signal, names, wait_s)

    api._await_signal = await_it  # noqa: SLF001  (this process is the test's)
    try:
        api._all_gather("mine")  # noqa: SLF001  (as torch calls it)
    except RuntimeError as error:
        told.send(str(error))
    rpc.shutdown(graceful=False)


def test_who_gathers_with_one_that_dies_is_told(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe(duplex=False)
    given = str(tmp_path / "store"), there, context.Event()
    members = [context.Process(target=take_part, args=(one, *given)) for one in (0, 1)]
    try:
        for member in members:
            member.start()
        assert here.poll(LIMIT_S)
        assert here.recv().endswith("these are gone: ['w0']")
        members[1].join(LIMIT_S)
    finally:
        for member in members:
            member.kill()
            member.join()
            member.close()
        here.close()
        there.close()


async def test_what_completes_a_future_runs_although_the_worker_ends() -> None:
    """Its threads were busy: somebody waits for that future all the same."""
    options = Options(
        threads=1, devices=DeviceOptions(exclusive=True), drain_timeout_s=0.0
    )
    go, completed = threading.Event(), threading.Event()
    thread = LoopThread("of a test")
    try:
        async with Cluster(1, options=options) as (a,):
            agent = Agent(a, thread, RpcBackendOptions(), None, is_static=True)
            held = a.parts.run_in_thread(lambda: go.wait(LIMIT_S))
            agent.in_thread(completed.set)
        assert await asyncio.to_thread(completed.wait, LIMIT_S)
    finally:
        go.set()
        thread.stop()
    assert await held

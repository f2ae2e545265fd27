"""Threads that wait in the facade are told of what is gone; groups end together."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Final

import pytest

from asyncrpc import DeviceOptions, Options
from asyncrpc.compat import rpc
from asyncrpc.compat.rpc import api
from asyncrpc.compat.rpc.agent import Agent
from asyncrpc.compat.rpc.options import TensorPipeRpcBackendOptions
from asyncrpc.core.hosting import LoopThread
from asyncrpc.testing import Cluster
from tests.ports import free_port

LIMIT_S: Final = 60.0  # which only a hang takes


def take_part(rank: int, store: str, reports: Connection, waits: Event) -> None:
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
        reports.send(str(error))
    rpc.shutdown(graceful=False)


def test_gather_names_a_killed_member(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe(duplex=False)
    arguments = str(tmp_path / "store"), there, context.Event()
    members = [
        context.Process(target=take_part, args=(rank, *arguments)) for rank in (0, 1)
    ]
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


async def test_future_completes_although_its_worker_ends() -> None:
    """The threads of the worker are busy."""
    options = Options(
        threads=1, devices=DeviceOptions(exclusive=True), drain_timeout_s=0.0
    )
    go, completed = threading.Event(), threading.Event()
    thread = LoopThread("of a test")
    try:
        async with Cluster(1, options=options) as (a,):
            own = TensorPipeRpcBackendOptions()
            agent = Agent(a, thread, own, None, [a.name])
            held = a.parts.run_in_thread(lambda: go.wait(LIMIT_S))
            agent.in_thread(completed.set)
        assert await asyncio.to_thread(completed.wait, LIMIT_S)
    finally:
        go.set()
        thread.stop()
    assert await held


async def test_worker_lost_before_another_has_begun_counts_in_its_group() -> None:
    """Who begins later waits for the same workers as all: else they wait for ever."""
    thread = LoopThread("of a test")
    try:
        async with Cluster(2) as (a, b):
            lost = a.members_changed()
            await b.shutdown()
            async for change in lost:
                if change.member.name == b.name and change.kind in {"left", "lost"}:
                    break
            own = TensorPipeRpcBackendOptions()
            agent = Agent(a, thread, own, None, [a.name, b.name])
            names = {info.name for info in agent.get_worker_infos()}
            assert names == {a.name, b.name}
            assert agent.get_worker_info(1).name == b.name
            assert agent.gone_of(names) == [b.name]
    finally:
        thread.stop()


# --- graceful shutdown ----------------------------------------------------------------


def end_together(
    rank: int, store: str, roles: dict[str, int], reports: Connection
) -> None:
    """One dies; one is in `shutdown` and serves the one that goes on calling it."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}")
    rpc.init_rpc(f"w{rank}", None, rank, 3, rpc_backend_options=options)
    if rank == roles["dies"]:
        threading.Event().wait(LIMIT_S)  # the caller ends it
    elif rank == roles["serves"]:
        rpc.shutdown()
        reports.send("served")
    else:
        server = f"w{roles['serves']}"
        rpc.rpc_sync(server, abs, (-1,))
        with pytest.raises(RuntimeError, match="exit"):
            rpc.rpc_sync(f"w{roles['dies']}", os._exit, (1,))
        reports.send([rpc.rpc_sync(server, abs, (-number,)) for number in range(20)])
        rpc.shutdown()
        reports.send("done")


@pytest.mark.parametrize("roles", list(itertools.permutations(range(3))), ids=str)
def test_closing_worker_serves_the_survivors(
    tmp_path: Path, roles: tuple[int, int, int]
) -> None:
    context = multiprocessing.get_context("forkserver")
    named = dict(zip(("dies", "serves", "calls"), roles, strict=True))
    members, ends = [], {}
    try:
        for role, rank in named.items():
            ends[role], there = context.Pipe(duplex=False)
            arguments = rank, str(tmp_path / "store"), named, there
            members.append(context.Process(target=end_together, args=arguments))
            members[-1].start()
            there.close()
        for role, wanted in (
            ("calls", list(range(20))),
            ("calls", "done"),
            ("serves", "served"),
        ):
            assert ends[role].poll(LIMIT_S)
            assert ends[role].recv() == wanted
    finally:
        for member in members:
            member.kill()
            member.join()
            member.close()
        for end in ends.values():
            end.close()


START_S: Final = 300.0  # two interpreters import torch; only a hang takes so long
AT_EXIT: Final = """\
import atexit, sys
import torch.distributed.rpc as rpc

when, rank, port = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if when == "before":
    atexit.register(lambda: rpc.shutdown(graceful=True))
options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
if when == "after":
    atexit.register(rpc.shutdown, graceful=True)
if rank == 0:
    print(rpc.rpc_sync("w1", abs, (-2,)), flush=True)
atexit.register(lambda: print("ends", flush=True))
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_shutdown_registered_at_exit_waits_for_the_group(
    when: str, tmp_path: Path
) -> None:
    """Registered before `init_rpc` or after it; the host of the store waits."""
    program, port = tmp_path / "program.py", str(free_port())
    program.write_text(AT_EXIT)
    command = [sys.executable, "-m", "asyncrpc.compat", str(program), when]
    members = [
        subprocess.Popen(
            [*command, str(rank), port],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [member.communicate(timeout=START_S) for member in members]
    finally:
        for member in members:
            member.kill()
            member.wait()
    assert said == [("2\nends\n", ""), ("ends\n", "")]
    assert [member.returncode for member in members] == [0, 0]

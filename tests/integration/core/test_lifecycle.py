"""However a worker ends, or fails to begin: it waits for nobody, and leaves nothing.

That nobody is waited for shows where the wait would have been for an hour.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import logging
import os
import re
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

import asyncrpc
from asyncrpc import LocalRendezvous, NetworkOptions, Options, Worker, WorkerLostError
from asyncrpc.core.barriers.machine.termination import Phase
from asyncrpc.errors import AlreadyStartedError, NotStartedError, UsageError
from asyncrpc.testing import Cluster, acting_as
from tests.integration.core import remote
from tests.integration.core.groups import LIMIT_S, alone, processes, program, until
from tests.integration.core.remote import Watch
from tests.ports import free_port

HOUR_S = 3600.0  # nobody waits for so long: `LIMIT_S` ends the test before
QUICK = Options(drain_timeout_s=0.5, rendezvous_timeout_s=0.2)


# --- before and after ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "x" * 256, "a\nb", "\x1b[2J", "\ud800"])
def test_unprintable_or_oversized_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"^name must be a "):
        alone(name)


async def test_oversized_address_list_is_refused_at_the_start() -> None:
    advertise = tuple(f"tcp://{number}.example.org:7000" for number in range(400))
    options = Options(
        secret="of thirty-two characters or more",
        network=NetworkOptions(listen=("tcp://127.0.0.1:0",), advertise=advertise),
    )
    worker = alone("a", options)
    with pytest.raises(UsageError, match=r"take 8192; name those .* in NetworkOptions"):
        await worker.__aenter__()


async def test_operations_need_a_running_worker() -> None:
    worker = alone("a")
    with pytest.raises(NotStartedError, match="has not been started; use `async with`"):
        worker.peer("a")
    async with worker:
        peer = worker.peer("a")
        assert await peer.call(remote.add, 1) == 2
        await peer.remote(remote.Counter)
    with pytest.raises(NotStartedError, match="it has been shut down"):
        worker.peer("a")
    with pytest.raises(NotStartedError, match="it has been shut down"):
        await peer.call(remote.add, 1)
    with pytest.raises(NotStartedError):
        peer.remote(remote.Counter)
    with pytest.raises(NotStartedError):
        await anext(peer.stream(remote.count_to, 1))
    with pytest.raises(NotStartedError):
        await worker.barrier()
    for act in (
        lambda: asyncrpc.rpc_async("a", remote.add, (1,)),
        lambda: asyncrpc.remote("a", remote.add, (1,)),
        asyncrpc.get_worker_info,
        asyncrpc.current_worker,
    ):
        with pytest.raises(NotStartedError, match="there is no running worker here"):
            act()
    with pytest.raises(NotStartedError):
        await asyncrpc.shutdown()


async def test_worker_starts_once_and_is_the_only_one_of_its_task() -> None:
    where = LocalRendezvous(1)
    async with Worker("a", rank=0, rendezvous=where) as worker:
        with pytest.raises(AlreadyStartedError, match="make a new Worker"):
            await worker.__aenter__()
        with pytest.raises(AlreadyStartedError, match="'a' already runs in this task"):
            asyncrpc.init_rpc("b", rank=0, rendezvous=where)
    with pytest.raises(AlreadyStartedError):
        await worker.__aenter__()
    async with asyncrpc.init_rpc("a", rank=0, rendezvous=LocalRendezvous(1)) as again:
        assert asyncrpc.current_worker() is again


# --- starts that fail ----------------------------------------------------------------


async def failing(worker: Worker, error: type[BaseException]) -> None:
    """Start a worker that cannot; what it leaves is noticed when the test ends."""
    with pytest.raises(error):
        await worker.__aenter__()
    assert worker.is_closed
    with pytest.raises(NotStartedError):
        worker.peer(worker.name)
    with pytest.raises(AlreadyStartedError):
        await worker.__aenter__()
    await worker.shutdown()


async def test_failed_listen_leaves_nothing_behind(tmp_path: Path) -> None:
    first = f"uds://{tmp_path}/first"
    for second in (f"uds://{tmp_path}/{'x' * 200}", first):
        options = Options(network=NetworkOptions(listen=(first, second)))
        await failing(alone("a", options), asyncrpc.errors.TransportError)
        assert not list(tmp_path.iterdir())  # noqa: ASYNC240  (it is empty)


@pytest.mark.parametrize("where", ["local", "file", "tcp host", "tcp guest"])
async def test_worker_that_meets_nobody_is_clean(where: str, tmp_path: Path) -> None:
    places: dict[str, str | LocalRendezvous] = {
        "local": LocalRendezvous(2),
        "file": f"file://{tmp_path}/store",
        "tcp host": f"tcp://127.0.0.1:{free_port()}",
        "tcp guest": f"tcp://127.0.0.1:{free_port()}",
    }
    worker = Worker(
        "a",
        rank=1 if where == "tcp guest" else 0,
        world_size=2,
        rendezvous=places[where],
        options=QUICK,
    )
    async with asyncio.timeout(LIMIT_S):
        await failing(worker, asyncrpc.errors.RendezvousTimeoutError)


# --- ends ----------------------------------------------------------------------------


async def test_shutdown_of_a_block_that_raises_is_immediate() -> None:
    remote.watches["w"] = watch = Watch()
    with contextlib.suppress(ZeroDivisionError):
        async with (
            asyncio.timeout(LIMIT_S),
            Cluster(2, options=Options(drain_timeout_s=HOUR_S)) as (a, _),
        ):
            call = a.parts.start_call("b", remote.wait_for_ever, ("w",))
            await watch.begun.wait()
            raise ZeroDivisionError
    assert watch.notes == ["cancelled on b"]
    with pytest.raises(WorkerLostError):
        await call


async def test_endless_thread_is_named(caplog: pytest.LogCaptureFixture) -> None:
    remote.watches["w"] = watch = Watch()
    async with Cluster(2) as (a, b):
        call = a.parts.start_call("b", remote.pass_gate, ("w",))
        await watch.begun.wait()
        await asyncio.wait_for(b.shutdown(drain_timeout_s=0.05), LIMIT_S)
        assert re.search(r"'b': these threads still run.*asyncrpc-b-1", caplog.text)
        with pytest.raises(asyncrpc.CallError):
            await call
        watch.gate.set()


async def test_cancelled_shutdown_is_completed_first(a: Worker, b: Worker) -> None:
    remote.watches["w"] = watch = Watch()
    call = a.parts.start_call("b", remote.wait_for_ever, ("w",))
    await watch.begun.wait()
    ending = asyncio.create_task(b.shutdown(drain_timeout_s=HOUR_S))
    await asyncio.sleep(0)
    assert b.is_draining
    ending.cancel()
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(asyncio.CancelledError):
            await ending
        with pytest.raises(asyncrpc.CallError):
            await call
    assert watch.notes == ["cancelled on b"]
    assert b.parts.directory.links == []


@pytest.mark.parametrize("transport", ["uds", "tcp"])
async def test_shutdown_does_not_wait_for_a_stopped_peer(transport: str) -> None:
    """Not dead, which shows, but silent, and for an hour it would not be lost."""
    patient = replace(QUICK, liveness=asyncrpc.LivenessOptions(lost_after_s=HOUR_S))
    cluster = processes(
        "b", transport=transport, options=replace(patient, rendezvous_timeout_s=LIMIT_S)
    )
    async with cluster as a:
        call = a.parts.start_call("b", remote.sleep_long)
        await a.peer("b").call(remote.add, 1)
        cluster.kill("b", signal.SIGSTOP)
        try:
            await asyncio.wait_for(a.shutdown(), LIMIT_S)
            with pytest.raises(WorkerLostError) as caught:
                await call
            assert caught.value.outcome is asyncrpc.Outcome.UNKNOWN
        finally:
            os.kill(cluster.pid("b"), signal.SIGKILL)


async def test_kill_during_a_common_shutdown_fails_no_survivor(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (cluster := processes("b", "c")) as a:
        await a.peer("b").call(remote.add, 1)
        with acting_as(a):
            leaving = asyncio.create_task(asyncrpc.shutdown())
        ending = a.parts.graceful_shutdown.machine
        await until(lambda: ending.phase is Phase.GATHERING)
        assert not leaving.done()  # the others never leave
        cluster.kill("b")
        cluster.kill("c")
        await asyncio.wait_for(leaving, LIMIT_S)
    assert "shutting down without the others" in caplog.text


# --- what nobody awaits --------------------------------------------------------------


async def test_unawaited_failed_call_is_logged_with_its_origin(
    a: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    loop = asyncio.get_running_loop()
    handler = loop.get_exception_handler()
    loop.set_exception_handler(None)  # asyncio's own, which logs
    try:
        with acting_as(a), caplog.at_level(logging.ERROR):
            line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
            call = asyncrpc.rpc_async("b", remote.fail)
            await asyncio.wait([call])
            del call
            gc.collect()
    finally:
        loop.set_exception_handler(handler)
    assert "exception was never retrieved" in caplog.text
    assert f"<CallFuture fail on 'b' done made at {__file__}:{line}>" in caplog.text


# --- Ctrl-C --------------------------------------------------------------------------

PRELUDE = """
import asyncio, os, signal, sys, time, asyncrpc
from tests.integration.core import remote

def block():
    print("ready", flush=True)
    time.sleep(3600)

async def stay():
    print("ready", flush=True)
    await asyncio.Event().wait()

def chain():
    return asyncrpc.rpc_sync("w", block)

begun = asyncio.Event()

async def stay_on():
    begun.set()
    while not asyncrpc.current_worker().is_draining:
        await asyncio.sleep(0.001)
    await stay()

for_an_hour = asyncrpc.Options(drain_timeout_s=3600, rendezvous_timeout_s=3600)
"""
ALONE = """
async def main():
    here = asyncrpc.LocalRendezvous(1)
    async with asyncrpc.Worker(
        "w", rank=0, rendezvous=here, options=for_an_hour
    ) as w:
        {}
asyncrpc.run(main())
"""
PORT = free_port()
MEETING = """async with asyncrpc.Worker(
        "w", rank={rank}, world_size=2, rendezvous="tcp://{place}",
        options=for_an_hour,
    ):
        pass
"""
PROGRAMS = {
    "idle": ALONE.format("await stay()"),
    "in a call": ALONE.format("await w.peer('w').call(stay)"),
    "in a thread": ALONE.format("await w.peer('w').call(block)"),
    "in threads that wait": ALONE.format("await w.peer('w').call(chain)"),
    "in its drain": ALONE.format(
        "w.parts.start_call('w', stay_on).add_done_callback(lambda f: f.exception()); "
        "await begun.wait()"
    ),
    "in the rendezvous": f"""
async def watch():
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", {PORT})
        except OSError:
            await asyncio.sleep(0.001)
        else:
            writer.close()
            return print("ready", flush=True)

async def main():
    watching = asyncio.create_task(watch())
    {MEETING.format(rank=0, place=f"127.0.0.1:{PORT}")}
asyncrpc.run(main())
""",
    "looking for the rendezvous": f"""
async def main():
    loop = asyncio.get_running_loop()
    connect = loop.sock_connect

    async def watched(*args):
        print("ready", flush=True)
        await connect(*args)

    loop.sock_connect = watched
    {MEETING.format(rank=1, place="192.0.2.1:9")}  # of nobody: RFC 5737
asyncrpc.run(main())
""",
}


def press_ctrl_c(process: subprocess.Popen[str], ready: int) -> str:
    """Interrupt a program once so many are ready; return what it said when it ended."""
    assert process.stdout is not None
    for _ in range(ready):
        line = process.stdout.readline()
        assert line.endswith("ready\n"), (line, process.communicate()[1])
    process.send_signal(signal.SIGINT)
    return process.communicate(timeout=LIMIT_S)[1]


def scratch(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
def test_ctrl_c_ends_a_program_in_any_state(tmp_path: Path) -> None:
    """Which would last an hour.  All start at once: each takes seconds to."""
    with contextlib.ExitStack() as stack:
        running = {
            what: stack.enter_context(
                program("-c", PRELUDE + text, TMPDIR=str(tmp_path))
            )
            for what, text in PROGRAMS.items()
        }
        for what, process in running.items():
            errors = press_ctrl_c(process, 1)
            assert process.returncode == -signal.SIGINT, (what, errors)
            assert "KeyboardInterrupt" in errors
            assert "Traceback" in errors
            assert "never retrieved" not in errors
            assert "Exception ignored" not in errors, (what, errors)
    assert scratch(tmp_path) == []


def test_second_ctrl_c_hurries_the_shutdown(tmp_path: Path) -> None:
    """Nothing is left of the worker, though its end has been cut short."""
    with program("-c", PRELUDE + STUCK, TMPDIR=str(tmp_path)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "closing\n", process.communicate()[1]
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=LIMIT_S)[1]
        assert process.returncode == -signal.SIGINT, errors
        assert "KeyboardInterrupt" in errors
    assert scratch(tmp_path) == []


STUCK = """
class Here(asyncrpc.LocalRendezvous):
    async def leave(self, timeout_s):
        try:
            await asyncio.Event().wait()
        finally:
            print("left", flush=True)

class Last:
    name = "last"
    routes = ()
    def on_peer_lost(self, peer, reason):
        pass
    async def close(self):
        print("closing", flush=True)
        await asyncio.Event().wait()

async def main():
    async with asyncrpc.Worker("w", rank=0, rendezvous=Here(1)) as w:
        w.parts.services.add(Last())
        await stay()
asyncrpc.run(main())
"""
GROUP = """
async def main():
    async with asyncrpc.Worker(f"w{os.environ['RANK']}") as worker:
        await worker.barrier()
        await worker.peer(1 - worker.rank).call(stay)
asyncrpc.run(main())
"""


def test_ctrl_c_ends_a_group(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PRELUDE + GROUP)
    folder = tmp_path / "scratch"
    folder.mkdir()
    arguments = ("-m", "asyncrpc", "run", "--nproc", "2", str(script))
    places = {"TMPDIR": str(folder), "ASYNCRPC_RUN_DIR": str(tmp_path / "runs")}
    with program(*arguments, **places) as process:
        errors = press_ctrl_c(process, 2)
        assert process.returncode == 130, errors
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)  # nobody is left of its session
    assert scratch(folder) == []

"""Workers find each other wherever they meet, or say whom they miss."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import asyncrpc
from asyncrpc import LocalRendezvous, Options, UsageError, Worker, WorkerLostError
from asyncrpc.core.barriers.service import BARRIER
from asyncrpc.core.membership import store_places
from asyncrpc.core.membership.rendezvous import open_rendezvous
from asyncrpc.core.membership.stores import PREFIX
from asyncrpc.core.multiprocessing.store import serve_store
from asyncrpc.errors import RendezvousTimeoutError, UnknownWorkerError
from asyncrpc.testing import Cluster, acting_as
from tests.forked import forked
from tests.integration.core import remote
from tests.integration.core.conftest import Trio
from tests.integration.core.groups import LIMIT_S, outcomes, program, started, until
from tests.ports import free_port

Seat = Callable[..., Worker]  # (name, rank, world size, options) -> a worker
WAIT_S = 4.0  # for who does not come; a slow machine has published and looked by then
SHORT = Options(rendezvous_timeout_s=WAIT_S)
FOR_AN_HOUR = Options(rendezvous_timeout_s=3600.0)


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASYNCRPC_SECRET", raising=False)


@pytest.fixture(params=["local", "file", "tcp", "env"])
def seat(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Seat:
    """Return what makes workers that meet, in each manner in turn."""
    meetings: dict[int, LocalRendezvous] = {}
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))

    def make(name: str, rank: int, size: int, options: Options | None = None) -> Worker:
        where: Mapping[str, str | LocalRendezvous] = {
            "local": meetings.setdefault(size, LocalRendezvous(size)),
            "file": f"file://{tmp_path}/store",
            "tcp": f"tcp://127.0.0.1:{port}",
            "env": "env://",
        }
        return Worker(
            name,
            rank=rank,
            world_size=size,
            rendezvous=where[request.param],
            options=options,
        )

    return make


# --- who meets -----------------------------------------------------------------------


async def test_workers_meet_and_can_call_each_other(seat: Seat) -> None:
    workers = [seat(name, rank, 3) for rank, name in enumerate("abc")]
    async with started(*workers):
        for worker in workers:
            known = [member.name for member in worker.parts.directory.members]
            assert known == ["a", "b", "c"]
            assert worker.world_size == 3
            for rank, name in enumerate("abc"):
                assert (await worker.peer(rank).call(remote.where))[0] == name


async def test_worker_knows_names_and_ranks_of_the_group(seat: Seat) -> None:
    a, b = seat("a", 0, 2), seat("b", 1, 2)
    async with started(a, b):
        with acting_as(b):
            assert asyncrpc.get_worker_info() == asyncrpc.WorkerInfo("b", 1)
            assert asyncrpc.get_worker_info().rank == asyncrpc.get_worker_info().id == 1
            assert asyncrpc.get_worker_info("a") == asyncrpc.WorkerInfo("a", 0)
            with pytest.raises(UnknownWorkerError, match="known: 'a', 'b'"):
                asyncrpc.get_worker_info("x")
        info = await a.peer("b").call(asyncrpc.get_worker_info)
        assert info == asyncrpc.WorkerInfo("b", 1)


@pytest.mark.parametrize("rank", [1, 7])
async def test_rank_beyond_a_local_rendezvous_is_refused(rank: int) -> None:
    worker = Worker("a", rank=rank, rendezvous=LocalRendezvous(1))
    wanted = f"between 0 and 0 at this LocalRendezvous, not {rank}"
    with pytest.raises(UsageError, match=wanted):
        await worker.__aenter__()
    await worker.shutdown()


@pytest.mark.parametrize("seat", ["local", "file", "tcp"], indirect=True)
async def test_missing_worker_is_named_to_the_present_ones(seat: Seat) -> None:
    came = [seat(name, rank, 4, SHORT) for rank, name in ((0, "a"), (2, "c"))]
    errors = await asyncio.wait_for(outcomes(*came), LIMIT_S)
    for error in errors:
        assert isinstance(error, RendezvousTimeoutError)
        assert tuple(error.missing) == (1, 3)
        assert "2 of 4 workers appeared within 4 s; missing: rank 1, 3" in str(error)
        assert str(error).endswith("there: 'a' (rank 0), 'c' (rank 2)")


async def refusal_of_one(*both: Worker) -> str:
    """Start workers at once; return what one is told, while the other goes on."""
    starting = [asyncio.ensure_future(worker.__aenter__()) for worker in both]
    try:
        async with asyncio.timeout(LIMIT_S):
            done, _ = await asyncio.wait(starting, return_when=asyncio.FIRST_COMPLETED)
        (task,) = done
        with pytest.raises(UsageError) as caught:
            await task
        return str(caught.value)
    finally:
        for start in starting:
            start.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        await asyncio.gather(*(worker.shutdown() for worker in both))


@pytest.mark.parametrize(
    ("other", "rank", "words"),
    [
        ("a", 1, "the name 'a' is not unique"),
        ("b", 0, "two workers of this group have rank 0"),
    ],
)
@pytest.mark.parametrize("seat", ["local", "tcp"], indirect=True)
async def test_a_name_and_a_rank_are_taken_once(
    seat: Seat, other: str, rank: int, words: str
) -> None:
    assert words in await refusal_of_one(seat("a", 0, 2), seat(other, rank, 2))


FORMER_LIFE = """
import os
import asyncrpc
async def main():
    b = asyncrpc.Worker("b", rank=1, world_size=3, rendezvous=os.environ["MEETING"])
    await b.__aenter__()
asyncrpc.run(main())
"""


async def test_worker_restarted_before_the_meeting_is_replaced() -> None:
    """The record of a restarted pod is still at the store."""
    port = free_port()
    where = f"tcp://127.0.0.1:{port}"
    patient = Options(rendezvous_timeout_s=LIMIT_S)

    def seat(name: str, rank: int) -> Worker:
        return Worker(name, rank=rank, world_size=3, rendezvous=where, options=patient)

    a, b = seat("a", 0), seat("b", 1)
    first = asyncio.create_task(a.__aenter__())
    with forked(FORMER_LIFE, MEETING=where) as former:
        await asyncio.to_thread(await_record, port, 1)
        former.kill()
    async with started(b, seat("c", 2)):
        await first
        try:
            assert a.parts.directory.find("b").member.incarnation == b.incarnation
            assert await a.peer("b").call(remote.add, 1) == 2
        finally:
            await a.shutdown()


async def test_first_of_two_equal_workers_is_told() -> None:
    port = free_port()
    place = f"tcp://127.0.0.1:{port}"
    first, second = (
        Worker("a", rank=0, world_size=2, rendezvous=place, options=FOR_AN_HOUR)
        for _ in range(2)
    )
    waiting = asyncio.create_task(first.__aenter__())
    await asyncio.to_thread(await_record, port, 0)
    other = asyncio.create_task(second.__aenter__())
    with pytest.raises(UsageError, match="'a' is not unique"):
        await asyncio.wait_for(waiting, LIMIT_S)
    other.cancel()
    await asyncio.wait([other])


def await_record(port: int, rank: int) -> None:
    """Wait until the record of a rank is at the store."""
    store = TCPStore(
        "127.0.0.1", port, is_master=False, timeout=timedelta(seconds=LIMIT_S)
    )
    store.wait([f"{PREFIX}/member/{rank}"])


@pytest.mark.parametrize("seat", ["file", "tcp"], indirect=True)
async def test_cancelled_start_ends_at_once(seat: Seat) -> None:
    a = seat("a", 0, 2, FOR_AN_HOUR)
    start = asyncio.create_task(a.__aenter__())
    await until(lambda: vars(a.parts.rendezvous)["_store"] is not None)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(start, LIMIT_S)


async def turns(count: int) -> None:
    """Let other tasks run; a dial of a port that is closed takes a few turns."""
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("count", [1, 3, 9, 99])
async def test_start_without_a_store_can_be_cancelled(count: int) -> None:
    where = f"tcp://127.0.0.1:{free_port()}"
    worker = Worker("a", rank=1, world_size=2, rendezvous=where, options=FOR_AN_HOUR)
    start = asyncio.create_task(worker.__aenter__())
    await turns(count)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(start, LIMIT_S)


async def test_worker_started_before_the_host_waits() -> None:
    where = f"tcp://127.0.0.1:{free_port()}"
    b = Worker("b", rank=1, world_size=2, rendezvous=where)
    start = asyncio.create_task(b.__aenter__())
    await turns(99)
    a = Worker("a", rank=0, world_size=2, rendezvous=where)
    async with started(a):
        await start
        assert await a.peer("b").call(remote.add, 1) == 2
        await b.shutdown()


async def test_missing_store_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_places, "GRACE_S", LIMIT_S)  # until it hosts it itself
    where = f"tcp://127.0.0.1:{free_port()}"
    b = Worker("b", rank=1, world_size=2, rendezvous=where, options=SHORT)
    (error,) = await outcomes(b)
    assert isinstance(error, RendezvousTimeoutError)
    assert "cannot be reached in 4 s: refused: no process listens there" in str(error)
    assert "missing: a worker at this address, such as rank 0" in str(error)
    assert error.missing == (where.removeprefix("tcp://"),)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("tcp://h:1",), "without a rank, use join://host:port of a member"),
        (("tcp://h:1", 0), "world_size is missing"),
        (("join://",), "rendezvous must be join"),
        (("tcp://h:1", 2, 2), "rank must be between 0 and 1, not 2"),
        (("tcp://h", 0, 1), "rendezvous must be env://"),
        (("file://", 0, 1), "names no file"),
        (("env://", 0, 1), "needs MASTER_ADDR"),
    ],
)
def test_missing_arguments_are_named_before_the_start(
    arguments: tuple[Any, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    keywords = zip(("rendezvous", "rank", "world_size"), arguments, strict=False)
    with pytest.raises(UsageError, match=re.escape(words)):
        Worker("a", **dict(keywords))


# --- a static list -------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["uds", "tcp"])
async def test_static_list_needs_no_peer_at_start(scheme: str, tmp_path: Path) -> None:
    """A call waits for a worker that begins later; one that never does is lost."""
    where = {name: f"uds://{tmp_path}/{name}" for name in "abc"}
    if scheme == "tcp":
        where = {name: f"tcp://127.0.0.1:{free_port()}" for name in "abc"}

    def worker(name: str, connect_timeout_s: float) -> Worker:
        network = asyncrpc.NetworkOptions(
            listen=(where[name],), connect_timeout_s=connect_timeout_s
        )
        options = Options(network=network, secret="s" * 32)
        return Worker(name, rendezvous=where, options=options)

    a, b, c = worker("a", LIMIT_S), worker("b", LIMIT_S), worker("c", 0.5)
    async with started(a, c):
        with pytest.raises(WorkerLostError, match="cannot be reached") as caught:
            await c.peer("b").call(remote.add, 1)
        assert (caught.value.to, caught.value.function) == ("b", "add")
        assert caught.value.outcome is asyncrpc.Outcome.NOT_EXECUTED
        early = asyncio.ensure_future(a.peer("b").call(remote.add, 1))
        async with started(b):
            assert await early == 2
            assert await b.peer("a").call(remote.add, 2) == 3


async def test_worker_outside_the_static_list_is_refused(tmp_path: Path) -> None:
    (error,) = await outcomes(Worker("x", rendezvous={"a": f"uds://{tmp_path}/a"}))
    assert isinstance(error, UsageError)
    assert str(error) == "worker 'x' is not in the static list; it has: 'a'"


async def test_a_wrong_address_in_the_static_list_is_named(tmp_path: Path) -> None:
    where = {"x": f"uds://{tmp_path}/x", "a": "127.0.0.1:7000"}
    (error,) = await outcomes(Worker("x", rendezvous=where))
    assert isinstance(error, UsageError)
    assert "an address of 'a' must be tcp://host:port" in str(error)
    assert "127.0.0.1:7000" in str(error)


async def test_address_of_another_worker_is_detected(tmp_path: Path) -> None:
    right = {"a": f"uds://{tmp_path}/a", "c": f"uds://{tmp_path}/c"}
    a = Worker(
        "a",
        rendezvous={"a": right["a"], "b": right["c"]},
        options=Options(network=asyncrpc.NetworkOptions(listen=(right["a"],))),
    )
    c = Worker(
        "c",
        rendezvous=right,
        options=Options(network=asyncrpc.NetworkOptions(listen=(right["c"],))),
    )
    async with started(a, c):
        with pytest.raises(WorkerLostError, match="this is worker 'c', not 'b'"):
            await a.peer("b").call(remote.add, 1)
        assert await c.peer("a").call(remote.add, 1) == 2


# --- torchrun ------------------------------------------------------------------------

UNDER_TORCHRUN = """
import asyncrpc, os
async def main():
    name = f"worker{os.environ['RANK']}"
    async with asyncrpc.init_rpc(name) as worker:
        other = f"worker{1 - worker.rank}"
        found = await asyncrpc.rpc_async(other, max, (worker.rank, 10))
        said = f"{name} of {worker.world_size} hears {found}\\n"
        os.write(1, said.encode())  # whole: both write to one pipe
        await asyncrpc.shutdown()
asyncrpc.run(main())
"""


def test_torchrun_starts_a_group(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNDER_TORCHRUN)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    with program(*torchrun, str(script), OMP_NUM_THREADS="1") as process:
        output, errors = process.communicate(timeout=300.0)
    assert process.returncode == 0, errors
    lines = sorted(output.splitlines())
    assert lines == ["worker0 of 2 hears 10", "worker1 of 2 hears 10"]


async def test_group_restarted_by_torchrun_meets_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store has outlived the processes, with what they wrote."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    store = serve_store()
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for attempt in ("20", "21"):  # no other test has had these
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        pair = [Worker(name, rank=rank, world_size=2) for rank, name in enumerate("ab")]
        async with started(*pair):
            assert await pair[0].peer("b").call(remote.add, 1) == 2


async def test_group_restarted_by_slurm_meets_separately_by_xla() -> None:
    """A requeue of the job, whose port is the same; the name is that of the step."""
    store = serve_store()
    variables = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
    }
    for attempt in ("22", "23"):  # no other test has had these
        more = variables | {"SLURM_RESTART_COUNT": attempt}
        pair = []
        for rank, name in enumerate("ab"):
            own = more | {"SLURM_PROCID": str(rank)}
            where = open_rendezvous("xla://", rank=None, world_size=None, environ=own)
            pair.append(Worker(name, rank=rank, world_size=2, rendezvous=where[0]))
        async with started(*pair):
            assert await pair[0].peer("b").call(remote.add, 1) == 2


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("join://10.0.0.2:7000", ["tcp://10.0.0.2:7000"]),
        ("join://h:1, [::1]:2", ["tcp://h:1", "tcp://[::1]:2"]),
        ("join:///run/ps,mem://b", ["uds:///run/ps", "mem://b"]),
    ],
)
def test_join_addresses_are_given_as_text(text: str, addresses: list[str]) -> None:
    parsed, rank, size = open_rendezvous(text, rank=None, world_size=None)
    assert parsed == asyncrpc.JoinRendezvous(addresses)
    assert (rank, size) == (-1, 0)
    assert open_rendezvous(text, rank=1, world_size=3)[1:] == (1, 3)


# --- barriers ------------------------------------------------------------------------


def is_at_barrier(worker: Worker) -> bool:
    return worker.parts.barriers.table.series(BARRIER).is_waiting


async def test_barrier_opens_after_the_last_arrival(wired: Trio) -> None:
    for late in range(3):
        others = [worker for worker in wired if worker.rank != late]
        waiting = [asyncio.create_task(worker.barrier()) for worker in others]
        await until(lambda: all(map(is_at_barrier, others)))  # noqa: B023  (awaited here)
        assert not any(task.done() for task in waiting)
        await wired[late].barrier(LIMIT_S)
        await asyncio.wait_for(asyncio.gather(*waiting), LIMIT_S)


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("connected", [True, False])
async def test_lost_worker_fails_the_barrier_of_all(
    trio: Trio, lost: int, *, connected: bool
) -> None:
    """For each rank, connected before or not."""
    if connected:
        await asyncio.gather(*(worker.barrier(LIMIT_S) for worker in trio))
    left = [worker for worker in trio if worker.rank != lost]
    waiting = [asyncio.create_task(worker.barrier()) for worker in left]
    await until(lambda: all(map(is_at_barrier, left)))
    await trio[lost].shutdown(drain_timeout_s=0.0)
    async with asyncio.timeout(LIMIT_S):
        errors = await asyncio.gather(*waiting, return_exceptions=True)
    for error in errors:
        assert isinstance(error, WorkerLostError)
        assert repr(trio[lost].name) in str(error)


@pytest.mark.parametrize("size", [3, 4, 5])
async def test_a_worker_lost_before_its_turn_fails_the_barrier(size: int) -> None:
    """One that was heard of, and died before the last one came."""
    async with Cluster(size) as (lost, late, *early):
        waiting = [asyncio.create_task(worker.barrier()) for worker in early]
        await until(lambda: all(map(is_at_barrier, early)))
        await lost.shutdown(drain_timeout_s=0.0)
        waiting.append(asyncio.create_task(late.barrier()))
        async with asyncio.timeout(LIMIT_S):
            errors = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(error, WorkerLostError) for error in errors)


@pytest.mark.parametrize("size", [2, 3, 5, 8])
async def test_worker_may_leave_right_after_a_barrier(size: int) -> None:
    async def pass_and_leave(worker: Worker) -> None:
        await worker.barrier(LIMIT_S)
        await worker.shutdown(drain_timeout_s=0.0)

    for _ in range(5):
        async with Cluster(size) as workers, asyncio.TaskGroup() as leaving:
            for worker in workers:
                leaving.create_task(pass_and_leave(worker))


async def test_barrier_timeout_fails_the_other_workers(a: Worker, b: Worker) -> None:
    patient = asyncio.create_task(b.barrier())
    with pytest.raises(TimeoutError):
        await a.barrier(0.05)
    broken = asyncrpc.errors.BarrierBrokenError
    with pytest.raises(broken, match=r"'a'\) gave up barrier 0"):
        await asyncio.wait_for(patient, LIMIT_S)

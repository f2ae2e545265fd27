"""Wherever workers meet, all find all, or all are told whom they miss."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import asyncrpc
from asyncrpc import (
    LocalRendezvous,
    Options,
    Outcome,
    RendezvousTimeoutError,
    UnknownWorkerError,
    UsageError,
    Worker,
    WorkerInfo,
    WorkerLostError,
)
from asyncrpc.testing import acting_as
from tests.integration.runtime import remote
from tests.integration.runtime.groups import (
    free_port,
    outcomes,
    started,
)

Seat = Callable[..., Worker]  # (name, rank, world size, options) -> a worker
QUICK = Options(rendezvous_timeout_s=0.5)


@pytest.fixture(scope="module", autouse=True)
def kept_by_torch() -> None:
    """Have torch's store make what it keeps for life, a pipe for signals."""
    TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASYNCRPC_SECRET", raising=False)


@pytest.fixture(params=["local", "file", "tcp", "env"])
def seat(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Seat]:
    """Return what makes workers that meet, in each manner in turn."""
    meetings: dict[int, LocalRendezvous] = {}
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))

    def make(name: str, rank: int, size: int, options: Options | None = None) -> Worker:
        where = {
            "local": meetings.setdefault(size, LocalRendezvous(size)),
            "file": f"file://{tmp_path}/store",
            "tcp": f"tcp://127.0.0.1:{port}",
            "env": "env://",
        }[request.param]
        return Worker(
            name, rank=rank, world_size=size, rendezvous=where, options=options
        )

    yield make


# --- who meets -----------------------------------------------------------------------


async def test_all_meet_and_all_can_call_all(seat: Seat) -> None:
    workers = [seat(name, rank, 3) for rank, name in enumerate("abc")]
    async with started(*workers):
        for worker in workers:
            assert [member.name for member in worker.directory.members] == [
                "a",
                "b",
                "c",
            ]
            assert worker.world_size == 3
            for rank, name in enumerate("abc"):
                assert (await worker.peer(rank).call(remote.where))[0] == name


async def test_a_worker_can_be_asked_who_is_who(seat: Seat) -> None:
    a, b = seat("a", 0, 2), seat("b", 1, 2)
    async with started(a, b):
        with acting_as(b):
            assert asyncrpc.get_worker_info() == WorkerInfo("b", 1)
            assert asyncrpc.get_worker_info("a") == WorkerInfo("a", 0)
            with pytest.raises(UnknownWorkerError, match="known: 'a', 'b'"):
                asyncrpc.get_worker_info("x")
        info = await a.peer("b").call(asyncrpc.get_worker_info)
        assert info == WorkerInfo("b", 1)


async def test_a_missing_worker_is_named_to_those_who_came(seat: Seat) -> None:
    came = [seat(name, rank, 4, QUICK) for rank, name in ((0, "a"), (2, "c"))]
    began_s = asyncio.get_running_loop().time()
    for error in await outcomes(*came):
        assert isinstance(error, RendezvousTimeoutError)
        assert tuple(error.missing) == (1, 3)
        assert "2 of 4 workers appeared within 0.5 s; missing: rank 1, 3" in str(error)
    assert asyncio.get_running_loop().time() - began_s < 0.5 + 3.0


async def test_a_name_is_taken_once(seat: Seat) -> None:
    twins = [seat("a", 0, 2, QUICK), seat("a", 1, 2, QUICK)]
    errors = await outcomes(*twins)
    told = [error for error in errors if isinstance(error, UsageError)]
    assert len(told) == 1
    assert "the name 'a' is not unique" in str(told[0])


async def test_a_rank_is_taken_once(seat: Seat) -> None:
    twins = [seat("a", 0, 2, QUICK), seat("b", 0, 2, QUICK)]
    errors = await outcomes(*twins)
    told = [error for error in errors if isinstance(error, UsageError)]
    assert [str(error) for error in told] == ["two workers of this group have rank 0"]


async def test_who_gives_up_waiting_is_gone_at_once(seat: Seat) -> None:
    a = seat("a", 0, 2, Options(rendezvous_timeout_s=60.0))
    start = asyncio.create_task(a.__aenter__())
    await asyncio.sleep(0.1)  # it waits for the other by now, or is on its way to
    start.cancel()
    async with asyncio.timeout(2.0):
        with pytest.raises(asyncio.CancelledError):
            await start


# --- a static list -------------------------------------------------------------------


async def test_a_static_list_needs_nobody_at_start(tmp_path: Path) -> None:
    where = {name: f"uds://{tmp_path}/{name}" for name in "ab"}
    a, b = (
        Worker(name, rendezvous=where, options=Options(listen=(where[name],)))
        for name in "ab"
    )
    async with started(a):
        with pytest.raises(WorkerLostError, match="cannot be reached") as caught:
            await a.peer("b").call(remote.add, 1)
        assert caught.value.to == "b"
        assert caught.value.function == "add"
        assert caught.value.outcome is Outcome.NOT_EXECUTED
        async with started(b):
            assert await a.peer("b").call(remote.add, 1) == 2
            assert await b.peer("a").call(remote.add, 2) == 3


async def test_an_address_that_is_anothers_is_found_out(tmp_path: Path) -> None:
    right = {"a": f"uds://{tmp_path}/a", "c": f"uds://{tmp_path}/c"}
    wrong = {"a": right["a"], "b": right["c"]}
    a = Worker("a", rendezvous=wrong, options=Options(listen=(right["a"],)))
    c = Worker("c", rendezvous=right, options=Options(listen=(right["c"],)))
    async with started(a, c):
        with pytest.raises(WorkerLostError, match="this is worker 'c', not 'b'"):
            await a.peer("b").call(remote.add, 1)
        assert await c.peer("a").call(remote.add, 1) == 2

"""Replicas in processes: killed, and replaced one by one while calls go on."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from asyncrpc import LocalRendezvous, Outcome, Worker, WorkerLostError, serving
from tests.forked import ForkedProgram, forked
from tests.integration.serving import replica_programs as programs

AT_ONCE = serving.ReplicaOptions(warm_s=0.0, ready_timeout_s=60.0)


class Fleet:
    """A router here, and replicas in processes."""

    def __init__(self, folder: Path, web: Worker) -> None:
        self.folder = folder
        self.web = web
        self.running: dict[str, ForkedProgram] = {}
        self._stack = AsyncExitStack()

    async def start(self, name: str) -> None:
        context = forked(programs.program(name, str(self.folder)))
        self.running[name] = await asyncio.to_thread(context.__enter__)
        self._stack.push_async_callback(
            asyncio.to_thread, context.__exit__, None, None, None
        )

    async def end(self, name: str) -> str:
        """Tell a replica to end; return what it said when it had."""
        program = self.running.pop(name)
        program.send_signal(signal.SIGTERM)
        return await asyncio.to_thread(program.output.read)

    async def close(self) -> None:
        await self._stack.aclose()


@asynccontextmanager
async def fleet_of(folder: Path, names: list[str]) -> AsyncIterator[Fleet]:
    web = Worker(
        "web",
        rank=0,
        rendezvous=LocalRendezvous(1),
        options=programs.options_at(f"uds://{folder}/web"),
    )
    async with web:
        fleet = Fleet(folder, web)
        try:
            await asyncio.gather(*map(fleet.start, names))
            yield fleet
        finally:
            await fleet.close()


@pytest_asyncio.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with fleet_of(tmp_path, ["model-0", "model-1", "model-2"]) as running:
        yield running


async def test_calls_survive_a_rolling_replacement(fleet: Fleet) -> None:
    async with serving.Replicas(fleet.web, "model-*", options=AT_ONCE) as replicas:
        await replicas.wait_ready(3)
        ended = asyncio.Event()
        counts: Counter[str] = Counter()

        async def flood() -> None:
            while not ended.is_set():
                counts[await replicas.call(programs.work, 0.005)] += 1

        async def read() -> None:
            while not ended.is_set():
                items = replicas.stream(programs.count_up, 20)
                assert [item async for item in items] == list(range(20))

        async with asyncio.TaskGroup() as clients:
            for _ in range(8):
                clients.create_task(flood())
            clients.create_task(read())
            for number in range(3):
                await fleet.start(f"model-{number + 3}")
                await replicas.wait_ready(4)
                assert "ended in order" in await fleet.end(f"model-{number}")
            before = sum(counts.values())
            while sum(counts.values()) < before + 50:
                await replicas.call(programs.work, 0.0)
            ended.set()
        assert len(counts) == 6
        names = {replica.name for replica in replicas.statistics().replicas}
        assert names == {"model-3", "model-4", "model-5"}


@pytest.mark.parametrize("idempotent", [False, True])
async def test_killed_replica_fails_or_moves_its_calls(
    fleet: Fleet,
    idempotent: bool,  # noqa: FBT001
) -> None:
    async with serving.Replicas(fleet.web, "model-*", options=AT_ONCE) as replicas:
        await replicas.wait_ready(3)
        through = replicas.using(idempotent=idempotent)
        calls = [asyncio.ensure_future(through.call(programs.hold)) for _ in range(9)]
        there: dict[str, int] = {}
        while sum(there.values()) < 9:  # they begin in the next turns
            await asyncio.sleep(0)
            found_now = replicas.statistics().replicas
            there = {item.name: item.outstanding for item in found_now}
        victim = max(there, key=lambda name: there[name])
        others = there.keys() - {victim}
        for name, count in there.items():
            await fleet.web.peer(name).call(programs.wait_held, count)
        await asyncio.to_thread(fleet.running[victim].kill)
        for name in others:
            await fleet.web.peer(name).call(programs.let_go)
        results = await asyncio.gather(*calls, return_exceptions=True)
        lost = [result for result in results if isinstance(result, BaseException)]
        if idempotent:
            assert not lost
            assert set(results) <= others
            assert replicas.statistics().retries == there[victim] > 0
        else:
            assert len(lost) == there[victim] > 0
            for result in lost:
                assert isinstance(result, WorkerLostError)
                assert result.outcome is Outcome.UNKNOWN


async def test_replica_can_be_drained_by_another_worker(fleet: Fleet) -> None:
    async with serving.Replicas(fleet.web, "model-*", options=AT_ONCE) as replicas:
        await replicas.wait_ready(3)
        assert await fleet.web.peer("model-1").call(serving.drain)
        for _ in range(30):
            assert await replicas.call(programs.work, 0.0) != "model-1"
        assert "ended in order" in await fleet.end("model-1")

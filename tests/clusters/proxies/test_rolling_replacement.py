"""Web workers and replicas are replaced one by one behind a proxy: no request fails."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

from tests.clusters.proxies import web_programs
from tests.clusters.proxies.proxies import FrontProxy
from tests.clusters.server_process import missing_programs
from tests.forked import ForkedProgram, forked
from tests.integration.serving.test_replica_processes import fleet_of
from tests.ports import free_port


class WebWorkers:
    """The two web workers behind a proxy, each at a port of its own."""

    def __init__(self, folder: Path, checks: int, ports: list[int]) -> None:
        self.folder = folder
        self.checks = checks
        self.ports = ports
        self.running: dict[int, ForkedProgram] = {}
        self.said = ""
        self._count = 0
        self._stack = AsyncExitStack()

    async def start(self, place: int) -> None:
        name = f"front-{self._count}"
        self._count += 1
        source = web_programs.program(
            name, str(self.folder), self.ports[place], self.checks
        )
        context = forked(source)
        self.running[place] = await asyncio.to_thread(context.__enter__)
        self._stack.push_async_callback(
            asyncio.to_thread, context.__exit__, None, None, None
        )

    async def end(self, place: int) -> str:
        program = self.running.pop(place)
        program.send_signal(signal.SIGTERM)
        text = await asyncio.to_thread(program.output.read)
        self.said += text
        return text

    async def close(self) -> None:
        await self._stack.aclose()


@pytest.mark.parametrize("kind", ["haproxy", "nginx"])
async def test_requests_survive_a_rolling_replacement(
    kind: str, tmp_path: Path
) -> None:
    if missing_programs(kind):
        pytest.skip(f"{missing_programs(kind)} are missing here")
    ports = [free_port(), free_port()]
    proxy = FrontProxy(kind, tmp_path, ports)
    workers = WebWorkers(tmp_path, proxy.checks, ports)
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(
            fleet_of(tmp_path, ["model-0", "model-1"])
        )
        stack.push_async_callback(workers.close)
        await workers.start(0)
        await workers.start(1)
        await asyncio.to_thread(proxy.__enter__)
        stack.push_async_callback(asyncio.to_thread, proxy.__exit__)
        await asyncio.to_thread(proxy.wait_both_up)
        answers: Counter[tuple[int, str]] = Counter()
        ended, last_answers = asyncio.Event(), asyncio.Event()

        async def flood(session: aiohttp.ClientSession, method: str) -> None:
            while not ended.is_set():
                async with session.request(method, "/predict") as answer:
                    text = await answer.text()
                answers[answer.status, text] += 1
                if text == "model-3":
                    last_answers.set()

        async with (
            aiohttp.ClientSession(proxy.url) as session,
            asyncio.TaskGroup() as clients,
        ):
            for number in range(6):
                # nginx passes on no POST that a worker may have begun.
                is_post = kind == "haproxy" and number % 2
                clients.create_task(flood(session, "POST" if is_post else "GET"))
            for number in range(2):
                await fleet.start(f"model-{number + 2}")
                assert "ended in order" in await workers.end(number)
                await workers.start(number)
                await asyncio.to_thread(proxy.wait_both_up)
                assert "ended in order" in await fleet.end(f"model-{number}")
            await last_answers.wait()
            ended.set()
        assert "ended in order" in await workers.end(0)
        assert "ended in order" in await workers.end(1)
        statuses = {status for status, _ in answers}
        assert statuses == {200}, (answers, workers.said, proxy.said())

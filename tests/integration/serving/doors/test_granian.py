"""FastAPI on granian: what could differ by the server, which is in another process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest

from tests.forked import forked
from tests.integration.serving.doors.clients import events_of, stalled
from tests.integration.serving.doors.conftest import (
    HELD_MAX,
    ITEM_LENGTH,
    kernel_bytes_max,
)
from tests.ports import free_port

PROGRAM = "from tests.integration.serving.doors.granian_program import run; run({})"
# This server lets the kernel choose its buffers.
HELD_THERE_MAX = HELD_MAX + kernel_bytes_max() // ITEM_LENGTH


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    port = free_port()
    with forked(PROGRAM.format(port)) as program:
        assert await asyncio.to_thread(program.output.readline) == "ready\n"
        await listens(port)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client_session:
            yield client_session


async def listens(port: int, is_running: Callable[[], bool] = lambda: True) -> None:
    """Wait until the server listens, which it does some time after it is ready."""
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:
            assert is_running(), "the server has ended"
            await asyncio.sleep(0.01)
        else:
            break
    writer.close()
    await writer.wait_closed()


async def answer_of(client: aiohttp.ClientSession, path: str) -> Any:
    async with asyncio.timeout(30), client.get(path) as response:
        return await response.json()


async def test_requests_are_answered_and_cancelled(
    client: aiohttp.ClientSession,
) -> None:
    async with client.get("/refuse") as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "8"
    asking = asyncio.create_task(client.get("/wait"))
    await answer_of(client, "/begun")
    asking.cancel()
    await answer_of(client, "/ended")


async def test_background_work_after_a_file_completes(
    client: aiohttp.ClientSession,
) -> None:
    """This server sends a file by its path (the extension `pathsend`)."""
    headers = {"Connection": "close"}
    async with client.get("/file", headers=headers) as response:
        assert b"An application on granian" in await response.read()
    assert await answer_of(client, "/file-ended") == "done"


async def test_event_streams_end_in_every_way(client: aiohttp.ClientSession) -> None:
    async with client.get("/count") as response:
        assert await events_of(response) == [
            {"data": str(number)} for number in range(40)
        ]
    async with client.get("/fail") as response:
        first, last = await events_of(response)
        assert (first, last["event"]) == ({"data": '"one"'}, "error")
    leaving = await client.get("/give")
    await answer_of(client, "/begun")
    leaving.close()
    await answer_of(client, "/ended")


async def test_websockets_echo_fail_and_end(client: aiohttp.ClientSession) -> None:
    async with client.ws_connect("/echo") as websocket:
        await websocket.send_str("ä")
        assert await websocket.receive_json() == "ä"
        await websocket.send_bytes(b"\xff")
        assert await websocket.receive_bytes() == b"\xff"
    async with client.ws_connect("/fail-socket") as websocket:
        await websocket.receive()
        assert (await websocket.receive()).data == 1013
    leaving = await client.ws_connect("/give-socket")
    await answer_of(client, "/begun")
    await leaving.close()
    await answer_of(client, "/ended")


@pytest.mark.parametrize("path", ["/slow", "/slow-socket"])
async def test_slow_reader_holds_back_its_own_generator_alone(
    client: aiohttp.ClientSession, path: str
) -> None:
    async with (
        stalled(client, path, upgrade=path.endswith("socket")),
        client.get("/quick") as response,
    ):
        read, items = 0, 4 * HELD_THERE_MAX
        while read < items * ITEM_LENGTH:
            read += len(await response.content.readany())
        produced = await answer_of(client, "/produced")
        assert produced["quick"] >= items - 1
        assert produced["slow"] <= HELD_THERE_MAX
    await answer_of(client, "/ended")

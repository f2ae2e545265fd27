"""Streams through an nginx that is configured as the page on FastAPI says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
from aiohttp import WSMsgType

from asyncrpc import current_worker
from tests.clusters.hanging import HANGS_S
from tests.clusters.server_process import (
    ServerProcess,
    missing_programs,
    nginx_command,
    page_of,
)
from tests.integration.serving import remote
from tests.integration.serving.conftest import Group
from tests.integration.serving.doors.clients import parsed, stalled
from tests.integration.serving.doors.conftest import HELD_MAX, ITEM_LENGTH, Door
from tests.integration.serving.doors.neutral import NeutralApp
from tests.ports import free_port

PAGE: Final = Path(__file__).parents[3] / "docs" / "how-to" / "serve-with-fastapi.md"
UP: Final = "location = /up { return 204; }\n"


def configuration(port: int, door_port: int) -> str:
    """Return what the page gives, for these ports."""
    section = PAGE.read_text("utf-8").partition("\n## Behind a proxy\n")[2]
    block = section.partition("```text\n")[2].partition("```")[0]
    for written, meant in (
        ("listen 80;", f"listen 127.0.0.1:{port};\n{UP}"),
        ("http://127.0.0.1:8000;", f"http://127.0.0.1:{door_port};"),
    ):
        assert block.count(written) == 1
        block = block.replace(written, meant)
    return block


def kernel_bytes_max() -> int:
    """Return what the kernel buffers at most for both connections of a proxy."""
    names = ("tcp_rmem", "tcp_wmem")
    texts = [Path(f"/proc/sys/net/ipv4/{name}").read_text("utf-8") for name in names]
    return 2 * sum(int(text.split()[2]) for text in texts)


@asynccontextmanager
async def behind_nginx(
    door: Door, neutral: NeutralApp, top: Path
) -> AsyncIterator[aiohttp.ClientSession]:
    """Serve an application by a door that clients reach by an nginx only."""
    if missing_programs("nginx"):
        pytest.skip(f"{missing_programs('nginx')} are missing here")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with door.run(door.make(neutral)) as door_port:
        command = nginx_command(top, configuration(port, door_port))
        with ServerProcess(command, top) as nginx:
            await asyncio.to_thread(
                nginx.wait_until, lambda: page_of(f"{url}/up") == (204, "")
            )
            async with aiohttp.ClientSession(url) as client:
                yield client


def there(function: Any, *args: Any) -> Any:
    return current_worker().peer("back").stream(function, *args)


async def one_event(response: aiohttp.ClientResponse) -> dict[str, str]:
    (event,) = parsed((await response.content.readuntil(b"\n\n")).decode())
    return event


async def test_event_passes_nginx_at_once(
    group: Group, door: Door, tmp_path: Path
) -> None:
    go_on = asyncio.Event()

    async def source(_: str) -> AsyncIterator[str]:
        yield "one"
        await go_on.wait()
        yield "two"

    app = NeutralApp(group.front, events={"/": source})
    async with (
        asyncio.timeout(HANGS_S),
        behind_nginx(door, app, tmp_path) as client,
        client.get("/") as response,
    ):
        assert await one_event(response) == {"data": '"one"'}
        go_on.set()
        assert await one_event(response) == {"data": '"two"'}
        assert await response.read() == b""


async def test_a_client_that_leaves_ends_its_generator(
    group: Group, door: Door, tmp_path: Path
) -> None:
    app = NeutralApp(
        group.front,
        events={"/": lambda _: there(remote.give_and_wait, group.name, "one")},
    )
    async with asyncio.timeout(HANGS_S), behind_nginx(door, app, tmp_path) as client:
        async with client.get("/") as response:
            assert await one_event(response) == {"data": '"one"'}
            assert not group.watch.cancelled.is_set()
        await group.watch.cancelled.wait()


async def test_a_client_that_does_not_read_holds_back_its_own_generator(
    group: Group, door: Door, tmp_path: Path
) -> None:
    def source(who: str) -> Any:
        return lambda _: there(remote.produce, group.name, who, ITEM_LENGTH)

    sources = {"/slow": source("slow"), "/quick": source("quick")}
    held_max = HELD_MAX + kernel_bytes_max() // ITEM_LENGTH
    app = NeutralApp(group.front, events=sources)
    async with asyncio.timeout(HANGS_S), behind_nginx(door, app, tmp_path) as client:
        async with stalled(client, "/slow"), client.get("/quick") as response:
            read = 0
            while read < 2 * held_max * ITEM_LENGTH:
                read += len(await response.content.readany())
            assert group.watch.produced["quick"] >= 2 * held_max - 1
            assert group.watch.produced["slow"] <= held_max
        await group.watch.cancelled.wait()  # its client has left


async def test_websocket_works_behind_nginx(
    group: Group, door: Door, tmp_path: Path
) -> None:
    async def answer(messages: AsyncIterator[str | bytes]) -> AsyncIterator[Any]:
        async for message in messages:
            yield [message]
            async for item in there(remote.give_and_refuse, "two"):
                yield item

    app = NeutralApp(group.front, sockets={"/": answer})
    async with (
        asyncio.timeout(HANGS_S),
        behind_nginx(door, app, tmp_path) as client,
        client.ws_connect("/") as websocket,
    ):
        await websocket.send_str("one")
        assert await websocket.receive_json() == ["one"]
        assert await websocket.receive_json() == "two"
        message = await websocket.receive()
    assert (message.type, message.data) == (WSMsgType.CLOSE, 1013)


async def test_websocket_client_that_leaves_ends_its_generator(
    group: Group, door: Door, tmp_path: Path
) -> None:
    app = NeutralApp(
        group.front,
        sockets={"/": lambda _: there(remote.give_and_wait, group.name, "one")},
    )
    async with asyncio.timeout(HANGS_S), behind_nginx(door, app, tmp_path) as client:
        async with stalled(client, "/", upgrade=True):
            await group.watch.begun.wait()
            assert not group.watch.cancelled.is_set()
        await group.watch.cancelled.wait()

"""Streams by websockets, on all doors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import WSMsgType

from asyncrpc import current_worker
from tests.integration.serving import remote
from tests.integration.serving.conftest import Group
from tests.integration.serving.doors.clients import stalled
from tests.integration.serving.doors.conftest import (
    HELD_MAX,
    ITEM_LENGTH,
    Door,
    kernel_bytes_max,
)
from tests.integration.serving.doors.neutral import NeutralApp
from tests.integration.serving.doors.test_events import ended, there

# What the kernel may keep of a client that sends, and what lies in the server.
SENT_MAX = HELD_MAX + kernel_bytes_max() // ITEM_LENGTH

Source = Callable[[AsyncIterator[str | bytes]], AsyncIterable[Any]]


def one_socket(group: Group, source: Source, **options: Any) -> NeutralApp:
    return NeutralApp(group.front, sockets={"/": source}, socket_options=options)


async def closed(websocket: aiohttp.ClientWebSocketResponse) -> tuple[int, str]:
    """Wait for the server's close frame; return its code and reason."""
    async with asyncio.timeout(30):
        message = await websocket.receive()
    assert message.type is WSMsgType.CLOSE
    return message.data, message.extra or ""


async def test_lone_surrogate_arrives_unchanged(group: Group, door: Door) -> None:
    async def items(_: Any) -> AsyncIterator[Any]:
        yield {"name": "a\ud800b"}

    app = one_socket(group, items)
    async with door.serve(app) as client, client.ws_connect("/") as websocket:
        assert await websocket.receive_json() == {"name": "a\ud800b"}
        assert await closed(websocket) == (1000, "")


async def test_unsendable_text_is_named(
    group: Group, door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    async def items(_: Any) -> AsyncIterator[str]:
        yield "a\ud800b"

    app = one_socket(group, items, encode=str)
    async with door.serve(app) as client, client.ws_connect("/") as websocket:
        assert (await closed(websocket))[0] == 1011
    assert "text that UTF-8 can carry" in caplog.text


async def test_a_stream_is_sent_and_ends(group: Group, door: Door) -> None:
    app = one_socket(group, lambda _: there(remote.count_to, 40))
    async with door.serve(app) as client, client.ws_connect("/") as websocket:
        numbers = [await websocket.receive_json() for _ in range(40)]
        assert numbers == list(range(40))
        assert await closed(websocket) == (1000, "")


async def test_a_page_of_any_site_may_open_a_websocket(
    group: Group, door: Door
) -> None:
    """As with aiohttp and Starlette: whoever uses cookies has to look at `Origin`."""
    app = one_socket(group, lambda _: there(remote.count_to, 1))
    asked = {"Origin": "https://other.example", "Cookie": "user=1"}
    async with (
        door.serve(app) as client,
        client.ws_connect("/", headers=asked) as websocket,
    ):
        assert await websocket.receive_json() == 0


async def test_messages_are_answered(group: Group, door: Door) -> None:
    async def answer(messages: AsyncIterator[str | bytes]) -> AsyncIterator[Any]:
        assert current_worker().name == "front"
        async for message in messages:
            if message == "end":
                return
            async for number in there(remote.count_to, 2):
                yield [message, number] if isinstance(message, str) else message * 2

    async with (
        door.serve(one_socket(group, answer)) as client,
        client.ws_connect("/") as websocket,
    ):
        await websocket.send_str("ä")
        assert [await websocket.receive_json() for _ in range(2)] == [
            ["ä", 0],
            ["ä", 1],
        ]
        await websocket.send_bytes(b"\xff")
        assert await websocket.receive_bytes() == b"\xff\xff"
        assert await websocket.receive_bytes() == b"\xff\xff"
        await websocket.send_str("end")
        assert await closed(websocket) == (1000, "")


async def test_messages_survive_a_small_queue(group: Group, door: Door) -> None:
    async def answer(messages: AsyncIterator[str | bytes]) -> AsyncIterator[Any]:
        async for message in messages:
            await current_worker().peer("back").call(remote.double, [1])
            yield message

    app = one_socket(group, answer, messages_max=1, encode=str)
    async with door.serve(app) as client, client.ws_connect("/") as websocket:
        sent = [f"{number}" * 100 for number in range(100)]

        async def send() -> None:
            for text in sent:
                await websocket.send_str(text)

        sending = asyncio.create_task(send())
        async with asyncio.timeout(30):
            assert [await websocket.receive_str() for _ in sent] == sent
            await sending


async def test_the_subprotocol_is_the_servers_choice(group: Group, door: Door) -> None:
    app = one_socket(group, lambda _: there(remote.count_to, 1), protocols=("v2", "v1"))
    async with (
        door.serve(app) as client,
        client.ws_connect("/", protocols=("v0", "v1", "v2")) as websocket,
    ):
        assert websocket.protocol == "v2"


@pytest.mark.parametrize(
    ("function", "code", "reason"),
    [
        (remote.give_and_refuse, 1013, "OverloadedError: retry after 8 s: "),
        (remote.give_and_fail, 1011, "InternalError: the server failed"),
    ],
)
async def test_error_sets_the_code_of_the_closure(
    group: Group, door: Door, function: Any, code: int, reason: str
) -> None:
    app = one_socket(group, lambda _: there(function, "one"))
    async with door.serve(app) as client, client.ws_connect("/") as websocket:
        assert await websocket.receive_json() == "one"
        closed_with, text = await closed(websocket)
    assert (closed_with, text[: len(reason)]) == (code, reason)


async def test_the_deadline_closes_the_websocket(group: Group, door: Door) -> None:
    async def answer(_: AsyncIterator[str | bytes]) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield 1

    app = one_socket(group, answer)
    app.options = {"timeout_s": 0.2}
    async with door.serve(app) as client:
        try:
            async with client.ws_connect("/") as websocket:
                code, text = await closed(websocket)
        except aiohttp.WSServerHandshakeError as error:  # it took longer than that
            code, text = 4000 + error.status, "DeadlineExceededError"
    assert (code, text.partition(":")[0]) == (4504, "DeadlineExceededError")


async def test_a_websocket_is_refused_by_a_response(group: Group, door: Door) -> None:
    app = one_socket(group, lambda _: there(remote.count_to, 1))
    headers = {"X-Envoy-Expected-Rq-Timeout-Ms": "soon"}
    async with door.serve(app) as client:
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await client.ws_connect("/", headers=headers)
    assert caught.value.status == 400


@pytest.mark.parametrize("is_heard", [True, False])
async def test_a_client_that_leaves_runs_the_remote_finally(
    group: Group,
    door: Door,
    is_heard: bool,  # noqa: FBT001
) -> None:
    async def answer(messages: AsyncIterator[str | bytes]) -> AsyncIterator[Any]:
        if is_heard:
            await anext(messages)
        async for value in there(remote.give_and_wait, group.name, "one"):
            yield value

    async with door.serve(one_socket(group, answer)) as client:
        websocket = await client.ws_connect("/")
        await websocket.send_str("begin")
        assert await websocket.receive_json() == "one"
        async with asyncio.timeout(30):
            await group.watch.begun.wait()
        assert not group.watch.cancelled.is_set()
        await websocket.close()
        await ended(group)


async def test_broken_connection_ends_the_generator(group: Group, door: Door) -> None:
    app = one_socket(group, lambda _: there(remote.give_and_wait, group.name, "one"))
    async with door.serve(app) as client:
        async with stalled(client, "/", upgrade=True), asyncio.timeout(30):
            await group.watch.begun.wait()
        await ended(group)


async def test_a_slow_reader_holds_back_its_own_generator_alone(
    group: Group, door: Door
) -> None:
    app = NeutralApp(
        group.front,
        sockets={
            f"/{who}": lambda _, who=who: there(  # type: ignore[misc]
                remote.produce, group.name, who, ITEM_LENGTH
            )
            for who in ("slow", "quick")
        },
    )
    async with door.serve(app) as client:
        async with (
            stalled(client, "/slow", upgrade=True),
            client.ws_connect("/quick") as websocket,
        ):
            for _ in range(4 * HELD_MAX):
                await websocket.receive_str()
            assert group.watch.produced["slow"] <= HELD_MAX
            assert not group.watch.cancelled.is_set()
        await ended(group)


async def test_a_client_that_sends_too_much_waits(group: Group, door: Door) -> None:
    """What nobody looks at is not read: the client's own buffers fill."""
    may_read, has_ended = asyncio.Event(), asyncio.Event()
    sent = 0

    async def ignore(messages: AsyncIterator[str | bytes]) -> AsyncIterator[Any]:
        try:
            await may_read.wait()
            async for _ in messages:
                pass
            yield "never"
        finally:
            has_ended.set()

    async def send(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        head = b"\x82\xfe" + ITEM_LENGTH.to_bytes(2, "big")
        while True:
            writer.write(head + bytes(4 + ITEM_LENGTH))  # a mask of zeros changes none
            await writer.drain()
            sent += 1

    app = one_socket(group, ignore)
    app.events = {
        "/quick": lambda _: there(remote.produce, group.name, "quick", ITEM_LENGTH)
    }
    async with door.serve(app) as client:
        async with (
            stalled(client, "/", upgrade=True) as writer,
            client.get("/quick") as response,
        ):
            sending = asyncio.create_task(send(writer))
            read = 0
            while read < 4 * SENT_MAX * ITEM_LENGTH:  # by then it would have sent more
                read += len(await response.content.readany())
            assert not sending.done()
            assert sent <= SENT_MAX
            sending.cancel()
            await asyncio.wait([sending])
            response.close()
        may_read.set()
        async with asyncio.timeout(30):
            await has_ended.wait()

"""Streams as server-sent events, on all doors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import Any

import pytest

import asyncrpc
from asyncrpc import current_worker
from asyncrpc.serving import Batcher, ServerSentEvent
from tests.integration.serving import remote
from tests.integration.serving.conftest import Group
from tests.integration.serving.doors.clients import events_of, stalled
from tests.integration.serving.doors.conftest import HELD_MAX, ITEM_LENGTH, Door
from tests.integration.serving.doors.neutral import Asked, NeutralApp


def one_stream(
    group: Group, source: Callable[[str], AsyncIterable[Any]], **options: Any
) -> NeutralApp:
    return NeutralApp(group.front, events={"/": source}, event_options=options)


def there(function: Callable[..., AsyncIterator[Any]], *args: Any) -> Any:
    return current_worker().peer("back").stream(function, *args)


async def ended(group: Group) -> None:
    async with asyncio.timeout(30):
        await group.watch.cancelled.wait()


async def test_items_are_sent_as_events(group: Group, door: Door) -> None:
    app = one_stream(group, lambda _: there(remote.count_to, 40))
    async with door.serve(app) as client, client.get("/") as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert response.headers["Cache-Control"] == "no-store"
        assert response.headers["X-Accel-Buffering"] == "no"
        assert await events_of(response) == [
            {"data": str(number)} for number in range(40)
        ]


async def test_lone_surrogate_arrives_unchanged(group: Group, door: Door) -> None:
    async def items(_: str) -> AsyncIterator[Any]:
        yield {"name": "a\ud800b"}

    async with (
        door.serve(one_stream(group, items)) as client,
        client.get("/") as response,
    ):
        (event,) = await events_of(response)
        assert json.loads(event["data"]) == {"name": "a\ud800b"}


async def test_event_has_name_id_and_retry(group: Group, door: Door) -> None:
    async def items(_: str) -> AsyncIterator[Any]:
        yield ServerSentEvent({"a": "ä\n"}, event="token", id="7", retry_s=1.5)
        yield ServerSentEvent("b", id="8")

    async with (
        door.serve(one_stream(group, items, end_event="done")) as client,
        client.get("/") as response,
    ):
        assert (
            await response.read()
            == (
                'event: token\nid: 7\nretry: 1500\ndata: {"a":"ä\\n"}\n\n'
                'id: 8\ndata: "b"\n\n'
                "event: done\ndata: null\n\n"
            ).encode()
        )


async def test_text_of_several_lines_arrives_whole(group: Group, door: Door) -> None:
    app = one_stream(
        group,
        lambda _: there(remote.count_to, 2),
        encode=lambda item: f"{item}\r\n{item}\n",
    )
    async with door.serve(app) as client, client.get("/") as response:
        assert await events_of(response) == [{"data": "0\n0\n"}, {"data": "1\n1\n"}]


async def test_the_last_event_id_is_handed_on(group: Group, door: Door) -> None:
    app = one_stream(group, lambda last: there(remote.count_to, int(last or 1)))
    async with door.serve(app) as client:
        async with client.get("/", headers={"Last-Event-ID": "3"}) as response:
            assert len(await events_of(response)) == 3
        async with client.get("/") as response:
            assert len(await events_of(response)) == 1


async def test_response_begins_before_the_first_item(group: Group, door: Door) -> None:
    app = one_stream(
        group, lambda _: there(remote.give_and_wait, group.name), begin_within_s=0.0
    )
    async with door.serve(app) as client, client.get("/") as response:
        assert response.status == 200
        assert await response.content.readline() == b":\n"
    await ended(group)


async def test_silence_is_broken_by_comments(group: Group, door: Door) -> None:
    app = one_stream(
        group,
        lambda _: there(remote.give_and_wait, group.name, "one"),
        keep_alive_s=0.01,
    )
    async with door.serve(app) as client, client.get("/") as response:
        lines = [await response.content.readline() for _ in range(8)]
    assert lines == [b'data: "one"\n', b"\n", *[b":\n", b"\n"] * 3]
    await ended(group)


async def test_head_request_runs_no_generator(group: Group, door: Door) -> None:
    asked: list[str] = []

    async def items(_: str) -> AsyncIterator[int]:
        asked.append("an item")
        yield 1

    async with door.serve(one_stream(group, items)) as client:
        async with client.head("/") as response:
            if response.status != 405:  # FastAPI's routes answer GET alone
                assert response.status == 200
                assert response.content_type == "text/event-stream"
        async with client.get("/nowhere") as response:  # on the same connection
            assert response.status == 404
    assert asked == []


# --- errors --------------------------------------------------------------------------


async def test_refused_stream_has_its_own_status(group: Group, door: Door) -> None:
    app = one_stream(group, lambda _: there(remote.give_and_refuse))
    async with door.serve(app) as client, client.get("/") as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "8"
        assert (await response.json())["error"] == "OverloadedError"


async def test_a_later_error_is_the_last_event(group: Group, door: Door) -> None:
    app = one_stream(group, lambda _: there(remote.give_and_refuse, "one"))
    async with door.serve(app) as client, client.get("/") as response:
        first, last = await events_of(response)
    assert (first, last["event"]) == ({"data": '"one"'}, "error")
    error = json.loads(last["data"])
    assert error["error"] == "OverloadedError"
    assert "32 items wait" in error["message"]


async def test_internal_error_is_hidden_from_the_client(
    group: Group, door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    app = one_stream(group, lambda _: there(remote.give_and_fail, "one"), end_event="e")
    async with door.serve(app) as client, client.get("/") as response:
        _, last = await events_of(response)
    assert last["event"] == "error"
    assert json.loads(last["data"])["error"] == "InternalError"
    assert "no luck" not in last["data"]
    assert "no luck" in caplog.text


async def test_item_that_is_not_json_ends_the_stream_with_an_error(
    group: Group, door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    async def items(_: str) -> AsyncIterator[Any]:
        yield "one"
        yield object()

    async with (
        door.serve(one_stream(group, items)) as client,
        client.get("/") as response,
    ):
        _, last = await events_of(response)
    assert json.loads(last["data"])["error"] == "InternalError"
    assert "an item of type object cannot be written as JSON" in caplog.text


async def test_expired_call_is_an_event(group: Group, door: Door) -> None:
    async def items(_: str) -> AsyncIterator[Any]:
        yield "one"
        async with asyncrpc.deadline(0.05):
            await asyncrpc.rpc_async("back", remote.wait_forever, args=(group.name,))

    async with (
        door.serve(one_stream(group, items)) as client,
        client.get("/") as response,
    ):
        _, last = await events_of(response)
    assert json.loads(last["data"])["error"] == "DeadlineExceededError"


async def test_the_deadline_of_the_request_ends_the_stream(
    group: Group, door: Door
) -> None:
    """By an event, if the response had begun; a slow machine may not come so far."""

    async def items(_: str) -> AsyncIterator[Any]:
        yield "one"
        await asyncio.Event().wait()

    app = one_stream(group, items)
    app.options = {"timeout_s": 0.2}
    async with door.serve(app) as client, client.get("/") as response:
        if response.status == 504:
            error = await response.json()
        else:
            error = json.loads((await events_of(response))[-1]["data"])
    assert error["error"] == "DeadlineExceededError"


# --- clients that leave, or do not read ----------------------------------------------


async def test_a_client_that_leaves_runs_the_remote_finally(
    group: Group, door: Door
) -> None:
    app = one_stream(group, lambda _: there(remote.give_and_wait, group.name, "one"))
    async with door.serve(app) as client:
        response = await client.get("/")
        async with asyncio.timeout(30):
            await group.watch.begun.wait()
        assert not group.watch.cancelled.is_set()
        response.close()
        await ended(group)


async def test_client_that_leaves_before_the_first_item_ends_the_call(
    group: Group, door: Door
) -> None:
    app = one_stream(group, lambda _: there(remote.give_and_wait, group.name))
    async with door.serve(app) as client:
        request = asyncio.create_task(client.get("/"))
        async with asyncio.timeout(30):
            await group.watch.begun.wait()
        request.cancel()
        await ended(group)


async def test_a_slow_reader_holds_back_its_own_generator_alone(
    group: Group, door: Door
) -> None:
    app = NeutralApp(
        group.front,
        events={
            f"/{who}": lambda _, who=who: there(  # type: ignore[misc]
                remote.produce, group.name, who, ITEM_LENGTH
            )
            for who in ("slow", "quick")
        },
    )
    async with door.serve(app) as client:
        async with stalled(client, "/slow"), client.get("/quick") as response:
            read = 0
            while read < 4 * HELD_MAX * ITEM_LENGTH:
                read += len(await response.content.readany())
            produced = group.watch.produced
            assert produced["quick"] >= 4 * HELD_MAX - 1
            assert produced["slow"] <= HELD_MAX
            assert not group.watch.cancelled.is_set()
        await ended(group)  # it has left without reading what was there


async def test_a_client_that_leaves_frees_its_place_in_the_batch(
    group: Group, door: Door
) -> None:
    begun, cancelled, waits = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def predict(rows: list[int]) -> list[int]:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return rows

    async with Batcher(predict, 1, 0.0) as batched:

        async def answer(asked: Asked) -> Any:
            answering = asyncio.create_task(batched(1))
            await asyncio.sleep(0)
            if batched.waiting:
                waits.set()
            try:
                return await answering
            finally:
                answering.cancel()

        app = NeutralApp(group.front, answers={"/": answer})
        async with door.serve(app) as client, asyncio.timeout(30):
            running = asyncio.create_task(client.get("/"))
            await begun.wait()
            waiting = asyncio.create_task(client.get("/"))
            await waits.wait()
            waiting.cancel()
            while batched.waiting:  # noqa: ASYNC110  (nothing tells when)
                await asyncio.sleep(0)
            running.cancel()
            await cancelled.wait()

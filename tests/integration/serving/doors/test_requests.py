"""Requests on all doors: lifetime of the worker, errors, deadlines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

import asyncrpc
from asyncrpc import Worker, current_worker
from tests.integration.serving import remote
from tests.integration.serving.conftest import Group
from tests.integration.serving.doors.conftest import Door
from tests.integration.serving.doors.neutral import Asked, NeutralApp

DEADLINE = "X-Envoy-Expected-Rq-Timeout-Ms"


def one_answer(
    group: Group, answer: Callable[[Asked], Awaitable[Any]], **options: Any
) -> NeutralApp:
    return NeutralApp(group.front, answers={"/": answer}, options=options)


async def wait_there(group: Group) -> None:
    await asyncrpc.rpc_async("back", remote.wait_forever, args=(group.name,))


async def test_a_handler_calls_other_workers(group: Group, door: Door) -> None:
    async def answer(asked: Asked) -> Any:
        worker = current_worker()
        doubled = await asyncrpc.rpc_async("back", remote.double, args=([1, 2],))
        return {"name": worker.name, "doubled": doubled}

    async with (
        door.serve(one_answer(group, answer)) as client,
        client.get("/") as response,
    ):
        assert await response.json() == {"name": "front", "doubled": [2, 4]}


async def test_the_body_reaches_the_handler_whole(group: Group, door: Door) -> None:
    """Reading ahead takes nothing from it, however large it is."""
    sent = bytes(range(256)) * 4096

    async def answer(asked: Asked) -> Any:
        await asyncrpc.rpc_async("back", remote.double, args=([1],))
        body = await asked.body()
        return body == sent

    async with (
        door.serve(one_answer(group, answer)) as client,
        client.post("/", data=sent) as response,
    ):
        assert await response.json() is True


async def test_the_worker_ends_with_the_application(group: Group, door: Door) -> None:
    workers: list[Worker] = []

    def make() -> Worker:
        workers.append(group.front())
        return workers[0]

    async with door.serve(NeutralApp(make)) as client:
        async with client.get("/readyz") as response:
            assert response.status == 200
        assert not workers[0].is_closed
    assert workers[0].is_closed


async def test_running_worker_outlives_the_application(
    group: Group, door: Door
) -> None:
    async def answer(asked: Asked) -> Any:
        return current_worker().name

    app = NeutralApp(group.back, answers={"/": answer})
    async with door.serve(app) as client, client.get("/") as response:
        assert await response.json() == "back"
    assert not group.back.is_closed


async def test_health_checks_follow_the_worker(group: Group, door: Door) -> None:
    async def answer(asked: Asked) -> Any:
        await current_worker().shutdown()
        return None

    async with door.serve(one_answer(group, answer)) as client:
        async with client.get("/readyz") as response:
            assert response.status == 200
            body = await response.json()
            assert body["ready"] is True
            assert [worker["name"] for worker in body["workers"]] == ["front"]
        async with client.get("/") as response:
            assert response.status == 200
        async with client.get("/readyz") as response:
            assert response.status == 503
            assert (await response.json())["ready"] is False
        async with client.head("/readyz") as response:
            assert response.status == 503
        async with client.get("/healthz") as response:
            assert await response.json() == {"live": True}
        async with client.post("/healthz") as response:
            assert response.status == 405


# --- strangers -----------------------------------------------------------------------

NAMED = ("tests.integration.serving.remote:double", "back", "builtins:list")


@pytest.mark.parametrize("way", ["path", "query", "header", "body"])
async def test_client_reaches_only_functions_that_handlers_call(
    group: Group, door: Door, way: str
) -> None:
    """Whatever function the client names, and wherever."""

    async def answer(_: Asked) -> Any:
        return await asyncrpc.rpc_async("back", remote.double, args=([1],))

    async with door.serve(one_answer(group, answer)) as client:
        for name in NAMED:
            path = f"/{name}" if way == "path" else "/"
            asked = {"function": name, "to": "back", "target": name}
            async with client.post(
                path,
                params=asked if way == "query" else None,
                headers=asked if way == "header" else None,
                json={**asked, "args": [[7]]} if way == "body" else None,
            ) as response:
                if way == "path":
                    assert response.status in {404, 405}
                else:
                    assert await response.json() == [2]


async def test_answers_show_no_traceback_and_no_value(group: Group, door: Door) -> None:
    functions = [remote.refuse, remote.overload, remote.fail, remote.time_out]

    async def answer(_: Asked) -> Any:
        value = "a value of the program"
        await asyncrpc.rpc_async("back", functions.pop())
        return value

    async with door.serve(one_answer(group, answer)) as client:
        while functions:
            async with client.get("/") as response:
                text = await response.text()
                assert response.status >= 500
                for secret in ("value of", "Traceback", ".py", "no luck", "of its own"):
                    assert secret not in text


# --- clients that leave --------------------------------------------------------------


async def test_a_client_that_leaves_cancels_the_remote_work(
    group: Group, door: Door
) -> None:
    async def answer(asked: Asked) -> Any:
        await wait_there(group)

    async with door.serve(one_answer(group, answer)) as client:
        await leave_while_it_waits(group, client.get("/"))


async def test_client_leaving_after_its_body_cancels_the_call(
    group: Group, door: Door
) -> None:
    async def answer(asked: Asked) -> Any:
        assert await asked.body() == b"all"
        await wait_there(group)

    async with door.serve(one_answer(group, answer)) as client:
        await leave_while_it_waits(group, client.post("/", data=b"all"))


async def test_client_leaving_during_the_response_cancels_the_call(
    group: Group, door: Door
) -> None:
    async def answer(asked: Asked) -> Any:
        await asked.begin(b"half")
        await wait_there(group)

    async with door.serve(one_answer(group, answer)) as client:
        response = await client.get("/")
        await group.watch.begun.wait()
        assert not group.watch.cancelled.is_set()
        response.close()
        async with asyncio.timeout(30):
            await group.watch.cancelled.wait()


async def leave_while_it_waits(group: Group, asking: Any) -> None:
    request = asyncio.ensure_future(asking)
    async with asyncio.timeout(30):
        await group.watch.begun.wait()
        assert not group.watch.cancelled.is_set()
        request.cancel()  # closes the client's connection
        await group.watch.cancelled.wait()


# --- errors --------------------------------------------------------------------------


async def answer_to(
    group: Group, door: Door, function: Callable[..., Awaitable[Any]]
) -> tuple[aiohttp.ClientResponse, dict[str, str]]:
    async def answer(asked: Asked) -> Any:
        await asyncrpc.rpc_async("back", function)

    async with (
        door.serve(one_answer(group, answer)) as client,
        client.get("/") as response,
    ):
        text = await response.text()
    return response, json.loads(text) if text.startswith("{") else {}


async def test_a_refused_call_is_503_with_retry_after(group: Group, door: Door) -> None:
    response, body = await answer_to(group, door, remote.refuse)
    assert (response.status, body["error"]) == (503, "RejectedError")
    assert "busy" in body["message"]
    assert response.headers["Retry-After"] == "1"
    assert response.content_type == "application/json"


async def test_overloaded_callee_sets_retry_after(group: Group, door: Door) -> None:
    response, body = await answer_to(group, door, remote.overload)
    assert (response.status, body["error"]) == (503, "OverloadedError")
    assert response.headers["Retry-After"] == "8"


async def test_an_overloaded_callee_may_be_answered_by_429(
    group: Group, door: Door
) -> None:
    async def answer(_: Asked) -> Any:
        await asyncrpc.rpc_async("back", remote.overload)

    async with (
        door.serve(one_answer(group, answer, overloaded_status=429)) as client,
        client.get("/") as response,
    ):
        assert response.status == 429
        assert response.headers["Retry-After"] == "8"
        assert (await response.json())["error"] == "OverloadedError"


async def test_a_lost_worker_is_503(group: Group, door: Door) -> None:
    async def answer(asked: Asked) -> Any:
        await group.back.shutdown(drain_timeout_s=0.0)
        await asyncrpc.rpc_async("back", remote.fail)

    async with (
        door.serve(one_answer(group, answer)) as client,
        client.get("/") as response,
    ):
        assert response.status == 503
        assert (await response.json())["error"] == "WorkerLostError"
        assert "Retry-After" in response.headers


async def test_an_application_whose_worker_has_ended_is_503(
    group: Group, door: Door
) -> None:
    async def answer(asked: Asked) -> Any:
        worker = current_worker()
        await worker.shutdown()
        worker.peer("back")

    async with (
        door.serve(one_answer(group, answer)) as client,
        client.get("/") as response,
    ):
        assert response.status == 503
        assert (await response.json())["error"] == "NotStartedError"


async def test_an_error_of_the_function_is_500(group: Group, door: Door) -> None:
    response, body = await answer_to(group, door, remote.fail)
    assert (response.status, body) == (500, {})


async def test_begun_response_is_cut_off_on_an_error(group: Group, door: Door) -> None:
    async def answer(asked: Asked) -> Any:
        await asked.begin(b"half")
        await asyncrpc.rpc_async("back", remote.refuse)

    async with (
        door.serve(one_answer(group, answer)) as client,
        client.get("/") as response,
    ):
        assert response.status == 200
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()


# --- deadlines -----------------------------------------------------------------------


async def test_the_deadline_is_504_and_travels(group: Group, door: Door) -> None:
    async def answer(asked: Asked) -> Any:
        await wait_there(group)

    async with (
        door.serve(one_answer(group, answer, timeout_s=0.1)) as client,
        client.get("/") as response,
    ):
        assert response.status == 504
        assert (await response.json())["error"] == "DeadlineExceededError"
    async with asyncio.timeout(30):
        await group.watch.cancelled.wait()


async def test_a_deadline_outside_any_call_is_504(group: Group, door: Door) -> None:
    async def answer(asked: Asked) -> Any:
        await asyncio.Event().wait()

    async with (
        door.serve(one_answer(group, answer, timeout_s=0.05)) as client,
        client.get("/") as response,
    ):
        assert response.status == 504
        assert (await response.json())["error"] == "DeadlineExceededError"


@pytest.mark.parametrize("timeout_s", [None, 3600.0])
async def test_a_client_may_shorten_the_deadline(
    group: Group, door: Door, timeout_s: float | None
) -> None:
    async def answer(asked: Asked) -> Any:
        await wait_there(group)

    async with (
        door.serve(one_answer(group, answer, timeout_s=timeout_s)) as client,
        client.get("/", headers={DEADLINE: "100"}) as response,
    ):
        assert response.status == 504


async def test_a_client_cannot_lengthen_the_deadline(group: Group, door: Door) -> None:
    async def answer(asked: Asked) -> Any:
        await wait_there(group)

    async with (
        door.serve(one_answer(group, answer, timeout_s=0.1)) as client,
        client.get("/", headers={DEADLINE: "3600000"}) as response,
    ):
        assert response.status == 504


@pytest.mark.parametrize("own", ["timeout of the call", "block"])
async def test_the_earlier_of_a_handlers_limit_and_the_requests_holds(
    group: Group, door: Door, own: str
) -> None:
    async def limited(timeout_s: float, function: Any, *args: Any) -> Any:
        if own == "block":
            async with asyncrpc.deadline(timeout_s):
                return await asyncrpc.rpc_async("back", function, args=args)
        peer = current_worker().peer("back").using(timeout_s=timeout_s)
        return await peer.call(function, *args)

    async def answer(asked: Asked) -> Any:
        assert await limited(3600.0, remote.double, [1]) == [2]
        with pytest.raises(asyncrpc.DeadlineExceededError):
            await limited(0.01, remote.wait_forever, group.name)
        return "went on"

    async def never_ends(asked: Asked) -> Any:
        await limited(3600.0, remote.wait_forever, group.name)

    async with (
        door.serve(one_answer(group, answer, timeout_s=3600.0)) as client,
        client.get("/") as response,
    ):
        assert await response.json() == "went on"
    async with (
        door.serve(one_answer(group, never_ends, timeout_s=0.1)) as client,
        client.get("/") as response,
    ):
        assert response.status == 504


@pytest.mark.parametrize("value", ["soon", "-1", "1.5", "1e3", "", "9" * 11])
async def test_deadline_that_is_not_a_number_is_400(
    group: Group, door: Door, value: str
) -> None:
    async def answer(asked: Asked) -> Any:
        raise AssertionError("it is not asked")

    async with (
        door.serve(one_answer(group, answer)) as client,
        client.get("/", headers={DEADLINE: value}) as response,
    ):
        assert response.status == 400
        body = await response.json()
    assert body["error"] == "BadRequest"
    assert DEADLINE in body["message"]
    assert repr(value) in body["message"]


async def test_deadline_header_has_the_chosen_name(group: Group, door: Door) -> None:
    async def answer(asked: Asked) -> Any:
        return "answered"

    options = {"deadline_header": "Connect-Timeout-Ms"}
    async with door.serve(one_answer(group, answer, **options)) as client:
        async with client.get("/", headers={DEADLINE: "nothing"}) as response:
            assert response.status == 200
        async with client.get("/", headers={"connect-timeout-ms": "0"}) as response:
            assert response.status == 504

"""Batches: what they gather, and that members do not hurt one another."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import pytest
import torch
from aiohttp import web

from asyncrpc import (
    Outcome,
    RejectedError,
    UsageError,
    current_worker,
    deadline,
    serving,
)
from asyncrpc.core.calls.context import deadline_var
from asyncrpc.errors import NotStartedError
from asyncrpc.serving import Batcher
from asyncrpc.serving.request_scope import request_deadline
from asyncrpc.testing.loop import SimLoop
from tests.integration.serving import remote
from tests.integration.serving.conftest import Group, Serving

FOREVER_S = 60.0


class Gate:
    """A function of many numbers that answers when it is let."""

    def __init__(self, *, is_open: bool = True) -> None:
        self.batches: list[list[int]] = []
        self.called = asyncio.Semaphore(0)
        self.open = asyncio.Event()
        self.was_cancelled = False
        if is_open:
            self.open.set()

    async def __call__(self, numbers: list[int]) -> list[int]:
        self.batches.append(numbers)
        self.called.release()
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        return [2 * number for number in numbers]


async def test_full_batch_is_sent_at_once() -> None:
    gate = Gate()
    async with Batcher(gate, 3, FOREVER_S) as batched:
        assert await asyncio.gather(*map(batched, range(6))) == [0, 2, 4, 6, 8, 10]
    assert gate.batches == [[0, 1, 2], [3, 4, 5]]


class TestInVirtualTime:
    loops = {"sim": SimLoop}  # noqa: RUF012  (read once, by the conftest)

    async def test_partial_batch_is_sent_after_its_wait(self) -> None:
        gate = Gate()
        async with Batcher(gate, 100, 0.02) as batched:
            loop = asyncio.get_running_loop()
            start_s = loop.time()
            assert await asyncio.gather(*map(batched, range(3))) == [0, 2, 4]
            assert loop.time() - start_s == pytest.approx(0.02)
        assert gate.batches == [[0, 1, 2]]


async def test_batches_grow_while_one_runs() -> None:
    gate = Gate(is_open=False)
    async with Batcher(gate, 4, 0.0) as batched:
        answers = asyncio.gather(*map(batched, range(5)))
        await gate.called.acquire()
        gate.open.set()
        assert await answers == [0, 2, 4, 6, 8]
    assert gate.batches == [[0], [1, 2, 3, 4]]


async def test_batches_run_concurrently_up_to_the_limit() -> None:
    gate = Gate(is_open=False)
    async with Batcher(gate, 1, 0.0, batches_max=2) as batched:
        answers = asyncio.gather(*map(batched, range(3)))
        for _ in range(2):
            await gate.called.acquire()
        assert batched.waiting == 1
        gate.open.set()
        assert await answers == [0, 2, 4]


async def test_cancelled_member_does_not_affect_the_others() -> None:
    gate = Gate(is_open=False)
    async with Batcher(gate, 3, FOREVER_S) as batched:
        tasks = [asyncio.ensure_future(batched(number)) for number in range(3)]
        await gate.called.acquire()
        tasks[1].cancel()
        await asyncio.wait(tasks[1:2])
        gate.open.set()
        assert await asyncio.gather(*tasks[::2]) == [0, 4]
    assert not gate.was_cancelled


async def test_a_member_that_leaves_before_the_call_is_not_sent() -> None:
    gate = Gate()
    async with Batcher(gate, 2, FOREVER_S) as batched:
        gone = asyncio.ensure_future(batched(1))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait([gone])
        assert batched.waiting == 0
        assert await asyncio.gather(*map(batched, (2, 3))) == [4, 6]
    assert gate.batches == [[2, 3]]


async def test_batch_without_waiting_members_is_cancelled(group: Group) -> None:
    """The remote coroutine is cancelled on the other worker."""

    async def call(names: list[str]) -> list[str]:
        await current_worker().peer("back").call(remote.wait_forever, names[0])
        return names

    async with group.front(), Batcher(call, 2, FOREVER_S) as batched:
        tasks = [asyncio.ensure_future(batched(group.name)) for _ in range(2)]
        async with asyncio.timeout(30):
            await group.watch.begun.wait()
            tasks[0].cancel()
            await asyncio.wait(tasks[:1])
            assert not group.watch.cancelled.is_set()
            tasks[1].cancel()
            await group.watch.cancelled.wait()


async def test_error_reaches_every_member() -> None:
    async def fail(numbers: list[int]) -> list[int]:
        raise ValueError(f"no luck with {len(numbers)}")

    async with Batcher(fail, 3, FOREVER_S) as batched:
        errors = await asyncio.gather(*map(batched, range(3)), return_exceptions=True)
    assert [str(error) for error in errors] == ["no luck with 3"] * 3


async def test_wrong_number_of_answers_is_named() -> None:
    async def lose_one(numbers: list[int]) -> list[int]:
        return numbers[1:]

    async with Batcher(lose_one, 2, FOREVER_S) as batched:
        errors = await asyncio.gather(*map(batched, range(2)), return_exceptions=True)
    for error in errors:
        assert isinstance(error, UsageError)
        assert "lose_one' of a Batcher returned 1 answers to 2 items" in str(error)


class Fields(NamedTuple):
    logits: list[float]
    hidden: list[float]


NO_ANSWERS: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "a number": lambda: 2,
    "a set": lambda: {1, 2},
    "a frozenset": lambda: frozenset({1, 2}),
    "a dict": lambda: {"logits": [1, 2], "hidden": [3, 4]},
    "a subclass of dict": lambda: OrderedDict(logits=1, hidden=2),
    "the keys of a dict": {1: 1, 2: 2}.keys,
    "the values of a dict": {1: 1, 2: 2}.values,
    "a string": lambda: "ab",
    "bytes": lambda: b"ab",
    "a bytearray": lambda: bytearray(b"ab"),
    "a memoryview": lambda: memoryview(b"ab"),
    "a generator": lambda: (number for number in range(2)),
    "an iterator": lambda: iter([1, 2]),
    "a named tuple": lambda: Fields([1.0], [2.0]),
    "a tuple of torch": lambda: torch.ones(2, 2).max(dim=1),
    "a size": lambda: torch.Size([3, 4]),
    "a tensor without rows": lambda: torch.tensor(2),
    "an array without rows": lambda: np.array(2),
    "a tensor of other rows": lambda: torch.ones(1, 2),
    "an array of other rows": lambda: np.ones((3, 2)),
    "a nested list": lambda: [[1, 2]],
}


@pytest.mark.parametrize("kind", NO_ANSWERS)
async def test_results_that_are_not_a_list_are_refused_by_name(kind: str) -> None:
    async def predict(numbers: list[int]) -> Any:
        return NO_ANSWERS[kind]()

    async with Batcher(predict, 2, FOREVER_S) as batched:
        errors = await asyncio.gather(*map(batched, range(2)), return_exceptions=True)
    assert [type(error) for error in errors] == [UsageError] * 2
    assert "predict' of a Batcher" in str(errors[0])


@pytest.mark.parametrize(
    "answers",
    [
        [1, 2],
        (1, 2),
        deque([1, 2]),
        range(1, 3),
        torch.tensor([1, 2]),
        np.array([1, 2]),
    ],
)
async def test_answers_of_any_sequence_type_keep_their_order(answers: Any) -> None:
    async def predict(numbers: list[int]) -> Any:
        return answers

    async with Batcher(predict, 2, FOREVER_S) as batched:
        results = await asyncio.gather(*map(batched, range(2)))
    assert [int(answer) for answer in results] == [1, 2]


async def test_plain_function_is_refused_by_name() -> None:
    def predict(numbers: list[int]) -> list[int]:
        return numbers

    wrong: Any = predict
    async with Batcher(wrong, 1, 0.0) as batched:
        with pytest.raises(UsageError, match=r"predict' of a Batcher must be a corout"):
            await batched(1)


async def test_a_function_that_cancels_itself_does_not_cancel_its_members() -> None:
    async def give_up(numbers: list[int]) -> list[int]:
        raise asyncio.CancelledError

    async with Batcher(give_up, 1, 0.0) as batched:
        with pytest.raises(RejectedError, match="the batch was cancelled") as caught:
            await batched(1)
    assert caught.value.outcome is Outcome.UNKNOWN


async def test_requests_beyond_waiting_max_are_rejected() -> None:
    gate = Gate(is_open=False)
    async with Batcher(gate, 1, 0.0, waiting_max=2) as batched:
        tasks = [asyncio.ensure_future(batched(number)) for number in range(3)]
        await gate.called.acquire()
        with pytest.raises(RejectedError, match="2 requests wait") as caught:
            await batched(9)
        assert caught.value.outcome is Outcome.NOT_EXECUTED
        gate.open.set()
        assert await asyncio.gather(*tasks) == [0, 2, 4]


async def test_leaving_the_block_answers_waiting_requests() -> None:
    gate = Gate()
    async with Batcher(gate, 2, FOREVER_S) as batched:
        tasks = [asyncio.ensure_future(batched(number)) for number in range(3)]
        await asyncio.sleep(0)
    assert [task.result() for task in tasks] == [0, 2, 4]
    with pytest.raises(RejectedError, match="closed"):
        await batched(1)


async def test_a_block_that_raises_ends_everything_at_once() -> None:
    gate = Gate(is_open=False)
    tasks: list[asyncio.Future[int]] = []

    async def block() -> None:
        async with Batcher(gate, 1, 0.0) as batched:
            tasks.extend(asyncio.ensure_future(batched(number)) for number in (1, 2))
            await gate.called.acquire()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await block()
    errors = await asyncio.gather(*tasks, return_exceptions=True)
    outcomes = [error.outcome for error in errors if isinstance(error, RejectedError)]
    assert outcomes == [Outcome.UNKNOWN, Outcome.NOT_EXECUTED]
    assert gate.was_cancelled


async def test_deadline_of_a_member_spares_the_others() -> None:
    gate = Gate(is_open=False)

    async def hurried() -> None:
        with pytest.raises(TimeoutError):
            async with deadline(0.02):
                await batched(1)

    async with Batcher(gate, 2, FOREVER_S) as batched:
        patient = asyncio.ensure_future(batched(2))
        await hurried()
        assert not patient.done()
        gate.open.set()
        assert await patient == 4
    assert not gate.was_cancelled


async def test_a_batch_has_the_latest_deadline_of_its_members() -> None:
    """None if one of them has none: whoever completes the batch lends it nothing."""
    seen: list[float | None] = []

    async def look(numbers: list[int]) -> list[int]:
        limit = deadline_var.get()
        seen.append(None if limit is None else limit.allowed_s)
        return numbers

    async def ask(
        timeout_s: float | None, limited_by: Callable[[float | None], Any] = deadline
    ) -> int:
        async with limited_by(timeout_s):
            return await batched(1)

    async with Batcher(look, 2, FOREVER_S) as batched:
        await asyncio.gather(ask(None), ask(5.0))
        await asyncio.gather(ask(50.0), ask(5.0))
        await asyncio.gather(ask(5.0), ask(60.0, request_deadline))
    assert seen == [None, 50.0, 60.0]


async def test_batcher_must_be_entered() -> None:
    with pytest.raises(NotStartedError, match="async with"):
        await Batcher(remote.double, 1, 0.0)(1)


@pytest.mark.parametrize(
    ("max_size", "max_wait_s", "waiting_max"), [(0, 0.0, 1), (1, -1.0, 1), (1, 0.0, 0)]
)
def test_impossible_numbers_are_refused(
    max_size: int, max_wait_s: float, waiting_max: int
) -> None:
    with pytest.raises(UsageError, match=r"^(max_size|max_wait_s|waiting_max) must be"):
        Batcher(remote.double, max_size, max_wait_s, waiting_max=waiting_max)


async def test_requests_share_a_remote_call(group: Group, serving_app: Serving) -> None:
    """Through HTTP: as many answers as requests, each to its own."""
    sizes: list[int] = []

    async def double(numbers: list[int]) -> list[int]:
        sizes.append(len(numbers))
        return await current_worker().peer("back").call(remote.double, numbers)

    batched = Batcher(double, 8, 0.05)

    async def enter(app: web.Application) -> AsyncIterator[None]:
        async with batched:
            yield

    async def handler(request: web.Request) -> web.Response:
        return web.json_response(await batched(int(request.query["number"])))

    app = web.Application(middlewares=[serving.middleware(timeout_s=5.0)])
    app.cleanup_ctx.extend([serving.worker_context(group.front), enter])
    app.router.add_get("/", handler)

    async def ask(client: aiohttp.ClientSession, number: int) -> int:
        async with client.get("/", params={"number": number}) as response:
            answer: int = await response.json()
            return answer

    async with serving_app(app) as client:
        answers = await asyncio.gather(*(ask(client, number) for number in range(16)))
    assert answers == [2 * number for number in range(16)]
    assert max(sizes) > 1
    assert sum(sizes) == 16

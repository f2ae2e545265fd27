"""Batches with limits: of bytes, of age, by deadline; shares, buckets, errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import torch
from aiohttp import web

from asyncrpc import Outcome, RejectedError, UsageError, deadline, expose, serving
from asyncrpc.errors import DeadlineExceededError, OverloadedError
from asyncrpc.serving import Batcher
from asyncrpc.testing import Cluster
from asyncrpc.testing.loop import SimLoop
from tests.integration.serving.conftest import Group, Serving

FOREVER_S = 60.0


class Model:
    """Answers with what it gets, after a time; notes the batches."""

    def __init__(self, takes_s: float = 0.0) -> None:
        self.batches: list[list[Any]] = []
        self.takes_s = takes_s

    async def __call__(self, items: list[Any]) -> list[Any]:
        self.batches.append(items)
        if self.takes_s:
            await asyncio.sleep(self.takes_s)
        return items


async def ends(*asked: Any) -> list[Any]:
    """Return how requests end: answers, and the names of errors."""
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    return [
        type(outcome).__name__ if isinstance(outcome, BaseException) else outcome
        for outcome in outcomes
    ]


# What runs on another worker, by name; workers of a test share its process.
batchers: dict[str, Batcher[int, int]] = {}


@expose
async def predict(name: str, number: int) -> int:
    return await batchers[name](number)


# --- single errors -------------------------------------------------------------------


async def test_exception_as_an_answer_fails_its_item_alone() -> None:
    async def divide(numbers: list[int]) -> list[float | Exception]:
        return [
            1 / number if number else ZeroDivisionError("no luck") for number in numbers
        ]

    async with Batcher(divide, 3, FOREVER_S) as batched:
        assert await ends(*map(batched, (1, 0, 2))) == [1.0, "ZeroDivisionError", 0.5]
        stats = batched.stats()
    assert (stats.answered, stats.failed, stats.running) == (2, 1, 0)


async def test_tensor_answer_is_split_into_rows() -> None:
    async def double(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(rows) * 2

    async with Batcher(double, 2, FOREVER_S) as batched:
        answers = await asyncio.gather(batched(torch.ones(3)), batched(torch.zeros(3)))
    assert torch.equal(answers[0], torch.full((3,), 2.0))
    assert torch.equal(answers[1], torch.zeros(3))


# --- bytes and buckets ---------------------------------------------------------------


async def test_bytes_of_a_batch_are_limited() -> None:
    model = Model()
    async with Batcher(model, 9, FOREVER_S, max_bytes=100) as batched:
        rows = [{"row": torch.zeros(10), "name": "x"} for _ in range(5)]  # 40 bytes
        await asyncio.gather(*map(batched, rows[:4]), batched(bytes(100)))
    assert [len(batch) for batch in model.batches] == [2, 2, 1]


async def test_an_item_that_never_fits_is_refused() -> None:
    async with Batcher(Model(), 9, 0.0, max_bytes=100) as batched:
        with pytest.raises(UsageError, match="101 bytes is larger than a batch may be"):
            await batched(bytes(101))


async def test_size_function_of_the_program_counts() -> None:
    model = Model()
    batched: Batcher[str, str]
    async with Batcher(model, 9, FOREVER_S, max_bytes=3, size_of=len) as batched:
        await asyncio.gather(batched("ab"), batched("c"), batched("def"))
    assert model.batches == [["ab", "c"], ["def"]]


async def test_a_batch_has_one_bucket() -> None:
    model = Model()
    async with Batcher(model, 2, FOREVER_S, bucket=len) as batched:
        asked = asyncio.gather(*map(batched, ("a", "bb", "c", "dd", "eee")))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert model.batches == [["a", "c"], ["bb", "dd"]][: len(model.batches)]
        assert batched.waiting >= 1
        batched_end = asked
    assert await batched_end == ["a", "bb", "c", "dd", "eee"]
    assert model.batches == [["a", "c"], ["bb", "dd"], ["eee"]]


async def test_a_bucket_must_be_hashable() -> None:
    listed: Any = list
    async with Batcher(Model(), 2, 0.0, bucket=listed) as batched:
        with pytest.raises(UsageError, match="what bucket returns must be hashable"):
            await batched("1")


# --- priorities and clients ----------------------------------------------------------


async def test_requests_run_by_priority_and_fair_share() -> None:
    model = Model()
    hold = asyncio.Event()

    async def held(items: list[Any]) -> list[Any]:
        await hold.wait()
        return await model(items)

    async with Batcher(held, 1, 0.0) as batched:
        first = asyncio.ensure_future(batched("first"))
        await asyncio.sleep(0)
        asked = [batched(f"a{number}", client="a") for number in range(3)]
        asked += [batched("b", client="b"), batched("high", client="a", priority=1)]
        others = asyncio.gather(*asked)
        await asyncio.sleep(0)
        hold.set()
        await asyncio.gather(first, others)
    assert [item for (item,) in model.batches] == [
        "first",
        "high",
        "a0",
        "b",
        "a1",
        "a2",
    ]


async def test_full_queue_evicts_for_a_client_without_a_place() -> None:
    hold = asyncio.Event()

    async def held(items: list[Any]) -> list[Any]:
        await hold.wait()
        return items

    async with Batcher(held, 1, 0.0, waiting_max=2) as batched:
        asked = [
            asyncio.ensure_future(batched(number, client="a")) for number in range(3)
        ]
        await asyncio.sleep(0)
        asked.append(asyncio.ensure_future(batched(3, client="b")))
        await asyncio.wait(asked[2:3])
        with pytest.raises(
            OverloadedError, match="another one took its place"
        ) as caught:
            asked[2].result()
        assert caught.value.outcome is Outcome.NOT_EXECUTED
        with pytest.raises(OverloadedError, match="waiting_max"):
            await batched(4, client="a")
        hold.set()
        assert await ends(*asked) == [0, 1, "OverloadedError", 3]
        stats = batched.stats()
    assert (stats.evicted, stats.refused, stats.answered) == (1, 1, 3)


async def test_overflow_oldest_evicts_the_oldest_request() -> None:
    hold = asyncio.Event()

    async def held(items: list[Any]) -> list[Any]:
        await hold.wait()
        return items

    async with Batcher(held, 1, 0.0, waiting_max=2, overflow="oldest") as batched:
        asked = asyncio.gather(ends(*map(batched, range(6))))
        await asyncio.sleep(0)
        hold.set()
        (results,) = await asked
    assert results == [0, *["OverloadedError"] * 3, 4, 5]


@pytest.mark.parametrize("priority", [101, -101, 1.0, True])
async def test_a_priority_is_a_small_integer(priority: Any) -> None:
    async with Batcher(Model(), 1, 0.0) as batched:
        with pytest.raises(UsageError, match="priority must be an integer between"):
            await batched(1, priority=priority)
        with pytest.raises(UsageError, match="client must be hashable"):
            await batched(1, client=[])  # type: ignore[arg-type]


# --- time ----------------------------------------------------------------------------


class TestInVirtualTime:
    loops = {"sim": SimLoop}  # noqa: RUF012  (read once, by the conftest)

    async def test_expired_request_never_runs(self) -> None:
        """The task that waits is not cancelled by its deadline."""
        model = Model(takes_s=5.0)

        async def ask(number: int, timeout_s: float | None) -> int:
            async with deadline(timeout_s):
                answer: int = await batched(number)
                return answer

        async with Batcher(model, 1, 0.0) as batched:
            results = await ends(ask(0, None), ask(1, 2.0), ask(2, None))
            stats = batched.stats()
        assert results == [0, "DeadlineExceededError", 2]
        assert model.batches == [[0], [2]]
        assert stats.expired == 1

    async def test_expired_request_has_the_outcome_not_executed(self) -> None:
        async with Batcher(Model(takes_s=5.0), 1, 0.0, name="predict") as batched:
            first = asyncio.ensure_future(batched(0))
            await asyncio.sleep(0)
            with pytest.raises(DeadlineExceededError, match="predict") as caught:
                async with deadline(2.0):
                    await batched(1)
            assert caught.value.outcome is Outcome.NOT_EXECUTED
            await first

    async def test_expired_deadline_is_refused_at_once(self) -> None:
        async with Batcher(Model(), 1, FOREVER_S) as batched:
            with pytest.raises(DeadlineExceededError):
                async with deadline(0.0):
                    await batched(1)
            assert batched.stats().expired == 1

    async def test_hopeless_deadline_is_refused_at_once(self) -> None:
        model = Model(takes_s=1.0)
        loop = asyncio.get_running_loop()
        async with Batcher(model, 1, 0.0) as batched:
            for number in range(3):
                await batched(number)
            runs = asyncio.ensure_future(batched(3))
            await asyncio.sleep(0.5)
            begun_s = loop.time()
            with pytest.raises(
                OverloadedError, match=r"deadline is in 1\.2 s"
            ) as caught:
                async with deadline(1.2):
                    await batched(4)
            assert loop.time() == begun_s
            assert caught.value.retry_after_s == pytest.approx(1.5)
            async with deadline(1.6):
                assert await batched(5) == 5
            await runs

    async def test_request_over_its_queue_age_is_shed(self) -> None:
        """Until the rate is known, requests wait for the whole age."""
        model = Model(takes_s=5.0)
        async with Batcher(model, 1, 0.0, max_queue_age_s=2.0) as batched:
            begun_s = asyncio.get_running_loop().time()
            first = asyncio.ensure_future(batched(0))
            await asyncio.sleep(0)
            with pytest.raises(OverloadedError, match="it waited 2 s") as caught:
                await batched(1)
            assert asyncio.get_running_loop().time() == pytest.approx(begun_s + 2.0)
            assert caught.value.retry_after_s > 0
            await first
            assert batched.stats().shed == 1

    async def test_flood_is_served_at_full_rate_with_short_waits(self) -> None:
        """20 times what can be done: nine of ten batches are full, all are quick."""
        takes_s, size = 1.0, 4
        model = Model(takes_s=takes_s)
        loop = asyncio.get_running_loop()
        latencies: list[float] = []
        refused: list[tuple[float, float]] = []

        async def ask(number: int) -> None:
            begun_s = loop.time()
            try:
                await batched(number)
            except OverloadedError as error:
                refused.append((loop.time() - begun_s, error.retry_after_s))
            else:
                latencies.append(loop.time() - begun_s)

        async with Batcher(model, size, 0.0, max_queue_age_s=takes_s) as batched:
            async with asyncio.TaskGroup() as tasks:
                for number in range(20 * size * 100):
                    tasks.create_task(ask(number))
                    await asyncio.sleep(takes_s / (20 * size))
            stats = batched.stats()
        assert len(latencies) >= 0.9 * size * 100
        # Only before the rate was known did anyone wait longer, or in vain.
        assert max(latencies[5 * size :]) <= 2 * takes_s + 1e-6
        assert sum(waited_s > 0 for waited_s, _ in refused) < 20 * size * 4
        assert all(retry_after_s > 0 for _, retry_after_s in refused)
        assert stats.answered + stats.refused + stats.shed == 20 * size * 100
        assert stats.capacity_per_s == pytest.approx(size / takes_s, rel=0.01)

    async def test_modest_client_is_unaffected_by_a_flood(self) -> None:
        model = Model(takes_s=1.0)
        modest: list[Any] = []

        async def flood() -> None:
            for number in range(2000):
                tasks.create_task(ends(batched(number, client="flood")))
                await asyncio.sleep(1 / 40)

        async def ask() -> None:
            for _ in range(20):
                await asyncio.sleep(1.3)
                modest.extend(await ends(batched("mine", client="modest")))

        batched = Batcher[Any, Any](model, 4, 0.0, max_queue_age_s=2.0)
        async with batched, asyncio.TaskGroup() as tasks:
            tasks.create_task(flood())
            tasks.create_task(ask())
        assert modest == ["mine"] * 20

    async def test_warm_up_batches_run_first(self) -> None:
        model = Model(takes_s=1.0)
        async with Batcher(model, 2, 0.0, warm_up=[[7], [8, 9]]) as batched:
            assert model.batches == [[7], [8, 9]]
            assert await batched(1) == 1
        stats = batched.stats()
        assert (stats.answered, stats.turns) == (1, 1)


async def test_the_deadline_of_a_caller_on_another_worker_counts() -> None:
    """Its item is taken out, and what refuses it tells the caller when to come."""
    hold = asyncio.Event()
    model = Model()

    async def held(items: list[int]) -> list[int]:
        await hold.wait()
        return await model(items)

    async with Cluster(2) as (a, _):
        peer = a.peer("b")
        async with Batcher(held, 1, 0.0, waiting_max=1) as batched:
            batchers["remote"] = batched
            first = a.parts.start_call("b", predict, ("remote", 0))
            with pytest.raises(DeadlineExceededError):
                await peer.using(timeout_s=0.05).call(predict, "remote", 1)
            async with asyncio.timeout(60):  # its own clock may be later
                while batched.waiting:  # noqa: ASYNC110  (nothing tells of it)
                    await asyncio.sleep(0.001)
            second = a.parts.start_call("b", predict, ("remote", 2))
            with pytest.raises(OverloadedError, match="waiting_max") as caught:
                await peer.call(predict, "remote", 3)
            assert caught.value.retry_after_s > 0
            # `predict` has run, and its item has not.
            assert caught.value.outcome is Outcome.EXECUTED
            hold.set()
            assert [await first, await second] == [0, 2]
        del batchers["remote"]
    assert model.batches == [[0], [2]]


async def test_overload_over_http_is_503_with_retry_after(
    group: Group, serving_app: Serving
) -> None:
    hold = asyncio.Event()
    is_held = asyncio.Event()

    async def held(items: list[int]) -> list[int]:
        is_held.set()
        await hold.wait()
        return items

    batched = Batcher(held, 1, 0.0, waiting_max=1)

    async def enter(app: web.Application) -> AsyncIterator[None]:
        async with batched:
            yield

    async def handler(request: web.Request) -> web.Response:
        return web.json_response(await batched(1))

    app = web.Application(middlewares=[serving.middleware()])
    app.cleanup_ctx.extend([serving.worker_context(group.front), enter])
    app.router.add_get("/", handler)

    async def ask(client: aiohttp.ClientSession) -> tuple[int, int]:
        async with client.get("/") as response:
            return response.status, int(response.headers.get("Retry-After", 0))

    async with serving_app(app) as client:
        asked = [asyncio.ensure_future(ask(client)) for _ in range(3)]
        # One runs, one waits, one is refused, in whichever order they come.
        done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        await is_held.wait()
        (refused,) = done
        assert refused.result() == (503, 1)
        hold.set()
        answers = await asyncio.gather(*asked)
    assert sorted(answers) == [(200, 0), (200, 0), (503, 1)]


async def test_failed_warm_up_is_raised() -> None:
    async def fail(items: list[int]) -> list[int]:
        raise ValueError(f"no luck with {items}")

    with pytest.raises(ValueError, match=r"no luck with \[1\]"):
        async with Batcher(fail, 1, 0.0, warm_up=[[1]]):
            pass


async def test_statistics_count_waiting_and_running_requests() -> None:
    hold = asyncio.Event()

    async def held(items: list[int]) -> list[int]:
        await hold.wait()
        return items

    async with Batcher(held, 2, 0.0) as batched:
        asked = [asyncio.ensure_future(batched(number)) for number in range(4)]
        await asyncio.sleep(0)
        stats = batched.stats()
        assert (stats.running, stats.waiting, stats.capacity_per_s) == (1, 3, 0.0)
        asked[3].cancel()
        await asyncio.wait(asked[3:])
        assert batched.stats().left == 1
        hold.set()
        await asyncio.gather(*asked[:3])
        stats = batched.stats()
    assert (stats.answered, stats.turns, stats.turn_requests) == (3, 2, 1.5)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"max_bytes": 0}, "max_bytes must be"),
        ({"size_of": 3}, "size_of must be callable"),
        ({"bucket": 3}, "bucket must be callable"),
        ({"max_queue_age_s": 0}, "max_queue_age_s must be"),
        ({"standing_queue_age_s": 1.0}, "needs max_queue_age_s and must not exceed it"),
        ({"max_queue_age_s": 1.0, "standing_queue_age_s": 2.0}, "must not exceed it"),
        ({"priority_step_s": -1}, "priority_step_s must be"),
        ({"overflow": "all"}, "overflow must be 'newest' or 'oldest'"),
        ({"warm_up": [[]]}, "must have 1 to 2 items"),
        ({"warm_up": [[1, 2, 3]]}, "must have 1 to 2 items"),
        ({"warm_up": [1]}, "each of warm_up must be"),
        ({"name": ""}, "name must be"),
    ],
)
def test_wrong_limits_are_named(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Batcher(Model(), 2, 0.0, **wrong)


async def test_closed_batcher_refuses_requests() -> None:
    async with Batcher(Model(), 1, 0.0) as batched:
        pass
    with pytest.raises(RejectedError, match="the batcher is closed"):
        await batched(1)

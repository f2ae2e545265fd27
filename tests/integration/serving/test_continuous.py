"""Sequences enter and leave between steps, and do not hurt one another."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest
import torch
from prometheus_client.openmetrics import parser

from asyncrpc import (
    Outcome,
    RejectedError,
    UsageError,
    current_worker,
    deadline,
    observability,
)
from asyncrpc.errors import DeadlineExceededError, NotStartedError, OverloadedError
from asyncrpc.serving import Batcher, ContinuousBatcher, Limiter
from asyncrpc.testing import Cluster, acting_as
from asyncrpc.testing.loop import SimLoop
from tests.integration.serving.conftest import Group


class Counter:
    """A model that counts: the sequence of `("a", 3)` is a1, a2, a3.

    Attributes:
        steps: the names in each step.
        entered: the names in each call of `enter`.
        left: names of the states that have left.
    """

    def __init__(self, step_s: float = 0.0) -> None:
        self.steps: list[str] = []
        self.entered: list[str] = []
        self.left: list[str] = []
        self.step_s = step_s
        self.threads: set[threading.Thread] = set()

    def enter(self, requests: list[Any]) -> list[Any]:
        self.threads.add(threading.current_thread())
        names = "".join(name for name, _ in requests)
        self.entered.append(names)
        if "X" in names:
            raise ValueError("X may not enter")
        return [
            ValueError("no luck") if name == "e" else [name, 0, last]
            for name, last in requests
        ]

    def step(self, states: list[Any]) -> list[Any]:
        self.threads.add(threading.current_thread())
        self.steps.append("".join(name for name, *_ in states))
        return [self.next(state) for state in states]

    @staticmethod
    def next(state: list[Any]) -> Any:
        state[1] += 1
        name, count, last = state
        if name == "f" and count == 2:
            return ValueError("f fails at its second step")
        return [f"{name}{count}"], count == last

    def leave(self, state: list[Any]) -> None:
        self.left.append(state[0])


class AsyncCounter(Counter):
    """The same on the loop, in the loop's time."""

    async def step(self, states: list[Any]) -> list[Any]:  # type: ignore[override]
        await asyncio.sleep(self.step_s)
        return Counter.step(self, states)


def batcher_of(model: Counter, slots: int = 2, **options: Any) -> Any:
    options.setdefault("in_thread", False)
    return ContinuousBatcher[Any, Any, str](model, slots, **options)


async def take(stream: AsyncGenerator[str, None], count: int = 1000) -> list[str]:
    items = []
    async with aclosing(stream) as source:
        async for item in source:
            items.append(item)
            if len(items) == count:
                break
    return items


async def test_sequence_enters_as_another_leaves() -> None:
    model = Counter()
    async with batcher_of(model) as batcher:
        asked = [("a", 1), ("b", 4), ("c", 2), ("d", 1)]
        results = await asyncio.gather(
            *(take(batcher.generate(request)) for request in asked)
        )
    assert results == [["a1"], ["b1", "b2", "b3", "b4"], ["c1", "c2"], ["d1"]]
    assert model.steps == ["ab", "bc", "bc", "bd"]
    assert sorted(model.left) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("in_thread", [True, False])
async def test_plain_functions_run_in_one_thread(in_thread: bool) -> None:  # noqa: FBT001
    model = Counter()
    async with batcher_of(model, in_thread=in_thread) as batcher:
        await take(batcher.generate(("a", 3)))
    (thread,) = model.threads
    assert (thread is threading.main_thread()) is not in_thread


async def test_coroutines_run_on_the_loop_with_the_worker(group: Group) -> None:
    seen: list[str] = []

    class Model(AsyncCounter):
        async def step(self, states: list[Any]) -> list[Any]:  # type: ignore[override]
            seen.append(current_worker().name)
            return await super().step(states)

        def enter(self, requests: list[Any]) -> list[Any]:
            seen.append(current_worker().name)
            return super().enter(requests)

    async with group.front(), batcher_of(Model(), in_thread=True) as batcher:
        assert await take(batcher.generate(("a", 1))) == ["a1"]
    assert seen == ["front", "front"]


async def test_error_of_a_sequence_does_not_affect_the_others() -> None:
    model = Counter()
    async with batcher_of(model, 4) as batcher:
        asked = [("a", 3), ("e", 3), ("f", 3), ("b", 3)]
        results = await asyncio.gather(
            *(take(batcher.generate(request)) for request in asked),
            return_exceptions=True,
        )
        stats = batcher.stats()
    assert results[0] == ["a1", "a2", "a3"]
    assert results[3] == ["b1", "b2", "b3"]
    assert [str(result) for result in results[1:3]] == [
        "no luck",
        "f fails at its second step",
    ]
    assert sorted(model.left) == ["a", "b", "f"]
    assert (stats.requests.answered, stats.requests.failed) == (2, 2)


async def test_refused_sequence_does_not_block_the_others() -> None:
    model = Counter()
    async with batcher_of(model, 3) as batcher:
        results = await asyncio.gather(
            *(take(batcher.generate((name, 1))) for name in "aXb"),
            return_exceptions=True,
        )
    assert (results[0], str(results[1]), results[2]) == (
        ["a1"],
        "X may not enter",
        ["b1"],
    )
    assert model.entered == ["aXb", "a", "X", "b"]


async def test_failed_step_fails_its_sequences_and_no_later_ones() -> None:
    class Model(Counter):
        def step(self, states: list[Any]) -> list[Any]:
            results = super().step(states)
            if len(self.steps) == 2:
                raise RuntimeError("out of memory")
            return results

    model = Model()
    async with batcher_of(model) as batcher:
        results = await asyncio.gather(
            *(take(batcher.generate((name, 3))) for name in "abc"),
            return_exceptions=True,
        )
    assert [str(result) for result in results[:2]] == ["out of memory"] * 2
    assert results[2] == ["c1", "c2", "c3"]
    assert sorted(model.left) == ["a", "b", "c"]


async def test_items_come_before_the_error() -> None:
    async with batcher_of(Counter()) as batcher:
        stream = batcher.generate(("f", 3))
        assert await anext(stream) == "f1"
        with pytest.raises(ValueError, match="second step"):
            await anext(stream)


async def test_slow_consumer_pauses_its_own_sequence_only() -> None:
    model = Counter()
    async with batcher_of(model, 2, items_max=2) as batcher:
        slow = batcher.generate(("s", 6))
        assert await anext(slow) == "s1"
        quick = await asyncio.gather(
            *(take(batcher.generate((name, 5))) for name in "abc")
        )
        assert [len(items) for items in quick] == [5, 5, 5]
        stats = batcher.stats()
        assert (stats.paused, stats.requests.running) == (1, 1)
        assert "".join(model.steps).count("s") == 3, "one taken, two wait"
        assert await take(slow) == ["s2", "s3", "s4", "s5", "s6"]
    # The slow one gave its slot to the third.
    assert any("s" not in step and len(step) == 2 for step in model.steps)


async def test_a_consumer_that_leaves_frees_its_slot_before_the_next_step() -> None:
    model = AsyncCounter()
    async with batcher_of(model, 1) as batcher:
        first = batcher.generate(("a", 1000))
        assert await anext(first) == "a1"
        second = asyncio.ensure_future(take(batcher.generate(("b", 1))))
        await asyncio.sleep(0)
        steps = len(model.steps)
        await first.aclose()
        assert await second == ["b1"]
    assert model.left == ["a", "b"]
    assert len(model.steps) <= steps + 2


async def test_sequence_cancelled_while_waiting_never_enters() -> None:
    model = AsyncCounter()
    async with batcher_of(model, 1) as batcher:
        first = batcher.generate(("a", 5))
        await anext(first)
        waits = asyncio.ensure_future(take(batcher.generate(("b", 1))))
        await asyncio.sleep(0)
        waits.cancel()
        await asyncio.wait([waits])
        await take(first)
        stats = batcher.stats()
    assert model.entered == ["a"]
    assert stats.requests.left == 1


async def test_memory_is_reserved_for_the_longest() -> None:
    model = Counter()
    options = {"memory_max": 10, "memory_of": lambda request: request[1]}
    async with batcher_of(model, 4, **options) as batcher:
        asked = [("a", 4), ("b", 4), ("c", 6), ("d", 1)]
        await asyncio.gather(*(take(batcher.generate(request)) for request in asked))
    assert model.steps[:4] == ["ab"] * 4, "c waits for memory, and d for its turn"
    assert model.steps[4] == "cd"


async def test_priorities_enter_first_and_clients_take_turns() -> None:
    model = Counter()
    async with batcher_of(model, 1) as batcher:
        asked = [batcher.generate((name, 1), client="x") for name in "abc"]
        asked += [
            batcher.generate(("y", 1), client="y"),
            batcher.generate(("p", 1), client="x", priority=1),
        ]
        await asyncio.gather(*map(take, asked))
    assert model.steps == ["p", "a", "y", "b", "c"]


async def test_entering_max_limits_entries_per_step() -> None:
    model = Counter()
    async with batcher_of(model, 3, entering_max=1) as batcher:
        await asyncio.gather(*(take(batcher.generate((name, 4))) for name in "abc"))
    assert model.steps[:3] == ["a", "ab", "abc"]


async def test_warm_up_runs_before_any_request() -> None:
    model = Counter()
    warm_up = [[("w", 2)], [("v", 100), ("w", 1)]]
    async with batcher_of(model, 2, warm_up=warm_up, in_thread=True) as batcher:
        assert model.steps[:4] == ["w", "w", "vw", "v"]
        assert len(model.steps) == 2 + 32
        assert model.left == ["w", "v", "w"]
        assert await take(batcher.generate(("a", 1))) == ["a1"]
        assert batcher.stats().steps == 1


async def test_failed_warm_up_is_raised() -> None:
    model = Counter()
    with pytest.raises(ValueError, match="X may not enter"):
        async with batcher_of(model, 1, warm_up=[[("X", 1)]], in_thread=True):
            pass


async def test_a_block_that_raises_ends_everything() -> None:
    """In the middle of a step."""
    third = asyncio.Event()

    class Model(AsyncCounter):
        async def step(self, states: list[Any]) -> list[Any]:  # type: ignore[override]
            if len(self.steps) == 3:
                third.set()
                await asyncio.Event().wait()
            return await super().step(states)

    model = Model()
    batcher = batcher_of(model, 1)
    asked: list[asyncio.Future[Any]] = []

    async def block() -> None:
        async with batcher:
            asked.extend(
                asyncio.ensure_future(take(batcher.generate((name, 10**6))))
                for name in "ab"
            )
            await third.wait()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await block()
    errors = await asyncio.gather(*asked, return_exceptions=True)
    outcomes = [error.outcome for error in errors if isinstance(error, RejectedError)]
    assert outcomes == [Outcome.UNKNOWN, Outcome.NOT_EXECUTED]
    assert model.left == ["a"]
    assert batcher.stats().requests.running == 0


async def test_a_coroutine_that_lets_sequences_enter_is_cancelled() -> None:
    begun = asyncio.Event()

    class Model(Counter):
        async def enter(self, requests: list[Any]) -> Any:  # type: ignore[override]
            begun.set()
            await asyncio.Event().wait()

    model = Model()
    batcher = batcher_of(model, 1)
    await batcher.__aenter__()
    asked = asyncio.ensure_future(take(batcher.generate(("a", 1))))
    await begun.wait()
    await batcher.__aexit__(ZeroDivisionError, ZeroDivisionError(), None)
    with pytest.raises(RejectedError):
        await asked
    stats = batcher.stats()
    assert (model.left, stats.requests.running, stats.memory_held) == ([], 0, 0)


@pytest.mark.parametrize("is_wrong", [False, True])
async def test_sequence_entering_while_the_block_raises_leaves(
    is_wrong: bool,  # noqa: FBT001
) -> None:
    loop = asyncio.get_running_loop()
    begun, go_on = asyncio.Event(), threading.Event()

    class Model(Counter):
        def enter(self, requests: list[Any]) -> list[Any]:
            loop.call_soon_threadsafe(begun.set)
            go_on.wait()
            return [] if is_wrong else super().enter(requests)

    model = Model()
    batcher = batcher_of(model, 1, in_thread=True)
    await batcher.__aenter__()
    asked = asyncio.ensure_future(take(batcher.generate(("a", 1))))
    await begun.wait()
    end = asyncio.ensure_future(batcher.__aexit__(ZeroDivisionError, Exception(), None))
    await asyncio.sleep(0)
    go_on.set()
    await end
    with pytest.raises(RejectedError):
        await asked
    assert model.left == ([] if is_wrong else ["a"])
    assert batcher.stats().requests.running == 0


class TestInVirtualTime:
    loops = {"sim": SimLoop}  # noqa: RUF012  (read once, by the conftest)

    async def test_unconsumed_sequence_is_abandoned(self) -> None:
        model = AsyncCounter(step_s=1.0)
        async with batcher_of(model, 1, items_max=1, pause_max_s=10.0) as batcher:
            slow = batcher.generate(("a", 5))
            assert await anext(slow) == "a1"
            await asyncio.sleep(30.0)
            assert model.left == ["a"]
            assert await anext(slow) == "a2"
            with pytest.raises(RejectedError, match="pause_max_s") as caught:
                await anext(slow)
        assert caught.value.outcome is Outcome.EXECUTED

    async def test_a_deadline_ends_a_sequence_between_steps(self) -> None:
        model = AsyncCounter(step_s=1.0)
        async with batcher_of(model, 1) as batcher:
            with pytest.raises(DeadlineExceededError):
                async with deadline(3.5):
                    await take(batcher.generate(("a", 100)))
            assert await take(batcher.generate(("b", 1))) == ["b1"]
        assert model.left == ["a", "b"]
        assert "".join(model.steps).count("a") <= 4

    async def test_deadline_ends_a_paused_sequence(self) -> None:
        model = AsyncCounter(step_s=1.0)
        async with batcher_of(model, 1, items_max=1) as batcher:
            async with deadline(5.0):
                slow = batcher.generate(("a", 100))
                await anext(slow)
            await asyncio.sleep(10.0)
            assert model.left == ["a"]
            await slow.aclose()

    async def test_sequence_expired_while_waiting_never_enters(self) -> None:
        model = AsyncCounter(step_s=1.0)
        async with batcher_of(model, 1) as batcher:
            first = asyncio.ensure_future(take(batcher.generate(("a", 10))))
            await asyncio.sleep(0.5)
            with pytest.raises(DeadlineExceededError) as caught:
                async with deadline(3.0):
                    await take(batcher.generate(("b", 1)))
            assert caught.value.outcome is Outcome.NOT_EXECUTED
            await first
            assert batcher.stats().requests.expired == 1
        assert model.entered == ["a"]

    async def test_overload_is_refused_by_the_rate_of_sequences(self) -> None:
        model = AsyncCounter(step_s=1.0)
        async with batcher_of(model, 2, max_queue_age_s=5.0) as batcher:
            for _ in range(3):
                await take(batcher.generate(("a", 4)))
            asked = [
                asyncio.ensure_future(take(batcher.generate((name, 4))))
                for name in "bcdefg"
            ]
            await asyncio.sleep(1.0)
            with pytest.raises(OverloadedError, match="max_queue_age_s") as caught:
                await take(batcher.generate(("h", 4)))
            assert caught.value.retry_after_s > 5.0
            await asyncio.gather(*asked, return_exceptions=True)


async def test_errors_name_the_wrong_result() -> None:
    class Wrong:
        def __init__(self, entered: Any, stepped: Any) -> None:
            self.entered, self.stepped = entered, stepped

        def enter(self, requests: list[Any]) -> Any:
            return self.entered

        def step(self, states: list[Any]) -> Any:
            return self.stepped

        def leave(self, state: Any) -> None:
            raise RuntimeError("it is logged")

    for entered, stepped, said in [
        (None, None, "`enter` must return a list"),
        ({1: 1}, None, "`enter` must return a list .* not an object of type .*dict"),
        ({1}, None, "`enter` must return a list"),
        ("a", None, "`enter` must return a list"),
        (iter([1]), None, "`enter` must return a list"),
        (torch.tensor(1), None, "`enter` must return a list"),
        ([1, 2], None, "`enter` returned 2 answers to 1 sequences"),
        ([1], None, "`step` must return a list"),
        ([1], [], "`step` returned 0 answers to 1 sequences"),
        ([1], {("a", True)}, "`step` must return a list"),
        ([1], {"a": True}, "`step` must return a list"),
        ([1], [("token", True)], "a list of its items, also of a single one"),
        ([1], [(b"token", True)], "a list of its items"),
        ([1], [({"token": 1}, True)], "a list of its items"),
        ([1], [({"token"}, True)], "a list of its items"),
        ([1], ["ab"], "its items and whether it was its last step"),
        ([1], [{1: 2, 3: 4}], "its items and whether it was its last step"),
        ([1], [3], "its items and whether it was its last step, not an object of"),
        ([1], [([1], True, 3)], "its items and whether it was its last step"),
    ]:
        wrong: Any = Wrong(entered, stepped)
        async with batcher_of(wrong) as batcher:
            with pytest.raises(UsageError, match=said):
                await take(batcher.generate(("a", 1)))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"slots": 0}, "slots must be"),
        ({"memory_max": 3}, "memory_max and memory_of must be given together"),
        ({"memory_of": len}, "memory_max and memory_of must be given together"),
        ({"memory_max": 0, "memory_of": len}, "memory_max must be"),
        ({"memory_max": 3, "memory_of": 3}, "memory_of must be callable"),
        ({"inside_max": 1}, "inside_max must be an integer of at least 2"),
        ({"entering_max": 0}, "entering_max must be"),
        ({"items_max": 0}, "items_max must be"),
        ({"pause_max_s": 0}, "pause_max_s must be"),
        ({"in_thread": 1}, "in_thread must be"),
        ({"warm_up": [[]]}, "must have 1 to 2 items"),
    ],
)
def test_wrong_arguments_are_named(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ContinuousBatcher(Counter(), **{"slots": 2, **wrong})
    with pytest.raises(
        UsageError, match="model must be an object with functions `enter`"
    ):
        ContinuousBatcher(3, 1)  # type: ignore[arg-type]


async def test_batcher_is_entered_once() -> None:
    batcher = batcher_of(Counter())
    with pytest.raises(NotStartedError, match="async with"):
        await take(batcher.generate(("a", 1)))
    async with batcher:
        pass
    with pytest.raises(UsageError, match="entered once"):
        await batcher.__aenter__()


OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def read(metrics: observability.Metrics) -> dict[tuple[str, ...], float]:
    parse: Any = parser.text_string_to_metric_families
    text = metrics.text(OPENMETRICS).body.decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in parse(text)
        for sample in family.samples
        if "queue" in sample.labels
    }


async def test_queue_metrics_are_shown_while_the_queue_is_open() -> None:
    hold = asyncio.Event()

    async def predict(items: list[int]) -> list[int]:
        await hold.wait()
        return items

    limiter = Limiter(1, name="handlers")
    async with Cluster(1) as (worker,):
        with acting_as(worker), observability.Metrics(worker) as metrics:
            first = Batcher(predict, 1, 0.0, name="predict")
            second = Batcher(predict, 1, 0.0, name="predict")
            model = ContinuousBatcher[Any, Any, str](Counter(), 1, name="model")
            async with first, second, model, limiter.turn():
                asked = [asyncio.ensure_future(first(number)) for number in range(3)]
                async with aclosing(model.generate(("a", 2))) as items:
                    assert [item async for item in items] == ["a1", "a2"]
                values = read(metrics)
                assert values["asyncrpc_queue_waiting", "predict"] == 2
                assert values["asyncrpc_queue_running", "predict"] == 1
                assert values["asyncrpc_queue_oldest_seconds", "predict"] >= 0
                assert values["asyncrpc_queue_waiting", "predict-2"] == 0
                assert values["asyncrpc_queue_running", "handlers"] == 1
                assert values["asyncrpc_sequence_items_total", "model"] == 2
                assert values["asyncrpc_sequence_steps_total", "model"] == 2
                hold.set()
                await asyncio.gather(*asked)
                values = read(metrics)
                ended = "asyncrpc_queue_requests_total"
                assert values[ended, "predict", "answered"] == 3
                assert values[ended, "model", "answered"] == 1
            assert {queue for _, queue, *_ in read(metrics)} == {"handlers"}

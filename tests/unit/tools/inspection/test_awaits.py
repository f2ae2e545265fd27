"""The chain of awaits of a task, and the context managers that it is inside of."""

from __future__ import annotations

import asyncio
import contextlib
import types
from collections.abc import AsyncIterator, Generator
from typing import Any

from asyncrpc.tools.inspection.awaits import Chain, chain_of, entered, objects_in


@contextlib.asynccontextmanager
async def waiting(coroutine: Any) -> AsyncIterator[Chain]:
    """Yield the chain of a task that runs a coroutine and waits."""
    task = asyncio.ensure_future(coroutine)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    try:
        yield chain_of(task)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def functions_of(chain: Chain) -> list[str]:
    return [step.code.co_name for step in chain.steps]


async def wait() -> None:
    await asyncio.get_running_loop().create_future()


async def test_awaited_coroutines_are_listed_outermost_first() -> None:
    async def inner() -> None:
        await wait()

    async def outer() -> None:
        await inner()

    async with waiting(outer()) as chain:
        assert functions_of(chain) == ["outer", "inner", "wait"]
        assert isinstance(chain.awaited, asyncio.Future)


async def test_unstarted_task_awaits_nothing() -> None:
    task = asyncio.create_task(wait())
    chain = chain_of(task)
    assert chain.awaited is None
    assert functions_of(chain) == ["wait"]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_asynchronous_generators_are_followed() -> None:
    async def numbers() -> AsyncIterator[int]:
        await wait()
        yield 1

    async def consume() -> None:
        async for _ in numbers():
            pass

    async with waiting(consume()) as chain:
        assert functions_of(chain) == ["consume", "numbers", "wait"]


async def test_awaited_generators_are_followed() -> None:
    @types.coroutine
    def old() -> Generator[Any, None, None]:
        yield from wait().__await__()

    async def outer() -> None:
        await old()

    async with waiting(outer()) as chain:
        assert functions_of(chain) == ["outer", "old", "wait"]


async def test_objects_with_await_are_followed() -> None:
    class Waits:
        def __await__(self) -> Generator[Any, None, None]:
            return wait().__await__()

    async def outer() -> None:
        await Waits()

    async with waiting(outer()) as chain:
        assert functions_of(chain) == ["outer", "wait"]


async def test_deep_chain_of_awaits_is_cut() -> None:
    async def down(depth: int) -> None:
        if depth:
            await down(depth - 1)
        else:
            await wait()

    async with waiting(down(300)) as chain:
        assert 100 < len(chain.steps) < 300


class TestEntered:
    async def test_context_managers_of_with_and_async_with_are_found(self) -> None:
        lock = asyncio.Lock()

        @contextlib.contextmanager
        def plain() -> Generator[None]:
            yield

        manager = plain()

        async def inside() -> None:
            async with lock:
                with manager:
                    await wait()

        async with waiting(inside()) as chain:
            managers = list(entered(chain.steps[0]))
            assert lock in managers
            assert manager in managers

    async def test_context_managers_inside_those_of_contextlib_are_found(self) -> None:
        gate = asyncio.Semaphore(1)

        @contextlib.asynccontextmanager
        async def guarded() -> AsyncIterator[None]:
            async with gate:
                yield

        async def inside() -> None:
            async with guarded():
                await wait()

        async with waiting(inside()) as chain:
            assert gate in list(entered(chain.steps[0]))

    async def test_left_context_managers_are_not_listed(self) -> None:
        lock = asyncio.Lock()

        async def outside() -> None:
            async with lock:
                pass
            await wait()

        async with waiting(outside()) as chain:
            assert list(entered(chain.steps[0])) == []


async def test_objects_are_found_in_variables_and_attributes() -> None:
    class Table:
        def __init__(self) -> None:
            self.lock = asyncio.Lock()

    async def use(table: Table, event: asyncio.Event) -> None:
        await wait()
        del table, event

    table, event = Table(), asyncio.Event()
    async with waiting(use(table, event)) as chain:
        objects = list(objects_in(chain.steps[0]))
        assert any(thing is event for thing in objects)
        assert any(thing is table.lock for thing in objects)

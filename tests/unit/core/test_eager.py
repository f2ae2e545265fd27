"""An eager task is a task like any other, only that its first step is behind it."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import weakref
from collections.abc import Coroutine
from typing import Any

import pytest
import uvloop

from asyncrpc.core.loop.tasks import eager_task

VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


def in_callback(loop_factory: Any, coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Start `coroutine` from a callback, as a connection does; return what came."""

    async def main() -> tuple[bool, Any]:
        loop = asyncio.get_running_loop()
        started: asyncio.Future[asyncio.Task[Any]] = loop.create_future()
        context = contextvars.copy_context()
        context.run(VARIABLE.set, 7)

        def start() -> None:
            task = eager_task(loop, coroutine, context)
            ended.append(task.done())
            started.set_result(task)

        ended: list[bool] = []
        loop.call_soon(start)
        task = await started
        try:
            return ended[0], await task
        except ValueError as error:
            return ended[0], error

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(main())


@pytest.mark.parametrize("loop_factory", LOOPS)
class TestEagerTask:
    def test_coroutine_that_never_waits_is_done_at_once(
        self, loop_factory: Any
    ) -> None:
        async def quick() -> int:
            return VARIABLE.get()

        assert in_callback(loop_factory, quick()) == (True, 7)

    def test_coroutine_that_waits_continues_as_a_task(self, loop_factory: Any) -> None:
        async def slow() -> int:
            await asyncio.sleep(0.001)
            return VARIABLE.get()

        assert in_callback(loop_factory, slow()) == (False, 7)

    def test_first_step_knows_its_task(self, loop_factory: Any) -> None:
        async def limited() -> str:
            first = asyncio.current_task()
            try:
                async with asyncio.timeout(0.001):  # needs a task to cancel
                    await asyncio.sleep(1)
            except TimeoutError:
                assert asyncio.current_task() is first
                return "late"
            return "never stopped"

        assert in_callback(loop_factory, limited()) == (False, "late")

    def test_error_of_first_step_is_error_of_the_task(self, loop_factory: Any) -> None:
        async def fail() -> None:
            raise ValueError("at once")

        ended, error = in_callback(loop_factory, fail())
        assert ended
        assert str(error) == "at once"

    def test_eager_start_leaves_the_loop_unchanged(self, loop_factory: Any) -> None:
        async def look() -> bool:
            loop = asyncio.get_running_loop()
            called = loop.create_future()
            loop.call_soon(called.set_result, True)  # noqa: FBT003
            return bool(await called) and "call_soon" not in vars(loop)

        assert in_callback(loop_factory, look()) == (False, True)

    def test_eager_task_inside_a_task_waits_its_turn(self, loop_factory: Any) -> None:
        async def inner() -> int:
            return 1

        async def outer() -> tuple[bool, int]:
            loop = asyncio.get_running_loop()
            task = eager_task(loop, inner(), contextvars.copy_context())
            return task.done(), await task

        with asyncio.Runner(loop_factory=loop_factory) as runner:
            assert runner.run(outer()) == (False, 1)

    def test_finalizer_during_an_eager_start_does_not_replace_the_task(
        self, loop_factory: Any
    ) -> None:
        """The collector may run at any allocation, that of the task included."""

        class Garbage:
            """Part of a circle; asks for a turn of the loop when it is collected."""

            def __init__(self, loop: asyncio.AbstractEventLoop, noted: Any) -> None:
                self.circle = self
                weakref.finalize(self, lambda: loop.call_soon(noted)).atexit = False

        async def waits() -> int:
            await asyncio.sleep(0)
            return 7

        async def main() -> None:
            loop = asyncio.get_running_loop()
            for _ in range(3):
                context = contextvars.copy_context()
                noted, begun = asyncio.Event(), loop.create_future()
                loop.call_soon(start, loop, context, noted, begun)
                async with asyncio.timeout(30):
                    assert await (await begun) == 7
                    await noted.wait()

        def start(loop: Any, context: Any, noted: Any, begun: Any) -> None:
            coroutine = waits()
            Garbage(loop, noted.set)
            loop.get_debug = collects  # the first thing that a task asks its loop
            try:
                begun.set_result(eager_task(loop, coroutine, context))
            finally:
                del loop.get_debug

        def collects() -> bool:
            gc.collect()
            return False

        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(main())

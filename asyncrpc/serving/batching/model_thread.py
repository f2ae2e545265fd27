"""Runs the functions of a model: on the loop, or in a thread of their own."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from asyncrpc.core.calls.context import current_worker_var
from asyncrpc.core.loop.threads import ThreadPool, outcome_to, uncancelled
from asyncrpc.core.torch_modes import FunctionModes, alone
from asyncrpc.extend import host_of

_END_S: Final = 5.0  # ample: the thread is idle when it is told to end


class ModelThread:
    """Calls the functions of a model, one at a time.

    A worker whose devices only one thread may use lends its own threads, with the
    device lock.
    """

    def __init__(
        self,
        name: str,
        loop: asyncio.AbstractEventLoop,
        context: contextvars.Context,
        *,
        in_thread: bool,
    ) -> None:
        self._loop = loop
        self._context = context
        self._own: ThreadPool | None = None
        self._pool: ThreadPool | None = None
        if not in_thread:
            return
        worker = context.get(current_worker_var)
        lent = None if worker is None or worker.is_closed else host_of(worker).pool
        if lent is not None and (lent.is_exclusive or lent.runs_here):
            self._pool = lent
        else:
            self._pool = self._own = ThreadPool(f"{name}-model", 1, loop)

    async def call(
        self,
        function: Callable[..., Any],
        argument: Any,
        *,
        late: Callable[[Any], None] | None = None,
    ) -> Any:
        """Return the result of a function, awaited if it is awaitable."""
        context = self._context.copy()
        is_plain = not inspect.iscoroutinefunction(function)
        try:
            if self._pool is None or not is_plain:
                await asyncio.sleep(0)  # let other tasks run, however quick the steps
                with FunctionModes():
                    result = context.run(function, argument)
            else:
                job = partial(context.run, function, argument)
                result = await self._in_thread(job, late)
            if inspect.isawaitable(result):
                result = await self._loop.create_task(alone(result), context=context)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise uncancelled(error) from error
        return result

    async def _in_thread(
        self, job: Callable[[], Any], late: Callable[[Any], None] | None
    ) -> Any:
        assert self._pool is not None  # the caller has checked
        ended: asyncio.Future[Any] = self._loop.create_future()
        self._pool.submit(job, outcome_to(ended))
        try:
            return await asyncio.shield(ended)
        except asyncio.CancelledError:
            await asyncio.wait([ended])  # the program's function ends it
            if ended.exception() is None and late is not None:
                late(ended.result())
            raise

    async def close(self) -> None:
        """End the thread."""
        if self._own is not None:
            await self._own.close(_END_S)

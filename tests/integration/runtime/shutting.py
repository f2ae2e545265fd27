"""Functions that end the worker that runs them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import asyncrpc

_ending: set[asyncio.Task[None]] = set()


async def in_coroutine() -> str:
    await asyncrpc.current_worker().shutdown()
    return "it is over"


def in_thread() -> str:
    worker = asyncrpc.current_worker()
    asyncio.run_coroutine_threadsafe(worker.shutdown(), worker.loop).result()
    return "it is over"


def in_thread_and_return() -> str:
    worker = asyncrpc.current_worker()
    asyncio.run_coroutine_threadsafe(worker.shutdown(), worker.loop)
    return "it will be over"


@asyncrpc.on_loop
def on_loop() -> str:
    task = asyncio.ensure_future(asyncrpc.current_worker().shutdown())
    _ending.add(task)
    task.add_done_callback(_ending.discard)
    return "it will be over"


async def at_once() -> str:
    await asyncrpc.current_worker().shutdown(drain_timeout_s=0.0)
    return "it is over"


def in_generator() -> Iterator[str]:
    yield "it begins"
    yield in_thread()


async def in_async_generator() -> AsyncIterator[str]:
    yield "it begins"
    yield await in_coroutine()

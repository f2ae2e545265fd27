"""Functions that end the worker that runs them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future

import asyncrpc

_begun: list[Future[None]] = []


def _begin() -> Future[None]:
    worker = asyncrpc.current_worker()
    shutdown = asyncio.run_coroutine_threadsafe(worker.shutdown(), worker.loop)
    _begun.append(shutdown)
    return shutdown


async def all_ended() -> None:
    """Wait for the shutdowns that were begun here in threads, and on the loop."""
    while _begun:
        await asyncio.wrap_future(_begun.pop())


async def in_coroutine() -> str:
    await asyncrpc.current_worker().shutdown()
    return "it is over"


def in_thread() -> str:
    _begin().result()
    return "it is over"


def in_thread_and_return() -> str:
    _begin()
    return "it will be over"


@asyncrpc.on_loop
def on_loop() -> str:
    _begin()
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

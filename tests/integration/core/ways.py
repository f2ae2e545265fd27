"""Every way in which a function can run, each with a function that misbehaves."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Final, TypeAlias, cast

import torch

import asyncrpc
from asyncrpc import Worker
from asyncrpc.testing import acting_as
from tests.integration.core.misbehaving import give, settled

Way: TypeAlias = Callable[[Worker, str], Awaitable[Any]]


def in_thread(kind: str) -> Any:
    return give(kind)


async def in_coroutine(kind: str) -> Any:
    return give(kind)


async def in_waiting_coroutine(kind: str) -> Any:
    await asyncio.sleep(0)
    return give(kind)


@asyncrpc.on_loop
def on_loop(kind: str) -> Any:
    return give(kind)


@asyncrpc.async_execution
def by_future(kind: str) -> concurrent.futures.Future[Any]:
    return settled(kind)


@asyncrpc.async_execution
def by_late_future(kind: str) -> concurrent.futures.Future[Any]:
    """Return a future that has its outcome later, from another thread."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    worker = cast("Worker", asyncrpc.current_worker())

    def finish() -> None:
        with acting_as(worker):
            done = settled(kind)
        try:
            future.set_result(done.result())
        except BaseException as error:  # noqa: BLE001  (whatever it is)
            future.set_exception(error)

    submit = worker.parts.pool.submit
    worker.loop.call_soon_threadsafe(submit, finish, lambda _result, _error: None)
    return future


@asyncrpc.async_execution
def by_torch_future(kind: str) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    try:
        future.set_result(give(kind))
    except Exception as error:  # noqa: BLE001  (torch takes no others)
        future.set_exception(error)
    return future


@asyncrpc.async_execution
def by_no_future(kind: str) -> Any:
    """Return the value itself, which is against the rule."""
    return give(kind)


def in_generator(kind: str) -> Iterator[Any]:
    yield 1
    yield give(kind)


async def in_async_generator(kind: str) -> AsyncIterator[Any]:
    yield 1
    yield give(kind)


@asyncrpc.expose
class Maker:
    """Its constructor raises; its methods misbehave in every way."""

    def __init__(self, kind: str = "none") -> None:
        give(kind)

    def method(self, kind: str) -> Any:
        return give(kind)

    async def coroutine(self, kind: str) -> Any:
        return give(kind)


class Propertied:
    """A method of it cannot be had."""

    def __init__(self, gate: str = "") -> None:
        self.gate = gate

    @property
    def method(self) -> Any:
        return give("value")


def calling(function: Callable[[str], Any]) -> Way:
    async def call(worker: Worker, kind: str) -> Any:
        return await worker.peer("b").call(function, kind)

    return call


def streaming(function: Callable[[str], Any]) -> Way:
    async def stream(worker: Worker, kind: str) -> Any:
        return [item async for item in worker.peer("b").stream(function, kind)][-1]

    return stream


async def remotely(worker: Worker, kind: str) -> Any:
    return await worker.peer("b").remote(in_thread, kind).to_here()


async def remotely_on_loop(worker: Worker, kind: str) -> Any:
    return await worker.peer("b").remote(on_loop, kind).to_here()


async def by_method(worker: Worker, kind: str) -> Any:
    return await worker.peer("b").remote(Maker).rpc_async().method(kind)


async def by_coroutine_method(worker: Worker, kind: str) -> Any:
    return await worker.peer("b").remote(Maker).rpc_async().coroutine(kind)


async def by_blocking_method(worker: Worker, kind: str) -> Any:
    rref = worker.peer("b").remote(Maker)
    return await worker.parts.run_in_thread(lambda: rref.rpc_sync().method(kind))


async def by_remote_method(worker: Worker, kind: str) -> Any:
    return await worker.peer("b").remote(Maker).remote().method(kind).to_here()


async def by_constructor(worker: Worker, kind: str) -> Any:
    return await worker.peer("b").remote(Maker, kind).rpc_async().method(kind)


async def by_group(worker: Worker, kind: str) -> Any:
    return (await worker.group(["b"]).call(in_thread, kind))[0]


CALLS: Final[dict[str, Way]] = {
    "thread": calling(in_thread),
    "coroutine": calling(in_coroutine),
    "waiting coroutine": calling(in_waiting_coroutine),
    "on loop": calling(on_loop),
    "future": calling(by_future),
    "late future": calling(by_late_future),
    "torch future": calling(by_torch_future),
    "generator": streaming(in_generator),
    "async generator": streaming(in_async_generator),
    "remote": remotely,
    "remote on loop": remotely_on_loop,
    "method": by_method,
    "coroutine method": by_coroutine_method,
    "blocking method": by_blocking_method,
    "remote method": by_remote_method,
    "group": by_group,
}

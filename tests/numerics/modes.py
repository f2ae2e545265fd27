"""What the tests of modes run on other workers: functions of every kind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import torch

import asyncrpc

Seen = tuple[bool, bool, str]  # gradients, inference mode, what autocast casts to


def seen() -> Seen:
    """Say what modes this thread has."""
    is_on = torch.is_autocast_enabled("cpu")
    to = str(torch.get_autocast_dtype("cpu")) if is_on else ""
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), to


@asyncrpc.on_loop
def on_loop() -> Seen:
    return seen()


async def coroutine() -> Seen:
    """Say what all steps have had, if it is the same."""
    found = [seen()]
    for _ in range(3):
        await asyncio.sleep(0)
        found.append(seen())
    return same(found)


@asyncrpc.functions.async_execution
def execution() -> Awaitable[Seen]:
    return coroutine()


@asyncrpc.functions.async_execution
def execution_elsewhere(to: str) -> Awaitable[Seen]:
    return asyncrpc.rpc_async(to, seen)


async def items_later(count: int) -> AsyncIterator[Seen]:
    for _ in range(count):
        await asyncio.sleep(0)
        yield seen()


def items(count: int) -> Iterator[Seen]:
    for _ in range(count):
        yield seen()


async def nested(to: str) -> Seen:
    """Say what a call of this one has, started in a later step."""
    await asyncio.sleep(0)
    found: Seen = await asyncrpc.rpc_async(to, coroutine)
    return found


def nested_in_thread(to: str) -> Seen:
    found: Seen = asyncrpc.rpc_sync(to, seen)
    return found


@asyncrpc.idempotent
def twice() -> Seen:
    return seen()


def nested_under(to: str, name: str) -> Seen:
    """Call under a mode, in a thread."""
    with torch.enable_grad(), torch.inference_mode(mode=False), MODES[name]():
        found: Seen = asyncrpc.rpc_sync(to, seen)
    return found


def made_in_thread(to: str) -> Any:
    """Return a reference to what a call sees that a thread has started."""
    return asyncrpc.remote(to, seen)


def without_gradients(to: str) -> Seen:
    with torch.no_grad():
        found: Seen = asyncrpc.rpc_sync(to, seen)
    return found


class Thing:
    """Has methods, and is called."""

    def seen(self) -> Seen:
        return seen()

    async def later(self) -> Seen:
        return await coroutine()

    def __call__(self) -> Seen:
        return seen()


async def changing() -> list[Seen]:
    """Change the modes for a while, in which others run."""
    found = [seen()]
    with torch.enable_grad(), torch.autocast("cpu", torch.float16):
        await asyncio.sleep(0)
        found.append(seen())
    await asyncio.sleep(0)
    found.append(seen())
    return found


def careless() -> Seen:
    """Leave modes changed."""
    before = seen()
    torch._C._set_grad_enabled(not before[0])  # noqa: SLF001
    return before


class Waiting:
    """Where a function stops until it is told, or cancelled.

    Attributes:
        ended: what it had at the end.
    """

    open_ones: dict[str, Waiting] = {}  # noqa: RUF012  (workers find them by name)

    def __init__(self, name: str) -> None:
        self.open_ones[name] = self
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()
        self.ended: asyncio.Future[Seen] = asyncio.get_running_loop().create_future()


async def wait(name: str) -> Seen:
    waiting = Waiting.open_ones.pop(name)
    waiting.begun.set()
    try:
        await waiting.go_on.wait()
    finally:
        waiting.ended.set_result(seen())
    return seen()


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def product(x: torch.Tensor) -> torch.Tensor:
    return x @ x


def same(found: list[Seen]) -> Seen:
    assert found, "nothing was seen"
    assert all(one == found[0] for one in found), found
    return found[0]


Mode = Callable[[], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def both() -> Iterator[None]:
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        yield


MODES: dict[str, Mode] = {
    "none": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no_grad and autocast": both,
}

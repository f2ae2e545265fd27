"""What the tests call on other workers: importable in any process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

import asyncrpc


async def add_async(x: Any, y: Any = 1) -> Any:
    await asyncio.sleep(0)
    return x + y


def add(x: Any, y: Any = 1) -> Any:
    return x + y


@asyncrpc.on_loop
def add_on_loop(x: Any, y: Any = 1) -> Any:
    return x + y


def echo(value: Any) -> Any:
    return value


async def echo_async(value: Any) -> Any:
    return value


def double(value: torch.Tensor) -> torch.Tensor:
    return value * 2


def total(value: torch.Tensor) -> float:
    return float(value.double().sum())


def keywords(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


def where() -> tuple[str, int, str, bool]:
    """Say on which worker, in which process and thread, on the loop or not."""
    try:
        asyncio.get_running_loop()
        on_loop = True
    except RuntimeError:
        on_loop = False
    name = asyncrpc.current_worker().name
    return name, os.getpid(), threading.current_thread().name, on_loop


async def where_async() -> tuple[str, int, str, bool]:
    return where()


@asyncrpc.on_loop
def where_on_loop() -> tuple[str, int, str, bool]:
    return where()


def alias_is_kept(pair: list[torch.Tensor]) -> bool:
    pair[0].zero_()
    return bool((pair[1] == 0).all())


@dataclass
class Point:
    x: int
    y: int

    def plus(self, other: Point) -> Point:
        return Point(self.x + other.x, self.y + other.y)

    async def plus_async(self, other: Point) -> Point:
        return self.plus(other)

    @staticmethod
    def origin() -> Point:
        return Point(0, 0)

    @classmethod
    def diagonal(cls, at: int) -> Point:
        return cls(at, at)


class Counter:
    """A value with state, for references."""

    def __init__(self, start: int = 0) -> None:
        self.count = start

    def add(self, by: int = 1) -> int:
        self.count += by
        return self.count

    async def add_async(self, by: int = 1) -> int:
        return self.add(by)

    def get(self) -> int:
        return self.count

    def fail(self) -> None:
        raise ValueError("the counter fails")

    def __call__(self, by: int) -> int:
        return self.add(by)


# --- what a test watches -------------------------------------------------------------


@dataclass
class Watch:
    """What functions of one test tell it, all on one loop or in one process."""

    begun: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    gate: threading.Event = field(default_factory=threading.Event)
    notes: list[Any] = field(default_factory=list)


watches: dict[str, Watch] = {}


def _in_loop(event: asyncio.Event) -> None:
    asyncrpc.current_worker().loop.call_soon_threadsafe(event.set)


async def wait_for_ever(test: str) -> None:
    watch, name = watches[test], asyncrpc.current_worker().name
    watch.begun.set()
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        watch.notes.append(f"cancelled on {name}")
        raise
    finally:
        watch.ended.set()


def wait_in_thread(test: str) -> bool:
    """Wait until the caller gives up."""
    watch = watches[test]
    _in_loop(watch.begun)
    pause = threading.Event()  # never set: a way to wait
    for _ in range(1000):
        if asyncrpc.cancelled():
            watch.notes.append("saw it")
            break
        pause.wait(0.005)
    _in_loop(watch.ended)
    return False


def pass_gate(test: str) -> str:
    watch = watches[test]
    _in_loop(watch.begun)
    watch.gate.wait(10)
    return "through"


def note(test: str, what: Any) -> None:
    watches[test].notes.append(what)


async def note_async(test: str, what: Any) -> None:
    watches[test].notes.append(what)


# --- calls that call -----------------------------------------------------------------


async def forward(to: list[str], function: Callable[..., Any], *args: Any) -> Any:
    """Call the function on the last of `to`, through all the others."""
    peer = asyncrpc.current_worker().peer(to[0])
    if len(to) == 1:
        return await peer.call(function, *args)
    return await peer.call(forward, to[1:], function, *args)


def forward_sync(to: list[str], function: Callable[..., Any], *args: Any) -> Any:
    if len(to) == 1:
        return asyncrpc.rpc_sync(to[0], function, args)
    return asyncrpc.rpc_sync(to[0], forward_sync, (to[1:], function, *args))


def forward_waiting(to: list[str], function: Callable[..., Any], *args: Any) -> Any:
    """As `forward_sync`, by way of a future."""
    if len(to) == 1:
        return asyncrpc.rpc_async(to[0], function, args).wait()
    return asyncrpc.rpc_async(to[0], forward_waiting, (to[1:], function, *args)).wait()


def bounce(here: str, there: str, depth: int) -> int:
    """Call back and forth, blocking a thread at each step; return how deep it went."""
    if not depth:
        return 0
    return 1 + int(asyncrpc.rpc_sync(there, bounce, (there, here, depth - 1)))


async def bounce_async(here: str, there: str, depth: int) -> int:
    if not depth:
        return 0
    peer = asyncrpc.current_worker().peer(there)
    return 1 + await peer.call(bounce_async, there, here, depth - 1)


async def time_left() -> float | None:
    """Return the seconds until this function's deadline."""
    from asyncrpc.core.calls.context import deadline_var  # noqa: PLC0415  (what it sees)

    limit = deadline_var.get()
    now_s = asyncio.get_running_loop().time()
    return None if limit is None else limit.at_s - now_s


# --- streams -------------------------------------------------------------------------


async def count_to(end: int, test: str = "") -> AsyncIterator[int]:
    watch = watches.get(test)
    try:
        for number in range(end):
            if watch is not None:
                watch.notes.append(number)
            yield number
    finally:
        if watch is not None:
            watch.ended.set()


def count_sync(end: int, test: str = "") -> Iterator[int]:
    watch = watches.get(test)
    try:
        for number in range(end):
            if watch is not None:
                watch.notes.append(number)
            yield number
    finally:
        if watch is not None:
            _in_loop(watch.ended)


async def fail_after(end: int) -> AsyncIterator[int]:
    for number in range(end):
        yield number
    raise ValueError(f"after {end}")


async def tensors(count: int, elements: int) -> AsyncIterator[torch.Tensor]:
    for number in range(count):
        # Small and large ones in turn: the small ones could overtake.
        yield torch.full((elements if number % 2 else 4,), float(number))


def open_gate(test: str) -> None:
    watches[test].gate.set()


def local_value_of(rref: asyncrpc.RRef[Any]) -> Any:
    return rref.local_value()


async def block_on_loop(to: str) -> Any:
    return asyncrpc.rpc_sync(to, add, (1,))


# --- async_execution -----------------------------------------------------------------


@asyncrpc.functions.async_execution
def add_elsewhere(to: str, x: int, y: int) -> Any:
    return asyncrpc.rpc_async(to, add, (x, y))


@asyncrpc.functions.async_execution
async def add_elsewhere_async(to: str, x: int, y: int) -> Any:
    return await asyncrpc.current_worker().peer(to).call(add, x, y)


@asyncrpc.functions.async_execution
def chained(to: list[str], x: int) -> Any:
    if not to:
        return asyncrpc.rpc_async(asyncrpc.current_worker().name, add, (x, 1))
    return asyncrpc.rpc_async(to[0], chained, (to[1:], x))


@asyncrpc.functions.async_execution
def no_future() -> int:
    return 1


@asyncrpc.functions.async_execution
def raises_at_once() -> Any:
    raise ValueError("at once")


@asyncrpc.functions.async_execution
def fails_later(to: str) -> Any:
    return asyncrpc.rpc_async(to, fail)


@asyncrpc.functions.async_execution
def torch_future(x: int) -> Any:
    future: Any = torch.futures.Future()
    threading.Thread(target=lambda: future.set_result(x + 1)).start()
    return future


@asyncrpc.functions.async_execution
def concurrent_future(x: int) -> Any:
    future: concurrent.futures.Future[int] = concurrent.futures.Future()
    threading.Thread(target=lambda: future.set_result(x + 1)).start()
    return future


def fail() -> None:
    raise ValueError("later")


class Elsewhere:
    """`async_execution` in every place where torch allows it."""

    def __init__(self, base: int = 0) -> None:
        self.base = base

    @staticmethod
    @asyncrpc.functions.async_execution
    def static(to: str, x: int) -> Any:
        return asyncrpc.rpc_async(to, add, (x,))

    @classmethod
    @asyncrpc.functions.async_execution
    def of_class(cls, to: str, x: int) -> Any:
        return asyncrpc.rpc_async(to, add, (x, len(cls.__name__)))

    @asyncrpc.functions.async_execution
    def bound(self, to: str, x: int) -> Any:
        return asyncrpc.rpc_async(to, add, (x, self.base))


class Sleeper:
    """Sleeps until it is cancelled, and can be asked about it."""

    def __init__(self) -> None:
        self.loop = asyncrpc.current_worker().loop
        self.begun = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def wait_begun(self) -> None:
        await self.begun.wait()

    async def wait_cancelled(self) -> str:
        await self.cancelled.wait()
        return asyncrpc.current_worker().name


async def sleep_on(sleeper: asyncrpc.RRef[Sleeper]) -> None:
    here = await sleeper.to_here()
    here.begun.set()
    try:
        await asyncio.Event().wait()
    finally:
        here.cancelled.set()


def wait_briefly(to: str, test: str) -> tuple[str, int]:
    """Wait for a call that cannot end, then let it end."""
    call = asyncrpc.rpc_async(to, wait_at_the_gate, args=(test,))
    try:
        call.wait(timeout_s=0.01)
    except TimeoutError:
        watches[test].gate.set()
        return "timed out", call.wait()
    return "ended", 0


def wait_at_the_gate(test: str) -> int:
    watches[test].gate.wait(60)
    return 1


async def slow_one() -> int:
    await asyncio.sleep(0.1)
    return 1


def gated(test: str) -> Iterator[int]:
    """Yield once, then wait in a thread until the test lets it."""
    watch = watches[test]
    try:
        yield 0
        _in_loop(watch.begun)
        watch.gate.wait(10)
        yield 1
    finally:
        watch.notes.append("finally")
        _in_loop(watch.ended)


async def count_and_wait(test: str) -> AsyncIterator[int]:
    watch = watches[test]
    try:
        yield 0
        watch.begun.set()
        await asyncio.Event().wait()
    finally:
        watch.ended.set()


def rows_of(rows: torch.Tensor) -> Iterator[torch.Tensor]:
    yield from rows


# --- references ----------------------------------------------------------------------


async def add_through(rref: asyncrpc.RRef[Counter], by: int) -> int:
    return int(await rref.rpc_async().add(by))


async def value_of(rref: asyncrpc.RRef[Counter]) -> int:
    return (await rref.to_here()).count


async def value_of_first(nested: dict[str, list[tuple[Any]]]) -> int:
    return await value_of(nested["it"][0][0])


def make_reference(start: int) -> asyncrpc.RRef[Counter]:
    return asyncrpc.RRef(Counter(start))


async def slow_counter() -> Counter:
    await asyncio.sleep(0.05)
    return Counter(1)


kept: list[asyncrpc.RRef[Counter]] = []


def keep(rref: asyncrpc.RRef[Counter]) -> None:
    kept.append(rref)


async def value_of_kept() -> int:
    return await value_of(kept[0])


def let_go() -> None:
    kept.clear()


async def counts() -> dict[str, int]:
    service: Any = asyncrpc.current_worker().parts.references
    totals: dict[str, int] = service.counts()
    return totals


async def sleep_long() -> None:
    await asyncio.sleep(3600)

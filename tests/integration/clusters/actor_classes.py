"""Classes whose objects tests put on workers."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import torch

import asyncrpc
from asyncrpc import Actor, Actors


class Counter:
    """Counts."""

    unit = "one"

    def __init__(self, n: int = 0, fails_on: str = "") -> None:
        self.n = n
        if fails_on == asyncrpc.current_worker().name:
            raise ValueError(f"cannot count on {fails_on}")

    async def add(self, n: int) -> int:
        self.n += n
        return self.n

    def name(self) -> str:
        return f"{self.n} by {threading.current_thread().name}"

    def pid(self) -> int:
        return os.getpid()

    async def rows(self, count: int) -> AsyncIterator[int]:
        for at in range(count):
            yield self.n + at

    def lines(self, count: int) -> Iterator[str]:
        for at in range(count):
            yield f"{self.n + at}"

    async def fail(self) -> None:
        raise ValueError("no such number")

    def leave(self) -> None:
        os._exit(3)

    def save(self) -> str:
        return "its own"

    def _private(self) -> None:
        raise AssertionError


class LoudCounter(Counter):
    """Overrides a method."""

    async def add(self, n: int) -> int:
        return 100 * await super().add(n)


class Slotted:
    """Has slots, and a state of its own making."""

    __slots__ = ("weights",)

    def __init__(self, size: int) -> None:
        self.weights = torch.zeros(size)

    def fill(self, value: float) -> None:
        self.weights.fill_(value)

    def total(self) -> float:
        return float(self.weights.sum())


class Versioned:
    """Says what its state is."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.n = 1

    def __getstate__(self) -> dict[str, Any]:
        return {"version": 2, "n": self.n}

    def __setstate__(self, state: dict[str, Any]) -> None:
        assert state["version"] == 2
        self.n = state["n"]

    def number(self) -> int:
        return self.n


class Gate:
    """Its calls wait until they are let through."""

    def __init__(self) -> None:
        self.entered: list[str] = []
        self.is_open = asyncio.Event()
        self.cancelled: list[str] = []

    async def enter(self, name: str) -> str:
        self.entered.append(name)
        try:
            await self.is_open.wait()
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        return name

    async def open(self) -> None:
        self.is_open.set()

    async def seen(self) -> tuple[list[str], list[str]]:
        return self.entered, self.cancelled


@asyncrpc.exclusive
class Queue:
    """One call at a time."""

    def __init__(self) -> None:
        self.running = self.most = self.n = 0
        self.order: list[int] = []

    def _begin(self) -> None:
        self.running += 1
        self.most = max(self.most, self.running)

    async def run(self, name: int) -> int:
        self._begin()
        await asyncio.sleep(0)
        self.order.append(name)
        self.running -= 1
        return name

    def work(self, name: int) -> int:
        self._begin()
        torch.ones(64, 64) @ torch.ones(64, 64)  # releases the lock of the interpreter
        self.order.append(name)
        self.running -= 1
        return name

    async def stream(self, count: int) -> AsyncIterator[int]:
        self._begin()
        for at in range(count):
            yield at
        self.running -= 1

    async def both(self, name: int) -> list[int]:
        return [await self.run(name), self.work(name)]

    def records(self) -> bool:
        return torch.is_grad_enabled()

    async def seen(self) -> tuple[int, list[int]]:
        return self.most, self.order


@asyncrpc.exclusive
class ExclusiveGate(Gate):
    """Holds up its own queue."""

    def stuck(self) -> str:
        thread_begun.set()
        thread_may_end.wait()
        return "ended"


thread_begun = threading.Event()
thread_may_end = threading.Event()


class HalfExclusive:
    """Some of its methods are exclusive."""

    def __init__(self) -> None:
        self.is_open = asyncio.Event()
        self.held = 0

    @asyncrpc.exclusive
    async def hold(self) -> int:
        self.held += 1
        await self.is_open.wait()
        return self.held

    async def count(self) -> int:
        return self.held

    async def open(self) -> None:
        self.is_open.set()

    def plain(self) -> str:
        return threading.current_thread().name

    async def rows(self) -> AsyncIterator[int]:
        yield 1

    def lines(self) -> Iterator[int]:
        yield 2

    @asyncrpc.on_loop
    def at_once(self) -> str:
        return threading.current_thread().name


@asyncrpc.exclusive
class StepsInTurn:
    """What cannot be."""

    def steps(self) -> Iterator[int]:
        yield 1


@asyncrpc.expose
@asyncrpc.exclusive
class Exposed:
    """A strict worker offers it."""

    async def twice(self, n: int) -> int:
        return 2 * n

    async def rows(self) -> AsyncIterator[int]:
        yield 1


class Summing:
    """Takes parts of tensors."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def sum(self, rows: torch.Tensor, *, scale: float = 1.0) -> float:
        return self.rank * 1000 + scale * float(rows.sum())


looked_at: list[Any] = []


def look_at(rref: asyncrpc.RRef[Any]) -> None:
    """Let a test in this process see what a worker holds."""
    looked_at.append(rref.local_value())


async def add_by(actor: Actor[Counter], n: int) -> int:
    return await actor.method(Counter.add)(n)


async def add_to_all(actors: Actors[Counter], n: int) -> list[int]:
    return await actors.method(Counter.add)(n)

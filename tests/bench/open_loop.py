"""Requests that come when they come, however the server fares.

Each has a time at which it is due, by a Poisson process; its latency counts from then,
and not from when the generator came to send it, so a server that holds up the generator
does not look better for it.

Source: G. Tene, "How NOT to Measure Latency", 2013 (coordinated omission); B. Schroeder
et al., "Open Versus Closed: A Cautionary Tale", NSDI 2006.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

from asyncrpc.core.loop.clock import now_s

Ask = Callable[[], Awaitable[bool]]  # returns whether it was answered, or refused

CONNECTIONS_MAX: Final = 512  # fewer than may wait to be accepted
PATIENCE_S: Final = 5.0  # of a client; then it gives up
SETTLING_S: Final = 1.0  # what is due in it does not count


@dataclass
class LoadResult:
    """What became of the requests of one load."""

    seconds: float  # in which those were due that count
    given_up: int = 0  # number of those that took longer than anyone waits
    # Number of answers that came in these seconds, whenever they were due.
    in_time: int = 0
    # Latencies of those that were answered.
    answered_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)  # of those that were refused
    late_s: float = 0.0  # by how much the generator was late, at most

    @property
    def goodput(self) -> float:
        return self.in_time / self.seconds


def quantile(values: list[float], share: float) -> float:
    """Return a quantile; NaN of nothing."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def one_at_a_time(ask: Ask, count: int) -> LoadResult:
    """Return the latencies if nothing else is there."""
    result = LoadResult(1.0)
    for _ in range(count):
        begun_s = now_s()
        if await ask():
            result.answered_s.append(now_s() - begun_s)
    return result


async def offer(ask: Ask, per_s: float, seconds: float, seed: int) -> LoadResult:
    """Offer so many requests a second for so long; return what became of them."""
    chance = random.Random(seed)
    result = LoadResult(seconds)

    async def request(due_s: float, *, counts: bool) -> None:
        try:
            async with asyncio.timeout(due_s + PATIENCE_S - now_s()):
                is_answered = await ask()
        except TimeoutError:
            result.given_up += counts
            return
        ended_s = now_s()
        if is_answered and begun_s + SETTLING_S <= ended_s < end_s:
            result.in_time += 1
        if counts:
            latencies_s = result.answered_s if is_answered else result.refused_s
            latencies_s.append(ended_s - due_s)

    begun_s = due_s = now_s()
    end_s = begun_s + SETTLING_S + seconds
    async with asyncio.TaskGroup() as tasks:
        while (due_s := due_s + chance.expovariate(per_s)) < end_s:
            wait_s = due_s - now_s()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            counts = due_s >= begun_s + SETTLING_S
            if counts:
                result.late_s = max(result.late_s, now_s() - due_s)
            tasks.create_task(request(due_s, counts=counts))
    return result


class _Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self.transport: Any = None  # uvloop's are of no class of asyncio
        self.answer: asyncio.Future[int] | None = None
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        if self.answer is not None and not self.answer.done():
            self.answer.set_exception(error or ConnectionError("it was closed"))

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        if not end:
            return
        length = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
        if len(body) >= int(length):
            self._received = b""
            if self.answer is not None and not self.answer.done():
                self.answer.set_result(int(head[9:12]))


class HttpClient:
    """As little of HTTP as it takes: a generator must not be what is slow."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: deque[_Connection] = deque()
        self._all: list[_Connection] = []
        self._free = asyncio.Semaphore(CONNECTIONS_MAX)

    async def ask(self, path: str) -> int:
        """Return the status of the answer to a GET."""
        loop = asyncio.get_running_loop()
        async with self._free:
            connection = await self._connection()
            connection.answer = loop.create_future()
            connection.transport.write(
                f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
            )
            try:
                status = await connection.answer
            except asyncio.CancelledError:
                connection.transport.close()  # so the server learns that nobody waits
                raise
            self._idle.append(connection)
        return status

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.transport is not None:
                return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            _Connection, "127.0.0.1", self._port
        )
        self._all.append(connection)
        return connection

    def close(self) -> None:
        for connection in self._all:
            if connection.transport is not None:
                connection.transport.close()

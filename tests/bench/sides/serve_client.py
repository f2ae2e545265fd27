"""The HTTP client of `bench_serve`, in a process of its own: the same for all sides.

It speaks HTTP/1.1 over connections that stay open, and does nothing else, so that it is
not what is measured: it makes some 10,000 requests a second on one core.

- *Closed loop*: each connection sends its next request when it has its answer.
- *Open loop*: requests are due at a fixed rate, and one that finds no free connection
  waits.  Its time counts from when it was due, so a server that stands still is charged
  for all the requests that it kept waiting ("coordinated omission").

Source: G. Tene, "How NOT to Measure Latency", 2013; RFC 9112 of HTTP/1.1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import uvloop

now_s = time.monotonic
_END: Final = b"\r\n\r\n"
OPEN_CONNECTIONS: Final = 128  # of the open loop: more than any batch has room for


class Answer:
    __slots__ = ("ended_s", "events", "first_s", "is_ok")

    def __init__(self) -> None:
        self.ended_s = 0.0  # when it was whole
        self.first_s = 0.0  # when its first event was there
        self.events = 0  # how many there were
        self.is_ok = False  # whether the status is 200


class HttpConnection(asyncio.Protocol):
    """A connection that sends one request after the other."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._received = b""
        self._body_left = (
            -1
        )  # of a body whose length is known; -1: the head is not here
        self._is_chunked = False
        self._answer = Answer()
        self._done: Callable[[Answer], None] | None = None
        self.is_open = False

    def connection_made(self, transport: Any) -> None:  # uvloop's is of no class
        self._transport = transport
        self.is_open = True

    def send(self, request: bytes, done: Callable[[Answer], None]) -> None:
        assert self._transport is not None
        self._answer, self._done = Answer(), done
        self._received, self._body_left = b"", -1
        self._transport.write(request)

    def abort(self) -> None:
        if self._transport is not None:
            self._done = None
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._answer.events += data.count(b"data:")
        if self._answer.events and not self._answer.first_s:
            self._answer.first_s = now_s()
        if self._body_left >= 0:
            self._body_left = max(0, self._body_left - len(data))
        elif not self._read_head(data):
            return
        if self._is_chunked:
            # The end of a chunked body; a whole answer may come in one piece.
            self._received = (self._received + data)[-len(_END) - 1 :]
            if self._received.endswith(b"0\r\n\r\n"):
                self._finish()
        elif self._body_left <= 0:
            self._finish()

    def _read_head(self, data: bytes) -> bool:
        """Read as much of the head as is there; return whether it is whole."""
        self._received += data
        head, end, body = self._received.partition(_END)
        if not end:
            return False
        lines = head.lower().split(b"\r\n")
        self._answer.is_ok = b" 200" in lines[0]
        fields = dict(line.split(b": ", 1) for line in lines[1:] if b": " in line)
        self._is_chunked = fields.get(b"transfer-encoding") == b"chunked"
        length = int(fields.get(b"content-length", 0))
        self._body_left = max(0, length - len(body))
        self._received = b""
        return True

    def _finish(self) -> None:
        answer, done, self._done = self._answer, self._done, None
        answer.ended_s = now_s()
        if done is not None:
            done(answer)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._done is not None:
            self._answer.is_ok = False
            self._finish()


class OpenLoop:
    """Requests that are due at a rate, and the connections that are free for them."""

    def __init__(self, request: bytes, free: list[HttpConnection]) -> None:
        self._request = request
        self._free = deque(free)
        self._due: deque[float] = deque()
        self._times_s: list[float] = []
        self._failed = 0
        self._total = 0
        self._all_ended = asyncio.Event()

    async def run(self, rate: float, seconds: float) -> dict[str, Any]:
        """Send them, and wait for their answers, for a while."""
        self._total = int(rate * seconds)
        begin_s = now_s()
        for number in range(self._total):
            at_s = begin_s + number / rate
            if (left_s := at_s - now_s()) > 0:
                await asyncio.sleep(left_s)
            self._due.append(at_s)
            self._start()
        try:
            async with asyncio.timeout(2 * seconds + 5):
                await self._all_ended.wait()
        except TimeoutError:
            self._failed = self._total - len(self._times_s)
        for connection in self._free:
            connection.abort()
        report = {
            "rate": len(self._times_s) / (now_s() - begin_s),
            "failed": self._failed,
        }
        return {**report, **percentiles("", self._times_s)}

    def _start(self) -> None:
        while self._due and self._free:
            connection = self._free.popleft()
            done = partial(self._end, self._due.popleft(), connection)
            connection.send(self._request, done)

    def _end(self, due_s: float, connection: HttpConnection, answer: Answer) -> None:
        if answer.is_ok:
            self._times_s.append(answer.ended_s - due_s)
        else:
            self._failed += 1
        if connection.is_open:
            self._free.append(connection)
        if len(self._times_s) + self._failed >= self._total:
            self._all_ended.set()
        self._start()


class Load:
    """Requests to one path of one server."""

    def __init__(self, port: int, path: str, body: bytes) -> None:
        self._port = port
        head = (
            f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n"
            "content-type: application/json\r\naccept: */*\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        self.request = head.encode() + body

    async def connect(self) -> HttpConnection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            HttpConnection, "127.0.0.1", self._port
        )
        return connection

    async def once(self, connection: HttpConnection) -> Answer:
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

        def done(answer: Answer) -> None:
            if not answered.done():
                answered.set_result(answer)

        connection.send(self.request, done)
        return await answered

    async def closed(self, connections: int, seconds: float) -> dict[str, Any]:
        """Let each connection send one request after the other."""
        times_s: list[float] = []
        firsts_s: list[float] = []
        events = failed = 0
        begin_s = now_s()

        async def repeat() -> None:
            nonlocal events, failed
            connection = await self.connect()
            while (sent_s := now_s()) < begin_s + seconds:
                answer = await self.once(connection)
                if not answer.is_ok:
                    failed += 1
                    connection = await self.connect()
                    continue
                times_s.append(answer.ended_s - sent_s)
                firsts_s.append(answer.first_s - sent_s)
                events += answer.events
            connection.abort()

        await asyncio.gather(*(repeat() for _ in range(connections)))
        took_s = now_s() - begin_s
        return {
            "rate": len(times_s) / took_s,
            "failed": failed,
            "events_rate": events / took_s,
            **percentiles("", times_s),
            **(percentiles("first_", firsts_s) if events else {}),
        }

    async def open(self, rate: float, seconds: float) -> dict[str, Any]:
        """Send requests that are due at a rate, whatever the server does."""
        free = [await self.connect() for _ in range(OPEN_CONNECTIONS)]
        return await OpenLoop(self.request, free).run(rate, seconds)

    async def leave_early(self, after_events: int) -> dict[str, float]:
        """Send a request, and go away once so many events have come."""
        connection = await self.connect()
        gone = asyncio.create_task(self.once(connection))
        while connection._answer.events < after_events and not gone.done():  # noqa: ASYNC110, SLF001
            await asyncio.sleep(0.001)
        left_s = now_s()
        connection.abort()
        gone.cancel()
        return {"left_s": left_s}


def percentiles(prefix: str, times_s: list[float]) -> dict[str, float]:
    """Return the percentiles of times, in milliseconds."""
    ordered = sorted(times_s) or [float("nan")]
    at = {"p50": 0.5, "p99": 0.99, "p999": 0.999}
    last = len(ordered) - 1
    return {
        f"{prefix}{name}_ms": 1000 * ordered[min(last, int(share * len(ordered)))]
        for name, share in at.items()
    }


async def run(options: argparse.Namespace) -> dict[str, Any]:
    load = Load(options.port, options.path, options.body.encode())
    match options.mode:
        case "closed":
            return await load.closed(options.connections, options.seconds)
        case "open":
            return await load.open(options.rate, options.seconds)
        case "leave":
            return await load.leave_early(options.events)
    raise ValueError(options.mode)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["closed", "open", "leave"])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--path", required=True)
    parser.add_argument("--body", required=True)
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--events", type=int, default=5)
    options = parser.parse_args()
    print(json.dumps(uvloop.run(run(options))), flush=True)


if __name__ == "__main__":
    main()

"""Server-sent events: sends each look to each browser that has the stream open.

A browser that reads slowly delays no other and accumulates nothing: after it has read
one look, it is sent the newest.  A stream ends with its client, with its session, and
with the application; also if its client has read nothing for `STALLED_S`, such as after
its network has failed.

Source: the HTML standard, "Server-sent events".
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeAlias

from aiohttp import web

from asyncrpc.serving.machine.server_sent_events import (
    COMMENT,
    HEADERS,
    ServerSentEvent,
    encoded,
)

NextEvent: TypeAlias = Callable[[], Awaitable[tuple[str, str]]]

STREAMS_MAX: Final = 64
STREAMS_OF_ONE_MAX: Final = 12  # of one session
STALLED_S: Final = 60.0  # that a client may take to read what was sent
SILENT_S: Final = 15.0  # then a comment is sent, so that proxies keep the connection


class EventStreams:
    """The streams that are open."""

    def __init__(self) -> None:
        self._open: dict[asyncio.Timeout, str] = {}
        self._is_closed = False

    def refusal(self, session: str) -> str:
        """Return why another stream of a session may not be opened; empty: it may."""
        if self._is_closed:
            return "the dashboard is shutting down"
        if len(self._open) >= STREAMS_MAX:
            return f"{STREAMS_MAX} streams are open, the limit"
        if Counter(self._open.values())[session] >= STREAMS_OF_ONE_MAX:
            return f"{STREAMS_OF_ONE_MAX} streams of this session are open, the limit"
        return ""

    async def run(
        self,
        request: web.Request,
        session: str,
        next_event: NextEvent,
        is_open: Callable[[], bool],
    ) -> web.StreamResponse:
        """Send events until the client, the session or the application ends."""
        response = web.StreamResponse(headers=HEADERS)
        await response.prepare(request)
        with self._ending(session) as end:
            try:
                async with end:
                    await _send_all(response, next_event, is_open)
            except (ConnectionError, TimeoutError):
                _drop_unread(request)  # the client has left; or see `close`
        return response

    @contextmanager
    def _ending(self, session: str) -> Iterator[asyncio.Timeout]:
        end = asyncio.timeout(None)
        self._open[end] = session
        try:
            yield end
        finally:
            del self._open[end]

    def close(self, session: str | None = None) -> None:
        """End the streams of a session; without one, end all and allow no new ones."""
        self._is_closed = self._is_closed or session is None
        now_s = asyncio.get_running_loop().time()
        for end, other in self._open.items():
            if session in (None, other):
                end.reschedule(now_s)


async def _send_all(
    response: web.StreamResponse, next_event: NextEvent, is_open: Callable[[], bool]
) -> None:
    while is_open():
        event = await _within(next_event, SILENT_S)
        sent = COMMENT
        if event is not None:
            name, data = event
            sent = encoded(ServerSentEvent(data, name), str)
        async with asyncio.timeout(STALLED_S):
            await response.write(sent)


def _drop_unread(request: web.Request) -> None:
    """Close a connection whose client does not read: its answer would never end."""
    transport = request.transport
    if transport is not None and transport.get_write_buffer_size():
        transport.abort()


async def _within(next_event: NextEvent, limit_s: float) -> tuple[str, str] | None:
    """Return the next event; None if there is none within `limit_s`."""
    try:
        async with asyncio.timeout(limit_s) as limit:
            return await next_event()
    except TimeoutError:
        if limit.expired():
            return None
        raise

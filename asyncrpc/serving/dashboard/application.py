"""The application: the page, its files, and the looks as JSON and as events.

It does not know where it is mounted, or how a proxy changes its paths: all links of the
page are relative, and so is the one redirect.

The files of the page: read once, in a thread, and served from memory.

Server-sent events: sends each look to each browser that has the stream open.

A browser that reads slowly delays no other and accumulates nothing: after it has read
one look, it is sent the newest.  A stream ends with its client, with its session, and
with the application; also if its client has read nothing for `STALLED_S`, such as after
its network has failed.

Source: the HTML standard, "Server-sent events".
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias

from aiohttp import web

from asyncrpc.errors import AsyncRpcError, NotStartedError, UsageError
from asyncrpc.serving.dashboard.access import Access, is_foreign, refused
from asyncrpc.serving.dashboard.look import NotFoundError, Seen, SharedLook, in_slices
from asyncrpc.serving.dashboard.machine.answers import encoded, heading_of
from asyncrpc.serving.dashboard.machine.query import ViewQuery, read_query
from asyncrpc.serving.dashboard.machine.sessions import Gate
from asyncrpc.serving.dashboard.views import DashboardView
from asyncrpc.serving.machine.server_sent_events import (
    COMMENT,
    HEADERS,
    ServerSentEvent,
)
from asyncrpc.serving.machine.server_sent_events import (
    encoded as encoded_event,
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
            sent = encoded_event(ServerSentEvent(data, name), str)
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


STATIC: Final = Path(__file__).parent / "static"
PAGE: Final = "index.html"
_KINDS: Final = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}


class PageFiles:
    """The files, by their names below `static/`."""

    def __init__(self) -> None:
        self._by_name: dict[str, bytes] | None = None

    async def response(self, name: str) -> web.Response:
        """Return a file."""
        if self._by_name is None:
            self._by_name = await asyncio.to_thread(_read_all)
        body = self._by_name.get(name)
        if body is None:
            raise web.HTTPNotFound(text="there is no such file\n")
        kind = _KINDS[Path(name).suffix]
        charset = None if kind == "image/svg+xml" else "utf-8"
        return web.Response(body=body, content_type=kind, charset=charset)


def _read_all() -> dict[str, bytes]:
    return {
        path.relative_to(STATIC).as_posix(): path.read_bytes()
        for path in STATIC.rglob("*")
        if path.suffix in _KINDS
    }


_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'self'; "
        "frame-ancestors 'none'; object-src 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

# Opens the views when they are first asked for, on the loop of the application.
OpenViews = Callable[[], Awaitable[dict[str, DashboardView]]]
CloseViews = Callable[[], Awaitable[None]]


class DashboardApplication:
    """Answers the requests of one dashboard."""

    def __init__(
        self, gate: Gate, open_views: OpenViews, close_views: CloseViews, every_s: float
    ) -> None:
        """Describe the application.

        Args:
            open_views: returns the views; the same ones each time.
        """
        self._gate = gate
        self._access = Access(gate)
        self._open_views = open_views
        self._close_views = close_views
        self._every_s = every_s
        self._files = PageFiles()
        self._streams = EventStreams()

    def make(self) -> web.Application:
        """Return the application."""
        app = web.Application(middlewares=[_errors_as_json])
        add = app.router.add_get
        add("", self._to_directory)
        add("/", self._page)
        add("/login", self._access.state)
        app.router.add_post("/login", self._sign_in)
        app.router.add_post("/logout", self._sign_out)
        add("/api/{view}", self._look)
        add("/api/{view}/live", self._live)
        add("/static/{name:.+}", self._file)
        app.on_response_prepare.append(_add_headers)
        app.on_shutdown.append(self._end_streams)
        app.cleanup_ctx.append(self._cleaned_up)
        return app

    async def _end_streams(self, _: web.Application) -> None:
        self._streams.close()

    async def _cleaned_up(self, _: web.Application) -> AsyncIterator[None]:
        yield
        await self._close_views()

    async def _to_directory(self, request: web.Request) -> web.StreamResponse:
        """Redirect to the same path with a slash, to which links are relative."""
        last = request.path.rpartition("/")[2]
        if not last:  # mounted at the root, where there is no path without a slash
            return await self._page(request)
        raise web.HTTPPermanentRedirect(f"{last}/")

    async def _page(self, _: web.Request) -> web.StreamResponse:
        return await self._files.response(PAGE)

    async def _file(self, request: web.Request) -> web.StreamResponse:
        return await self._files.response(request.match_info["name"])

    async def _sign_in(self, request: web.Request) -> web.StreamResponse:
        if is_foreign(request):
            return _foreign()
        return await self._access.sign_in(request)

    async def _sign_out(self, request: web.Request) -> web.StreamResponse:
        if is_foreign(request):
            return _foreign()
        session = await self._access.session_of(request)
        response = await self._access.sign_out(request)
        if session is not None:
            self._streams.close(session)
        return response

    # --- looks -----------------------------------------------------------------------

    async def _look(self, request: web.Request) -> web.StreamResponse:
        if await self._access.session_of(request) is None:
            return refused(self._gate)
        view, query = await self._asked(request)
        look = await view.look_for(query)
        seen = await look.newest()
        if seen.digest is None:
            return web.json_response({"error": seen.trouble}, status=503)
        text = await self._answer(view, query, seen)
        return web.Response(text=text, content_type="application/json")

    async def _live(self, request: web.Request) -> web.StreamResponse:
        session = await self._access.session_of(request)
        if session is None:
            return refused(self._gate)
        view, query = await self._asked(request)
        look = await view.look_for(query)
        # Keep no look in this frame, which lasts as long as the stream.
        follower = _Follower(
            look,
            await look.newest(),
            lambda seen: self._answer(view, query, seen),
        )
        if (why := self._streams.refusal(session)) != "":
            return web.json_response({"error": why}, status=429)
        return await self._streams.run(
            request, session, follower.next, lambda: self._access.is_open(session)
        )

    async def _asked(self, request: web.Request) -> tuple[DashboardView, ViewQuery]:
        views = await self._open_views()
        view = views.get(request.match_info["view"])
        if view is None:
            raise NotFoundError(f"unknown view; use one of {', '.join(views)}")
        query = read_query(
            request.query.items(), keys=view.keys, sort=view.sort, is_up=view.is_up
        )
        return view, query

    async def _answer(
        self, view: DashboardView, query: ViewQuery, seen: Seen[Any]
    ) -> str:
        """Return the part of a look that a query asks for, as JSON."""
        heading = heading_of(
            view.name,
            taken_at_s=seen.taken_at_s,
            took_s=seen.took_s,
            every_s=self._every_s,
            workers=seen.workers,
            silent=seen.silent,
        )
        shown = await in_slices(view.show(seen, query))
        return await in_slices(encoded(heading | shown))


def _foreign() -> web.Response:
    error = "a page of another site may not sign in or out; send JSON from this one"
    return web.json_response({"error": error}, status=403)


class _Follower:
    """Follows one look for one stream."""

    def __init__(
        self,
        look: SharedLook[Any, Any],
        first: Seen[Any],
        answer: Callable[[Seen[Any]], Awaitable[str]],
    ) -> None:
        self._look = look
        self._answer = answer
        self._first: Seen[Any] | None = first
        self._number = first.number

    async def next(self) -> tuple[str, str]:
        """Return the name and the JSON of the newest look, or of its trouble."""
        seen = self._first or await self._look.after(self._number)
        self._first, self._number = None, seen.number
        if seen.digest is None:
            return "trouble", await in_slices(encoded({"why": seen.trouble}))
        return "look", await self._answer(seen)


@web.middleware
async def _errors_as_json(
    request: web.Request,
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
) -> web.StreamResponse:
    try:
        return await handler(request)
    except NotFoundError as error:
        return web.json_response({"error": str(error)}, status=404)
    except NotStartedError as error:  # a fault of the program, not of the client
        return web.json_response({"error": str(error)}, status=503)
    except UsageError as error:
        return web.json_response({"error": str(error)}, status=400)
    except AsyncRpcError as error:
        return web.json_response({"error": str(error)}, status=503)


async def _add_headers(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_HEADERS)

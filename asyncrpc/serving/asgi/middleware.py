"""The middleware for ASGI: FastAPI, Starlette and any other application.

It is plain ASGI: it wraps an application, and depends on no framework and no server.

Spans of requests and websockets, where no other middleware makes them.

Watches a connection of ASGI, and cancels the application if its client leaves.

Source: the ASGI specification 3.0.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final

from asyncrpc.core.arguments import check_callable, check_flag
from asyncrpc.core.calls.context import current_worker_var
from asyncrpc.core.worker import Worker
from asyncrpc.errors import UsageError
from asyncrpc.extend import CallTracer, tracer_of
from asyncrpc.serving.asgi.lifespan import run_lifespan
from asyncrpc.serving.asgi.machine.connection import (
    WATCHED_KEY,
    WORKER_KEY,
    AsgiApplication,
    AsgiConnection,
    AsgiMessage,
    AsgiReceive,
    AsgiScope,
    AsgiSend,
    AsgiState,
    check_state_key,
    header_values,
    send_response,
)
from asyncrpc.serving.contract import DEADLINE_HEADER, Contract
from asyncrpc.serving.lifetime import WorkerSource, check_worker_source, worker_of
from asyncrpc.serving.machine.error_answers import (
    CLIENT_LEFT_STATUS,
    FAILED_CLOSURES,
    INTERNAL,
    OVERLOADED_STATUS,
    RETRY_AFTER_S,
    ErrorAnswer,
)
from asyncrpc.serving.request_scope import ClientScope, beside, request_deadline


class WatchedConnection:
    """Replaces a server's `receive` and `send` for the application.

    Attributes:
        on_answered: called once the answer is complete.
    """

    def __init__(self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        self.connection = AsgiConnection(scope)
        self.on_answered: Callable[[], None] = lambda: None
        self._receive = receive
        self._send = send
        self._changed = asyncio.Event()  # a message has come, or one may be read
        self._failure: Exception | None = None

    @asynccontextmanager
    async def watching(self, *, cancels: bool) -> AsyncIterator[None]:
        """Cancel the block when the client leaves; it ends as if it had returned.

        Args:
            cancels: whether to cancel; False: only note that the client has left.
        """
        client = ClientScope()
        leave = client.leave if cancels else lambda: None
        async with client, beside(self._read_ahead(leave)):
            yield

    async def receive(self) -> AsgiMessage:
        """Return the next message of the client."""
        if self.connection.asks():
            self._notify()
        try:
            while (message := self.connection.take()) is None:
                if self._failure is not None:
                    raise self._failure
                await self._wait()
            return message
        finally:
            self.connection.asks_no_more()
            self._notify()

    async def send(self, message: AsgiMessage) -> None:
        """Send a message to the client."""
        self.connection.sends(message)
        await self._send(message)
        if self.connection.state is AsgiState.ANSWERED:
            self.on_answered()

    async def answer_nobody(self) -> None:
        """Give a request without an answer one, which its client will not read.

        The client has left.  Servers drop the answer, but a middleware outside of ours
        (Starlette's BaseHTTPMiddleware) takes it for an error if none comes.
        """
        head = {"status": CLIENT_LEFT_STATUS, "headers": []}
        with suppress(Exception):  # as of ASGI 2.4, if the server sees it first
            await self._send({"type": "http.response.start", **head})
            await self._send({"type": "http.response.body", "body": b""})

    async def _read_ahead(self, leave: Callable[[], None]) -> None:
        try:
            while True:
                while not self.connection.may_read:
                    await self._wait()
                if self.connection.received(await self._receive()):
                    leave()
                self._notify()
        except Exception as error:  # noqa: BLE001  (raised in the application)
            self._failure = error
            self._notify()

    async def _wait(self) -> None:
        """Wait for a change; any number of tasks may wait."""
        await self._changed.wait()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


@asynccontextmanager
async def traced(
    tracer: CallTracer, scope: AsgiScope, connection: AsgiConnection
) -> AsyncIterator[None]:
    """Make a span of a request or websocket, to which its handler's calls belong.

    Args:
        scope: of the request; its trace context headers name the span's parent.
    """
    parents = header_values(scope, "traceparent")
    parent = (
        parents[0] if len(parents) == 1 else "",
        ",".join(header_values(scope, "tracestate")),
    )
    # ASGI gives no method for a websocket: in HTTP/1.1 it is GET (RFC 6455), in HTTP/2
    # CONNECT (RFC 8441).
    opening = "CONNECT" if scope.get("http_version", "") == "2" else "GET"
    method = scope.get("method", opening)
    with tracer.request(method, "", scope["path"], parent) as span:
        try:
            yield
        finally:
            # A framework stores the route that it has found in the same scope.
            route = getattr(scope.get("route"), "path", "")
            if isinstance(route, str) and route:
                span.routed(route)
            if connection.status is not None:
                span.answered(connection.status)
            if connection.close_code is not None:
                code = connection.close_code
                span.closed(code, has_failed=code in FAILED_CLOSURES)


logger = logging.getLogger("asyncrpc")

_DENIAL: Final = "websocket.http.response"  # the extension to refuse by a response


class WorkerMiddleware:
    """An application whose handlers have a current worker, a deadline, mapped errors.

    Inside a handler `asyncrpc.rpc_async`, `remote` and `autograd` act on the worker.
    If the handler has not begun its response, the middleware answers these errors, as
    JSON `{"error": class, "message": text}`:

    - 400: the header of the deadline is not a number of milliseconds;
    - 504: the deadline passed (`DeadlineExceededError`, or `timeout_s` itself);
    - 503 with Retry-After: `OverloadedError`, `RejectedError`, `WorkerLostError`,
      `OwnerLostError`, or this application's worker has ended.

    A websocket that is not accepted yet is refused with the same response, if the
    server supports it; an accepted websocket is closed with code 4504, 1013, or 1011
    for other errors.

    When the client leaves, the handler is cancelled, and with it the calls that it
    awaits, on every worker that they have reached.  A websocket's handler that waits
    for a message gets the disconnect message instead.  A handler whose response is
    complete is cancelled neither by its client's leave nor by the deadline, which then
    limits nothing any more: not its background tasks, nor tasks that it has left.

    If the worker is traced (`asyncrpc.observability.trace_calls`), each request and
    each websocket has a span, in the trace that its header `traceparent` names, unless
    a span is current.

    Middlewares that must see these answers go outside, such as Starlette's
    `CORSMiddleware`, without whose headers a browser hides them from its script.  Of
    `app.add_middleware`, the last one is the outermost: add this one first.

    All other errors are passed on.  The texts name functions and workers: hide them
    from clients that must not see these names.

    Example:
        >>> app = FastAPI(lifespan=asgi.lifespan(make_worker))
        >>> app.add_middleware(asgi.WorkerMiddleware, timeout_s=2.0)
        >>> bare = asgi.WorkerMiddleware(application, make_worker)
    """

    def __init__(
        self,
        app: AsgiApplication,
        worker: WorkerSource | None = None,
        *,
        timeout_s: float | None = None,
        retry_after_s: float = RETRY_AFTER_S,
        deadline_header: str | None = DEADLINE_HEADER,
        overloaded_status: int = OVERLOADED_STATUS,
        handler_cancellation: bool = True,
        key: str = WORKER_KEY,
    ) -> None:
        """Wrap an application.

        Args:
            app: of ASGI 3.
            worker: a worker that has not been started, or a function that makes one: it
                is started before the application and ended after it, even if the
                application has no lifespan.  Or a running worker, which is left
                running.  None: the lifespan of the application starts the worker, by
                `lifespan(...)`.
            timeout_s: seconds that a request may take; every call made for it inherits
                the remaining time.  It also limits websockets and streams.  None: no
                limit.
            retry_after_s: seconds after which a client may try again if the error does
                not tell; rounded up.
            deadline_header: name of the header by which a client shortens `timeout_s`:
                whole milliseconds.  None: a client cannot.
            overloaded_status: HTTP status for `OverloadedError`: 503, or 429 for
                clients and proxies that handle it better.
            handler_cancellation: whether a handler is cancelled when its client leaves.
            key: of the worker in the state of the lifespan.

        Raises:
            UsageError: an argument has the wrong type, or is out of range.
        """
        check_callable("app", app)
        if worker is not None:
            check_worker_source(worker)
        check_flag("handler_cancellation", handler_cancellation)
        check_state_key("key", key)
        self._app = app
        self._source = worker
        self._worker: Worker | None = None
        self._contract = Contract(
            timeout_s, retry_after_s, deadline_header, overloaded_status
        )
        self._is_cancelling = handler_cancellation
        self._key = key

    async def __call__(
        self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend
    ) -> None:
        """Serve one connection, or the lifespan; a server calls it.

        Args:
            scope: of ASGI.
            receive: of ASGI.
            send: of ASGI.

        Raises:
            UsageError: no worker was started for the application.
            Exception: an error of the application that is not answered.

        Cancellation:
            The handler's calls are cancelled where they run.
        """
        if scope["type"] in {"http", "websocket"}:
            await self._serve(scope, receive, send)
        elif scope["type"] == "lifespan" and self._source is not None:
            self._worker = worker_of(self._source)
            if "state" in scope:
                scope["state"][self._key] = self._worker
            await run_lifespan(self._app, self._worker, (scope, receive, send))
        else:
            await self._app(scope, receive, send)

    async def _serve(
        self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend
    ) -> None:
        worker = self._worker_for(scope)
        watched = WatchedConnection(scope, receive, send)
        tracer = tracer_of(worker)
        token = current_worker_var.set(worker)
        try:
            async with self._watching(scope, watched):
                if tracer is None:
                    await self._answer(scope, watched, worker)
                    return
                async with traced(tracer, scope, watched.connection):
                    await self._answer(scope, watched, worker)
        finally:
            current_worker_var.reset(token)

    @asynccontextmanager
    async def _watching(
        self, scope: AsgiScope, watched: WatchedConnection
    ) -> AsyncIterator[None]:
        async with watched.watching(cancels=self._is_cancelling):
            scope[WATCHED_KEY] = self._is_cancelling
            yield
        connection = watched.connection
        if connection.has_left:
            logger.debug("%s: the client has left", scope["path"])
            if connection.status is None and not connection.is_websocket:
                await watched.answer_nobody()

    async def _answer(
        self, scope: AsgiScope, watched: WatchedConnection, worker: Worker
    ) -> None:
        values = self._contract.header_of(lambda name: header_values(scope, name))
        loop = asyncio.get_running_loop()
        end_s = math.inf
        try:
            timeout_s = self._contract.time_allowed_s(values)
            end_s = math.inf if timeout_s is None else loop.time() + timeout_s
            async with request_deadline(timeout_s) as limit:
                if limit is not None:
                    watched.on_answered = limit.lift
                await self._app(scope, watched.receive, watched.send)
        except Exception as error:
            if watched.connection.state is AsgiState.ANSWERED:
                raise  # of what the application does after its answer
            answer = self._contract.answer_to(
                error, is_over=loop.time() >= end_s, is_closed=worker.is_closed
            )
            if answer is not None:
                logger.warning("%s: %s", scope["path"], answer.message)
            if not await _send_answer(scope, watched, answer):
                raise

    def _worker_for(self, scope: AsgiScope) -> Worker:
        worker = self._worker or scope.get("state", {}).get(self._key)
        if not isinstance(worker, Worker):
            raise UsageError(
                f"the application has no worker under {self._key!r} in the state of "
                "its lifespan: give it lifespan=asgi.lifespan(make_worker), or give "
                "the worker to WorkerMiddleware, which must be the outermost middleware"
            )
        return worker


async def _send_answer(
    scope: AsgiScope, watched: WatchedConnection, answer: ErrorAnswer | None
) -> bool:
    """Answer an error, if possible; return whether that settles it."""
    connection, send = watched.connection, watched.send
    if connection.has_left:
        return answer is not None
    if connection.state is AsgiState.ACCEPTED:
        error_answer = answer or INTERNAL
        closing = {"code": error_answer.close_code, "reason": error_answer.reason}
        await send({"type": "websocket.close", **closing})
        return answer is not None
    if answer is None or connection.state is not AsgiState.WAITING:
        return False  # not for us, or too late: the client has half a response
    if connection.is_websocket and _DENIAL not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": answer.close_code})
        return True
    prefix = "websocket." if connection.is_websocket else ""
    body = answer.body.encode()
    await send_response(send, answer.status, answer.headers, body, prefix=prefix)
    return True

"""A worker inside an aiohttp application, which starts and ends with the application.

The worker shares the application's event loop, installs no signal handlers, and is
stored under a typed key, so an application or process may hold several.

Start the application with `handler_cancellation=True` (`web.run_app`, `AppRunner`):
then a client that disconnects cancels its handler, and with it the calls that the
handler awaits, on every worker that they have reached.  Without it, aiohttp lets a
handler continue although its client is gone.

Spans of requests to an application, where no other middleware makes them.

Source: https://docs.aiohttp.org/en/stable/web_advanced.html, "Cleanup Context" and
"Web Handler Cancellation".
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, TypeAlias, TypeVar

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from asyncrpc.core.arguments import check_kind
from asyncrpc.core.calls.context import current_worker_var
from asyncrpc.core.worker import Worker
from asyncrpc.errors import AsyncRpcError, UsageError
from asyncrpc.extend import CallTracer, tracer_of
from asyncrpc.serving.contract import (
    DEADLINE_HEADER,
    BadDeadlineError,
    Contract,
)
from asyncrpc.serving.lifetime import (
    WorkerSource,
    check_worker_source,
    running,
    worker_of,
)
from asyncrpc.serving.machine.error_answers import (
    FAILED_CLOSURES,
    OVERLOADED_STATUS,
    RETRY_AFTER_S,
)
from asyncrpc.serving.request_scope import request_deadline

R = TypeVar("R", bound=web.StreamResponse)


async def traced(
    tracer: CallTracer, request: web.Request, answer: Callable[[], Awaitable[R]]
) -> R:
    """Answer a request in a span, to which its handler's calls belong.

    Args:
        request: begins the span; its trace context headers name the parent.
    """
    resource = request.match_info.route.resource
    route = "" if resource is None else resource.canonical
    parent = (_only(request, "traceparent"), _all(request, "tracestate"))
    with tracer.request(request.method, route, request.path, parent) as span:
        try:
            response = await answer()
        except web.HTTPException as answered:
            span.answered(answered.status)
            raise
        span.answered(response.status)
        if isinstance(response, web.WebSocketResponse):
            own = getattr(response, "own_close_code", None)
            code = response.close_code if own is None else own
            if code is not None:
                span.closed(code, has_failed=code in FAILED_CLOSURES)
        return response


def _only(request: web.Request, name: str) -> str:
    """Return a header that may occur only once; empty if it occurs more often."""
    values = request.headers.getall(name, [])
    return values[0] if len(values) == 1 else ""


def _all(request: web.Request, name: str) -> str:
    """Return a header that may occur several times, joined."""
    return ",".join(request.headers.getall(name, []))


logger = logging.getLogger("asyncrpc")

WORKER: Final = web.AppKey("asyncrpc_worker", Worker)
"""The key of an application's worker, unless another key is given."""

# Of `Worker` or of a class derived from it: an AppKey is invariant in its type.
WorkerKey: TypeAlias = web.AppKey[Any]
CleanupContext: TypeAlias = Callable[[web.Application], AsyncIterator[None]]


def worker_context(worker: WorkerSource, *, key: WorkerKey = WORKER) -> CleanupContext:
    """Return a context that starts a worker with an application, and ends it with it.

    Append it to `app.cleanup_ctx`.  Later startup hooks, and tasks that they start,
    find the worker under `app[key]`, and as the current worker; of several workers, the
    last one started is current.  At the end, aiohttp stops listening and waits for its
    handlers; then the worker drains (`Options.drain_timeout_s`).

    Args:
        worker: a worker that has not been started; or a function that makes one, for an
            application that is set up more than once; or a running worker, which is
            left running.
        key: the key under which the application stores the worker.

    Returns:
        A function for `app.cleanup_ctx`.

    Raises:
        UsageError: an argument has the wrong type.  When the application starts:
            `worker` did not return a Worker, or another worker is under `key`.
        RendezvousTimeoutError: when the application starts: not every worker of the
            group appeared.

    Cancellation:
        A start that is cancelled leaves nothing behind.

    Example:
        >>> app.cleanup_ctx.append(serving.worker_context(Worker("front", rank=0)))
        >>> app.cleanup_ctx.append(serving.worker_context(make_other, key=OTHER))
    """
    check_worker_source(worker)
    check_key("key", key)

    async def context(app: web.Application) -> AsyncIterator[None]:
        if app.get(key) is not None and not app[key].is_closed:
            raise UsageError(
                f"the application already has worker {app[key].name!r} under this key; "
                "give each worker its own web.AppKey"
            )
        app[key] = chosen = worker_of(worker)
        async with running(chosen):
            yield

    return context


def middleware(
    *,
    timeout_s: float | None = None,
    retry_after_s: float = RETRY_AFTER_S,
    deadline_header: str | None = DEADLINE_HEADER,
    overloaded_status: int = OVERLOADED_STATUS,
    key: WorkerKey = WORKER,
) -> Middleware:
    """Return a middleware: handlers have a current worker, a deadline, mapped errors.

    Inside a handler `asyncrpc.rpc_async`, `remote` and `autograd` act on the worker.
    If the handler has not begun its response, the middleware answers these errors, as
    JSON `{"error": class, "message": text}`:

    - 400: the header of the deadline is not a number of milliseconds;
    - 504: the deadline passed (`DeadlineExceededError`, or `timeout_s` itself);
    - 503 with Retry-After: `OverloadedError`, `RejectedError`, `WorkerLostError`,
      `OwnerLostError`, or this application's worker has ended.

    If the worker is traced (`asyncrpc.observability.trace_calls`), each request has a
    span, in the trace that its header `traceparent` names, unless a span is current:
    then another middleware has made one.

    Middlewares that must see these answers, such as one that adds the headers of CORS,
    go outside, which is before this one in `middlewares=[...]`.

    All other errors are passed on, so a function that raised gives aiohttp's 500.  The
    texts name functions and workers: hide them from clients that must not see these
    names.

    Args:
        timeout_s: seconds that a request may take; every call made for it inherits the
            remaining time.  It also limits websockets and streams.  None: no limit.
        retry_after_s: seconds after which a client may try again if the error does not
            tell; rounded up.
        deadline_header: name of the header by which a client shortens `timeout_s`:
            whole milliseconds.  None: a client cannot.
        overloaded_status: HTTP status for `OverloadedError`: 503, or 429 for clients
            and proxies that handle it better.
        key: of the worker, in this application or one that it is mounted in.

    Returns:
        A middleware for `web.Application(middlewares=[...])`.

    Raises:
        UsageError: an argument has the wrong type, or is out of range.

    Cancellation:
        The handler's calls are cancelled where they run.
    """
    contract = Contract(timeout_s, retry_after_s, deadline_header, overloaded_status)
    check_key("key", key)

    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        worker = request.config_dict[key]
        loop = asyncio.get_running_loop()
        values = contract.header_of(lambda name: request.headers.getall(name, ()))
        end_s = math.inf
        token = current_worker_var.set(worker)
        try:
            timeout_s = contract.time_allowed_s(values)
            end_s = math.inf if timeout_s is None else loop.time() + timeout_s
            async with request_deadline(timeout_s):
                return await handler(request)
        except (AsyncRpcError, TimeoutError, BadDeadlineError) as error:
            answer = contract.answer_to(
                error, is_over=loop.time() >= end_s, is_closed=worker.is_closed
            )
            if answer is None or request.writer.output_size:
                raise  # not for us, or too late: the client has half a response
            logger.warning("%s %s: %s", request.method, request.path, error)
            return web.Response(
                text=answer.body, status=answer.status, headers=answer.headers
            )
        finally:
            current_worker_var.reset(token)

    @web.middleware
    async def use_worker(request: web.Request, handler: Handler) -> web.StreamResponse:
        tracer = tracer_of(request.config_dict[key])
        if tracer is None:
            return await answer(request, handler)
        return await traced(tracer, request, lambda: answer(request, handler))

    return use_worker


def check_key(name: str, key: object) -> None:
    """Raise UsageError unless an argument is a key of an application."""
    check_kind(name, key, web.AppKey, "a web.AppKey")

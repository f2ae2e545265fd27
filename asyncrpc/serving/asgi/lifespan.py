"""A worker that lives as long as an ASGI application."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
)
from typing import Any, TypeAlias

from asyncrpc.core.worker import Worker
from asyncrpc.serving.asgi.machine.connection import (
    WORKER_KEY,
    AsgiApplication,
    AsgiMessage,
    AsgiReceive,
    AsgiScope,
    AsgiSend,
    check_state_key,
)
from asyncrpc.serving.asgi.machine.lifespan import (
    STARTUP_COMPLETE,
    STARTUP_FAILED,
    InnerLifespan,
)
from asyncrpc.serving.lifetime import (
    WorkerSource,
    check_worker_source,
    running,
    worker_of,
)

Lifespan: TypeAlias = Callable[[Any], AbstractAsyncContextManager[dict[str, Any]]]


def lifespan(worker: WorkerSource, *, key: str = WORKER_KEY) -> Lifespan:
    """Return a lifespan that starts a worker with an application, and ends it with it.

    Use it in `FastAPI(lifespan=...)` and `Starlette(lifespan=...)`, or inside your own
    lifespan.  `WorkerMiddleware` finds the worker in its state.  At the end the server
    waits for its requests; then the worker drains
    (`Options.drain_timeout_s`).

    Args:
        worker: a worker that has not been started; or a function that makes one, for an
            application that is set up more than once; or a running worker, which is
            left running.
        key: of the worker in the state, if an application has several.

    Returns:
        A function of the application that returns an asynchronous context manager,
        whose value is the state.

    Raises:
        UsageError: an argument has the wrong type.  When the application starts:
            `worker` did not return a Worker.
        RendezvousTimeoutError: when the application starts: not every worker of the
            group appeared.

    Cancellation:
        A start that is cancelled leaves nothing behind.

    Example:
        >>> app = FastAPI(lifespan=asgi.lifespan(make_worker))
        >>> @asynccontextmanager
        ... async def own(app):
        ...     async with asgi.lifespan(make_worker)(app) as state:
        ...         async with Batcher(predict, 32, 0.005) as batched:
        ...             yield {**state, "batched": batched}
    """
    check_worker_source(worker)
    check_state_key("key", key)

    @asynccontextmanager
    async def context(_: Any) -> AsyncIterator[dict[str, Any]]:
        chosen = worker_of(worker)
        async with running(chosen):
            yield {key: chosen}

    return context


async def run_lifespan(
    app: AsgiApplication,
    worker: Worker,
    connection: tuple[AsgiScope, AsgiReceive, AsgiSend],
) -> None:
    """Run the lifespan of an application, and of a worker around it."""
    _, receive, send = connection
    first = await receive()
    inner = InnerLifespan()
    async with AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(running(worker))
        except Exception as error:
            message = f"worker {worker.name!r} did not start: {error}"
            await send({"type": STARTUP_FAILED, "message": message})
            raise
        await _run_inner(app, inner, first, connection)
    await send(inner.last)


async def _run_inner(
    app: AsgiApplication,
    inner: InnerLifespan,
    first: AsgiMessage,
    connection: tuple[AsgiScope, AsgiReceive, AsgiSend],
) -> None:
    """Run the lifespan of the application itself, to its end, if it has one."""
    scope, receive, send = connection
    pending = [first]

    async def receive_inner() -> AsgiMessage:
        return pending.pop() if pending else await receive()

    async def send_inner(message: AsgiMessage) -> None:
        if inner.sends(message):
            await send(message)

    try:
        await app(scope, receive_inner, send_inner)
    except Exception:
        if not inner.returned():
            raise
    if inner.returned():
        await send({"type": STARTUP_COMPLETE})
        await receive()  # until the shutdown

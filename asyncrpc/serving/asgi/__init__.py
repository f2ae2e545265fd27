"""Workers inside ASGI applications: FastAPI, Starlette, and any other.

    app = FastAPI(lifespan=asgi.lifespan(make_worker))
    app.add_middleware(asgi.WorkerMiddleware, timeout_s=2.0)
    app.add_route("/healthz", health := asgi.health_app())
    app.add_route("/readyz", health)

It depends on no framework and no server.  Its answers are the same as those of
`asyncrpc.serving` for aiohttp.
"""

from asyncrpc.serving.asgi.health import health_app
from asyncrpc.serving.asgi.lifespan import lifespan
from asyncrpc.serving.asgi.middleware import WorkerMiddleware
from asyncrpc.serving.asgi.responses import (
    AsgiWebSocket,
    sse_response,
    websocket_response,
)

__all__ = [
    "AsgiWebSocket",
    "WorkerMiddleware",
    "health_app",
    "lifespan",
    "sse_response",
    "websocket_response",
]

"""Health of the workers of an ASGI application, for load balancers and people."""

from __future__ import annotations

import json

from asyncrpc.core.worker import Worker
from asyncrpc.serving.asgi.machine.connection import (
    WORKER_KEY,
    AsgiApplication,
    AsgiReceive,
    AsgiScope,
    AsgiSend,
    check_state_key,
    send_response,
)
from asyncrpc.serving.paths import check_path
from asyncrpc.serving.worker_status import ready_body


def health_app(
    *keys: str, live: str = "/healthz", ready: str = "/readyz"
) -> AsgiApplication:
    """Return an ASGI application that answers the two checks.

    Mount it (`app.mount("/health", ...)`: the paths follow that prefix), or give it to
    `app.add_route(path, ...)` of Starlette or FastAPI at each of the two paths.  Both
    checks answer GET and HEAD, in the same way as `serving.health_routes`.

    Args:
        *keys: of the workers that must be ready, in the state of the lifespan; without
            keys: the worker that `lifespan` starts.
        live: path of the check that the process lives.
        ready: path of the check that it takes requests.

    Returns:
        An application of ASGI 3.

    Raises:
        UsageError: an argument has the wrong type.

    Example:
        >>> health = asgi.health_app()
        >>> app.add_route("/healthz", health)
        >>> app.add_route("/readyz", health)
    """
    for number, key in enumerate(keys):
        check_state_key(f"keys[{number}]", key)
    check_path("live", live)
    check_path("ready", ready)
    return HealthApplication(keys or (WORKER_KEY,), live, ready)


class HealthApplication:
    """Answers the two checks; a class, as frameworks take functions for handlers."""

    def __init__(self, keys: tuple[str, ...], live: str, ready: str) -> None:
        self._keys = keys
        self._live = live
        self._ready = ready

    async def __call__(
        self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend
    ) -> None:
        """Answer one request; a server calls it."""
        if scope["type"] != "http":
            await send({"type": "websocket.close"})
            return
        status, body = self._answer(scope)
        headers = {"Content-Type": "application/json; charset=utf-8"}
        if status == _NOT_ALLOWED:
            headers["Allow"] = "GET, HEAD"
        # For HEAD, a server sends the length of the body but not the body.
        await send_response(send, status, headers, json.dumps(body).encode(), prefix="")

    def _answer(self, scope: AsgiScope) -> tuple[int, object]:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path not in {self._live, self._ready}:
            return 404, {"error": "NotFound", "message": "there is no such check"}
        if scope["method"] not in {"GET", "HEAD"}:
            return _NOT_ALLOWED, {"error": "MethodNotAllowed", "message": "use GET"}
        if path == self._live:
            return 200, {"live": True}
        candidates = [scope.get("state", {}).get(key) for key in self._keys]
        workers = [
            candidate if isinstance(candidate, Worker) else None
            for candidate in candidates
        ]
        return ready_body(workers)


_NOT_ALLOWED = 405

"""The names that ASGI has for its parts.

Source: the ASGI specification 3.0, https://asgi.readthedocs.io/en/latest/specs/.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from asyncrpc.core.arguments import wrong

AsgiScope: TypeAlias = MutableMapping[str, Any]
AsgiMessage: TypeAlias = MutableMapping[str, Any]
AsgiReceive: TypeAlias = Callable[[], Awaitable[AsgiMessage]]
AsgiSend: TypeAlias = Callable[[AsgiMessage], Awaitable[None]]
AsgiApplication: TypeAlias = Callable[
    [AsgiScope, AsgiReceive, AsgiSend], Awaitable[None]
]

# Key of the worker in the state of the lifespan, of which each request has a copy.
WORKER_KEY = "asyncrpc_worker"
# Key in a scope: a middleware already watches whether the client leaves.
WATCHED_KEY = "asyncrpc.watched"


def check_state_key(name: str, key: object) -> None:
    """Raise UsageError unless an argument is a name in the state of a lifespan."""
    if not isinstance(key, str) or not key:
        raise wrong(name, "a non-empty string", key)


def header_values(scope: AsgiScope, name: str) -> list[str]:
    """Return the values of all headers of a name."""
    wanted = name.lower().encode("latin-1")
    return [value.decode("latin-1") for key, value in scope["headers"] if key == wanted]


async def send_response(
    send: AsgiSend, status: int, headers: dict[str, str], body: bytes, *, prefix: str
) -> None:
    """Send a whole response."""
    raw = [
        (key.lower().encode("latin-1"), value.encode("latin-1"))
        for key, value in headers.items()
    ]
    raw.append((b"content-length", str(len(body)).encode()))
    await send(
        {"type": f"{prefix}http.response.start", "status": status, "headers": raw}
    )
    await send({"type": f"{prefix}http.response.body", "body": body})

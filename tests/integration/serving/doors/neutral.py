"""An application in words of no framework, which each door makes one of its own of."""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from asyncrpc.serving.lifetime import WorkerSource


class Asked(Protocol):
    """A request."""

    async def body(self) -> bytes:
        """Read all of it."""

    async def begin(self, data: bytes) -> Callable[[bytes], Awaitable[None]]:
        """Begin a response of its own; return what writes more of it."""


@dataclass
class NeutralApp:
    """What an application answers, by path.

    Attributes:
        worker: of the application.
        answers: what returns JSON, for GET and POST.
        events: what returns a stream, given the `Last-Event-ID`.
        sockets: a stream, or a function of messages, for a websocket.
        options: of the middleware.
        event_options: of the responses of events.
        socket_options: of the responses by websockets.
    """

    worker: WorkerSource
    answers: Mapping[str, Callable[[Asked], Awaitable[Any]]] = field(
        default_factory=dict
    )
    events: Mapping[str, Callable[[str], AsyncIterable[Any]]] = field(
        default_factory=dict
    )
    sockets: Mapping[str, Callable[[Any], AsyncIterable[Any]]] = field(
        default_factory=dict
    )
    options: Mapping[str, Any] = field(default_factory=dict)
    event_options: Mapping[str, Any] = field(default_factory=dict)
    socket_options: Mapping[str, Any] = field(default_factory=dict)

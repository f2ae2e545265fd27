"""One connection of ASGI, a request or a websocket, as its middleware sees it.

The middleware reads ahead of the application, as this is the only way to learn that the
client has left.  It holds the messages within a limit; at the limit it reads no
further, and learns that the client has left only after the application has read.

When the client leaves, the application is cancelled, with two exceptions: once its
response is complete, it does its own work; and the application of a websocket that
waits for a message gets the disconnect message instead.

Source: the ASGI specification 3.0, "HTTP & WebSocket ASGI Message Format", and its
extensions "Zero Copy Send" and "Path Send":
https://asgi.readthedocs.io/en/latest/specs/.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final, TypeAlias

from asyncrpc.core.arguments import wrong
from asyncrpc.core.state_table import StateTable
from asyncrpc.serving.machine.error_answers import NORMAL_CLOSURE

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


READ_AHEAD_BYTES_MAX: Final = 64 << 10  # as much of a body as uvicorn buffers
READ_AHEAD_MESSAGES_MAX: Final = 16
_SWITCHING_PROTOCOLS: Final = 101
_FORBIDDEN: Final = 403
_NO_CODE: Final = 1005  # ASGI's: the client has sent no code


class AsgiState(enum.Enum):
    """How far the answer to a connection is."""

    WAITING = "nothing has been answered"
    ACCEPTED = "the websocket is accepted"
    ANSWERING = "a response has begun"
    ANSWERED = "the response is complete, or the websocket closed"
    LEFT = "the client has left before that"


class AsgiStep(enum.Enum):
    """What changes the state."""

    ACCEPT = "the application accepts the websocket"
    BEGIN = "the application begins a response"
    END = "the application ends the response, or closes the websocket"
    LEAVE = "the client leaves"


_S, _E = AsgiState, AsgiStep

TRANSITIONS: Final = StateTable(
    "a connection",
    {
        _S.WAITING: {
            _E.ACCEPT: _S.ACCEPTED,
            _E.BEGIN: _S.ANSWERING,
            _E.END: _S.ANSWERED,
            _E.LEAVE: _S.LEFT,
        },
        _S.ACCEPTED: {_E.END: _S.ANSWERED, _E.LEAVE: _S.LEFT},
        _S.ANSWERING: {_E.END: _S.ANSWERED, _E.LEAVE: _S.LEFT},
        _S.ANSWERED: {},
        _S.LEFT: {},
    },
    late=AsgiStep,
)

_STEPS: Final[Mapping[str, AsgiStep]] = {
    "websocket.accept": _E.ACCEPT,
    "websocket.close": _E.END,
    "http.response.start": _E.BEGIN,
    "websocket.http.response.start": _E.BEGIN,
    "http.response.pathsend": _E.END,
}
_BODIES: Final = (
    "http.response.body",
    "http.response.zerocopysend",
    "websocket.http.response.body",
)
_LEAVINGS: Final = ("http.disconnect", "websocket.disconnect")


class AsgiConnection:
    """The messages of a connection, and how far its answer is.

    Attributes:
        status: of the response; None: no response has begun.  For a websocket, as its
            client sees it: 101 if accepted, 403 if closed before that.
        close_code: the code with which a websocket was closed, by the application or
            its client; None: it has not been closed.
    """

    def __init__(self, scope: Mapping[str, Any]) -> None:
        self.is_websocket = scope["type"] == "websocket"
        self.state = AsgiState.WAITING
        self.status: int | None = None
        self.close_code: int | None = None
        self._messages: deque[AsgiMessage] = deque()
        self._leaving: AsgiMessage | None = None
        self._bytes = 0
        self._readers = 0
        # Reading the body of such a request makes the client send it: this is left to
        # the application.
        self._is_asked_for = not _expects_continue(scope)

    @property
    def has_left(self) -> bool:
        """Whether the client has left before the answer was complete."""
        return self.state is AsgiState.LEFT

    def advance(self, step: AsgiStep) -> None:
        """Go to the next state."""
        self.state = TRANSITIONS.after(self.state, step)

    # --- from the client -------------------------------------------------------------

    @property
    def may_read(self) -> bool:
        """Whether another message may be read now."""
        if self._leaving is not None or not self._is_asked_for:
            return False
        return (
            self._bytes < READ_AHEAD_BYTES_MAX
            and len(self._messages) < READ_AHEAD_MESSAGES_MAX
        )

    def received(self, message: AsgiMessage) -> bool:
        """Take a message; return whether the application must be cancelled."""
        if message["type"] not in _LEAVINGS:
            self._messages.append(message)
            self._bytes += _bytes_of(message)
            return False
        self._leaving = message
        if self.is_websocket and self.close_code is None:
            self.close_code = message.get("code", _NO_CODE)
        self.advance(AsgiStep.LEAVE)
        is_told = self.is_websocket and self._readers > 0
        return self.has_left and not is_told

    # --- to the application ----------------------------------------------------------

    def asks(self) -> bool:
        """Note that the application waits; return whether reading begins by this."""
        self._readers += 1
        was_asked_for, self._is_asked_for = self._is_asked_for, True
        return not was_asked_for

    def asks_no_more(self) -> None:
        """Note that the application has its message, or was cancelled."""
        self._readers -= 1

    def take(self) -> AsgiMessage | None:
        """Return the next message; None: it has not arrived yet.

        The disconnect message is the last one, and is returned again and again.
        """
        if not self._messages:
            return self._leaving
        message = self._messages.popleft()
        self._bytes -= _bytes_of(message)
        return message

    # --- from the application --------------------------------------------------------

    def sends(self, message: Mapping[str, Any]) -> None:
        """Note that the application is about to send a message."""
        kind = message["type"]
        if kind in _STEPS:
            self.advance(_STEPS[kind])
        elif kind in _BODIES and not message.get("more_body", False):
            self.advance(AsgiStep.END)
        if kind.endswith("http.response.start"):
            self.status = message["status"]
        elif kind == "websocket.accept":
            self.status = _SWITCHING_PROTOCOLS
        elif kind == "websocket.close":
            if self.status is None:
                self.status = _FORBIDDEN
            if self.close_code is None:
                self.close_code = message.get("code", NORMAL_CLOSURE)


def _bytes_of(message: Mapping[str, Any]) -> int:
    content = message.get("body") or message.get("bytes") or message.get("text") or b""
    return len(content)


def _expects_continue(scope: Mapping[str, Any]) -> bool:
    return any(
        name == b"expect" and value.lower() == b"100-continue"
        for name, value in scope["headers"]
    )

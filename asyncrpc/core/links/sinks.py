"""What takes the messages of a connection before it has a link, and after.

First comes the peer's HELLO, and nothing else; what comes to a connection that is being
closed is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from asyncrpc.core.wire.frames import FrameKind, Hello
from asyncrpc.errors import MalformedError


class HelloSink:
    """Takes the peer's HELLO: until it is in, nothing else is allowed."""

    __slots__ = ("_has_come", "_on_hello")

    def __init__(self, on_hello: Callable[[Hello], None]) -> None:
        self._on_hello = on_hello
        self._has_come = False

    def on_message(self, kind: int, *rest: Any) -> None:
        """Take the HELLO."""
        if kind != FrameKind.HELLO or self._has_come:
            raise MalformedError(f"a {FrameKind(kind).name} came before the HELLO")
        *_, control, _buffers = rest
        hello = Hello.decode(control)
        self._has_come = True
        self._on_hello(hello)

    def on_transfer_dropped(self, kind: int, call_id: int) -> None:
        """Refuse it: no transfer can have begun before the HELLO."""
        raise MalformedError(f"a DROP of {kind} {call_id} came before the HELLO")


class Silent:
    """The sink of a connection that is being closed."""

    def on_message(self, *_message: Any) -> None:
        """Drop it."""

    def on_transfer_dropped(self, kind: int, call_id: int) -> None:
        """Drop it."""


SILENT: Final = Silent()

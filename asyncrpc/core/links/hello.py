"""The first frame of a connection: the peer's HELLO."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncrpc.core.wire.frames import FrameKind
from asyncrpc.core.wire.messages import Hello
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

"""The ways of one connection's large messages, and how to give a message up.

A message that must not be sent yet waits here; each way keeps those that it has taken.
So a message is in one place at a time, and giving it up means asking each in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from asyncrpc.runtime.calls.deferred import DeferredMessage
from asyncrpc.runtime.payloads.lanes import Lanes
from asyncrpc.wire.frames import INLINE_BYTES_MAX, Outgoing


class PayloadRoute(Protocol):
    """A way for large payloads."""

    def send(self, message: Outgoing) -> bool:
        """Take a message and its payload over, or refuse.

        Returns:
            False if another way must be tried; then nothing was done.
        """

    def drop(self, kind: int, call_id: int) -> bool:
        """Give up a message taken over and not sent; return whether there was one."""

    def clear(self) -> None:
        """The connection has ended: forget what was to be sent."""


class PayloadRoutes:
    """The ways of one connection.

    Attributes:
        mover: takes payloads through shared memory, if there is any.
        lanes: take those that it leaves, once they have been prepared.
        in_band: takes the rest, over the connection itself.
    """

    def __init__(self, in_band: PayloadRoute, send: Callable[[Outgoing], None]) -> None:
        """Begin with one way.

        Args:
            in_band: takes every payload.
            send: sends a message that has been held back, by any way.
        """
        self.mover: PayloadRoute | None = None
        self.lanes: Lanes | None = None
        self.in_band = in_band
        self._send = send
        self._held: list[DeferredMessage] = []

    def send(self, message: Outgoing, payload_bytes: int) -> None:
        """Send a message by the first way that takes it."""
        if self.mover is not None and self.mover.send(message):
            return
        is_large = payload_bytes > INLINE_BYTES_MAX
        if is_large and self.lanes is not None and self.lanes.send(message):
            return
        self.in_band.send(message)

    def hold(self, held: DeferredMessage, message: Outgoing) -> None:
        """Keep a message until what it refers to is at the peer; others pass it by."""

        def send() -> None:
            self._held.remove(held)
            self._send(message._replace(buffers=list(held)))

        held.hold((message.kind, message.call_id), send, message.on_sent)
        self._held.append(held)

    def drop(self, kind: int, call_id: int) -> bool:
        """Give up a message that has not left whole; return whether there was one."""
        if self._held and self._drop_held((kind, call_id)):
            return True
        ways = (self.mover, self.lanes, self.in_band)
        return any(way is not None and way.drop(kind, call_id) for way in ways)

    def _drop_held(self, key: tuple[int, int]) -> bool:
        dropped = [held for held in self._held if held.key == key]
        self._held = [held for held in self._held if held.key != key]
        for held in dropped:
            held.give_up()
        return bool(dropped)

    def clear(self) -> None:
        """The connection has ended: forget what was to be sent."""
        self.in_band.clear()
        held_back, self._held = self._held, []
        for held in held_back:
            held.give_up()
        for way in (self.mover, self.lanes):
            if way is not None:
                way.clear()

"""Messages held back until the peer has what they refer to, or their bytes came."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from asyncrpc.errors import AsyncRpcError, CallError
from asyncrpc.runtime.calls.futures import CallFuture
from asyncrpc.serde import describe_exception
from asyncrpc.wire.frames import FrameKind

if TYPE_CHECKING:
    from asyncrpc.runtime.links.link import Link
    from asyncrpc.serde import Encoded


class HeldBack(list[memoryview]):
    """The buffers of a message that must not be sent yet.

    `Connection.send` takes it for a list of buffers that says when.

    Attributes:
        key: kind and call of the message, once it has been given to a connection.
        is_released: whether it may be sent.
    """

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        super().__init__(buffers)
        self.key = (0, 0)
        self.is_released = False
        self._reasons = 1
        self._send: Callable[[], None] | None = None
        self._on_sent: Callable[[], None] | None = None

    def hold(
        self,
        key: tuple[int, int],
        send: Callable[[], None],
        on_sent: Callable[[], None] | None,
    ) -> None:
        """Keep a message.

        Args:
            key: its kind and call.
            send: sends it.
            on_sent: called if it is given up.
        """
        self.key, self._send, self._on_sent = key, send, on_sent

    def hold_again(self) -> None:
        """Keep it for one more reason: `release` is to be called once more."""
        self._reasons += 1

    def release(self) -> None:
        """Send it if nothing else holds it, unless it has been given up."""
        self._reasons -= 1
        if self._reasons:
            return
        self.is_released = True
        send, self._send = self._send, None
        if send is not None:
            send()

    def give_up(self) -> bool:
        """Do not send it; say whether it would have been."""
        was_held, self._send = self._send is not None, None
        if was_held and self._on_sent is not None:
            self._on_sent()
        return was_held


def hold(encoded: Encoded) -> HeldBack:
    """Have a message held back, for one more reason if it is already."""
    buffers = encoded.buffers
    if isinstance(buffers, HeldBack):
        buffers.hold_again()
        return buffers
    held = encoded.buffers = HeldBack(buffers)
    return held


def fail_held(link: Link, held: HeldBack, error: AsyncRpcError) -> None:
    """Give up a message that can never be sent, and tell whoever waits for it."""
    kind, call_id = held.key
    if link.connection.drop(kind, call_id):  # unless the caller has given it up
        _return_credit(link, kind, call_id)
        _fail(link, held.key, error)
    elif kind == FrameKind.REQUEST and link.credit.withdraw(call_id):
        _fail(link, held.key, error)


def _return_credit(link: Link, kind: int, call_id: int) -> None:
    """Nothing of a message will be sent: give back the credit that it has taken."""
    call = link.pending.get(call_id) if kind == FrameKind.REQUEST else None
    if call is not None and call.request_bytes:
        link.return_credit(call)


def _fail(link: Link, key: tuple[int, int], error: AsyncRpcError) -> None:
    """Tell whoever waits for a message, or for its answer, that it was not sent."""
    kind, call_id = key
    if kind not in (FrameKind.REQUEST, FrameKind.SERVICE):
        inbound = link.served.get(call_id)
        if inbound is not None:  # a stream: it cannot go on without this item
            inbound.cancel()
        tree = describe_exception(
            error, link.codec, worker=link.worker.name, pid=link.worker.pid
        )
        control = link.codec.encode(tree).control
        link.connection.send(FrameKind.ERROR, call_id, control=control)
        return
    call = link.pending.get(call_id)
    if call is None:  # given up meanwhile
        return
    link.pending.take(call_id)
    call.settle()
    if call.pins is not None:
        call.pins.undo()
    if isinstance(error, CallError):
        error.to = link.peer.name
    if isinstance(call, CallFuture):
        if isinstance(error, CallError):
            error.function = call.function
        call.fail(error)
    else:
        call.on_error(error, 0)

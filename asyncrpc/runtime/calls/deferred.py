"""Messages that wait: until the peer has their memory, or until their bytes are ready.

A deferred message has been encoded and given to its connection, which keeps it until
nothing more is awaited.  If that cannot come, the call or the caller of the message
gets an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from asyncrpc.errors import AsyncRpcError, CallError
from asyncrpc.runtime.calls.error_encoder import ErrorEncoder
from asyncrpc.runtime.calls.futures import CallFuture
from asyncrpc.runtime.calls.machine.calls import PendingCalls, ServedCalls
from asyncrpc.runtime.ports import MessageSender
from asyncrpc.serde import Encoded
from asyncrpc.wire.frames import FrameKind

OnFailed = Callable[["DeferredMessage", AsyncRpcError], None]


class DeferredMessage(list[memoryview]):
    """The buffers of a message that must not be sent yet.

    `Connection.send` takes it for a list of buffers that says when.

    Attributes:
        key: kind and call of the message, once it has been given to a connection.
        is_released: whether it may be sent.
    """

    def __init__(
        self, buffers: Sequence[memoryview], on_failed: OnFailed | None = None
    ) -> None:
        super().__init__(buffers)
        self.key = (0, 0)
        self.is_released = False
        self._awaited = 1
        self._send: Callable[[], None] | None = None
        self._on_sent: Callable[[], None] | None = None
        self._on_failed = on_failed

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

    def add_dependency(self) -> None:
        """Wait for one more thing: `release` must be called once more."""
        self._awaited += 1

    def release(self) -> None:
        """Send it if nothing else is awaited, unless it has been given up."""
        self._awaited -= 1
        if self._awaited:
            return
        self.is_released = True
        send, self._send = self._send, None
        if send is not None:
            send()

    def on_filled(self, error: AsyncRpcError | None) -> None:
        """Its bytes have left their devices, or cannot: None is no error."""
        if error is None:
            self.release()
        else:
            self.fail(error)

    def fail(self, error: AsyncRpcError) -> None:
        """Give up: something that it waits for cannot come; fail its call."""
        if self._on_failed is not None:
            self._on_failed(self, error)

    def give_up(self) -> bool:
        """Do not send it; return whether it would have been."""
        was_held, self._send = self._send is not None, None
        if was_held and self._on_sent is not None:
            self._on_sent()
        return was_held


class DropsMessages(MessageSender, Protocol):
    """A connection, as far as deferred messages go."""

    def drop(self, kind: int, call_id: int) -> bool:
        """Give up a message that waits or is on its way; return whether it was."""


class Call(Protocol):
    """A call of ours that can fail before it is sent.

    Attributes:
        call_id: of the call.
        request_bytes: the part of the peer's credit that it has spent.
        function: the called function.
        pins: of the request.
    """

    call_id: int
    request_bytes: int
    function: str
    pins: Any

    def settle(self) -> None:
        """Let go of what was kept for the call in flight."""

    def fail(self, error: BaseException) -> None:
        """Fail with an error."""


class Served(Protocol):
    """A call of the peer, as far as a failing answer concerns it."""

    def cancel(self) -> None:
        """Cancel it."""


class WithdrawsRequests(Protocol):
    """Large requests that wait for the peer's credit."""

    def withdraw(self, call_id: int) -> bool:
        """Do not send a request that waits; return whether there was one."""


class DeferredMessages:
    """The messages of one link that wait: made here, and failed here."""

    def __init__(
        self,
        *,
        to: str,
        connection: DropsMessages,
        pending: PendingCalls[Any],
        served: ServedCalls[Any],
        credit: WithdrawsRequests,
        errors: ErrorEncoder,
    ) -> None:
        """Join the parts that hold messages.

        Args:
            to: name of the peer.
            connection: keeps messages that wait.
            pending: calls of ours: each a `Call`.
            served: calls of the peer: each a `Served`.
            credit: keeps requests that wait for credit as well.
            errors: encodes errors for the peer.
        """
        self._to = to
        self._connection = connection
        self._pending: PendingCalls[Call] = pending
        self._served: ServedCalls[Served] = served
        self._credit = credit
        self._errors = errors

    def defer(self, encoded: Encoded) -> DeferredMessage:
        """Make a message wait for one more thing, and return it."""
        buffers = encoded.buffers
        if isinstance(buffers, DeferredMessage):
            buffers.add_dependency()
            return buffers
        message = encoded.buffers = DeferredMessage(buffers, self._fail)
        return message

    def _fail(self, message: DeferredMessage, error: AsyncRpcError) -> None:
        """Give up a message that can never be sent, and fail its call."""
        kind, call_id = message.key
        if self._connection.drop(kind, call_id):  # unless the caller has given it up
            if kind == FrameKind.REQUEST:
                self._return_credit(call_id)
            self._tell(kind, call_id, error)
        elif kind == FrameKind.REQUEST and self._credit.withdraw(call_id):
            self._tell(kind, call_id, error)

    def _return_credit(self, call_id: int) -> None:
        """Give back the credit of a request of which nothing was sent."""
        call = self._pending.get(call_id)
        if call is not None and call.request_bytes:
            self._connection.send(FrameKind.CANCEL, call_id, aux=call.request_bytes)

    def _tell(self, kind: int, call_id: int, error: AsyncRpcError) -> None:
        """Fail the call of a message that was not sent, here or at the peer."""
        if kind not in (FrameKind.REQUEST, FrameKind.SERVICE):
            served = self._served.get(call_id)
            if served is not None:  # a stream: it cannot go on without this item
                served.cancel()
            control = self._errors.in_words(error)
            self._connection.send(FrameKind.ERROR, call_id, control=control)
            return
        call = self._pending.get(call_id)
        if call is None:  # given up meanwhile
            return
        self._pending.take(call_id)
        call.settle()
        if call.pins is not None:
            call.pins.undo()
        if isinstance(error, CallError):
            error.to = self._to
            if isinstance(call, CallFuture):
                error.function = call.function
        call.fail(error)

"""Buffers that are not ready: the peer lacks their memory, or they have no bytes yet.

A message with such buffers has been encoded and given to its connection, which keeps it
until nothing more is awaited.  If what is awaited cannot come, the call or the caller
of the message gets an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from asyncrpc.core.calls.error_encoder import ErrorEncoder
from asyncrpc.core.calls.futures import CallFuture
from asyncrpc.core.calls.machine.calls import PendingCalls, ServedCalls
from asyncrpc.core.calls.streams import StreamReceiver
from asyncrpc.core.serde import Encoded
from asyncrpc.core.trace.events import outcome_of
from asyncrpc.core.wire.frames import FrameKind
from asyncrpc.core.wire.outgoing import OutgoingMessage, OutgoingState
from asyncrpc.errors import AsyncRpcError, CallError

if TYPE_CHECKING:
    from asyncrpc.core.calls.outbound import CallEnds
    from asyncrpc.core.calls.ports import CallConnection

OnFailed = Callable[["PendingBuffers", AsyncRpcError], None]


class PendingBuffers(list[memoryview]):
    """The buffers of a message that must not be sent yet.

    Attributes:
        message: the message that the buffers belong to, once it waits.
        are_ready: whether it may be sent.
    """

    def __init__(
        self, buffers: Sequence[memoryview], on_failed: OnFailed | None = None
    ) -> None:
        super().__init__(buffers)
        self.message: OutgoingMessage | None = None
        self.are_ready = False
        self._awaited = 1
        self._submit: Callable[[OutgoingMessage], None] | None = None
        self._on_failed = on_failed

    def then(
        self, message: OutgoingMessage, submit: Callable[[OutgoingMessage], None]
    ) -> None:
        """Call `submit` with their message once they are ready."""
        self.message, self._submit = message, submit

    def forget(self) -> None:
        """Do not submit their message: it is given up."""
        self._submit = None

    def add_dependency(self) -> None:
        """Wait for one more thing: `release` must be called once more."""
        self._awaited += 1

    def release(self) -> None:
        """Submit the message if nothing else is awaited."""
        self._awaited -= 1
        if self._awaited:
            return
        self.are_ready = True
        submit, self._submit = self._submit, None
        if submit is not None and self.message is not None:
            submit(self.message)

    def on_filled(self, error: AsyncRpcError | None) -> None:
        """Note that the bytes have left their devices, or fail with `error`."""
        if error is None:
            self.release()
        else:
            self.fail(error)

    def fail(self, error: AsyncRpcError) -> None:
        """Give up, since something awaited cannot come, and fail the call."""
        if self._on_failed is not None:
            self._on_failed(self, error)


class DeferredMessages:
    """The messages of one link that wait: made here, and failed here."""

    def __init__(
        self,
        *,
        to: str,
        connection: CallConnection,
        pending: PendingCalls[CallFuture[Any] | StreamReceiver],
        served: ServedCalls[Any],
        errors: ErrorEncoder,
        ends: CallEnds,
    ) -> None:
        self._to = to
        self._connection = connection
        self._pending = pending
        self._served = served
        self._errors = errors
        self._ends = ends

    def defer(self, encoded: Encoded) -> PendingBuffers:
        """Make a message wait for one more thing, and return its buffers."""
        buffers = encoded.buffers
        if isinstance(buffers, PendingBuffers):
            buffers.add_dependency()
            return buffers
        pending = encoded.buffers = PendingBuffers(buffers, self._fail)
        return pending

    def _fail(self, buffers: PendingBuffers, error: AsyncRpcError) -> None:
        """Give up a message that can never be sent, and fail its call."""
        message = buffers.message
        if message is None:
            return
        kind, call_id = message.kind, message.call_id
        waited_for = self._connection.drop(kind, call_id)
        if waited_for is None:  # the caller has given it up
            return
        if kind == FrameKind.REQUEST and waited_for is not OutgoingState.NO_CREDIT:
            self._return_credit(call_id)
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
        self._ends.note_given_up(call, outcome_of(error))
        call.fail(error)

"""The answers to the calls of one link: results, errors, items of streams.

Everything here runs on the event loop, and nothing waits.
"""

from __future__ import annotations

import logging
from typing import Any, Final, Protocol

from asyncrpc.errors import (
    AsyncRpcError,
    CallError,
    MalformedError,
    Outcome,
    RemoteProtocolError,
)
from asyncrpc.ids import WorkerId
from asyncrpc.runtime.calls.ends import CallEnds
from asyncrpc.runtime.calls.futures import CallFuture, CallLink
from asyncrpc.runtime.calls.machine.calls import PendingCalls
from asyncrpc.runtime.calls.message_codec import (
    NO_META,
    MessageCodec,
    answer_meta,
    unreadable,
)
from asyncrpc.runtime.calls.streams import StreamReceiver, item_bytes
from asyncrpc.runtime.extensions import NOTE, References
from asyncrpc.runtime.schema import kind_of
from asyncrpc.serde import Codec, FunctionTable, rebuild_exception
from asyncrpc.trace import OK, outcome_of
from asyncrpc.wire.frames import Frame, FrameKind
from asyncrpc.wire.messages import Meta, unpack_head

logger = logging.getLogger("asyncrpc")

_TOKENS: Final = kind_of(list[int])
_ARRIVING_MAX: Final = 1 << 12


class AnswerHost(Protocol):
    """The parts of a worker that read answers.

    Attributes:
        codec: of all its values.
        functions: classes of exceptions that may be rebuilt.
        references: take back the loans of requests; None if there are none.
    """

    codec: Codec
    functions: FunctionTable
    references: References | None


class CountsReceived(Protocol):
    """A connection, as far as the message at hand goes."""

    @property
    def message_bytes_copied(self) -> int:
        """Return how many bytes of the current message were copied on arrival."""


def _unreadable_answer(
    raised: BaseException, call: CallFuture[Any] | StreamReceiver
) -> AsyncRpcError:
    """Return the error about an answer that cannot be read: the function has run."""
    error = unreadable(raised)
    if isinstance(error, CallError):
        error.function, error.to = call.function, call.to
        error.outcome = Outcome.EXECUTED
    return error


class AnswerReceiver:
    """Takes what the peer answers."""

    def __init__(
        self,
        peer: WorkerId,
        host: AnswerHost,
        *,
        connection: CountsReceived,
        pending: PendingCalls[CallFuture[Any] | StreamReceiver],
        messages: MessageCodec,
        calls: CallLink,
        ends: CallEnds,
    ) -> None:
        """Take answers.

        Args:
            peer: the peer that answers.
            host: the worker that called.
            connection: the connection that answers come over.
            pending: the calls that wait for an answer.
            messages: decodes results.
            calls: gives up a stream that cannot be read on.
            ends: notes how calls end.
        """
        self._peer = peer
        self._functions = host.functions
        self._references = host.references
        self._connection = connection
        self._pending = pending
        self._messages = messages
        self._calls = calls
        self._ends = ends
        self._note = ends.note
        # Used for every answer.
        self._decode = messages.decode
        self._take_over = messages.take_over
        self._get, self._end = pending.get, pending.end
        self._arriving: set[int] = set()  # calls whose answers arrive

    def is_wanted(self, kind: int, call_id: int, nbytes: int) -> bool:
        """Return whether the payload of an answer is wanted that begins to arrive.

        Raises:
            MalformedError: the call was never made, has another answer that arrives, or
                is a stream whose producer runs too far ahead.
        """
        self._pending.check(call_id)
        call = self._get(call_id)
        if call is None:
            return False
        if kind == FrameKind.STREAM_ITEM:
            if isinstance(call, StreamReceiver):
                call.on_item_begun(nbytes)
            return isinstance(call, StreamReceiver)
        if call_id in self._arriving:
            raise MalformedError(f"call {call_id} is answered twice")
        if len(self._arriving) > _ARRIVING_MAX:  # some have been given up
            self._arriving &= self._pending.calls.keys()
        self._arriving.add(call_id)
        return True

    def on_response(
        self,
        _flags: int,
        call_id: int,
        _aux: int,
        head: bytes,
        control: bytes,
        buffers: list[memoryview],
    ) -> None:
        """Take the result of a call.

        Raises:
            MalformedError: the answer does not belong to a call of this kind.
        """
        meta = answer_meta(head) if head else NO_META
        call = self._get(call_id)
        if not isinstance(call, CallFuture):
            self._refuse_kind(call, call_id)
            self._discard(control, buffers, meta)
            return
        self._end(call_id)
        call.settle()
        if call.pins is not None:
            call.pins = None
        if meta:
            call.note = meta.get(NOTE)
            self._take_back(meta)
        if buffers:
            stats = call.stats
            stats.bytes_copied += self._connection.message_bytes_copied
            for buffer in buffers:
                stats.bytes_received += buffer.nbytes
        try:
            value, loans = self._decode(control, buffers, meta)
        except BaseException as raised:  # noqa: BLE001  (a value's own code may run)
            error = _unreadable_answer(raised, call)
            self._note(call, outcome_of(error))
            call.fail(error)
            return
        self._note(call, OK)
        if call.destination is None:
            call.succeed(value)
        else:
            call.destination.deliver(call, value, buffers)
        self._take_over(loans)

    def on_error(
        self,
        _flags: int,
        call_id: int,
        aux: int,
        head: bytes,
        control: bytes,
        buffers: list[memoryview],
    ) -> None:
        """Take the error of a call or a stream.

        Raises:
            MalformedError: the call was never made, or the number of items is negative.
        """
        call = self._pending.get(call_id)
        meta = answer_meta(head)
        if aux < 0:
            raise MalformedError(f"an error must follow at least 0 items, not {aux}")
        if call is None:
            self._pending.take(call_id)  # refuses an answer that the peer made up
            self._discard(control, buffers, meta)
            return
        call.settle()
        call.note = meta.get(NOTE)
        self._release_pins(call, meta)
        try:
            tree = self._messages.decode_error(control, buffers)
            error: AsyncRpcError = rebuild_exception(
                tree, self._functions, function=call.function, to=call.to
            )
        except BaseException as raised:  # noqa: BLE001  (a value's own code may run)
            error = _unreadable_answer(raised, call)
        if isinstance(error, CallError):
            said = str(meta.get("o", ""))
            error.outcome = Outcome.__members__.get(said, error.outcome)
        if isinstance(call, CallFuture):
            self._pending.take(call_id)
            self._note(call, outcome_of(error))
            call.fail(error)
        else:
            call.on_error(error, aux)
            self._end_if_whole(call)

    def on_stream_item(
        self,
        _flags: int,
        call_id: int,
        _aux: int,
        head: bytes,
        control: bytes,
        buffers: list[memoryview],
    ) -> None:
        """Take one item of a stream.

        Raises:
            MalformedError: the item does not belong to a stream, or its number is not
                new.
        """
        stream = self._pending.get(call_id)
        if not isinstance(stream, StreamReceiver):
            self._refuse_kind(stream, call_id)
            self._messages.give_back(control, buffers)  # the consumer has gone
            return
        record = unpack_head(head)
        meta = record[1] if len(record) > 1 and record[1] else NO_META
        serial = record[0] if record and type(record[0]) is int else -1
        if serial < 0 or stream.has(serial):
            raise MalformedError(
                f"an item of a stream must have a new number, not {serial}"
            )
        nbytes = item_bytes(control, buffers)
        stream.check_ahead()
        try:
            value, loans = self._decode(control, buffers, meta)
        except BaseException as raised:  # noqa: BLE001  (a value's own code may run)
            stream.on_error(_unreadable_answer(raised, stream), 0)
            self._calls.cancel(stream)
            return
        if NOTE in meta:
            stream.note = meta[NOTE]
        stream.on_item(serial, value, nbytes)
        self._end_if_whole(stream)
        self._take_over(loans)

    def on_stream_end(self, frame: Frame) -> None:
        """Take the end of a stream, with its number of items.

        Raises:
            MalformedError: the end does not belong to a stream, or counts fewer
                items than have arrived.
        """
        stream = self._pending.get(frame.call_id)
        if not isinstance(stream, StreamReceiver):
            self._refuse_kind(stream, frame.call_id)
            self._take_back(answer_meta(frame.head))
            return
        self._check_count(stream, frame.aux)
        meta = answer_meta(frame.head)
        stream.note = meta.get(NOTE, stream.note)
        self._release_pins(stream, meta)
        stream.on_end(frame.aux)
        self._end_if_whole(stream)

    def _refuse_kind(self, call: object, call_id: int) -> None:
        """Refuse an answer that its call cannot have; a call given up may have any.

        Raises:
            MalformedError: the call was never made, or is of another kind.
        """
        self._pending.check(call_id)
        if call is not None:
            raise MalformedError(f"call {call_id} is answered as another kind of call")

    def _check_count(self, stream: StreamReceiver, items: int) -> None:
        """Refuse the end of a stream that counts fewer items than have come.

        Raises:
            MalformedError: the stream ended after fewer items than have arrived.
        """
        if items < stream.received:
            raise MalformedError(
                f"a stream ends after {items} items, but {stream.received} have come"
            )

    def _end_if_whole(self, stream: StreamReceiver) -> None:
        """Forget a stream once its end and all items are here: the end may overtake."""
        if stream.is_whole:
            self._pending.take(stream.call_id)
            self._ends.note_stream(stream, outcome_of(stream.error))

    def _release_pins(self, call: CallFuture[Any] | StreamReceiver, meta: Meta) -> None:
        """Release the pins of a request, which has been answered."""
        call.pins = None
        self._take_back(meta)

    def _take_back(self, meta: Meta) -> None:
        """Take back the loans of a request; a bad loan does not spoil the answer."""
        references = self._references
        if references is None or "l" not in meta:
            return
        try:
            tokens = _TOKENS.read_as("the loans that an answer returns", meta["l"])
            references.take_back(self._peer.incarnation, tokens)
        except RemoteProtocolError as error:
            logger.warning("from worker %r: %s", self._peer.name, error)

    def _discard(self, control: bytes, buffers: list[memoryview], meta: Meta) -> None:
        """Discard an answer whose caller has gone: give back its loans."""
        self._take_back(meta)
        self._messages.give_back(control, buffers)

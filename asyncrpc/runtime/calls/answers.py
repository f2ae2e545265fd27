"""The answers to a link's calls: results, errors, items of streams.

Everything here runs on the event loop, and nothing waits.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from asyncrpc.errors import (
    AsyncRpcError,
    CallError,
    MalformedError,
    Outcome,
    RemoteProtocolError,
    WorkerLostError,
)
from asyncrpc.runtime.calls import streams
from asyncrpc.runtime.calls.futures import CallFuture
from asyncrpc.runtime.forms import ID, Form, each
from asyncrpc.runtime.links.core import NO_META, LinkCore, unreadable
from asyncrpc.serde import rebuild_exception
from asyncrpc.wire.messages import Meta, unpack_head

logger = logging.getLogger("asyncrpc")

_TOKENS: Final[Form] = each(ID)


def _unreadable_answer(
    raised: BaseException, call: CallFuture[Any] | streams.Inflow
) -> AsyncRpcError:
    """Return the error about an answer that cannot be read: the function has run."""
    error = unreadable(raised)
    if isinstance(error, CallError):
        error.function, error.to = call.function, call.to
        error.outcome = Outcome.EXECUTED
    return error


class Answers(LinkCore):
    """What the peer answers."""

    def _on_response(
        self,
        _flags: int,
        call_id: int,
        _aux: int,
        head: bytes,
        control: bytes,
        buffers: list[memoryview],
    ) -> None:
        meta = self._answer_meta(head)
        call = self.pending.get(call_id)
        if not isinstance(call, CallFuture):
            self._refuse_kind(call, call_id)
            self._discard(control, meta)
            return
        self.pending.take(call_id)
        call.settle()
        self._release_pins(call, meta)
        if buffers:
            stats = call.stats
            stats.bytes_copied += self.connection.message_bytes_copied
            for buffer in buffers:
                stats.bytes_received += buffer.nbytes
        try:
            value, loans = self._decode(control, buffers, meta)
        except BaseException as raised:  # noqa: BLE001  (a value's own code may run)
            error = _unreadable_answer(raised, call)
            call.fail(error)
            return
        if call.destination is None:
            call.succeed(value)
        else:
            call.destination.deliver(call, value, buffers)
        self._take_over(loans)

    def _on_error(
        self,
        _flags: int,
        call_id: int,
        aux: int,
        head: bytes,
        control: bytes,
        buffers: list[memoryview],
    ) -> None:
        call = self.pending.get(call_id)
        meta = self._answer_meta(head)
        if aux < 0:
            raise MalformedError(f"an error after {aux} items")
        if call is None:
            self.pending.take(call_id)  # refuses an answer that the peer made up
            self._discard(control, meta)
            return
        call.settle()
        self._release_pins(call, meta)
        try:
            tree = self.codec.decode(control, buffers)
            error: AsyncRpcError = rebuild_exception(
                tree, self.worker.functions, function=call.function, to=call.to
            )
        except BaseException as raised:  # noqa: BLE001  (a value's own code may run)
            error = _unreadable_answer(raised, call)
        if isinstance(error, CallError):
            said = str(meta.get("o", ""))
            error.outcome = Outcome.__members__.get(said, error.outcome)
        if isinstance(call, CallFuture):
            self.pending.take(call_id)
            call.fail(error)
        else:
            call.on_error(error, aux)
            self._end_if_whole(call)

    def _on_stream_item(
        self,
        _flags: int,
        call_id: int,
        _aux: int,
        head: bytes,
        control: bytes,
        buffers: list[memoryview],
    ) -> None:
        inflow = self.pending.get(call_id)
        if not isinstance(inflow, streams.Inflow):
            self._refuse_kind(inflow, call_id)
            self.give_back(control)  # nobody waits for it any more
            return
        record = unpack_head(head)
        meta = record[1] if len(record) > 1 and record[1] else NO_META
        serial = record[0] if record and type(record[0]) is int else -1
        if serial < 0 or inflow.has(serial):
            raise MalformedError(f"an item of a stream with the number {serial}")
        try:
            value, loans = self._decode(control, buffers, meta)
        except BaseException as raised:  # noqa: BLE001  (a value's own code may run)
            self.link.cancel(inflow)
            inflow.on_error(_unreadable_answer(raised, inflow), 0)
            return
        inflow.on_item(serial, value)
        self._end_if_whole(inflow)
        self._take_over(loans)

    def _on_stream_end(
        self, _flags: int, call_id: int, aux: int, head: bytes, *_rest: object
    ) -> None:
        inflow = self.pending.get(call_id)
        if not isinstance(inflow, streams.Inflow):
            self._refuse_kind(inflow, call_id)
            self._take_back(self._answer_meta(head))
            return
        self._check_count(inflow, aux)
        self._release_pins(inflow, self._answer_meta(head))
        inflow.on_end(aux)
        self._end_if_whole(inflow)

    def _refuse_kind(self, call: object, call_id: int) -> None:
        """Refuse an answer that its call cannot have; of one given up, anything.

        Raises:
            MalformedError: a call has one answer, a stream has items and an end.
        """
        self.pending.check(call_id)
        if call is not None:
            raise MalformedError(f"call {call_id} is answered as another kind of call")

    def _check_count(self, inflow: streams.Inflow, items: int) -> None:
        """Refuse the end of a stream that says less than what has come.

        Raises:
            MalformedError: it does.
        """
        if items < inflow.received:
            raise MalformedError(
                f"a stream of {items} items ends, of which {inflow.received} have come"
            )

    def _end_if_whole(self, inflow: streams.Inflow) -> None:
        """Forget a stream once its end and every item are in: the end may overtake."""
        if inflow.is_whole:
            self.pending.take(inflow.call_id)

    def _release_pins(self, call: CallFuture[Any] | streams.Inflow, meta: Meta) -> None:
        """The answer is here: the request need not be kept up any more."""
        call.pins = None
        self._take_back(meta)

    def _take_back(self, meta: Meta) -> None:
        """Take back the loans of a request; the answer is good if they are not."""
        references = self.worker.references
        if references is None or "l" not in meta:
            return
        try:
            _TOKENS("the loans that an answer returns", meta["l"])
            references.take_back(self.peer.incarnation, meta["l"])
        except RemoteProtocolError as error:
            logger.warning("from worker %r: %s", self.peer.name, error)

    def _discard(self, control: bytes, meta: Meta) -> None:
        """Take an answer nobody waits for: what it lends must be given back."""
        self._take_back(meta)
        self.give_back(control)

    def _lost_error(self, function: str, outcome: Outcome) -> WorkerLostError:
        return WorkerLostError(
            f"the worker is gone: {self.lost_because}",
            function=function,
            to=self.peer.name,
            outcome=outcome,
        )

"""The answers to a link's calls: results, errors, items of streams.

Everything here runs on the event loop, and nothing waits.
"""

from __future__ import annotations

from typing import Any

from asyncrpc.errors import (
    AsyncRpcError,
    CallError,
    MalformedError,
    Outcome,
    WorkerLostError,
)
from asyncrpc.runtime.calls import streams
from asyncrpc.runtime.calls.futures import CallFuture
from asyncrpc.runtime.links.core import NO_META, LinkCore, unreadable
from asyncrpc.serde import rebuild_exception
from asyncrpc.wire.messages import Meta, unpack_head


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
        call = self.pending.take(call_id)
        if not isinstance(call, CallFuture):
            self._discard(control, buffers, meta)
            return
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
        if call is None:
            self.pending.take(call_id)  # refuses an answer that the peer made up
            self._take_back(meta)
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
            error.outcome = Outcome.__members__.get(meta.get("o", ""), error.outcome)
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
            return
        record = unpack_head(head)
        meta = record[1] if len(record) > 1 and record[1] else NO_META
        serial = int(record[0]) if record and type(record[0]) is int else -1
        if serial < 0:
            raise MalformedError("an item of a stream without its number")
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
            self.pending.take(call_id)  # refuses an answer that the peer made up
            return
        self._release_pins(inflow, self._answer_meta(head))
        inflow.on_end(aux)
        self._end_if_whole(inflow)

    def _end_if_whole(self, inflow: streams.Inflow) -> None:
        """Forget a stream once its end and every item are in: the end may overtake."""
        if inflow.is_whole:
            self.pending.take(inflow.call_id)

    def _release_pins(self, call: CallFuture[Any] | streams.Inflow, meta: Meta) -> None:
        """The answer is here: the request need not be kept up any more."""
        if call.pins is not None:
            call.pins.release(list(meta.get("l", ())))
            call.pins = None

    def _take_back(self, meta: Meta) -> None:
        """Take back the loans of a request that has been given up meanwhile."""
        references = self.worker.references
        if references is not None and "l" in meta:
            references.take_back(self.peer.incarnation, meta["l"])

    def _discard(self, control: bytes, buffers: list[memoryview], meta: Meta) -> None:
        """Take an answer nobody waits for: what it lends must be given back."""
        self._take_back(meta)
        if self.worker.references is None:
            return
        try:
            value, loans = self._decode(control, buffers, meta)
        except Exception:  # noqa: BLE001  (nobody waits for it)
            return
        del value
        self._take_over(loans)

    def _lost_error(self, function: str, outcome: Outcome) -> WorkerLostError:
        return WorkerLostError(
            f"the worker is gone: {self.lost_because}",
            function=function,
            to=self.peer.name,
            outcome=outcome,
        )

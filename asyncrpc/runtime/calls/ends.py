"""How calls end, noted for the flight recorder: at the caller, and at the callee."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncrpc.errors import WorkerLostError
from asyncrpc.ids import WorkerId
from asyncrpc.runtime.calls.futures import CallFuture
from asyncrpc.runtime.calls.streams import StreamReceiver
from asyncrpc.trace import CANCELLED, FlightRecorder, outcome_of
from asyncrpc.trace.ring import plain

if TYPE_CHECKING:
    from asyncrpc.runtime.calls.inbound import InboundCall

_LOST = WorkerLostError.__name__


class CallEnds:
    """Notes how the calls of this worker to one peer end."""

    __slots__ = ("_calls", "_now_s", "_streams", "_to")

    def __init__(self, to: WorkerId, recorder: FlightRecorder) -> None:
        self._to = plain(to)
        self._now_s = recorder.now_s
        self._calls = recorder.calls
        self._streams = recorder.received

    def note(self, call: CallFuture[Any], outcome: str) -> None:
        """Record a call that has been answered."""
        moved = call.moved
        self._calls.record(
            (
                self._now_s(),
                call.began_s,
                self._to,
                call.function,
                call.call_id,
                outcome,
                0 if moved is None else moved.bytes_sent,
                0 if moved is None else moved.bytes_received,
                call.task,
            )
        )

    def note_stream(self, stream: StreamReceiver, outcome: str) -> None:
        """Record a stream that has ended."""
        self._streams.record(
            (
                self._now_s(),
                stream.began_s,
                self._to,
                stream.function,
                stream.call_id,
                outcome,
                stream.received,
                stream.task,
            )
        )

    def note_given_up(
        self, call: CallFuture[Any] | StreamReceiver, outcome: str = CANCELLED
    ) -> None:
        """Record a call that its caller gave up; a stream may have failed before."""
        if isinstance(call, StreamReceiver):
            failed = call.error
            self.note_stream(call, outcome if failed is None else outcome_of(failed))
        else:
            self.note(call, outcome)

    def note_lost(self, call: CallFuture[Any] | StreamReceiver) -> None:
        """Record a call whose peer is lost."""
        self.note_given_up(call, _LOST)

    def note_unsent(self, call: CallFuture[Any]) -> None:
        """Record a call that has ended, and was never sent."""
        self.note(call, CANCELLED if call.cancelled() else outcome_of(call.failure))


class ServedEnds:
    """Notes how the calls that one peer has made of this worker end."""

    __slots__ = ("_caller", "_now_s", "_served", "_streams")

    def __init__(self, caller: WorkerId, recorder: FlightRecorder) -> None:
        self._caller = plain(caller)
        self._now_s = recorder.now_s
        self._served = recorder.served
        self._streams = recorder.sent

    def note(self, inbound: InboundCall, outcome: str, items: int) -> None:
        """Record a call that was answered or given up; a stream, with its items."""
        target = inbound.target
        name = "" if target is None else target.name
        if inbound.credit is None:
            self._served.record(
                (
                    self._now_s(),
                    inbound.came_s,
                    inbound.began_s,
                    self._caller,
                    name,
                    inbound.call_id,
                    outcome,
                )
            )
        else:
            self._streams.record(
                (
                    self._now_s(),
                    inbound.came_s,
                    self._caller,
                    name,
                    inbound.call_id,
                    outcome,
                    items,
                )
            )

"""Answers that go out: results, errors, and the items of streams.

An `InboundCall` brings what its function returned, or raised.  Everything runs on the
event loop, and nothing waits.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

from asyncrpc.errors import (
    CallError,
    DeadlineExceededError,
    Outcome,
    RejectedError,
    RRefDeletedError,
)
from asyncrpc.runtime.calls.backlog import LARGE_BYTES, Backlog
from asyncrpc.runtime.calls.ends import ServedEnds
from asyncrpc.runtime.calls.error_encoder import ErrorEncoder, holds_device_tensor
from asyncrpc.runtime.calls.inbound import InboundCall
from asyncrpc.runtime.calls.machine.calls import ServedCalls
from asyncrpc.runtime.calls.message_codec import (
    CODEC,
    DeviceCopies,
    MessageCodec,
    unsendable,
)
from asyncrpc.runtime.calls.modes import Target
from asyncrpc.runtime.calls.preparation import PACK_HERE_BYTES_MAX
from asyncrpc.runtime.calls.streams import item_bytes
from asyncrpc.runtime.extensions import NOTE, Pins, References
from asyncrpc.runtime.ports import MessageSender, PeerLink, Pool
from asyncrpc.runtime.threads import ThreadPool
from asyncrpc.serde import Encoded, compression_for_answer
from asyncrpc.trace import CANCELLED, OK, FlightRecorder, outcome_of
from asyncrpc.wire.frames import FrameKind
from asyncrpc.wire.messages import pack_head

CANCELLED_AT_ONCE: Final = 256  # calls of a lost peer, of 20 us each

_RESPONSE: Final = int(FrameKind.RESPONSE)  # an enum's member takes 0.1 us to find


class CountsServed(Protocol):
    """Counts the calls that a worker serves.

    Attributes:
        active: how many there are now, by all links.
    """

    active: int

    def on_served(self) -> None:
        """Count a call as ended: it has been answered, or its caller has gone."""


class ResponderHost(Protocol):
    """The parts of a worker that answer calls.

    Attributes:
        name: of the worker.
        pool: threads that may touch devices.
        references: keep results that stay here; None if there are none.
        error_encoder: describes exceptions of functions.
        on_raised: called with exceptions of functions, if not None.
        note_of: returns what is told beside an answer; None: nothing is.
        recorder: keeps how calls end.
    """

    name: str
    pool: ThreadPool
    references: References | None
    error_encoder: ErrorEncoder
    on_raised: Callable[[BaseException], None] | None
    note_of: Callable[[Any], Any] | None
    recorder: FlightRecorder

    @property
    def host_pool(self) -> Pool:
        """Threads for work on host memory."""

    @property
    def devices(self) -> DeviceCopies:
        """The worker's devices."""

    @property
    def admission(self) -> CountsServed:
        """Counts the calls that are served."""


class Responder:
    """Sends the answers to the calls of one peer.

    Attributes:
        caller: name of the peer.
        backlog: what it has not taken.
    """

    def __init__(
        self,
        link: PeerLink,
        host: ResponderHost,
        *,
        connection: MessageSender,
        backlog: Backlog,
        served: ServedCalls[InboundCall],
        messages: MessageCodec,
    ) -> None:
        """Answer calls.

        Args:
            link: to the peer; references get it.
            host: the worker that answers.
            connection: carries answers.
            backlog: what the peer has not taken.
            served: calls that run here.
            messages: encodes results.
        """
        self._link = link
        self._host = host
        self._served = served
        self._messages = messages
        self._references = host.references
        self._errors = host.error_encoder
        self._ends = ServedEnds(link.peer, host.recorder)
        self.caller = link.peer.name
        self.backlog = backlog
        # Used for every answer.
        self._encode = messages.encode
        self._send = connection.send
        self._admission = host.admission
        self._on_served = host.admission.on_served

    def begin(self, inbound: InboundCall) -> None:
        """Record that a call is served from now on.

        Raises:
            MalformedError: the peer uses an id twice.
        """
        self._served.begin(inbound.call_id, inbound)
        self._admission.active += 1

    def on_lost(self) -> None:
        """The connection has ended: cancel what runs for the peer, in turns."""
        self.backlog.close()
        self._cancel_next(deque(self._served))

    def _cancel_next(self, calls: deque[InboundCall]) -> None:
        """Cancel some calls; each task that is cancelled runs in this turn, or next."""
        for _ in range(min(len(calls), CANCELLED_AT_ONCE)):
            inbound = calls.popleft()
            if self._served.get(inbound.call_id) is inbound:  # it goes on
                inbound.cancel()
        if calls:
            self._messages.call_soon(self._cancel_next, calls)

    def run_later(
        self,
        inbound: InboundCall,
        target: Target,
        args: list[Any],
        kwargs: dict[str, Any],
    ) -> None:
        """Run a call once its caller has taken earlier answers."""

        def begin() -> None:
            try:
                inbound.run(target, args, kwargs)
            except BaseException as error:  # noqa: BLE001  (the caller gets it)
                self.answer_error(inbound, error)

        self.backlog.hold(begin)

    def answer(self, inbound: InboundCall, value: Any) -> None:
        """Send a function's result, or keep it if it stays here."""
        if self._served.get(inbound.call_id) is not inbound:
            return  # cancelled, expired or lost meanwhile
        references = self._references
        if inbound.rref_id is not None and references is not None:
            references.fulfil(inbound.rref_id, value)
            value = None
        compression = None
        try:
            encode = self._encode_back(inbound)
            if CODEC in inbound.meta:
                compression = compression_for_answer(inbound.meta[CODEC])
                encode = functools.partial(encode, compression=compression)
            encoded, pins, meta = inbound.in_context(encode, value)
        except BaseException as error:  # noqa: BLE001  (the result's own code runs)
            self.answer_error(inbound, unsendable(error))
            return
        if compression is None:
            self._send_answer(inbound, _RESPONSE, encoded, meta, pins)
        else:
            self._pack_answer(inbound, encoded, meta, pins)

    def _encode_back(self, inbound: InboundCall) -> Callable[..., Any]:
        """Return what encodes a result, or an item, for the devices of its caller."""
        device_map = inbound.device_map_back if inbound.meta else None
        if device_map is None:
            return self._encode
        return functools.partial(self._encode, device_map=device_map)

    def _pack_answer(
        self,
        inbound: InboundCall,
        encoded: Encoded,
        meta: dict[str, Any] | None,
        pins: Pins | None,
    ) -> None:
        """Apply the caller's codec to a result, in a thread, and send it."""
        inbound.task = None  # it ends now; a cancel need not wait for it

        def finish(packed: Encoded | None, error: BaseException | None) -> None:
            if packed is not None and self._served.get(inbound.call_id) is inbound:
                self._send_answer(inbound, _RESPONSE, packed, meta, pins)
                return
            if pins is not None:
                pins.undo()
            if error is not None:
                self.answer_error(inbound, error)

        def pack(error: BaseException | None = None) -> None:
            if error is not None:
                finish(None, error)
                return
            if encoded.payload_bytes > PACK_HERE_BYTES_MAX:
                with contextlib.suppress(RejectedError):  # closing: no threads
                    self._host.host_pool.submit(encoded.pack, finish)
                    return
            finish(encoded.pack(), None)

        if encoded.copies:
            self._host.devices.fill(encoded.copies, pack)
        else:
            pack()

    def answer_error(
        self,
        inbound: InboundCall,
        error: BaseException,
        *,
        items: int = 0,
        outcome: Outcome = Outcome.EXECUTED,
    ) -> None:
        """Send a function's exception, or keep it for workers that fetch the value.

        Args:
            inbound: the call.
            error: what was raised.
            items: how many items a stream sent before.
            outcome: whether the function ran; it did not if this worker refuses the
                call.
        """
        if self._served.get(inbound.call_id) is not inbound:
            return
        if inbound.span is not None:
            inbound.span.failed(error)
        if outcome is Outcome.NOT_EXECUTED and issubclass(type(error), CallError):
            error.outcome = outcome  # type: ignore[attr-defined]  # its text says so
        if outcome is Outcome.EXECUTED and self._host.on_raised is not None:
            self._host.on_raised(error)
        if issubclass(type(error), CallError) and not error.function:  # type: ignore[attr-defined]
            error.function, error.to = inbound.function_name, self._host.name  # type: ignore[attr-defined]
        if self._fails_value_alone(inbound, error, outcome):
            self.answer(inbound, None)
            return
        describe = functools.partial(self._errors.describe, error)
        failed = outcome_of(error)
        if not self._host.pool.is_exclusive or not holds_device_tensor(error):
            self._send_error(inbound, describe, items, outcome, failed)
            return

        def on_described(tree: Any, problem: BaseException | None) -> None:
            if self._served.get(inbound.call_id) is inbound:
                described = describe if problem is not None else (lambda: tree)
                self._send_error(inbound, described, items, outcome, failed)

        inbound.task = None  # it ends now; a cancel need not wait for it
        self._host.pool.submit(describe, on_described)  # its text shows the tensor

    def _fails_value_alone(
        self, inbound: InboundCall, error: BaseException, outcome: Outcome
    ) -> bool:
        """Fail the value of a remote(); return whether its call did not fail.

        Its users see the error.  Once the deadline has passed the call has failed as
        well: an answer must not reach the caller as a success just before its deadline.
        """
        references = self._references
        if inbound.rref_id is None or references is None:
            return False
        references.fail(inbound.rref_id, error, outcome)
        inbound.rref_id = None
        has_expired = outcome is Outcome.UNKNOWN and inbound.deadline is not None
        return not (has_expired and issubclass(type(error), DeadlineExceededError))

    def _send_error(
        self,
        inbound: InboundCall,
        describe: Callable[[], Any],
        items: int,
        outcome: Outcome,
        failed: str,
    ) -> None:
        encoded = self._errors.encode(describe, self._messages.fetch)
        meta = None if outcome is Outcome.EXECUTED else {"o": outcome.name}
        self._send_answer(inbound, FrameKind.ERROR, encoded, meta, None, items, failed)

    def forget(self, inbound: InboundCall, *, items: int = 0) -> None:
        """Send no answer: the caller has gone; a stream has sent `items` items."""
        if self._served.get(inbound.call_id) is inbound:
            self._give_up_value(inbound)
            self._end_served(inbound, CANCELLED, items)
            self._settle_loans(inbound, answered=False)

    def _give_up_value(self, inbound: InboundCall) -> None:
        """Fail the tasks that wait for the value of a remote(): it will never come.

        Its creator is gone; others may have been lent the reference.
        """
        references = self._references
        if inbound.rref_id is not None and references is not None:
            name = self._link.peer.name
            gone = f"the value was never made: its creator {name!r} was lost meanwhile"
            references.fail(inbound.rref_id, RRefDeletedError(gone))
            inbound.rref_id = None

    def send_item(self, inbound: InboundCall, serial: int, value: Any) -> int:
        """Send one item of a stream; return the bytes that it counts for.

        Raises:
            EncodeError: the item cannot travel.
        """
        encode = self._encode_back(inbound)
        try:
            encoded, pins, meta = inbound.in_context(encode, value)
        except BaseException as error:
            raise unsendable(error) from error
        if not serial and self._host.note_of is not None:
            meta = {**(meta or {}), NOTE: self._host.note_of(inbound.said)}
        self._send(
            FrameKind.STREAM_ITEM,
            inbound.call_id,
            head=pack_head([serial, meta]),
            control=encoded.control,
            buffers=encoded.buffers,
            on_sent=None if pins is None else pins.on_sent,
        )
        nbytes = item_bytes(encoded.control, encoded.buffers)
        if nbytes > LARGE_BYTES:
            self.backlog.look()
        return nbytes

    def end_stream(self, inbound: InboundCall, items: int) -> None:
        """Tell the consumer that the generator has returned."""
        if self._served.get(inbound.call_id) is inbound:
            self._end_served(inbound, OK, items)
            returned = self._settle_loans(inbound, answered=True)
            meta: dict[str, Any] = {"l": returned} if returned else {}
            if self._host.note_of is not None:
                meta[NOTE] = self._host.note_of(inbound.said)
            self._send(
                FrameKind.STREAM_END,
                inbound.call_id,
                aux=items,
                head=pack_head([meta]) if meta else b"",
            )

    def _send_answer(  # noqa: PLR0917
        self,
        inbound: InboundCall,
        kind: int,
        encoded: Encoded,
        meta: dict[str, Any] | None,
        pins: Pins | None,
        aux: int = 0,
        outcome: str = OK,
    ) -> None:
        buffers = encoded.buffers
        large = ""  # what has answered with much
        if len(encoded.control) > LARGE_BYTES or (
            buffers and sum(buffer.nbytes for buffer in buffers) > LARGE_BYTES
        ):
            large = inbound.function_name or "a function"
        on_sent = None if pins is None else pins.on_sent
        if inbound.claim is not None and encoded.buffers:
            on_sent = inbound.claim.until_sent(on_sent)
        self._end_served(inbound, outcome, aux)
        if inbound.loans is not None:
            returned = self._settle_loans(inbound, answered=True)
            if returned:
                meta = meta or {}
                meta["l"] = returned
        if self._host.note_of is not None:
            meta = {**(meta or {}), NOTE: self._host.note_of(inbound.said)}
        self._send(
            kind,
            inbound.call_id,
            aux=aux,
            # With a head it arrives even if the call is cancelled meanwhile, and so do
            # the references in it, which the caller then gives back.
            head=pack_head([meta]) if meta or pins is not None else b"",
            control=encoded.control,
            buffers=buffers,
            on_sent=on_sent,
        )
        if large:
            self.backlog.on_large(large)

    def _end_served(self, inbound: InboundCall, outcome: str, items: int) -> None:
        self._ends.note(inbound, outcome, items)
        if inbound.span is not None:
            is_stream = inbound.credit is not None
            inbound.span.end(outcome, items=items if is_stream else None)
        inbound.end()
        self._served.end(inbound.call_id)
        self._on_served()

    def _settle_loans(self, inbound: InboundCall, *, answered: bool) -> list[int]:
        loans, inbound.loans = inbound.loans, None
        references = self._references
        if loans is None or references is None:
            return []
        return references.settle_loans(self._link, loans, answered=answered)

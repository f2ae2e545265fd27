"""A link: the calls between this worker and one incarnation of another.

It turns calls into frames and frames into calls, over whichever connection survives.
Everything here runs on the event loop, and nothing waits: what has to is in `inbound`
(functions), `streams` (generators) and `futures` (callers).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from asyncrpc.clock import NO_LIMIT_NS, Deadline
from asyncrpc.errors import (
    AsyncRpcError,
    CallError,
    DeadlineExceededError,
    MalformedError,
    Outcome,
    RejectedError,
    RemoteProtocolError,
    WorkerLostError,
)
from asyncrpc.ids import WorkerId
from asyncrpc.runtime import streams
from asyncrpc.runtime.futures import CallFuture
from asyncrpc.runtime.inbound import InboundCall, Mode, Target, mode_of
from asyncrpc.runtime.machine.calls import PendingCalls, ServedCalls
from asyncrpc.serde import Encoded, describe_exception, rebuild_exception
from asyncrpc.wire.frames import Flags, FrameKind
from asyncrpc.wire.messages import Meta, pack_head, unpack_head

if TYPE_CHECKING:
    from asyncrpc.runtime.connection import Connection
    from asyncrpc.runtime.extensions import OnGradient, Pins
    from asyncrpc.runtime.worker import Worker

# Functions one peer may name here: more than any program has, few enough to hold.
NAMES_MAX: Final = 1 << 16
NO_META: Final[dict[str, Any]] = {}


class Link:
    """The calls to and from one peer over one connection."""

    def __init__(self, worker: Worker, peer: WorkerId, connection: Connection) -> None:
        self.worker = worker
        self.peer = peer
        self.connection = connection
        self.loop = worker.loop
        self.pending: PendingCalls[CallFuture[Any] | streams.Inflow] = PendingCalls()
        self.served: ServedCalls[InboundCall] = ServedCalls()
        self.lost_because = ""
        self._peer_drains = False
        self._codec = worker.codec
        self._sent_names: dict[str, int] = {}
        self._targets: dict[int, Target] = {}
        self._handlers: dict[int, Callable[..., None]] = {
            FrameKind.REQUEST: self._on_request,
            FrameKind.RESPONSE: self._on_response,
            FrameKind.ERROR: self._on_error,
            FrameKind.CANCEL: self._on_cancel,
            FrameKind.STREAM_ITEM: self._on_stream_item,
            FrameKind.STREAM_END: self._on_stream_end,
            FrameKind.STREAM_CREDIT: self._on_stream_credit,
            FrameKind.SERVICE: self._on_service,
            FrameKind.NOTICE: self._on_notice,
            FrameKind.PING: self._on_ping,
            FrameKind.PONG: self._on_pong,
            FrameKind.GOODBYE: self._on_goodbye,
        }

    @property
    def is_lost(self) -> bool:
        """Whether the connection has ended."""
        return bool(self.lost_because)

    # --- the caller's side -----------------------------------------------------------

    def start(  # noqa: PLR0913  (the one way a call is made; options are by keyword)
        self,
        call: CallFuture[Any],
        target: str | list[Any] | None,
        value: tuple[list[Any], dict[str, Any]],
        *,
        deadline: Deadline | None = None,
        meta: dict[str, Any] | None = None,
    ) -> None:
        """Send a call; its future completes when the answer comes.

        Args:
            call: the future; its `function` and `to` are set.
            target: name of a function; None if the callable is the first argument; a
                list for what an extension resolves.
            value: arguments and keyword arguments.
            deadline: when the caller stops waiting, and the callee working.
            meta: what travels beside the arguments.

        Raises:
            EncodeError: an argument cannot travel.  Nothing was sent.
            DeadlineExceededError: the deadline has passed.  Nothing was sent.
            RejectedError: the peer is shutting down.  Nothing was sent.
        """
        budget_ns = self._budget_ns(call, deadline)
        encoded, call.pins, meta = self._encode(list(value), meta)
        call_id = call.call_id = self.pending.open(call)
        call.link = self
        stats = call.stats
        stats.bytes_copied += encoded.bytes_copied
        for buffer in encoded.buffers:
            stats.bytes_sent += buffer.nbytes
        if deadline is not None:
            self._watch(call, deadline, meta)
        self.connection.send(
            FrameKind.REQUEST,
            call_id,
            aux=budget_ns,
            head=self._head(target, meta),
            control=encoded.control,
            buffers=encoded.buffers,
            on_sent=None if call.pins is None else call.pins.on_sent,
        )

    def request_service(
        self, service: str, method: str, value: Any, *, deadline: Deadline | None = None
    ) -> CallFuture[Any]:
        """Send a message to a part of the peer; the future holds its answer.

        Raises:
            EncodeError: the value cannot travel.  Nothing was sent.
        """
        name = f"{service}.{method}"
        call: CallFuture[Any] = CallFuture(
            loop=self.loop, function=name, to=self.peer.name
        )
        if self.is_lost:
            call.fail(self._lost_error(name, Outcome.NOT_EXECUTED))
            return call
        budget_ns = self._budget_ns(call, deadline)
        encoded, call.pins, _ = self._encode(value, None)
        call.call_id = self.pending.open(call)
        call.link = self
        if deadline is not None:
            call.allowed_s = deadline.allowed_s
            call.timer = self.loop.call_at(deadline.at_s, self._expire, call)
        self.connection.send(
            FrameKind.SERVICE,
            call.call_id,
            aux=budget_ns,
            head=pack_head([service, method]),
            control=encoded.control,
            buffers=encoded.buffers,
            on_sent=None if call.pins is None else call.pins.on_sent,
        )
        return call

    def notify(self, service: str, method: str, value: Any) -> None:
        """Send a message to a part of the peer that wants no answer.

        The value is plain (numbers, text, lists): no tensors, no references.
        """
        control = self._codec.encode(value).control
        self.connection.send(
            FrameKind.NOTICE, 0, head=pack_head([service, method]), control=control
        )

    def start_stream(
        self,
        inflow: streams.Inflow,
        target: str | None,
        value: tuple[list[Any], dict[str, Any]],
        deadline: Deadline | None,
    ) -> None:
        """Ask for a stream; its items arrive in `inflow`.

        Raises:
            EncodeError: an argument cannot travel.  Nothing was sent.
        """
        encoded, inflow.pins, meta = self._encode(list(value), None)
        inflow.call_id = self.pending.open(inflow)
        self.connection.send(
            FrameKind.REQUEST,
            inflow.call_id,
            flags=Flags.STREAM,
            aux=NO_LIMIT_NS
            if deadline is None
            else deadline.budget_ns(self.loop.time()),
            head=self._head(target, meta),
            control=encoded.control,
            buffers=encoded.buffers,
            on_sent=None if inflow.pins is None else inflow.pins.on_sent,
        )

    def send_credit(self, call_id: int, items: int) -> None:
        """Tell a stream's producer that items have been taken."""
        self.connection.send(FrameKind.STREAM_CREDIT, call_id, aux=items)

    def cancel(self, call: CallFuture[Any] | streams.Inflow) -> None:
        """Tell the callee that nobody waits any more."""
        if self.pending.get(call.call_id) is not call:
            return
        self.pending.take(call.call_id)
        call.settle()
        never_read = self.connection.drop(FrameKind.REQUEST, call.call_id)
        if never_read and call.pins is not None:
            call.pins.undo()
        self.connection.send(FrameKind.CANCEL, call.call_id)

    def _budget_ns(self, call: CallFuture[Any], deadline: Deadline | None) -> int:
        if self._peer_drains:
            raise RejectedError(
                "the worker is shutting down",
                function=call.function,
                to=call.to,
                outcome=Outcome.NOT_EXECUTED,
            )
        if deadline is None:
            return NO_LIMIT_NS
        budget_ns = deadline.budget_ns(self.loop.time())
        if not budget_ns:
            raise DeadlineExceededError(
                function=call.function,
                to=call.to,
                outcome=Outcome.NOT_EXECUTED,
                timeout_s=deadline.allowed_s,
            )
        return budget_ns

    def _watch(self, call: CallFuture[Any], deadline: Deadline, meta: Meta | None) -> None:
        """Fail the call at its deadline; of a remote(), the owner fails the value."""
        call.allowed_s = deadline.allowed_s
        if not meta or "r" not in meta:
            call.timer = self.loop.call_at(deadline.at_s, self._expire, call)

    def _expire(self, call: CallFuture[Any]) -> None:
        call.timer = None
        self.cancel(call)
        call.fail(
            DeadlineExceededError(
                function=call.function,
                to=call.to,
                outcome=Outcome.UNKNOWN,
                timeout_s=call.allowed_s,
            )
        )

    def _head(self, target: str | list[Any] | None, meta: Meta | None) -> bytes:
        """Route a request; a function's name travels once per connection."""
        if type(target) is not str:
            return pack_head([target, meta])
        known = self._sent_names.get(target)
        if known is not None:
            return pack_head([known, meta] if meta else [known])
        if len(self._sent_names) >= NAMES_MAX:
            return pack_head([[0, target], meta])
        number = self._sent_names[target] = len(self._sent_names) + 1
        return pack_head([[number, target], meta])

    # --- encoding and decoding, with the extensions ----------------------------------

    def _encode(
        self, value: Any, meta: dict[str, Any] | None = None
    ) -> tuple[Encoded, Pins | None, dict[str, Any] | None]:
        """Encode a value for the peer; let references and propagators take part."""
        references = self.worker.references
        if references is None:
            encoded, pins = self._codec.encode(value), None
        else:
            references.begin_encode(self)
            sent = False
            try:
                encoded = self._codec.encode(value)
                sent = True
            finally:
                pins = references.end_encode(sent=sent)
        for propagator in self.worker.propagators:
            part = propagator.outgoing(self, encoded.gradient_tensors)
            if part is not None:
                meta = meta or {}
                meta[propagator.key] = part
        return encoded, pins, meta

    def _decode(
        self, control: bytes, buffers: list[memoryview], meta: Meta
    ) -> tuple[Any, Any]:
        """Return a value and what it lent."""
        on_gradient: OnGradient | None = None
        for propagator in self.worker.propagators:
            if propagator.key in meta:
                found = propagator.incoming(self, meta[propagator.key])
                on_gradient = found or on_gradient
        references = self.worker.references
        if references is None:
            return self._codec.decode(control, buffers, on_gradient=on_gradient), None
        references.begin_decode(self)
        try:
            value = self._codec.decode(control, buffers, on_gradient=on_gradient)
        finally:
            loans = references.end_decode()
        return value, loans

    # --- what arrives ----------------------------------------------------------------

    def on_message(  # noqa: PLR0913  (MessageSink)
        self,
        kind: int,
        flags: int,
        call_id: int,
        aux: int,
        head: bytes,
        control: bytes,
        buffers: list[memoryview],
    ) -> None:
        """Take one message."""
        handler = self._handlers.get(kind)
        if handler is None:
            raise MalformedError(f"a {FrameKind(kind).name} on an open connection")
        handler(flags, call_id, aux, head, control, buffers)

    def on_transfer_dropped(self, kind: int, call_id: int) -> None:
        """The peer gave up a message: a request that it cancels, or an answer."""
        if kind == FrameKind.REQUEST:
            self.served.cancel(call_id, awaited=False)

    def _on_request(  # noqa: PLR0913
        self,
        flags: int,
        call_id: int,
        aux: int,
        head: bytes,
        control: bytes,
        buffers: list[memoryview],
    ) -> None:
        record = unpack_head(head)
        meta = (record[1] if len(record) > 1 else None) or NO_META
        deadline = Deadline.from_budget(aux, self.loop.time())
        inbound = InboundCall(self, call_id, deadline, meta)
        try:
            self.worker.admit()
            rref_id = meta.get("r")
            if rref_id is not None:
                self._expect(inbound, rref_id)
            (args, kwargs), inbound.loans = self._arguments(control, buffers, meta)
        except RemoteProtocolError:
            raise
        except AsyncRpcError as error:
            self._refuse(inbound, record[0], error)
            return
        if not self._begin_served(inbound):
            self._settle_loans(inbound, answered=False)
            return
        try:
            self._dispatch(inbound, record[0], args, kwargs, flags)
        except RemoteProtocolError:
            raise
        except AsyncRpcError as error:
            self.answer_error(inbound, error)

    def _expect(self, inbound: InboundCall, rref_id: list[int]) -> None:
        references = self.worker.references
        if references is None:
            raise RejectedError("this worker has no remote references")
        inbound.rref_id = (int(rref_id[0]), int(rref_id[1]))
        references.expect(self, inbound.rref_id)

    def _arguments(
        self, control: bytes, buffers: list[memoryview], meta: Meta
    ) -> tuple[tuple[list[Any], dict[str, Any]], Any]:
        try:
            value, loans = self._decode(control, buffers, meta)
        except CallError as error:
            error.outcome = Outcome.NOT_EXECUTED
            raise
        if type(value) is not list or len(value) != 2:  # noqa: PLR2004
            raise MalformedError("a request without arguments")
        args, kwargs = value
        if type(args) is not list or type(kwargs) is not dict:
            raise MalformedError("a request whose arguments are no list and no map")
        return (args, kwargs), loans

    def _refuse(self, inbound: InboundCall, target: Any, error: AsyncRpcError) -> None:
        """Answer a request that cannot be run, and keep its name for those to come."""
        if type(target) is list and target and type(target[0]) is int:
            try:
                self._named_target(target)
            except CallError:
                pass  # this caller is told of `error`; the next one of the name
        self._begin_served(inbound)
        self.answer_error(inbound, error)

    def _dispatch(
        self,
        inbound: InboundCall,
        target: Any,
        args: list[Any],
        kwargs: dict[str, Any],
        flags: int,
    ) -> None:
        """Find what is to run, and run it."""
        if type(target) is int:
            found = self._targets.get(target)
            if found is None:
                raise MalformedError(f"function {target} has not been named")
        elif target is None:
            found = self._value_target(args)
        elif type(target) is list and target and type(target[0]) is int:
            found = self._named_target(target)
        else:
            self._resolve(inbound, target, args, kwargs)
            return
        self._run(inbound, found, args, kwargs, flags)

    def _run(
        self,
        inbound: InboundCall,
        target: Target,
        args: list[Any],
        kwargs: dict[str, Any],
        flags: int,
    ) -> None:
        is_stream = target.mode in (Mode.ASYNC_GENERATOR, Mode.GENERATOR)
        if is_stream != bool(flags & Flags.STREAM):
            inbound.target = target
            raise RejectedError(
                "it is a generator: use `stream`, not `call`"
                if is_stream
                else "it is no generator: use `call`, not `stream`",
                function=target.name,
                to=self.worker.name,
                outcome=Outcome.NOT_EXECUTED,
            )
        if is_stream:
            streams.serve(inbound, target, args, kwargs)
        else:
            inbound.run(target, args, kwargs)

    def _named_target(self, target: list[Any]) -> Target:
        if len(target) != 2 or type(target[1]) is not str:  # noqa: PLR2004
            raise MalformedError("a function is named by a number and a text")
        number, name = target
        if len(self._targets) >= NAMES_MAX and number:
            raise MalformedError(f"more than {NAMES_MAX} functions have been named")
        found = self.worker.target(name)
        if number:
            self._targets[number] = found
        return found

    def _value_target(self, args: list[Any]) -> Target:
        if not args or not callable(args[0]):
            raise MalformedError("a request whose first argument is not callable")
        function = args.pop(0)
        if not self.worker.functions.is_allowed(function):
            raise RejectedError(
                f"{function!r} is not exposed here; mark it with @asyncrpc.expose",
                outcome=Outcome.NOT_EXECUTED,
            )
        name = getattr(function, "__qualname__", type(function).__qualname__)
        return Target(name, function, mode_of(function))

    def _resolve(
        self,
        inbound: InboundCall,
        target: Any,
        args: list[Any],
        kwargs: dict[str, Any],
    ) -> None:
        references = self.worker.references
        if references is None or type(target) is not list:
            raise MalformedError(f"a request for {target!r}, which nothing resolves")

        def ready(function: Callable[..., Any]) -> None:
            name = getattr(function, "__qualname__", type(function).__qualname__)
            try:
                found = Target(name, function, mode_of(function))
                self._run(inbound, found, args, kwargs, 0)
            except AsyncRpcError as error:
                self.answer_error(inbound, error)

        references.resolve(self, target, ready)

    # --- answers, from here ----------------------------------------------------------

    def answer(self, inbound: InboundCall, value: Any) -> None:
        """Send a function's result, or keep it where it is to stay."""
        if self.served.get(inbound.call_id) is not inbound:
            return  # cancelled, expired or lost meanwhile
        references = self.worker.references
        if inbound.rref_id is not None and references is not None:
            references.fulfil(inbound.rref_id, value)
            value = None
        try:
            encoded, pins, meta = inbound.in_context(self._encode, value)
        except AsyncRpcError as error:
            self.answer_error(inbound, error)
            return
        self._send_answer(inbound, FrameKind.RESPONSE, encoded, meta, pins)

    def answer_error(
        self, inbound: InboundCall, error: BaseException, *, items: int = 0
    ) -> None:
        """Send what a function raised, or keep it for those who ask for the value.

        Args:
            inbound: the call.
            error: what was raised.
            items: how many items a stream sent before.
        """
        if self.served.get(inbound.call_id) is not inbound:
            return
        references = self.worker.references
        if inbound.rref_id is not None and references is not None:
            # The value failed, which those are told who ask for it; the call did not.
            references.fail(inbound.rref_id, error)
            inbound.rref_id = None
            self.answer(inbound, None)
            return
        if isinstance(error, CallError) and not error.function:
            error.function, error.to = inbound.function_name, self.worker.name
        tree = describe_exception(
            error, self._codec, worker=self.worker.name, pid=os.getpid()
        )
        encoded = self._codec.encode(tree)
        self._send_answer(inbound, FrameKind.ERROR, encoded, None, None, items)

    def forget(self, inbound: InboundCall) -> None:
        """Nobody waits for this call any more: no answer."""
        if self.served.get(inbound.call_id) is inbound:
            self._end_served(inbound)
            self._settle_loans(inbound, answered=False)

    def _send_answer(
        self,
        inbound: InboundCall,
        kind: FrameKind,
        encoded: Encoded,
        meta: dict[str, Any] | None,
        pins: Pins | None,
        aux: int = 0,
    ) -> None:
        self._end_served(inbound)
        returned = self._settle_loans(inbound, answered=True)
        if returned:
            meta = meta or {}
            meta["l"] = returned
        self.connection.send(
            kind,
            inbound.call_id,
            aux=aux,
            head=pack_head([meta]) if meta else b"",
            control=encoded.control,
            buffers=encoded.buffers,
            on_sent=None if pins is None else pins.on_sent,
        )

    def _begin_served(self, inbound: InboundCall) -> bool:
        begun = self.served.begin(inbound.call_id, inbound)
        if begun:
            self.worker.active += 1
        return begun

    def _end_served(self, inbound: InboundCall) -> None:
        inbound.end()
        self.served.end(inbound.call_id)
        self.worker.on_served()

    def _settle_loans(self, inbound: InboundCall, *, answered: bool) -> list[int]:
        loans, inbound.loans = inbound.loans, None
        references = self.worker.references
        if loans is None or references is None:
            return []
        return references.settle_loans(self, loans, answered=answered)

    # --- answers, from the peer ------------------------------------------------------

    def _on_response(  # noqa: PLR0913
        self,
        _flags: int,
        call_id: int,
        _aux: int,
        head: bytes,
        control: bytes,
        buffers: list[memoryview],
    ) -> None:
        call = self.pending.take(call_id)
        meta = self._answer_meta(head)
        if not isinstance(call, CallFuture):
            self._discard(control, buffers, meta)
            return
        call.settle()
        self._release_pins(call, meta)
        for buffer in buffers:
            call.stats.bytes_received += buffer.nbytes
        try:
            value, loans = self._decode(control, buffers, meta)
        except CallError as error:
            error.function, error.to = call.function, call.to
            error.outcome = Outcome.EXECUTED
            call.fail(error)
            return
        call.succeed(value)
        self._take_over(loans)

    def _on_error(  # noqa: PLR0913
        self,
        _flags: int,
        call_id: int,
        aux: int,
        head: bytes,
        control: bytes,
        buffers: list[memoryview],
    ) -> None:
        call = self.pending.take(call_id)
        if call is None:
            return
        meta = self._answer_meta(head)
        call.settle()
        self._release_pins(call, meta)
        try:
            tree = self._codec.decode(control, buffers)
            error: BaseException = rebuild_exception(
                tree, self.worker.functions, function=call.function, to=call.to
            )
        except CallError as undecodable:
            undecodable.function, undecodable.to = call.function, call.to
            error = undecodable
        if isinstance(call, CallFuture):
            call.fail(error)
        else:
            call.on_error(error, aux)

    def _release_pins(
        self, call: CallFuture[Any] | streams.Inflow, meta: Meta
    ) -> None:
        """The answer is here: the request need not be kept up any more."""
        if call.pins is not None:
            call.pins.release(list(meta.get("l", ())))
            call.pins = None

    def _answer_meta(self, head: bytes) -> Meta:
        record = unpack_head(head) if head else []
        meta = record[0] if record else None
        return meta if type(meta) is dict else NO_META

    def _discard(self, control: bytes, buffers: list[memoryview], meta: Meta) -> None:
        """Take an answer nobody waits for: what it lends must be given back."""
        if self.worker.references is None:
            return
        try:
            value, loans = self._decode(control, buffers, meta)
        except CallError:
            return
        del value
        self._take_over(loans)

    def _take_over(self, loans: Any) -> None:
        """Give back what a result lent, or register it; both go as notices."""
        references = self.worker.references
        if loans is not None and references is not None:
            references.settle_loans(self, loans, answered=False)

    def _on_cancel(
        self, _flags: int, call_id: int, _aux: int, *_rest: object
    ) -> None:
        awaited = self.connection.forget_transfer(FrameKind.REQUEST, call_id)
        inbound = self.served.cancel(call_id, awaited=False)
        if inbound is not None and not awaited:
            inbound.cancel()

    # --- streams, services, the connection itself ------------------------------------

    def _on_stream_item(  # noqa: PLR0913
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
        try:
            value, loans = self._decode(control, buffers, meta)
        except CallError as error:
            self.cancel(inflow)
            inflow.on_error(error, 0)
            return
        inflow.on_item(int(record[0]), value)
        self._take_over(loans)

    def _on_stream_end(
        self, _flags: int, call_id: int, aux: int, head: bytes, *_rest: object
    ) -> None:
        inflow = self.pending.take(call_id)
        if isinstance(inflow, streams.Inflow):
            self._release_pins(inflow, self._answer_meta(head))
            inflow.on_end(aux)

    def _on_stream_credit(
        self, _flags: int, call_id: int, aux: int, *_rest: object
    ) -> None:
        inbound = self.served.get(call_id)
        if inbound is not None and inbound.credit is not None:
            inbound.credit.grant(aux)

    def send_item(self, inbound: InboundCall, serial: int, value: Any) -> int:
        """Send one item of a stream; return the bytes of its buffers.

        Raises:
            EncodeError: the item cannot travel.
        """
        encoded, pins, meta = inbound.in_context(self._encode, value)
        self.connection.send(
            FrameKind.STREAM_ITEM,
            inbound.call_id,
            head=pack_head([serial, meta]),
            control=encoded.control,
            buffers=encoded.buffers,
            on_sent=None if pins is None else pins.on_sent,
        )
        return sum(buffer.nbytes for buffer in encoded.buffers)

    def end_stream(self, inbound: InboundCall, items: int) -> None:
        """Tell the consumer that the generator has returned."""
        if self.served.get(inbound.call_id) is inbound:
            self._end_served(inbound)
            returned = self._settle_loans(inbound, answered=True)
            self.connection.send(
                FrameKind.STREAM_END,
                inbound.call_id,
                aux=items,
                head=pack_head([{"l": returned}]) if returned else b"",
            )

    def _on_service(  # noqa: PLR0913
        self,
        _flags: int,
        call_id: int,
        aux: int,
        head: bytes,
        control: bytes,
        buffers: list[memoryview],
    ) -> None:
        record = unpack_head(head)
        deadline = Deadline.from_budget(aux, self.loop.time())
        inbound = InboundCall(self, call_id, deadline, NO_META)
        if not self._begin_served(inbound):
            return
        try:
            service = self.worker.service(record[0])
            value, inbound.loans = self._decode(control, buffers, NO_META)
        except AsyncRpcError as error:
            self.answer_error(inbound, error)
            return
        name = f"{record[0]}.{record[1]}"
        target = Target(name, service.on_request, Mode.COROUTINE)
        inbound.run(target, [self, str(record[1]), value], {})

    def _on_notice(  # noqa: PLR0913
        self,
        _flags: int,
        _call_id: int,
        _aux: int,
        head: bytes,
        control: bytes,
        buffers: list[memoryview],
    ) -> None:
        record = unpack_head(head)
        try:
            service = self.worker.service(record[0])
            value = self._codec.decode(control, buffers)
        except CallError as error:
            raise MalformedError(f"a notice that cannot be read: {error}") from error
        service.on_notice(self, str(record[1]), value)

    def _on_ping(self, _flags: int, call_id: int, aux: int, *_rest: object) -> None:
        self.connection.send(FrameKind.PONG, call_id, aux=aux)

    def _on_pong(self, _flags: int, _call_id: int, aux: int, *_rest: object) -> None:
        self.worker.on_pong(self, aux)

    def _on_goodbye(self, *_rest: object) -> None:
        self._peer_drains = True
        self.worker.on_goodbye(self)

    def say_goodbye(self) -> None:
        """Tell the peer that no further request is sent or accepted."""
        self.connection.send(FrameKind.GOODBYE, 0)

    # --- the end ---------------------------------------------------------------------

    def on_lost(self, reason: str) -> None:
        """The connection has ended: fail what waits, cancel what it runs."""
        self.lost_because = reason or "the connection was closed"
        for call in self.pending.take_all():
            call.settle()
            call.pins = None  # the peer's death settles what it was lent
            if isinstance(call, CallFuture):
                error = self._lost_error(call.function, call.outcome_if_lost)
                call.fail(error)
            else:
                call.on_error(self._lost_error(call.function, Outcome.UNKNOWN), 0)
        for inbound in self.served:
            inbound.cancel()

    def _lost_error(self, function: str, outcome: Outcome) -> WorkerLostError:
        return WorkerLostError(
            f"the worker is gone: {self.lost_because}",
            function=function,
            to=self.peer.name,
            outcome=outcome,
        )


def call_site(depth: int) -> tuple[str, int]:
    """Return the file and line of the caller's caller, `depth` frames up."""
    frame = sys._getframe(depth + 1)  # noqa: SLF001  (the only cheap way to a line)
    return frame.f_code.co_filename, frame.f_lineno


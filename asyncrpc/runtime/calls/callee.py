"""The callee's side of a link: requests in, answers out.

A request is decoded, its function found, and an `InboundCall` runs it; that calls back
here with the answer.  Everything runs on the event loop, and nothing waits.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from torch.autograd import profiler

from asyncrpc.clock import Deadline
from asyncrpc.errors import (
    AsyncRpcError,
    CallError,
    DecodeError,
    MalformedError,
    Outcome,
    RejectedError,
    RemoteProtocolError,
    RRefDeletedError,
)
from asyncrpc.ids import WorkerId
from asyncrpc.runtime.calls import streams
from asyncrpc.runtime.calls.credit import FREE_BYTES_MAX
from asyncrpc.runtime.calls.error_encoder import holds_device_tensor
from asyncrpc.runtime.calls.inbound import InboundCall, Mode, Target, mode_of
from asyncrpc.runtime.calls.named import NamedFunctions, name_of_value
from asyncrpc.runtime.calls.preparing import PACK_HERE_BYTES_MAX
from asyncrpc.runtime.calls.profiling import show_function
from asyncrpc.runtime.devices.maps import DEVICES, DeviceMap
from asyncrpc.runtime.extensions import Refused
from asyncrpc.runtime.forms import ID, TEXT, Form, array
from asyncrpc.runtime.links.core import CODEC, NO_META, LinkCore, unreadable, unsendable
from asyncrpc.serde import Encoded, compression_for_answer, text_of
from asyncrpc.wire.frames import Flags, FrameKind
from asyncrpc.wire.messages import Meta, pack_head, unpack_head

if TYPE_CHECKING:
    from asyncrpc.runtime.extensions import Pins
    from asyncrpc.runtime.links.connection import Connection
    from asyncrpc.runtime.worker import Worker


logger = logging.getLogger("asyncrpc")

# Plain numbers: to find a member of an enum costs 0.1 us, to test a flag 0.7 us.
_STREAM: Final = int(Flags.STREAM)
_RESPONSE: Final = int(FrameKind.RESPONSE)
_REFERENCE: Final[Form] = array(creator=ID, serial=ID)


class CalleeSide(LinkCore):
    """What the peer asks of this worker."""

    def __init__(self, worker: Worker, peer: WorkerId, connection: Connection) -> None:
        super().__init__(worker, peer, connection)
        self._named = NamedFunctions(worker.target)
        # Heads that say no more than the number of a function named before.
        self._heads: dict[bytes, tuple[Target, dict[str, Any]]] = {}
        self._arriving = self.credit.account.arriving
        self._errors = worker.error_encoder

    def _on_request(  # noqa: PLR0917
        self,
        flags: int,
        call_id: int,
        aux: int,
        head: bytes,
        control: bytes,
        buffers: list[memoryview],
    ) -> None:
        target, meta = self._heads.get(head) or self._read_head(head)
        deadline = None
        if aux >= 0:
            deadline = Deadline.from_budget(aux, self.loop.time())
        inbound, unread = None, control
        try:
            inbound = InboundCall(self.link, call_id, deadline, meta)
            self.worker.admit()
            if meta:
                self._check_meta(inbound, meta)
            unread = b""
            (args, kwargs), inbound.loans = self._arguments(control, buffers, meta)
        except BaseException as error:  # noqa: BLE001  (a value's own code may run)
            self.give_back(unread)
            inbound = inbound or InboundCall(self.link, call_id, deadline, NO_META)
            self._refuse(inbound, target, unreadable(error), buffers)
            return
        self._begin_served(inbound)
        if self._arriving or (
            buffers and (len(buffers) > 1 or buffers[0].nbytes > FREE_BYTES_MAX)
        ):
            inbound.claim = self.credit.claim(call_id, buffers)
        buffers.clear()  # a tensor dies with the function's last reference to it
        try:
            if type(target) is Target:
                self._run(inbound, target, args, kwargs, flags)
            else:
                self._dispatch(inbound, target, args, kwargs, flags)
        except RemoteProtocolError:
            raise
        except AsyncRpcError as error:
            self._name(error, target)
            self.answer_error(inbound, error, outcome=Outcome.NOT_EXECUTED)
        except BaseException as error:  # noqa: BLE001  (the function's; the caller's)
            self.answer_error(inbound, error)

    def _read_head(self, head: bytes) -> tuple[Any, dict[str, Any]]:
        """Return what to run, as far as it is known, and what travels beside it."""
        record = unpack_head(head)
        if not record:
            raise MalformedError("a request for nothing")
        if type(record[0]) is list:
            self._named.learn(record[0])
        if len(record) != 1:
            meta = record[1]
            if meta is not None and type(meta) is not dict:
                raise MalformedError(
                    "a request with something else beside it than a map"
                )
            return record[0], meta or NO_META
        number = record[0]
        found = self._named.targets.get(number) if type(number) is int else None
        if found is None:
            return record[0], NO_META
        self._heads[head] = found, NO_META  # at most one for each function named
        return found, NO_META

    def _check_meta(self, inbound: InboundCall, meta: Meta) -> None:
        """Look at what travels beside a request, before its function may run.

        Raises:
            MalformedError: it makes no sense.
            RejectedError: no more values can be made here.
        """
        if DEVICES in meta:
            DeviceMap.from_wire(meta[DEVICES])
        if CODEC in meta:
            TEXT("the codec of a request", meta[CODEC])
        if "r" in meta:
            self._expect(inbound, meta["r"])

    def _expect(self, inbound: InboundCall, rref_id: list[int]) -> None:
        references = self.worker.references
        if references is None:
            raise RejectedError("this worker has no remote references")
        _REFERENCE("the reference to the result of a request", rref_id)
        wanted = (rref_id[0], rref_id[1])
        references.expect(self.link, wanted)
        inbound.rref_id = wanted  # not before: what is refused is no value that failed

    def _arguments(
        self, control: bytes, buffers: list[memoryview], meta: Meta
    ) -> tuple[tuple[list[Any], dict[str, Any]], Any]:
        try:
            value, loans = self._decode(control, buffers, meta)
        except CallError as error:
            error.outcome = Outcome.NOT_EXECUTED
            raise
        if type(value) is not list or len(value) != 2:  # noqa: PLR2004
            raise _no_arguments("it has none")
        args, kwargs = value
        if type(args) is not list or type(kwargs) is not dict:
            raise _no_arguments("they are no list and no map")
        return (args, kwargs), loans

    def _refuse(
        self,
        inbound: InboundCall,
        target: Any,
        error: AsyncRpcError,
        buffers: list[memoryview],
    ) -> None:
        """Answer a request that cannot be run."""
        self._name(error, target)
        self._begin_served(inbound)
        inbound.claim = self.credit.claim(inbound.call_id, buffers)
        self.answer_error(inbound, error, outcome=Outcome.NOT_EXECUTED)

    def _dispatch(
        self,
        inbound: InboundCall,
        target: Any,
        args: list[Any],
        kwargs: dict[str, Any],
        flags: int,
    ) -> None:
        """Find what is to run, and run it."""
        if target is None:
            found = self._value_target(args)
        else:
            named = self._named.find(target)
            if named is None:
                self._resolve(inbound, target, args, kwargs)
                return
            found = named
        self._run(inbound, found, args, kwargs, flags)

    def _run(
        self,
        inbound: InboundCall,
        target: Target,
        args: list[Any],
        kwargs: dict[str, Any],
        flags: int,
    ) -> None:
        is_stream = target.is_stream
        if is_stream != bool(flags & _STREAM):
            inbound.target = target
            raise RejectedError(
                "it is a generator: use `stream`, not `call`"
                if is_stream
                else "it is no generator: use `call`, not `stream`",
                function=target.name,
                to=self.worker.name,
                outcome=Outcome.NOT_EXECUTED,
            )
        if inbound.meta:
            target = self._surrounded(target, inbound.meta)
        if profiler._is_profiler_enabled:  # noqa: SLF001
            target = show_function(inbound, target)
        if is_stream:
            streams.serve(inbound, target, args, kwargs)
        else:
            inbound.run(target, args, kwargs)

    def _surrounded(self, target: Target, meta: Meta) -> Target:
        """Return what runs a function under the state of its caller's thread."""
        function = target.function
        for state in self.worker.thread_states:
            if state.key in meta:
                try:
                    function = state.surround(meta[state.key], function)
                except MalformedError as error:  # of this request, and of no other
                    raise unreadable(error) from error
        if function is target.function:
            return target
        return Target(target.name, function, target.mode)

    def _name(self, error: AsyncRpcError, target: Any) -> None:
        """Say in an error which function was called, as far as its request tells."""
        if not isinstance(error, CallError) or error.function:
            return
        name = self._named.name_of(target)
        if name:
            error.function, error.to = name, self.worker.name

    def _value_target(self, args: list[Any]) -> Target:
        if not args or not callable(args[0]):
            raise DecodeError(
                "what is to be called arrived as a value, and is not callable",
                outcome=Outcome.NOT_EXECUTED,
            )
        function = args.pop(0)
        if not self.worker.functions.is_allowed(function):
            raise RejectedError(
                f"{function!r} is not exposed here; mark it with @asyncrpc.expose",
                outcome=Outcome.NOT_EXECUTED,
            )
        return Target(name_of_value(function), function, mode_of(function))

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

        def ready(function: Callable[..., Any] | Refused) -> None:
            if isinstance(function, Refused):
                self.answer_error(inbound, function.error, outcome=function.outcome)
                return
            try:
                mode = self.worker.mode_of_method(function)
                found = Target(name_of_value(function), function, mode)
                self._run(inbound, found, args, kwargs, 0)
            except AsyncRpcError as error:
                self.answer_error(inbound, error, outcome=Outcome.NOT_EXECUTED)
            except BaseException as error:  # noqa: BLE001  (the caller gets it)
                self.answer_error(inbound, error)

        references.resolve(self.link, target, ready)

    def answer(self, inbound: InboundCall, value: Any) -> None:
        """Send a function's result, or keep it where it is to stay."""
        if self.served.get(inbound.call_id) is not inbound:
            return  # cancelled, expired or lost meanwhile
        references = self.worker.references
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
            if packed is not None and self.served.get(inbound.call_id) is inbound:
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
                    self.worker.host_pool.submit(encoded.pack, finish)
                    return
            finish(encoded.pack(), None)

        if encoded.copies:
            self.worker.devices.fill(encoded.copies, pack)
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
        """Send what a function raised, or keep it for those who ask for the value.

        Args:
            inbound: the call.
            error: what was raised.
            items: how many items a stream sent before.
            outcome: whether the function ran; it has not if this worker refuses it.
        """
        if self.served.get(inbound.call_id) is not inbound:
            return
        references = self.worker.references
        if outcome is Outcome.EXECUTED and self.worker.on_raised is not None:
            self.worker.on_raised(error)
        if inbound.rref_id is not None and references is not None:
            # The value failed, which those are told who ask for it; the call did not.
            references.fail(inbound.rref_id, error)
            inbound.rref_id = None
            self.answer(inbound, None)
            return
        if issubclass(type(error), CallError) and not error.function:  # type: ignore[attr-defined]
            error.function, error.to = inbound.function_name, self.worker.name  # type: ignore[attr-defined]
        describe = functools.partial(self._errors.describe, error)
        if not self.worker.pool.takes_turns or not holds_device_tensor(error):
            self._send_error(inbound, describe, items, outcome)
            return

        def on_described(tree: Any, problem: BaseException | None) -> None:
            if self.served.get(inbound.call_id) is inbound:
                described = describe if problem is not None else (lambda: tree)
                self._send_error(inbound, described, items, outcome)

        inbound.task = None  # it ends now; a cancel need not wait for it
        self.worker.pool.submit(describe, on_described)  # its text shows the tensor

    def _send_error(
        self,
        inbound: InboundCall,
        describe: Callable[[], Any],
        items: int,
        outcome: Outcome,
    ) -> None:
        encoded = self._errors.encode(describe, self._fetch)
        meta = None if outcome is Outcome.EXECUTED else {"o": outcome.name}
        self._send_answer(inbound, FrameKind.ERROR, encoded, meta, None, items)

    def forget(self, inbound: InboundCall) -> None:
        """Nobody waits for this call any more: no answer."""
        if self.served.get(inbound.call_id) is inbound:
            self._give_up_value(inbound)
            self._end_served(inbound)
            self._settle_loans(inbound, answered=False)

    def _give_up_value(self, inbound: InboundCall) -> None:
        """Tell those who wait for the value of a remote() that it will never come.

        Its creator is gone; others may have been lent the reference.
        """
        references = self.worker.references
        if inbound.rref_id is not None and references is not None:
            name = self.peer.name
            gone = f"the value was never made: its creator {name!r} was lost meanwhile"
            references.fail(inbound.rref_id, RRefDeletedError(gone))
            inbound.rref_id = None

    def send_item(self, inbound: InboundCall, serial: int, value: Any) -> int:
        """Send one item of a stream; return the bytes of its buffers.

        Raises:
            EncodeError: the item cannot travel.
        """
        encode = self._encode_back(inbound)
        try:
            encoded, pins, meta = inbound.in_context(encode, value)
        except BaseException as error:
            raise unsendable(error) from error
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

    def _send_answer(  # noqa: PLR0917
        self,
        inbound: InboundCall,
        kind: int,
        encoded: Encoded,
        meta: dict[str, Any] | None,
        pins: Pins | None,
        aux: int = 0,
    ) -> None:
        on_sent = None if pins is None else pins.on_sent
        if inbound.claim is not None and encoded.buffers:
            on_sent = inbound.claim.until_sent(on_sent)
        self._end_served(inbound)
        if inbound.loans is not None:
            returned = self._settle_loans(inbound, answered=True)
            if returned:
                meta = meta or {}
                meta["l"] = returned
        self.connection.send(
            kind,
            inbound.call_id,
            aux=aux,
            # With a head it arrives even if the call is cancelled meanwhile, and so do
            # the references in it, which the caller then gives back.
            head=pack_head([meta]) if meta or pins is not None else b"",
            control=encoded.control,
            buffers=encoded.buffers,
            on_sent=on_sent,
        )

    def _begin_served(self, inbound: InboundCall) -> None:
        self.served.begin(inbound.call_id, inbound)
        self.worker.active += 1

    def _end_served(self, inbound: InboundCall) -> None:
        inbound.end()
        self.served.end(inbound.call_id)
        self.worker.on_served()

    def _settle_loans(self, inbound: InboundCall, *, answered: bool) -> list[int]:
        loans, inbound.loans = inbound.loans, None
        references = self.worker.references
        if loans is None or references is None:
            return []
        return references.settle_loans(self.link, loans, answered=answered)

    def _on_cancel(self, _flags: int, call_id: int, aux: int, *_rest: object) -> None:
        # A cancel may overtake its request, whose payload is still on its way.
        arriving = self.connection.forget_transfer(FrameKind.REQUEST, call_id)
        if arriving is not None:
            self.give_back(arriving)
        elif not self.preparing.cancel(call_id):
            inbound = self.served.get(call_id)
            if inbound is not None:
                inbound.cancel()
            if self.connection.lanes is not None:  # the answer may be on its way
                self.connection.lanes.drop_unwanted(_RESPONSE, call_id)
        self.credit.on_cancel(call_id, aux)

    def discard_request(self, head: bytes, control: bytes) -> None:
        """Take a request that has been cancelled: what it lends must be given back."""
        self._read_head(head)
        self.give_back(control)

    def _on_stream_credit(
        self, _flags: int, call_id: int, aux: int, *_rest: object
    ) -> None:
        if aux <= 0:
            raise MalformedError(f"a credit of {aux} items")
        inbound = self.served.get(call_id)
        if inbound is not None and inbound.credit is not None:
            inbound.credit.grant(aux)

    def _on_service(
        self,
        _flags: int,
        call_id: int,
        aux: int,
        head: bytes,
        control: bytes,
        buffers: list[memoryview],
    ) -> None:
        record = _routed(head)
        deadline = Deadline.from_budget(aux, self.loop.time())
        inbound = InboundCall(self.link, call_id, deadline, NO_META)
        self._begin_served(inbound)
        try:
            service = self.worker.service(record[0])
            value, inbound.loans = self._decode(control, buffers, NO_META)
        except BaseException as error:  # noqa: BLE001  (a value's own code may run)
            self.answer_error(inbound, unreadable(error))
            return
        name = f"{record[0]}.{record[1]}"
        target = Target(name, service.on_request, Mode.COROUTINE)
        inbound.run(target, [self.link, str(record[1]), value], {})

    def _on_notice(
        self,
        _flags: int,
        _call_id: int,
        _aux: int,
        head: bytes,
        control: bytes,
        buffers: list[memoryview],
    ) -> None:
        record = _routed(head)
        try:
            service = self.worker.service(record[0])
            value, _ = self._decode(control, buffers, NO_META)
            service.on_notice(self.link, str(record[1]), value)
        except BaseException as error:
            # Nobody waits for an answer to it, and other messages are not at fault.
            is_expected = isinstance(error, AsyncRpcError)
            logger.warning(
                "a notice of %r could not be taken: %s.%s: %s",
                self.peer.name,
                record[0],
                record[1],
                text_of(error),
                exc_info=not is_expected,
            )


def _routed(head: bytes) -> list[Any]:
    """Return the service and the method that a message is for, and what follows."""
    record = unpack_head(head)
    if len(record) < 2:  # noqa: PLR2004
        raise MalformedError("a message to a service that names none")
    return record


def _no_arguments(problem: str) -> DecodeError:
    text = f"a request's arguments cannot be read: {problem}"
    return DecodeError(text, outcome=Outcome.NOT_EXECUTED)

"""Requests that come in: admitted, read, their functions found, and run.

A request is decoded, its function found, and an `InboundCall` runs it; the `Responder`
sends the answer.  Everything runs on the event loop, and nothing waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sized
from functools import partial
from typing import Any, Final, NoReturn

from torch.autograd import profiler

from asyncrpc.core.calls import streams
from asyncrpc.core.calls.credit import LinkCredit
from asyncrpc.core.calls.heads import ReceivedHeads, name_of_value
from asyncrpc.core.calls.inbound import InboundCall, Responder
from asyncrpc.core.calls.machine.calls import ServedCalls
from asyncrpc.core.calls.machine.served_rate import ServedRate
from asyncrpc.core.calls.message_codec import (
    CODEC,
    NO_META,
    MessageCodec,
    unreadable,
)
from asyncrpc.core.calls.modes import (
    ASYNC_GENERATOR,
    GENERATOR,
    Mode,
    Target,
    mode_of,
)
from asyncrpc.core.calls.peer_memory import (
    COUNTED,
    FREE_BYTES_MAX,
    HEAD_BYTES_MAX,
    UNWEIGHED_CALLS_MAX,
    PeerMemory,
)
from asyncrpc.core.calls.ports import CallConnection, CallHost
from asyncrpc.core.calls.preparation import MessagePreparation
from asyncrpc.core.calls.profiling import show_function
from asyncrpc.core.calls.tracing import trace_function
from asyncrpc.core.devices.maps import DEVICES, DeviceMap
from asyncrpc.core.ids import Incarnation, RRefId
from asyncrpc.core.lifecycle import Lifecycle
from asyncrpc.core.loop.clock import Deadline
from asyncrpc.core.serde import text_of
from asyncrpc.core.services.extensions import (
    RefusedFunction,
)
from asyncrpc.core.services.ports import PeerLink
from asyncrpc.core.services.schema import RecordSchema, Sender, kind_of, not_by
from asyncrpc.core.wire.frames import Flags, Frame, FrameKind, Meta
from asyncrpc.errors import (
    AsyncRpcError,
    CallError,
    CallKindError,
    DecodeError,
    MalformedError,
    Outcome,
    OverloadedError,
    RejectedError,
    RemoteProtocolError,
)

logger = logging.getLogger("asyncrpc")

# Plain numbers: to find a member of an enum costs 0.1 us, to test a flag 0.7 us.
_STREAM: Final = int(Flags.STREAM)
_RESPONSE: Final = int(FrameKind.RESPONSE)
_REFERENCE: Final = RecordSchema(RRefId)
_TEXT: Final = kind_of(str)

# Of a limit of so many calls or more, one peer has a part: a call takes 3 KB at least.
SHARED_MIN: Final = 1000
PEER_PART: Final = 2


class CallAdmission:
    """The calls that one worker serves, counted.

    Attributes:
        active: how many there are now.
        refused: how many were refused, ever.
        ended: how many have ended, ever; also refused ones, which are answered.
        wakes_at: at so many calls, or fewer, `wake` is called.
        held_bytes: what all peers together hold besides their calls.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        calls_max: int,
        now_s: Callable[[], float],
        *,
        peer_bytes_max: int,
        services_hold: Callable[[Incarnation], int],
    ) -> None:
        """Admit calls up to a limit, until the worker shuts down.

        Args:
            now_s: reads the clock; called when a call is refused.
        """
        self.active = self.refused = self.ended = 0
        self.held_bytes = 0
        self._rate = ServedRate()
        self._now_s = now_s
        self._lifecycle = lifecycle
        self._calls_max = calls_max
        self._peer_bytes_max = peer_bytes_max
        self._services_hold = services_hold
        # Of a limit that is not small, one peer must not take all.
        self._peer_calls_max = (
            calls_max if calls_max < SHARED_MIN else calls_max // PEER_PART
        )
        self._idle = asyncio.Event()
        self.wakes_at = 0

    def open(self, peer: Incarnation, calls: Sized) -> PeerMemory:
        """Open the account of a peer, whose served calls are `calls`."""
        services_hold = partial(self._services_hold, peer)
        return PeerMemory(self, calls, services_hold, self._peer_bytes_max)

    def admit(self, of_peer: Sized) -> None:
        """Accept a call, or refuse it."""
        if self._lifecycle.is_draining:
            self.refused += 1
            raise RejectedError(
                "the worker is shutting down", outcome=Outcome.NOT_EXECUTED
            )
        if self.active >= self._peer_calls_max:
            if self.active >= self._calls_max:
                limit = "its limit (LimitOptions.inbound_calls_max)"
                self._refuse(f"{self.active} calls, {limit}")
            if len(of_peer) >= self._peer_calls_max:
                share = "one peer's share of LimitOptions.inbound_calls_max"
                self._refuse(f"{len(of_peer)} calls of this peer, {share}")

    def _refuse(self, load: str) -> NoReturn:
        served = self.ended - self.refused
        self.refused += 1
        after_s = self._rate.retry_after_s(served, self.active, self._now_s())
        raise OverloadedError(
            f"the worker is serving {load}; try again in {after_s:.3g} s",
            retry_after_s=after_s,
        )

    def wake(self) -> None:
        """Let go on what waits for calls to end."""
        self._idle.set()

    async def wait_idle(self, *, but: int = 0) -> None:
        """Wait until no call is served."""
        self.wakes_at = max(self.wakes_at, but)
        while self.active > but:
            self._idle.clear()
            await self._idle.wait()  # shutdown and drain have a limit


class RequestDispatcher:
    """Takes what the peer asks of this worker."""

    def __init__(
        self,
        link: PeerLink,
        host: CallHost,
        *,
        connection: CallConnection,
        served: ServedCalls[InboundCall],
        credit: LinkCredit,
        messages: MessageCodec,
        heads: ReceivedHeads,
        preparation: MessagePreparation,
        responder: Responder,
    ) -> None:
        """Take requests.

        Args:
            link: to the peer; services get it.
        """
        self._link = link
        self._host = host
        self._now_s = host.recorder.now_s
        self._connection = connection
        self._served = served
        self._credit = credit
        self._messages = messages
        self._preparation = preparation
        self._responder = responder
        self._backlog = responder.backlog
        self._references = host.references
        self._functions = heads.functions
        # Used for every request.
        self._heads = heads.known
        self._read_head = heads.read
        self._arriving = credit.arriving
        self._admission = host.admission
        self._admit = host.admission.admit
        self._memory = credit.memory
        self._running = served.running
        self._decode = messages.decode
        self._open = served.begin
        self._router = router = host.router
        self._requests, self._notices = router.requests, router.notices

    def on_request(  # noqa: C901, PLR0917  (of every request: no calls)
        self,
        flags: int,
        call_id: int,
        aux: int,
        head: bytes,
        control: bytes,
        buffers: list[memoryview],
    ) -> None:
        """Accept a call, or refuse it."""
        target, meta = self._heads.get(head) or self._read_head(head)
        now_s, deadline = self._now_s(), None
        if aux >= 0:
            deadline = Deadline.from_budget(aux, now_s)
        inbound, unread = None, control
        try:
            inbound = InboundCall(
                self._host, self._responder, call_id, now_s, deadline, meta
            )
            self._admit(self._served)
            size_bytes, weight = len(control), -1
            if (
                size_bytes > FREE_BYTES_MAX
                or self._memory.is_watched
                or len(self._running) > UNWEIGHED_CALLS_MAX
                or (meta and len(head) > HEAD_BYTES_MAX)
            ):
                weight = self._weigh(size_bytes, head if meta else b"", buffers)
            if meta:
                self._check_meta(inbound, meta)
            unread = b""
            (args, kwargs), inbound.loans = self._arguments(
                control, buffers, meta, counts=weight == COUNTED
            )
        except BaseException as error:  # noqa: BLE001  (a value's own code may run)
            self._messages.give_back(unread, buffers)
            if inbound is None:
                inbound = InboundCall(
                    self._host, self._responder, call_id, now_s, deadline, NO_META
                )
            self._refuse(inbound, target, unreadable(error), control, buffers)
            return
        self._open(call_id, inbound)  # as `_begin`
        self._admission.active += 1
        if (
            self._arriving
            or size_bytes > FREE_BYTES_MAX
            or (buffers and (len(buffers) > 1 or buffers[0].nbytes > FREE_BYTES_MAX))
        ):
            inbound.claim = self._credit.claim(call_id, control, buffers)
        try:
            if weight != -1:
                kept = head if meta else b""
                self._hold(inbound, weight, size_bytes, kept, buffers)
            buffers.clear()  # a tensor dies with the function's last reference to it
            if type(target) is Target:
                self._run(inbound, target, args, kwargs, flags)
            else:
                self._dispatch(inbound, target, args, kwargs, flags)
        except RemoteProtocolError:
            raise
        except AsyncRpcError as error:
            self._name(error, target)
            self._responder.answer_error(inbound, error, outcome=Outcome.NOT_EXECUTED)
        except BaseException as error:  # noqa: BLE001  (the function's; the caller's)
            self._responder.answer_error(inbound, error)

    def _begin(self, inbound: InboundCall) -> None:
        """Count a call as served from now on."""
        self._open(inbound.call_id, inbound)
        self._admission.active += 1

    def _weigh(self, size_bytes: int, head: bytes, buffers: list[memoryview]) -> int:
        """Return what a message may hold without credit; see `PeerMemory.weigh`."""
        if self._backlog.is_full:
            self._backlog.on_asked()
        return self._memory.weigh(size_bytes, head, buffers)

    def _hold(
        self,
        inbound: InboundCall,
        weight: int,
        size_bytes: int,
        head: bytes,
        buffers: list[memoryview],
    ) -> None:
        """Count what a message holds that has been decoded."""
        if weight == COUNTED:
            values = self._messages.values
            weight = self._memory.counted(values, size_bytes, head, buffers)
        inbound.claim = self._credit.hold(inbound.claim, weight)

    def _check_meta(self, inbound: InboundCall, meta: Meta) -> None:
        """Check the metadata of a request, before its function may run."""
        if DEVICES in meta:
            DeviceMap.from_wire(meta[DEVICES])
        if CODEC in meta:
            _TEXT.read_as("the codec of a request", meta[CODEC])
        if "r" in meta:
            self._expect(inbound, meta["r"])

    def _expect(self, inbound: InboundCall, rref_id: Any) -> None:
        references = self._references
        if references is None:
            raise RejectedError("this worker has no remote references")
        name = "the reference to the result of a request"
        wanted: RRefId = _REFERENCE.read_as(name, rref_id)
        references.expect(self._link, wanted)
        inbound.rref_id = wanted  # not before: a refused value is not a failed one

    def _arguments(
        self,
        control: bytes,
        buffers: list[memoryview],
        meta: Meta,
        *,
        counts: bool,
    ) -> tuple[tuple[list[Any], dict[str, Any]], Any]:
        try:
            value, loans = self._decode(control, buffers, meta, counts=counts)
        except CallError as error:
            error.outcome = Outcome.NOT_EXECUTED
            raise
        if type(value) is not list or len(value) != 2:  # noqa: PLR2004
            raise _no_arguments("they are missing")
        args, kwargs = value
        if type(args) is not list or type(kwargs) is not dict:
            raise _no_arguments("they are not a list and a map")
        return (args, kwargs), loans

    def _refuse(
        self,
        inbound: InboundCall,
        target: Any,
        error: AsyncRpcError,
        control: bytes,
        buffers: list[memoryview],
    ) -> None:
        """Answer a request that cannot be run."""
        self._name(error, target)
        self._begin(inbound)
        inbound.claim = self._credit.claim(inbound.call_id, control, buffers)
        self._responder.answer_error(inbound, error, outcome=Outcome.NOT_EXECUTED)

    def _dispatch(
        self,
        inbound: InboundCall,
        target: Any,
        args: list[Any],
        kwargs: dict[str, Any],
        flags: int,
    ) -> None:
        """Find the target, and run it."""
        if target is None:
            resolved = self._value_target(args)
        else:
            named = self._functions.find(target)
            if named is None:
                self._resolve(inbound, target, args, kwargs)
                return
            resolved = named
        self._run(inbound, resolved, args, kwargs, flags)

    def _run(
        self,
        inbound: InboundCall,
        target: Target,
        args: list[Any],
        kwargs: dict[str, Any],
        flags: int,
    ) -> None:
        # As `is_current` and the like, but a property takes 40 ns.
        if target.look_up(target.first) is not target.root:
            target = self._functions.find([0, target.path]) or target
        is_stream = target.mode is ASYNC_GENERATOR or target.mode is GENERATOR
        if is_stream != bool(flags & _STREAM):
            inbound.target = target
            raise CallKindError(
                "it is a generator: use `stream`, not `call`"
                if is_stream
                else "it is not a generator: use `call`, not `stream`; to stream what"
                " it returns, make it a generator (`yield from ...`)",
                function=target.name,
                to=self._host.name,
                outcome=Outcome.NOT_EXECUTED,
            )
        tracer = self._host.tracer
        if tracer is not None and not inbound.is_cancelled:
            trace_function(tracer, inbound, target, self._link.peer.name)
        if inbound.meta:
            target = self._surrounded(target, inbound.meta)
        if profiler._is_profiler_enabled:  # noqa: SLF001
            target = show_function(
                inbound, target, caller=self._link.peer.name, callee=self._host.name
            )
        if is_stream:
            streams.serve(inbound, target, args, kwargs)
        elif self._backlog.is_pressed and self._backlog.must_wait(target.name):
            self._responder.run_later(inbound, target, args, kwargs)
        else:
            inbound.run(target, args, kwargs)

    def _surrounded(self, target: Target, meta: Meta) -> Target:
        """Return what runs a function under the state of its caller's thread."""
        function = target.function
        for state in self._host.thread_states:
            if state.key in meta:
                try:
                    function = state.surround(meta[state.key], function)
                except MalformedError as error:  # of this request, and of no other
                    raise unreadable(error) from error
        if function is target.function:
            return target
        return Target(target.name, function, target.mode)

    def _name(self, error: BaseException, target: Any) -> None:
        """Say in an error which function was called, as far as its request tells."""
        # By its type: the error of a value may pretend to be of another.
        if not issubclass(type(error), CallError) or error.function:  # type: ignore[attr-defined]
            return
        name = self._functions.name_of(target)
        if name:
            error.function, error.to = name, self._host.name  # type: ignore[attr-defined]

    def _value_target(self, args: list[Any]) -> Target:
        if not args or not callable(args[0]):
            raise DecodeError(
                "the target of the call arrived as a value, and is not callable",
                outcome=Outcome.NOT_EXECUTED,
            )
        function = args.pop(0)
        if not self._host.functions.is_allowed(function):
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
        references = self._references
        if references is None or type(target) is not list:
            raise MalformedError(
                f"a request names the target {target!r}, which this worker cannot "
                "resolve"
            )

        def ready(function: Callable[..., Any] | RefusedFunction) -> None:
            if isinstance(function, RefusedFunction):
                self._name(function.error, target)
                self._responder.answer_error(
                    inbound, function.error, outcome=function.outcome
                )
                return
            try:
                mode = self._host.mode_of_method(function)
                method_target = Target(name_of_value(function), function, mode)
                self._run(inbound, method_target, args, kwargs, 0)
            except AsyncRpcError as error:
                self._responder.answer_error(
                    inbound, error, outcome=Outcome.NOT_EXECUTED
                )
            except BaseException as error:  # noqa: BLE001  (the caller gets it)
                self._responder.answer_error(inbound, error)

        inbound.wanted = references.resolve(self._link, target, ready)

    def on_cancel(self, frame: Frame) -> None:
        """Cancel a call that the peer gives up."""
        call_id = frame.call_id
        # A cancel may overtake its request, whose payload is still on its way.
        arriving = self._connection.forget_transfer(FrameKind.REQUEST, call_id)
        if arriving is not None:
            self._messages.give_back(arriving)
        elif not self._preparation.cancel(call_id):
            inbound = self._served.get(call_id)
            if inbound is not None:
                inbound.cancel()
            # The answer may be on its way.  What it tells beside its value (which
            # references were kept, say) must arrive.
            self._connection.drop(_RESPONSE, call_id, bare_only=True)
        self._credit.on_cancel(call_id, frame.aux)

    def on_stream_credit(self, frame: Frame) -> None:
        """Take the credit for items that the consumer of a stream has taken."""
        if frame.aux <= 0:
            raise MalformedError(
                f"a credit must be of at least 1 item, not {frame.aux}"
            )
        inbound = self._served.get(frame.call_id)
        if inbound is not None and inbound.credit is not None:
            inbound.credit.grant(frame.aux)

    def check_payload(self, kind: int, head: bytes, nbytes: int) -> None:
        """Refuse the payload of a message whose service takes none."""
        is_notice = kind == FrameKind.NOTICE
        find = self._router.notice if is_notice else self._router.request
        route = find(head)
        sender = self._link.peer.name
        if self._link.is_guest and Sender.GUEST not in route.by:
            raise not_by(sender, Sender.GUEST, route.name, route.by)
        if not route.takes_payload:
            raise MalformedError(
                f"worker {sender!r} announced {nbytes} bytes with a"
                f" {route.name!r:.80}, which takes none"
            )

    def on_service(
        self,
        _flags: int,
        call_id: int,
        aux: int,
        head: bytes,
        control: bytes,
        buffers: list[memoryview],
    ) -> None:
        """Take a request to a service of this worker."""
        route = self._requests.get(head) or self._router.request(head)
        now_s = self._now_s()
        deadline = Deadline.from_budget(aux, now_s)
        inbound = InboundCall(
            self._host, self._responder, call_id, now_s, deadline, NO_META
        )
        size_bytes, weight, unread = len(control), -1, control
        try:
            if (
                size_bytes > FREE_BYTES_MAX
                or self._memory.is_watched
                or len(self._running) > UNWEIGHED_CALLS_MAX
            ):
                weight = self._weigh(size_bytes, b"", buffers)
            unread, counts = b"", weight == COUNTED
            value, inbound.loans = self._decode(
                control, buffers, NO_META, counts=counts
            )
            if weight != -1:
                self._hold(inbound, weight, size_bytes, b"", buffers)
        except BaseException as error:  # noqa: BLE001  (a value's own code may run)
            self._messages.give_back(unread, buffers)
            self._begin(inbound)
            self._responder.answer_error(
                inbound, unreadable(error), outcome=Outcome.NOT_EXECUTED
            )
            return
        self._begin(inbound)
        target = Target(route.name, route.handle, Mode.COROUTINE)
        if self._backlog.is_pressed and self._backlog.must_wait(target.name):
            self._responder.run_later(inbound, target, [self._link, value], {})
        else:
            inbound.run(target, [self._link, value], {})

    def on_notice(
        self,
        _flags: int,
        _call_id: int,
        _aux: int,
        head: bytes,
        control: bytes,
        buffers: list[memoryview],
    ) -> None:
        """Take a notice to a service of this worker; it is not answered."""
        route = self._notices.get(head) or self._router.notice(head)
        try:
            value, _ = self._decode(control, buffers, NO_META)
            route.handle(self._link, value)
        except BaseException as error:
            # It has no answer that could fail, and other messages are not at fault.
            is_expected = isinstance(error, AsyncRpcError)
            logger.warning(
                "a notice of %r could not be taken: %s: %s",
                self._link.peer.name,
                route.name,
                text_of(error),
                exc_info=not is_expected,
            )


def _no_arguments(problem: str) -> DecodeError:
    text = f"a request's arguments cannot be read: {problem}"
    return DecodeError(text, outcome=Outcome.NOT_EXECUTED)

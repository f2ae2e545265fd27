"""Messages with a long control part: they are read in a thread, one after the other.

On the loop a million numbers would take 60 ms, as many lists a second.  While such a
message is read, no other is parsed that came after it over the connection: messages
keep their order, and a peer can neither pile up long ones nor have two read at once.

References are counted on the loop, so they are taken there before the message is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from asyncrpc.core.calls.machine.calls import LinkStatus
from asyncrpc.core.calls.message_codec import DecodedBuffers, MessageCodec
from asyncrpc.core.wire.frames import Meta
from asyncrpc.errors import RejectedError, RemoteProtocolError

if TYPE_CHECKING:
    from asyncrpc.core.calls.ports import CallConnection, CallHost

_LIFTED_AT_ONCE: Final = 128  # references, of 10 us each

Deliver = Callable[[bytes, list[memoryview]], None]


@dataclass(slots=True)
class _LongMessage:
    """A message that is read in a thread; `deliver` is None if it is not wanted."""

    meta: Meta
    control: bytes
    buffers: list[memoryview]
    deliver: Deliver | None
    takes_references: bool


class LongMessages:
    """The long messages of one link."""

    __slots__ = ("_connection", "_host", "_messages", "_queue", "_status")

    def __init__(
        self,
        host: CallHost,
        *,
        messages: MessageCodec,
        connection: CallConnection,
        status: LinkStatus,
    ) -> None:
        self._host = host
        self._messages = messages
        self._connection = connection
        self._status = status
        self._queue: deque[_LongMessage] = deque()  # the first is being read

    def take(
        self,
        meta: Meta,
        control: bytes,
        buffers: list[memoryview],
        deliver: Deliver | None,
        *,
        takes_references: bool = True,
    ) -> None:
        """Read a message, then deliver it with the control part and `DecodedBuffers`.

        Args:
            deliver: called on the loop; None: only the references of the message are
                taken, and given back.
        """
        self._queue.append(
            _LongMessage(meta, control, buffers, deliver, takes_references)
        )
        if len(self._queue) == 1:
            self._connection.turns.hold()
            self._begin()

    def _begin(self) -> None:
        message = self._queue[0]
        if message.takes_references and self._messages.may_refer(message.control):
            self._in_thread(
                lambda: self._messages.references_in(message.control), self._lift
            )
        else:
            self._read([], [])

    def _in_thread(
        self,
        job: Callable[[], Any],
        then: Callable[[Any], None],
    ) -> None:
        """Run a job in a thread, or here if there is none; then go on with its result.

        The job raises nothing but what ends the message.
        """

        def done(result: Any, error: BaseException | None) -> None:
            if self._status.is_lost:
                self._queue.clear()
            elif error is not None:  # no memory for a thread, say
                self._end(DecodedBuffers(self._queue[0].buffers, loans=[], error=error))
            else:
                then(result)

        try:
            self._host.host_pool.submit(job, done)
        except RejectedError:  # the worker is closing, and has no threads
            try:
                result = job()
            except Exception as error:  # noqa: BLE001  (the message is not readable)
                done(None, error)
            else:
                done(result, None)

    def _lift(self, trees: list[Any]) -> None:
        """Take the references of a message, a part of them in each turn of the loop."""
        rest: Iterator[list[Any]] = iter(
            [
                trees[at : at + _LIFTED_AT_ONCE]
                for at in range(0, len(trees), _LIFTED_AT_ONCE)
            ]
        )
        lifted: list[Any] = []
        loans: list[Any] = []

        def go_on() -> None:
            if self._status.is_lost:
                self._queue.clear()
                return
            part = next(rest, None)
            if part is None:
                self._read(lifted, loans)
                return
            loans.extend(self._messages.lift(part, lifted))
            self._messages.call_soon(go_on)

        go_on()

    def _read(self, lifted: list[Any], loans: list[Any]) -> None:
        message = self._queue[0]
        if message.deliver is None:
            self._end(DecodedBuffers([], loans=loans))
            return
        try:
            on_gradient = self._messages.join(message.meta)
        except Exception as error:  # noqa: BLE001  (the caller gets it)
            self._end(DecodedBuffers(message.buffers, loans=loans, error=error))
            return

        def job() -> DecodedBuffers:
            return self._messages.read_apart(
                message.control, message.buffers, on_gradient, lifted, loans
            )

        def end(decoded: DecodedBuffers) -> None:
            self._messages.joined(on_gradient)
            self._end(decoded)

        self._in_thread(job, end)

    def _end(self, decoded: DecodedBuffers) -> None:
        """Deliver the first message; go on with the next, or with the connection."""
        message = self._queue.popleft()
        try:
            if message.deliver is None:
                self._messages.give_back(b"", decoded)
            else:
                message.deliver(message.control, decoded)
        except RemoteProtocolError as error:
            self._connection.fail(error)
            self._queue.clear()
            return
        if self._queue:
            self._begin()
        else:
            self._connection.turns.resume()

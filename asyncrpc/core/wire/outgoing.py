"""A large message on its way out: its state while it waits, and giving it up.

A small message is written when it is sent, and does not pass through this module.  A
message that cannot be written yet is an `OutgoingMessage`.  It is in one state at a
time; `TRANSITIONS` has the events that may happen in each state.  The part that holds
the message provides a function that takes it back, so that a message is given up in one
place, whatever it waits for.

Sans-IO, as all of `wire`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Final

from asyncrpc.core.state_table import StateTable
from asyncrpc.core.wire.frames import FrameKind


class OutgoingState(enum.Enum):
    """The state of a message that is not written at once."""

    NEW = "the message is new"
    NO_CREDIT = "the peer has no room for the message yet"
    BLOCKED = "the peer lacks memory that it refers to, or its bytes are not ready"
    COPYING = "its payload is being copied into shared memory"
    NO_LANE = "the message waits for the first lane"
    QUEUED = "its chunks leave in turn with those of other messages"
    SENT = "its last byte has been taken"
    DROPPED = "the message has been given up"


class OutgoingEvent(enum.Enum):
    """An event of a message."""

    AWAIT_CREDIT = "the message is large, and the peer has given no credit for it"
    BLOCK = "the peer lacks memory that it refers to, or its bytes are not ready"
    COPY = "it goes through shared memory, and is too large to be copied at once"
    AWAIT_LANE = "it goes over lanes, and no lane is open yet"
    QUEUE = "it goes in chunks"
    SEND = "its last byte has been taken"
    DROP = "it is not wanted any more, or the connection has ended"


NEW, NO_CREDIT, BLOCKED, COPYING, NO_LANE, QUEUED, SENT, DROPPED = OutgoingState
_E = OutgoingEvent

# A message skips states in which it need not wait; otherwise it takes them in order.
TRANSITIONS: Final = StateTable(
    "a message",
    {
        NEW: {
            _E.AWAIT_CREDIT: NO_CREDIT,
            _E.BLOCK: BLOCKED,
            _E.COPY: COPYING,
            _E.AWAIT_LANE: NO_LANE,
            _E.QUEUE: QUEUED,
            _E.SEND: SENT,
            _E.DROP: DROPPED,
        },
        NO_CREDIT: {
            _E.BLOCK: BLOCKED,
            _E.COPY: COPYING,
            _E.AWAIT_LANE: NO_LANE,
            _E.QUEUE: QUEUED,
            _E.SEND: SENT,
            _E.DROP: DROPPED,
        },
        BLOCKED: {
            _E.COPY: COPYING,
            _E.AWAIT_LANE: NO_LANE,
            _E.QUEUE: QUEUED,
            _E.SEND: SENT,
            _E.DROP: DROPPED,
        },
        COPYING: {_E.SEND: SENT, _E.DROP: DROPPED},
        NO_LANE: {_E.QUEUE: QUEUED, _E.DROP: DROPPED},
        QUEUED: {_E.SEND: SENT, _E.DROP: DROPPED},
        SENT: {},
        DROPPED: {},
    },
)


_ANSWERS: Final = (FrameKind.RESPONSE, FrameKind.STREAM_ITEM, FrameKind.ERROR)


class OutgoingMessage:
    """A message that is not written at once.

    Attributes:
        aux: the `aux` of the header.
        buffers: the payload; it must not change until the message is sent or dropped.
        on_sent: called once, when the message is sent or dropped.
    """

    __slots__ = (
        "aux",
        "buffers",
        "call_id",
        "control",
        "flags",
        "head",
        "kind",
        "on_sent",
        "state",
    )

    def __init__(
        self,
        kind: int,
        call_id: int,
        *,
        flags: int = 0,
        aux: int = 0,
        head: bytes = b"",
        control: bytes = b"",
        buffers: Sequence[memoryview] = (),
        on_sent: Callable[[], None] | None = None,
    ) -> None:
        self.kind = kind
        self.call_id = call_id
        self.flags = flags
        self.aux = aux
        self.head = head
        self.control = control
        self.buffers = buffers
        self.on_sent = on_sent
        self.state = NEW

    @property
    def is_bare(self) -> bool:
        """Whether the message has only a value: no head, and no `on_sent`."""
        return not self.head and self.on_sent is None

    def on(self, event: OutgoingEvent) -> None:
        """Take an event; for `OutgoingMessages` alone."""
        self.state = TRANSITIONS.after(self.state, event)


class OutgoingMessages:
    """The messages of one connection that wait.

    Attributes:
        on_less: called when `answer_bytes` has become less.
    """

    __slots__ = ("_waiting", "on_less")

    def __init__(self, on_less: Callable[[], object] = lambda: None) -> None:
        self.on_less = on_less
        self._waiting: dict[OutgoingMessage, Callable[[], object]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def answer_bytes(self) -> int:
        """Bytes of the buffers of answers among them."""
        return sum(
            buffer.nbytes
            for message in self._waiting
            if message.kind in _ANSWERS
            for buffer in message.buffers
        )

    def wait(
        self,
        message: OutgoingMessage,
        event: OutgoingEvent,
        take_back: Callable[[], object],
    ) -> None:
        """Record what a message waits for from now on."""
        message.on(event)
        self._waiting[message] = take_back

    def sent(self, message: OutgoingMessage) -> None:
        """Record that the last byte of a message has been taken."""
        self._end(message, OutgoingEvent.SEND)

    def drop(
        self, kind: int, call_id: int, *, bare_only: bool = False
    ) -> OutgoingState | None:
        """Give up the messages of one kind and call that wait."""
        state = None
        if not self._waiting:
            return state
        for message in list(self._waiting):
            # A callback of one message may have dropped another.
            if (
                message.kind == kind
                and message.call_id == call_id
                and (message.is_bare or not bare_only)
                and message in self._waiting
            ):
                state = message.state
                self._waiting[message]()
                self._end(message, OutgoingEvent.DROP)
        return state

    def forget(self, message: OutgoingMessage) -> None:
        """Drop a message that has no holder any more."""
        self._end(message, OutgoingEvent.DROP)

    def clear(self) -> None:
        """Drop all messages: the connection has ended, and the holders forget them."""
        while self._waiting:
            self._end(next(iter(self._waiting)), OutgoingEvent.DROP)

    def _end(self, message: OutgoingMessage, event: OutgoingEvent) -> None:
        message.on(event)
        has_waited = self._waiting.pop(message, None) is not None
        is_less = has_waited and message.kind in _ANSWERS and bool(message.buffers)
        message.buffers = ()  # which may refer to the message
        if is_less:
            self.on_less()
        if message.on_sent is not None:
            message.on_sent()

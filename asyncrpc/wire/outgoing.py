"""A large message on its way out: where it waits, and how it is given up.

A small message is written when it is sent, and nothing here knows of it.  One that
cannot be written yet is an `OutgoingMessage`.  It is in one state at a time, and what
may happen to it then is in `TRANSITIONS`.  Whoever has it meanwhile says how to take it
back, so that a message is given up in one place, whatever it waits for.

Sans-IO, as all of `wire`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from asyncrpc.errors import LocalProtocolError


class OutgoingState(enum.Enum):
    """What a message waits for."""

    NEW = "it has been made"
    NO_CREDIT = "the peer has no room for it yet"
    BLOCKED = "the peer has not what it refers to, or its bytes are not ready"
    COPYING = "its payload is being copied into shared memory"
    NO_LANE = "the first lane is being opened"
    QUEUED = "its chunks leave in turn with those of others"
    SENT = "it has left whole"
    DROPPED = "it has been given up"


class OutgoingEvent(enum.Enum):
    """What happens to a message."""

    AWAIT_CREDIT = "it is large, and the peer has given no credit for it"
    BLOCK = "it refers to what the peer has not, or its bytes are not ready"
    COPY = "it is to go through shared memory, and is too large to be copied at once"
    AWAIT_LANE = "it is to go over lanes, and there is none yet"
    QUEUE = "it is to go in chunks"
    SEND = "its last byte has been taken"
    DROP = "nobody wants it any more, or the connection has ended"


NEW, NO_CREDIT, BLOCKED, COPYING, NO_LANE, QUEUED, SENT, DROPPED = OutgoingState
_E = OutgoingEvent

# What a message need not wait for is left out; otherwise the order is this.
TRANSITIONS: Final[Mapping[OutgoingState, Mapping[OutgoingEvent, OutgoingState]]] = {
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
}


class OutgoingMessage:
    """A message that is not written at once.

    Attributes:
        kind: its kind.
        call_id: its call.
        flags: of the header.
        aux: of the header.
        head: routing.
        control: the value.
        buffers: the payload, until the message is sent or dropped: not to change.
        on_sent: called once, when it is.
        state: what it waits for.
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
        """Whether nothing travels beside the value."""
        return not self.head and self.on_sent is None

    def on(self, event: OutgoingEvent) -> None:
        """Take an event; for `OutgoingMessages` alone.

        Raises:
            LocalProtocolError: it cannot happen in this state.  Nothing has changed.
        """
        state = TRANSITIONS[self.state].get(event)
        if state is None:
            raise LocalProtocolError(f"{event.name} of a message: {self.state.value}")
        self.state = state


class OutgoingMessages:
    """The messages of one connection that wait."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: dict[OutgoingMessage, Callable[[], object]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def wait(
        self,
        message: OutgoingMessage,
        event: OutgoingEvent,
        take_back: Callable[[], object],
    ) -> None:
        """Record what a message waits for from now on.

        Args:
            message: it may have waited for something else before.
            event: what happens to it.
            take_back: called if it is dropped: whoever has it forgets it, and tells the
                peer if that has heard of it.
        """
        message.on(event)
        self._waiting[message] = take_back

    def sent(self, message: OutgoingMessage) -> None:
        """The last byte of a message has been taken."""
        self._end(message, OutgoingEvent.SEND)

    def drop(
        self, kind: int, call_id: int, *, bare_only: bool = False
    ) -> OutgoingState | None:
        """Give up the messages of one kind and call that wait.

        Args:
            kind: of the messages.
            call_id: of the messages.
            bare_only: leave a message that tells the peer more than its value.

        Returns:
            What the last of them waited for; None if there was none.
        """
        state = None
        if not self._waiting:
            return state
        for message in list(self._waiting):
            # Whoever is told of one may have dropped another.
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
        """Drop a message that nobody has any more."""
        self._end(message, OutgoingEvent.DROP)

    def clear(self) -> None:
        """Drop everything: the connection has ended, and whoever has it forgets it."""
        while self._waiting:
            self._end(next(iter(self._waiting)), OutgoingEvent.DROP)

    def _end(self, message: OutgoingMessage, event: OutgoingEvent) -> None:
        message.on(event)
        self._waiting.pop(message, None)
        message.buffers = ()  # which may refer to the message
        if message.on_sent is not None:
            message.on_sent()

"""A large message on its way out: where it waits, and how it is given up.

A small message is written when it is sent, and nothing here knows of it.  One that
cannot be written yet is an `OutgoingMessage`.  It is in one state at a time, and each
move must be in `TRANSITIONS`.  Whoever has it meanwhile gives `OutgoingMessages` what
takes it back, so that a message is given up in one place, whatever it waits for.

Sans-IO, as all of `wire`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Final


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


NEW, NO_CREDIT, BLOCKED, COPYING, NO_LANE, QUEUED, SENT, DROPPED = OutgoingState

# In this order, but for what a message need not wait for.
TRANSITIONS: Final[Mapping[OutgoingState, frozenset[OutgoingState]]] = {
    NEW: frozenset({NO_CREDIT, BLOCKED, COPYING, NO_LANE, QUEUED, SENT, DROPPED}),
    NO_CREDIT: frozenset({BLOCKED, COPYING, NO_LANE, QUEUED, SENT, DROPPED}),
    BLOCKED: frozenset({COPYING, NO_LANE, QUEUED, SENT, DROPPED}),
    COPYING: frozenset({SENT, DROPPED}),
    NO_LANE: frozenset({QUEUED, DROPPED}),
    QUEUED: frozenset({SENT, DROPPED}),
    SENT: frozenset(),
    DROPPED: frozenset(),
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
        buffers: the payload: not to change until the message is sent or dropped.
        on_sent: called once, when it is.
        state: what it waits for; only `OutgoingMessages` changes it.
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
        state: OutgoingState,
        take_back: Callable[[], object],
    ) -> None:
        """Record what a message waits for from now on.

        Args:
            message: it may have waited for something else before.
            state: what it waits for.
            take_back: called if it is dropped: whoever has it forgets it, and tells the
                peer if that has heard of it.
        """
        _move(message, state)
        self._waiting[message] = take_back

    def sent(self, message: OutgoingMessage) -> None:
        """The last byte of a message has been taken."""
        self._end(message, SENT)

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
                self._end(message, DROPPED)
        return state

    def forget(self, message: OutgoingMessage) -> None:
        """Drop a message that nobody has any more."""
        self._end(message, DROPPED)

    def clear(self) -> None:
        """Drop everything: the connection has ended, and whoever has it forgets it."""
        while self._waiting:
            self._end(next(iter(self._waiting)), DROPPED)

    def _end(self, message: OutgoingMessage, state: OutgoingState) -> None:
        _move(message, state)
        self._waiting.pop(message, None)
        on_sent, message.on_sent = message.on_sent, None
        if on_sent is not None:
            on_sent()


def _move(message: OutgoingMessage, state: OutgoingState) -> None:
    assert state in TRANSITIONS[message.state], f"{message.state} to {state}"
    message.state = state

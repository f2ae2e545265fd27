"""Decides which messages a worker loses or delays, for tests of programs.

A message is identified by its content: sent again, it counts as the same message.  So a
program that repeats a lost call gets an answer in the end.

Invariant: a message of a type that is set to fail is lost `num_fail_sends` times; after
that it is delayed as its type says.

Source: torch's FaultyTensorPipeAgent (torch/csrc/distributed/rpc/testing), which also
counts by the bytes of a message.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Final

# Messages whose sends are counted: more than any test sends.  The oldest is dropped.
COUNTED_MAX: Final = 1 << 16


class MessageType(enum.Enum):
    """The messages of torch that can be lost or delayed.

    SCRIPT messages run an operator of torch or a TorchScript function, PYTHON messages
    any other function.  The last four are messages of torch's own protocols.
    """

    PYTHON_CALL = enum.auto()
    SCRIPT_CALL = enum.auto()
    PYTHON_REMOTE_CALL = enum.auto()
    SCRIPT_REMOTE_CALL = enum.auto()
    PYTHON_RREF_FETCH_CALL = enum.auto()
    SCRIPT_RREF_FETCH_CALL = enum.auto()
    RREF_FORK_REQUEST = enum.auto()
    RREF_CHILD_ACCEPT = enum.auto()
    RREF_USER_DELETE = enum.auto()
    CLEANUP_AUTOGRAD_CONTEXT_REQ = enum.auto()


def message_type(name: str) -> MessageType:
    """Return the type with a name.

    Raises:
        RuntimeError: no type has the name; the message lists the names.
    """
    found = MessageType.__members__.get(name)
    if found is None:
        known = ", ".join(MessageType.__members__)
        raise RuntimeError(
            f"No mapping to rpc::MessageType exists for {name}; there are {known}"
        )
    return found


class Faults:
    """Decides about each message of one worker, and counts the lost ones.

    Args:
        messages_to_fail: names of types.
        messages_to_delay: seconds by the name of a type.
        num_fail_sends: how often a message is lost before it is sent.

    Raises:
        RuntimeError: a type is unknown, or a number is negative.
    """

    def __init__(
        self,
        messages_to_fail: Iterable[str],
        messages_to_delay: Mapping[str, float],
        num_fail_sends: int,
    ) -> None:
        if num_fail_sends < 0:
            raise RuntimeError("numFailSends should be non-negative")
        self._failing = frozenset(map(message_type, messages_to_fail))
        self._delays_s = {
            message_type(name): delay_s for name, delay_s in messages_to_delay.items()
        }
        for kind, delay_s in self._delays_s.items():
            if not delay_s >= 0:
                raise RuntimeError(
                    f"{kind.name} cannot be delayed by {delay_s} s: use 0 or more"
                )
        self._num_fail_sends = num_fail_sends
        self._lost: dict[tuple[MessageType, bytes], int] = {}

    def is_lost(self, kind: MessageType, outline: Callable[[], bytes]) -> bool:
        """Return whether a message sent now is lost; if so, count it.

        Args:
            kind: type of the message.
            outline: returns the identity of the message.
        """
        if kind not in self._failing:
            return False
        message = outline()
        lost = self._lost.get((kind, message), 0)
        if lost >= self._num_fail_sends:
            return False
        self._lost[kind, message] = lost + 1
        if len(self._lost) > COUNTED_MAX:
            del self._lost[next(iter(self._lost))]
        return True

    def delay_s(self, kind: MessageType) -> float:
        """Return the delay of messages of a type, in seconds."""
        return self._delays_s.get(kind, 0.0)

"""Decides which messages a worker loses or holds back, for tests of programs.

A message is identified by its content: one that is sent again counts as the same.  So a
program that repeats a lost call is answered in the end.

Invariant: a message of a type that is set to fail is lost `num_fail_sends` times; after
    that it is held back as its type says.

Source: torch's FaultyTensorPipeAgent (torch/csrc/distributed/rpc/testing), which counts
by the bytes of a message, too.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Final

# Messages whose sends are counted: more than any test makes.  The oldest is forgotten.
COUNTED_MAX: Final = 1 << 16


class MessageType(enum.Enum):
    """The messages of torch that can be lost or held back.

    SCRIPT is what runs an operator of torch's or a TorchScript function, PYTHON what
    runs any other.  The last four are messages of torch's own protocols.
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
        num_fail_sends: how often a message is lost before it goes through.

    Raises:
        RuntimeError: there is no such type, or a number is negative.
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
        """Return whether a message that is sent now is lost; count it if it is.

        Args:
            kind: its type.
            outline: returns what stands for all that it says.
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
        """Return the seconds for which messages of a type are held back."""
        return self._delays_s.get(kind, 0.0)

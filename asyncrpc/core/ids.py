"""Identifiers.  Named tuples, because they are dictionary keys on the path of a call.

Each start of a worker is an *incarnation*: a random 64-bit number drawn at start.  Ids
that outlive a connection contain the incarnation of the worker that made them, so that
a restarted worker under the same name cannot repeat one.
"""

from __future__ import annotations

from typing import Final, NamedTuple, NewType

NAME_CHARACTERS_MAX: Final = 255  # it travels in every handshake, and in every error

Incarnation = NewType("Incarnation", int)  # 64 random bits, one life of one worker


class WorkerId(NamedTuple):
    """One life of one worker."""

    name: str
    incarnation: Incarnation


class RRefId(NamedTuple):
    """A value with references: the worker that requested it, and a random number."""

    creator: Incarnation
    serial: int

    def __str__(self) -> str:
        return f"{self.creator:016x}-{self.serial:016x}"


class ContextId(NamedTuple):
    """One distributed autograd context: the worker that opened it, a random number."""

    creator: Incarnation
    serial: int

    def __str__(self) -> str:
        return f"{self.creator:016x}-{self.serial:016x}"


class MessageId(NamedTuple):
    """One message with tensors of a context: its sender, and a counter there."""

    sender: Incarnation
    serial: int


def is_name(text: str) -> bool:
    """Return whether a worker can have a name; logs and terminals show it."""
    return 0 < len(text) <= NAME_CHARACTERS_MAX and text.isprintable()


class WorkerInfo(NamedTuple):
    """A worker, by name and rank.

    Attributes:
        name: name of the worker, unique in its group.
        id: rank of the worker; -1 if it has no rank.
    """

    name: str
    id: int

    @property
    def rank(self) -> int:
        """The rank of the worker, as `id`, which is torch's name of it."""
        return self.id

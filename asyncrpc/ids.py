"""Identifiers.  Named tuples, because they are dictionary keys on the path of a call.

A worker that is started again under its old name is another *incarnation*: a random
64-bit number drawn at start.  Ids that outlive a connection carry the incarnation of
the worker that made them, so that a restarted worker cannot repeat one.
"""

from __future__ import annotations

from typing import NamedTuple, NewType

Incarnation = NewType("Incarnation", int)  # 64 random bits, one life of one worker


class WorkerId(NamedTuple):
    """One life of one worker."""

    name: str
    incarnation: Incarnation


class RRefId(NamedTuple):
    """A value that is referred to: who asked for it to be made, and a counter there."""

    creator: Incarnation
    serial: int


class ContextId(NamedTuple):
    """One distributed autograd context: who opened it, and a counter there."""

    creator: Incarnation
    serial: int

    def __str__(self) -> str:
        return f"{self.creator:016x}-{self.serial}"


class MessageId(NamedTuple):
    """One message that carried tensors of a context: who sent it, a counter there."""

    sender: Incarnation
    serial: int


class WorkerInfo(NamedTuple):
    """A worker as programs see it.

    Attributes:
        name: unique in its group.
        id: its rank; -1 if it has none.
    """

    name: str
    id: int

"""The messages of collectives; docs/reference/wire-protocol.md has them all."""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeAlias

import torch

from asyncrpc.collectives.machine.operations import CollectiveFailure, Descriptor
from asyncrpc.runtime.messages import Notice, Request, message
from asyncrpc.runtime.schema import (
    Count,
    RecordSchema,
    Signed,
    integer,
)

SERVICE: Final = "collectives"

Rank: TypeAlias = Annotated[int, integer(0, 1 << 31, "a rank")]

_DESCRIPTOR: Final = RecordSchema(Descriptor)


@message(SERVICE, "block")
class TensorBlock(Request[CollectiveFailure | None]):
    """Tensors for another rank; answered when it has taken them, or why it has not.

    Attributes:
        group: number of the group.
        number: of the collective.
        rank: of the sender.
        turn: counts the sender's messages to the receiver in this collective.
        descriptor: what the sender believes the collective to be; None: as before.
        tensors: (blocks,), those of a step.
    """

    group: Count
    number: Count
    rank: Rank
    turn: Count
    descriptor: Descriptor | None
    tensors: list[torch.Tensor]


@message(SERVICE, "point")
class SentTensor(Request[CollectiveFailure | None]):
    """A tensor that was sent; answered when it has been received, or never will be."""

    group: Count
    rank: Rank
    tag: Signed
    tensor: torch.Tensor


@message(SERVICE, "begun")
class CountBegun(Request[Count | None]):
    """Ask how many collectives have begun; None: the group is closed."""

    group: Count


@message(SERVICE, "begun")
class CollectiveBegun(Notice):
    """What the sender, which is this rank, waits in."""

    group: Count
    number: Count
    rank: Rank
    descriptor: Descriptor


@message(SERVICE, "woke")
class WakeUp(Notice):
    """Something that the receiver sleeps for is on the board."""

    group: Count


@message(SERVICE, "failed")
class CollectiveFailed(Notice):
    """A collective has failed."""

    group: Count
    number: Count
    failure: CollectiveFailure


@message(SERVICE, "left")
class GroupLeft(Notice):
    """The sender has closed the group, and ended all collectives before this number."""

    group: Count
    ended: Count
    failure: CollectiveFailure


@message(SERVICE, "lost")
class RankGone(Notice):
    """A rank is gone."""

    group: Count
    failure: CollectiveFailure


def read_descriptor(value: Any) -> Descriptor:
    """Return what a rank has written of a collective on the board.

    Raises:
        MalformedError: it is something else.
    """
    found: Descriptor = _DESCRIPTOR.read_as("the description of a collective", value)
    return found

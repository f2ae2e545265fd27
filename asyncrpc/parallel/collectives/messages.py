"""The messages of collectives; docs/reference/wire-protocol.md has them all."""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeAlias

import torch

from asyncrpc.errors import MalformedError
from asyncrpc.extend import (
    Count,
    Integer,
    Notice,
    Number,
    RecordSchema,
    Request,
    Signed,
    WorkerId,
    message,
)
from asyncrpc.parallel.collectives.machine.operations import (
    CollectiveFailure,
    Descriptor,
)
from asyncrpc.parallel.collectives.machine.reconfiguration import Standing
from asyncrpc.parallel.collectives.machine.views import (
    Accusation,
    Applicant,
    Departure,
    Proposal,
    View,
)

SERVICE: Final = "collectives"
# Of an elastic group.  Each accusation and each standing costs about 50 bytes for each.
WORKERS_MAX: Final = 4096

Rank: TypeAlias = Annotated[int, Integer(0, 1 << 31, "a rank")]

_DESCRIPTOR: Final = RecordSchema(Descriptor)


@message(SERVICE, "block", about="the rank of the sender in a group")
class TensorBlock(Request[CollectiveFailure | None]):
    """Tensors for another rank; answered when it has taken them, or with a failure.

    Attributes:
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


@message(SERVICE, "point", about="the rank of the sender in a group")
class SentTensor(Request[CollectiveFailure | None]):
    """A tensor that was sent; answered when it has been received, or never will be."""

    group: Count
    rank: Rank
    tag: Signed
    tensor: torch.Tensor


@message(SERVICE, "begun", about="a group of the sender")
class CountBegun(Request[Count | None]):
    """Ask how many collectives have begun; None: the group is closed."""

    group: Count


@message(SERVICE, "begun", about="the rank of the sender in a group")
class CollectiveBegun(Notice):
    """The collective that the sender waits in."""

    group: Count
    number: Count
    rank: Rank
    descriptor: Descriptor


@message(SERVICE, "woke", about="a group of the sender")
class WakeUp(Notice):
    """The board holds data that the receiver sleeps for."""

    group: Count


@message(SERVICE, "failed", about="a collective of a group of the sender")
class CollectiveFailed(Notice):
    """A collective has failed."""

    group: Count
    number: Count
    failure: CollectiveFailure


@message(SERVICE, "left", about="the sender, in a group of it")
class GroupLeft(Notice):
    """The sender has closed the group, and ended all collectives before this number."""

    group: Count
    ended: Count
    failure: CollectiveFailure


@message(SERVICE, "lost", about="a rank of a group of the sender")
class RankGone(Notice):
    """A rank is gone."""

    group: Count
    failure: CollectiveFailure


@message(
    SERVICE,
    "standing",
    about="the sender; from a worker that takes part, also others",
)
class MemberStanding(Notice):
    """What the sender knows of an elastic group, and of its next view.

    Attributes:
        generation: of the last view that the sender knows.
        members: of that view, by rank.
        steps: how far the program of each member was.
        is_here: whether the sender waits for the next view.
        applicants: workers that want to be in it.
        accusations: workers that others have lost.
        departures: workers that have left, each with the last turn in which it came.
    """

    group_name: str
    generation: Count
    members: list[WorkerId]
    steps: list[Number]
    is_here: bool
    applicants: list[Applicant]
    accusations: list[Accusation]
    departures: list[Departure]


def standing_of(message: MemberStanding) -> Standing:
    """Return the standing in a message."""
    lists = message.members, message.applicants, message.accusations, message.departures
    if any(len(workers) > WORKERS_MAX for workers in lists):
        raise MalformedError(f"a standing must list at most {WORKERS_MAX} workers")
    members = tuple(message.members)
    if len(message.steps) != len(members) or len(set(members)) != len(members):
        raise MalformedError("a view must have distinct members, each with a step")
    if (message.generation == 0) != (not members):
        raise MalformedError("only generation 0 must have no members")
    proposal = Proposal(
        {applicant.id: applicant for applicant in message.applicants},
        frozenset(message.accusations),
        {departure.id: departure.turn for departure in message.departures},
    )
    view = View(message.generation, members, tuple(message.steps))
    return Standing(view, message.is_here, proposal)


def notice_of(name: str, standing: Standing) -> MemberStanding:
    """Return the message that tells a standing."""
    view, proposal = standing.view, standing.proposal
    departures = [
        Departure(worker, turn) for worker, turn in proposal.departures.items()
    ]
    return MemberStanding(
        name,
        view.generation,
        list(view.members),
        list(view.steps),
        standing.is_here,
        list(proposal.applicants.values()),
        sorted(proposal.accusations),
        departures,
    )


def read_descriptor(value: Any) -> Descriptor:
    """Return the description of a collective that a rank wrote on the board."""
    descriptor: Descriptor = _DESCRIPTOR.read_as(
        "the description of a collective", value
    )
    return descriptor

"""Views of an elastic group, and proposals for the next one; pure functions.

A *view* is a membership: a generation and the members by rank.  While its members agree
on the next view, each has a *proposal*: what it knows of the workers that want to be in
it, and of those that are gone.  Proposals only grow, and are joined like sets, so
members that exchange them come to the same one.  The next view is a function of the
present view and the proposal: members with the same proposal derive the same view.

A worker is left out if it has left, or if another one accuses it of being lost.  Two
workers whose connection broke accuse each other; then the one with more accusers is
left out, and of equals the one with the higher rank.  The accusations of a worker that
is left out do not count any more.

Source: the quorum of dynamic voting (Jajodia and Mutchler, 1990): more than half of the
members of the view before, or half of them with its first rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from asyncrpc.core.ids import WorkerId
from asyncrpc.core.services.schema import Count, Number


class Applicant(NamedTuple):
    """A worker that wants to be in the next view.

    Attributes:
        turn: counts how often it has come, so that it can leave and come again.
        rank: its rank among all workers, by which newcomers are ordered; -1: none.
        step: how far its program is; a newcomer's is -1.
        min_size: members that the view must have at least.
        needs_majority: whether the view needs a quorum of the one before.
    """

    id: WorkerId
    turn: Count
    rank: Number
    step: Number
    min_size: Count = 1
    needs_majority: bool = True


class Accusation(NamedTuple):
    """A worker that another one has lost."""

    by: WorkerId
    lost: WorkerId


class Departure(NamedTuple):
    """A worker that has left, and the last turn in which it had come."""

    id: WorkerId
    turn: Count


@dataclass(frozen=True, slots=True)
class View:
    """A membership.

    Attributes:
        generation: counts the views of a group; 0: there has been none.
        members: by rank.
        steps: how far the program of each member was when it came.
    """

    generation: int = 0
    members: tuple[WorkerId, ...] = ()
    steps: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[int, int, tuple[WorkerId, ...]]:
        """Return the order of views: of two, the lower one is given up."""
        return self.generation, len(self.members), self.members


NO_VIEW: Final = View()


@dataclass(frozen=True, slots=True)
class Proposal:
    """What is known for the next view.

    Attributes:
        applicants: workers that want to be in it.
        accusations: workers that others have lost.
        departures: workers that have left, and the last turn in which each had come.
    """

    applicants: Mapping[WorkerId, Applicant] = field(default_factory=dict)
    accusations: frozenset[Accusation] = frozenset()
    departures: Mapping[WorkerId, int] = field(default_factory=dict)

    def joined(self, other: Proposal) -> Proposal:
        """Return the union of two proposals."""
        if other == self:
            return self
        applicants = dict(self.applicants)
        for worker, applicant in other.applicants.items():
            applicants[worker] = max(applicant, applicants.get(worker, applicant))
        departures = dict(self.departures)
        for worker, turn in other.departures.items():
            departures[worker] = max(turn, departures.get(worker, 0))
        accusations = self.accusations | other.accusations
        return Proposal(applicants, accusations, departures)

    def of(self, worker: WorkerId) -> Proposal:
        """Return what a worker says of itself, and the workers that it accuses."""
        return Proposal(
            {worker: self.applicants[worker]} if worker in self.applicants else {},
            frozenset(it for it in self.accusations if it.by == worker),
            {worker: self.departures[worker]} if worker in self.departures else {},
        )

    def having(self, applicant: Applicant) -> Proposal:
        """Return the proposal with an applicant."""
        return self.joined(Proposal({applicant.id: applicant}))

    def accusing(self, by: WorkerId, lost: WorkerId) -> Proposal:
        """Return the proposal with an accusation."""
        return replace(self, accusations=self.accusations | {Accusation(by, lost)})

    def has_left(self, worker: WorkerId) -> bool:
        """Return whether a worker has left, and has not come again."""
        turn = self.departures.get(worker)
        applicant = self.applicants.get(worker)
        return turn is not None and (applicant is None or applicant.turn <= turn)


def excluded_by(view: View, proposal: Proposal) -> frozenset[WorkerId]:
    """Return the members and applicants that cannot be in the next view."""
    ranked = {worker: rank for rank, worker in enumerate(_ordered(view, proposal))}
    out = {worker for worker in ranked if proposal.has_left(worker)}
    while True:
        counts = dict.fromkeys(ranked, 0)
        for by, lost in proposal.accusations:
            if by in ranked and lost in ranked and not {by, lost} & out:
                counts[lost] += 1
        worst = max(
            ranked, key=lambda worker: (counts[worker], ranked[worker]), default=None
        )
        if worst is None or not counts[worst]:
            return frozenset(out)
        out.add(worst)


def next_view(view: View, proposal: Proposal) -> View:
    """Return the view that follows from a proposal, however small it is."""
    out = excluded_by(view, proposal)
    members = [
        worker
        for worker in _ordered(view, proposal)
        if worker in proposal.applicants and worker not in out
    ]
    steps = tuple(proposal.applicants[worker].step for worker in members)
    return View(view.generation + 1, tuple(members), steps)


def awaited(view: View, proposal: Proposal) -> tuple[WorkerId, ...]:
    """Return the members of the present view that have not come, but still may."""
    out = excluded_by(view, proposal)
    return tuple(
        member
        for member in view.members
        if member not in out and member not in proposal.applicants
    )


def least_size(view: View, proposal: Proposal) -> int:
    """Return how many members the next view must have: as many as each asks for."""
    members = next_view(view, proposal).members
    return max((proposal.applicants[member].min_size for member in members), default=1)


def can_have_quorum(view: View, proposal: Proposal) -> bool:
    """Return whether the members that are not left out are a quorum of the view.

    Members that have left do not count: they will not go on elsewhere.  If members have
    come that are not left out, only those decide whether a quorum is needed.
    """
    out = excluded_by(view, proposal)
    came = [member for member in view.members if member in proposal.applicants]
    asking = [member for member in came if member not in out] or came
    if not any(proposal.applicants[member].needs_majority for member in asking):
        return True
    voters = [member for member in view.members if not proposal.has_left(member)]
    present = [member for member in voters if member not in out]
    twice = 2 * len(present)
    return twice > len(voters) or (twice == len(voters) and present[:1] == voters[:1])


def _ordered(view: View, proposal: Proposal) -> list[WorkerId]:
    """Return members by rank, then newcomers by their ranks among all workers."""
    applicants = proposal.applicants
    new: Iterable[WorkerId] = applicants.keys() - set(view.members)

    def place(worker: WorkerId) -> tuple[bool, int, WorkerId]:
        rank = applicants[worker].rank
        return rank < 0, rank, worker

    return [*view.members, *sorted(new, key=place)]

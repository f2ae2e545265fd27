"""How the members of an elastic group agree on who is in it: one worker's part.

    state            the worker
    OUTSIDE          is in no view of the group, and does not ask to be
    JOINING          asks to be in the next view
    MEMBER           is in the view, and in the middle of its program
    RECONFIGURING    is in the view, between two steps, and asks for the next view
    EXCLUDED         was in a view; the others have gone on without it

No member leads.  A worker that has come tells all others its *standing*: its view and
its proposal for the next one (`views`), and again each time the proposal has grown.  It
installs the next view once every member of that view has told it the same proposal.

A worker that hears of a later view that it is in installs that view: one of its members
had heard the same proposal from all, this worker included.  A worker that hears of a
later view that it is not in is excluded, or asks to be in the view after it.  A worker
that hears of an earlier view answers with its own.

A member of the view, or a worker that asks to be in the next one, is believed also what
it has heard of others; any other worker, what it says of itself.  Of a later view those
of its members are believed that took part before.

Why there is one group: a view of the same generation needs all of its members, since
every collective does.  Two views with quorums of the view before have a member in
common, which installs one of them.  So at most one of them is ever used.

Sans-IO: `outbox` has the workers that must be told the standing now.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from asyncrpc.core.ids import WorkerId
from asyncrpc.core.state_table import StateTable
from asyncrpc.errors import MalformedError
from asyncrpc.parallel.collectives.machine.views import (
    NO_VIEW,
    Applicant,
    Proposal,
    View,
    awaited,
    can_have_quorum,
    excluded_by,
    least_size,
    next_view,
)

NEWCOMER_STEP: Final = -1
# How far ahead of the view that is known another may be, and how often a worker comes
# in a life: so no member can use up the numbers, which end at 2^63.
AHEAD_MAX: Final = 1 << 32


class MemberState(enum.Enum):
    """The state of a worker in an elastic group."""

    OUTSIDE = enum.auto()
    JOINING = enum.auto()
    MEMBER = enum.auto()
    RECONFIGURING = enum.auto()
    EXCLUDED = enum.auto()


OUTSIDE, JOINING, MEMBER, RECONFIGURING, EXCLUDED = MemberState


class MemberEvent(enum.Enum):
    """An event of a worker in an elastic group."""

    COME = enum.auto()  # its program asks for the next view
    INSTALL = enum.auto()  # it has the next view
    GIVE_UP = enum.auto()  # its program does not wait any longer
    EXCLUDE = enum.auto()  # the others have gone on without it
    LEAVE = enum.auto()  # its program leaves the group


COME, INSTALL, GIVE_UP, EXCLUDE, LEAVE = MemberEvent

TRANSITIONS: Final = StateTable(
    "a worker in an elastic group",
    {
        OUTSIDE: {COME: JOINING, LEAVE: OUTSIDE},
        JOINING: {INSTALL: MEMBER, GIVE_UP: OUTSIDE, LEAVE: OUTSIDE},
        MEMBER: {
            COME: RECONFIGURING,
            INSTALL: MEMBER,
            EXCLUDE: EXCLUDED,
            LEAVE: OUTSIDE,
        },
        RECONFIGURING: {
            INSTALL: MEMBER,
            GIVE_UP: MEMBER,
            EXCLUDE: EXCLUDED,
            LEAVE: OUTSIDE,
        },
        EXCLUDED: {COME: JOINING, LEAVE: OUTSIDE},
    },
)


@dataclass(frozen=True, slots=True)
class Standing:
    """The state of a worker, as it tells the others.

    Attributes:
        view: the last view that it knows.
        is_here: whether it waits for the next view.
    """

    view: View
    is_here: bool
    proposal: Proposal


@dataclass(frozen=True, slots=True)
class Application:
    """The request of a program for the next view.

    Attributes:
        min_size: members that the view must have at least.
        needs_majority: whether the view needs a quorum of the one before.
    """

    step: int = NEWCOMER_STEP
    min_size: int = 1
    needs_majority: bool = True


class ElasticMember:
    """One worker in one elastic group.

    Attributes:
        view: the last view that it knows; the worker is in it unless it is JOINING,
            OUTSIDE or EXCLUDED.
        outbox: names of workers that must be told its standing.
        has_quorum: False: `lost_view` can no longer have a quorum.
        lost_view: the view that has lost its quorum.
        absent: the names of the members that `lost_view` has lost.
        excluded_from: the view that the worker is not in, if it is EXCLUDED.
        farewell: its last standing, and the workers to tell, if it has just left; else
            None.
    """

    def __init__(self, me: WorkerId, rank: int) -> None:
        """Begin outside.

        Args:
            rank: its rank among all workers; -1: none.
        """
        self.me = me
        self.state = OUTSIDE
        self.view = NO_VIEW
        self.proposal = Proposal()
        self.outbox: dict[str, None] = {}
        self.has_quorum = True
        self.lost_view = NO_VIEW
        self.absent: tuple[str, ...] = ()
        self.excluded_from = NO_VIEW
        self.farewell: tuple[Standing, tuple[str, ...]] | None = None
        self._announced = self.proposal
        self._rank = rank
        self._turn = 0
        self._heard: dict[WorkerId, Proposal] = {}  # of workers that are here
        self._outside: set[WorkerId] = set()  # members that say they are in no view
        self._roster: dict[str, bool] = {}  # all workers, and whether each has answered
        self._lost: dict[str, WorkerId] = {}  # by name: the last life that was lost

    # --- what programs ask -----------------------------------------------------------

    @property
    def is_here(self) -> bool:
        """Return whether it waits for the next view."""
        return self.state in (JOINING, RECONFIGURING)

    @property
    def standing(self) -> Standing:
        """Return what to tell the workers in the outbox."""
        return Standing(self.view, self.is_here, self.proposal)

    @property
    def newcomers(self) -> tuple[str, ...]:
        """Return the names of workers that ask to be in the next view."""
        members = next_view(self.view, self.proposal).members
        return tuple(
            member.name for member in members if member not in self.view.members
        )

    @property
    def missing(self) -> tuple[str, ...]:
        """Return the names of workers that the next view waits for."""
        late = {member.name: None for member in awaited(self.view, self.proposal)}
        members = next_view(self.view, self.proposal).members
        late |= {
            member.name: None
            for member in members
            if member != self.me and self._heard.get(member) != self.proposal
        }
        if self.view == NO_VIEW:
            late |= {
                name: None
                for name, has_answered in self._roster.items()
                if not has_answered
            }
        return tuple(late)

    @property
    def size(self) -> int:
        """Return how many members the next view would have now."""
        return len(next_view(self.view, self.proposal).members)

    @property
    def least(self) -> int:
        """Return how many members the next view must have."""
        return least_size(self.view, self.proposal)

    def come(self, application: Application, roster: Iterable[str] = ()) -> None:
        """Ask for the next view."""
        self._advance(COME)
        if self.state is JOINING:
            self._rebase(NO_VIEW)
            self._roster = {name: name in self._lost for name in roster}
        self.has_quorum = True
        self._turn += 1
        mine = Applicant(
            self.me,
            self._turn,
            self._rank,
            application.step,
            application.min_size,
            application.needs_majority,
        )
        self.proposal = self.proposal.having(mine)
        self._accuse()
        self._tell_all()
        self._decide()

    def give_up(self) -> None:
        """Stop waiting for the next view."""
        was_joining = self.state is JOINING
        self._advance(GIVE_UP)
        if was_joining:
            self._say_goodbye()
        else:
            self._tell_all()

    def leave(self) -> None:
        """Leave the group for good."""
        was_outside = self.state in (OUTSIDE, EXCLUDED)
        self._advance(LEAVE)
        if not was_outside:
            self._say_goodbye()

    def meet(self, roster: Iterable[str]) -> None:
        """Take the names of all other workers; a newcomer asks those that are new."""
        if self.state is JOINING and self.view == NO_VIEW:
            for name in roster:
                if name not in self._roster:
                    self._roster[name] = False
                    self.outbox[name] = None

    def repeat(self) -> None:
        """Tell the standing again to the workers that this one waits for."""
        if self.is_here:
            self.outbox |= dict.fromkeys(self.missing)
            if self.view != NO_VIEW:
                self.outbox |= {
                    member.name: None for member in awaited(self.view, Proposal())
                }
            self.outbox.pop(self.me.name, None)

    # --- what others say -------------------------------------------------------------

    def receive(self, sender: WorkerId, standing: Standing) -> None:
        """Take the standing of another worker."""
        proposal, view = standing.proposal, standing.view
        turns = [applicant.turn for applicant in proposal.applicants.values()]
        ahead = view.generation - self.view.generation
        if max(ahead, *turns, *proposal.departures.values(), 0) > AHEAD_MAX:
            raise MalformedError(
                f"worker {sender.name!r} told a generation or turn that is more than "
                f"{AHEAD_MAX} ahead"
            )
        self.back(sender)
        if self.state in (OUTSIDE, EXCLUDED):
            if standing.is_here:
                self.outbox[sender.name] = None
            return
        self._roster[sender.name] = True
        ours, theirs = self.view.key, standing.view.key
        if theirs > ours:
            self._on_later_view(sender, standing)
        elif theirs == ours:
            self._on_same_view(sender, standing)
        else:
            self._on_earlier_view(sender, standing)

    def lose(self, lost: WorkerId) -> None:
        """Take the loss of a worker."""
        self._lost[lost.name] = lost
        self._heard.pop(lost, None)
        if lost.name in self._roster:
            self._roster[lost.name] = True
        if self.state in (OUTSIDE, EXCLUDED):
            return
        self._accuse()
        self._after_news()

    def back(self, worker: WorkerId) -> None:
        """Take the news that a worker was not lost."""
        if self._lost.get(worker.name) == worker:
            del self._lost[worker.name]

    def cannot_reach(self, name: str) -> None:
        """Take the news that no worker of a name can be reached."""
        if name in self._roster:
            self._roster[name] = True
        concerned = {*self.view.members, *self.proposal.applicants}
        for worker in sorted(worker for worker in concerned if worker.name == name):
            self.lose(worker)
        if self.is_here:
            self._decide()

    # --- parts -----------------------------------------------------------------------

    def _on_later_view(self, sender: WorkerId, standing: Standing) -> None:
        view = standing.view
        knows = {*self.view.members, *self.proposal.applicants}
        is_stranger = self.view != NO_VIEW and sender not in knows
        if is_stranger or sender not in view.members:
            return  # its members say it themselves when they are asked
        if self.me in view.members:
            if sender in excluded_by(self.view, self.proposal):
                return  # its view has no future: this worker is not in it for long
            self._install(view)
            self._on_same_view(sender, standing)
        elif self.state is JOINING:
            mine = self.proposal.applicants[self.me]
            self._rebase(view)
            self.proposal = self.proposal.having(mine)
            self._tell_all()
            self._on_same_view(sender, standing)
        else:
            self._advance(EXCLUDE)
            self.excluded_from = view
            self._rebase(NO_VIEW)

    def _on_same_view(self, sender: WorkerId, standing: Standing) -> None:
        proposal = standing.proposal
        if sender not in self.view.members and sender not in proposal.applicants:
            proposal = proposal.of(sender)
        self.proposal = self.proposal.joined(proposal)
        if standing.is_here:
            self._heard[sender] = standing.proposal
        else:
            self._heard.pop(sender, None)
        self._accuse()
        self._after_news()

    def _on_earlier_view(self, sender: WorkerId, standing: Standing) -> None:
        if not standing.is_here:
            if standing.view == NO_VIEW and sender in self.view.members:
                self._on_no_view(sender)
            return
        self.outbox[sender.name] = None
        applicant = standing.proposal.applicants.get(sender)
        if standing.view == NO_VIEW and applicant is not None:
            self.proposal = self.proposal.having(applicant)
            self._accuse()
            self._after_news()

    def _on_no_view(self, sender: WorkerId) -> None:
        """A member says that it is in no view: its farewell has not come."""
        self._outside.add(sender)
        if self.state is RECONFIGURING:
            # It may have gone on with others, and left them: it votes for no view here.
            self.proposal = self.proposal.accusing(self.me, sender)
        self._after_news()

    def _after_news(self) -> None:
        if self.is_here:
            if self.proposal != self._announced and self._is_complete:
                self._tell_all()
            self._decide()

    def _accuse(self) -> None:
        """Accuse the workers that this one has lost, where it makes a difference."""
        concerned = set(self.view.members) | set(self.proposal.applicants)
        if self.me not in self.view.members:
            # A newcomer that cannot reach a member of the view stays out itself.
            concerned -= set(self.view.members)
        for lost in sorted(concerned & set(self._lost.values())):
            if lost not in excluded_by(self.view, self.proposal):
                self.proposal = self.proposal.accusing(self.me, lost)

    def _decide(self) -> None:
        if self.state is JOINING and self.view != NO_VIEW:
            self._look_for_members()
        view, proposal = self.view, self.proposal
        if not self.is_here:
            return
        if not can_have_quorum(view, proposal):
            # A newcomer waits for what the members do now.
            if self.state is RECONFIGURING:
                self._stop(excluded_by(view, proposal))
            return
        following = next_view(view, proposal)
        is_in = self.me in following.members
        if is_in and self.size >= self.least and not self.missing:
            self._install(following)

    def _look_for_members(self) -> None:
        """Stop waiting for a group that has no members left."""
        departed = {
            member for member in self.view.members if self.proposal.has_left(member)
        }
        departed |= self._outside
        lost = set(self.view.members) & set(self._lost.values())
        if departed == set(self.view.members):  # it is over: begin another one
            mine = self.proposal.applicants[self.me]
            self._rebase(NO_VIEW)
            self.proposal = self.proposal.having(mine)
            self._tell_all()
        elif departed | lost == set(self.view.members):
            # They may live beyond a network partition: the program must decide.
            self._stop(lost)

    def _stop(self, absent: Collection[WorkerId]) -> None:
        self.has_quorum = False
        self.absent = tuple(
            member.name for member in self.view.members if member in absent
        )
        self.lost_view = self.view
        self.give_up()

    def _install(self, view: View) -> None:
        self._advance(INSTALL)
        self._rebase(view)

    def _rebase(self, view: View) -> None:
        self.view = view
        self.proposal = Proposal()
        self._heard.clear()
        self._outside.clear()

    def _say_goodbye(self) -> None:
        departure = Proposal(departures={self.me: self._turn})
        self.proposal = self.proposal.joined(departure)
        self._tell_all()
        self.farewell = self.standing, tuple(self.outbox)
        self.outbox.clear()
        self._rebase(NO_VIEW)

    @property
    def _is_complete(self) -> bool:
        """Whether no worker is awaited; until then no worker can use the proposal.

        If each arrival were passed on at once, `n` members would send `n³` messages.
        """
        if self.view == NO_VIEW:
            return all(self._roster.values())
        return not awaited(self.view, self.proposal)

    def _tell_all(self) -> None:
        self._announced = self.proposal
        audience = set(self.view.members) | set(self.proposal.applicants)
        audience -= excluded_by(self.view, self.proposal)
        self.outbox |= {worker.name: None for worker in sorted(audience)}
        if self.view == NO_VIEW:
            self.outbox |= dict.fromkeys(self._roster)
        self.outbox.pop(self.me.name, None)

    def _advance(self, event: MemberEvent) -> None:
        self.state = TRANSITIONS.after(self.state, event)

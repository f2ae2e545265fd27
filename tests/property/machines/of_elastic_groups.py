"""A worker in an elastic group: who is in the next generation."""

from __future__ import annotations

import enum
from types import ModuleType
from typing import Any, Final

from asyncrpc.core.ids import Incarnation, WorkerId
from asyncrpc.parallel.collectives.machine import reconfiguration, views
from asyncrpc.parallel.collectives.machine.views import (
    Accusation,
    Applicant,
    Proposal,
    View,
)
from tests.property.machines.elastic_world import Scene, play, visit
from tests.property.machines.spec import Machine, Part, guards

A, B, C, D = (WorkerId(name, Incarnation(n)) for n, name in enumerate("abcd", 1))
SEEDS: Final = range(60)


class _OneMember:
    """Worker `a`, and another one that tells it things."""

    def __init__(self, build: ModuleType) -> None:
        self._build = build
        self.machine: Any = build.ElasticMember(A, 0)

    @property
    def state(self) -> enum.Enum:
        """What the worker is."""
        current: enum.Enum = self.machine.state
        return current

    def on(self, event: enum.Enum) -> None:
        """Let an event happen to it."""
        machine, state = self.machine, self.machine.state.name
        is_in = state in ("JOINING", "MEMBER", "RECONFIGURING")
        match event.name:
            case "COME":
                machine.come(self._build.Application(step=1), ["b"])
            case "GIVE_UP":
                machine.give_up()
            case "LEAVE":
                machine.leave()
            case "INSTALL" if is_in:
                self._hear_of(A, B)
            case "EXCLUDE" if is_in and state != "JOINING":
                self._hear_of(B)
            case _:  # there is no way to ask for it
                machine._advance(event)  # noqa: SLF001

    def _hear_of(self, *members: WorkerId) -> None:
        view = View(self.machine.view.generation + 1, members, (0,) * len(members))
        standing = self._build.Standing(view, is_here=False, proposal=Proposal())
        self.machine.receive(B, standing)


def _small_groups_agree_in_every_order(build: ModuleType) -> None:
    for scene, least in (
        (Scene(2), 10),
        (Scene(2, deaths=1), 50),
        (Scene(0, newcomers=2), 10),
        (Scene(1, newcomers=1), 10),
    ):
        assert visit(build, scene, 2000) > least


def _larger_groups_agree_in_random_orders(build: ModuleType) -> None:
    for scene in (
        Scene(3, deaths=1),
        Scene(3, newcomers=1, deaths=1),
        Scene(4, newcomers=1, deaths=2),
        Scene(0, newcomers=4, deaths=1),
        Scene(4, deaths=2, needs_majority=False),
        Scene(2, newcomers=2, deaths=1, needs_majority=False),
    ):
        play(build, scene, SEEDS)


def _member(build: ModuleType, *members: WorkerId) -> Any:
    machine = build.ElasticMember(A, 0)
    machine.state = build.MEMBER
    machine.view = View(1, members, (0,) * len(members))
    return machine


def _of(worker: WorkerId, turn: int = 1, **terms: Any) -> Applicant:
    return Applicant(worker, turn, -1, 0, **terms)


def _a_minority_stops(build: ModuleType) -> None:
    machine = _member(build, A, B, C)
    machine.come(build.Application())
    machine.lose(B)
    assert machine.is_here
    machine.lose(C)
    assert not machine.is_here
    assert not machine.has_quorum
    assert machine.absent == ("b", "c")
    assert machine.lost_view.generation == 1
    machine.come(build.Application(needs_majority=False))
    assert machine.view == View(2, (A,), (-1,))
    assert machine.has_quorum


def _member_that_gives_up_counts_as_absent(build: ModuleType) -> None:
    machine = _member(build, A, B)
    machine.come(build.Application())
    machine.outbox.clear()
    machine.give_up()
    assert list(machine.outbox) == ["b"]
    assert not machine.standing.is_here
    other = _member(build, A, B)
    other.me = B
    other.come(build.Application())
    joined = machine.proposal.joined(other.proposal)
    other.receive(A, build.Standing(other.view, is_here=True, proposal=Proposal()))
    other.receive(A, build.Standing(other.view, is_here=False, proposal=joined))
    assert other.is_here
    assert other.missing == ("a",)


def _newcomers_begin_once_all_have_answered(build: ModuleType) -> None:
    machine = build.ElasticMember(A, 0)
    machine.come(build.Application(min_size=2), ["b", "c"])
    assert set(machine.outbox) == {"b", "c"}
    assert machine.missing == ("b", "c")
    machine.receive(C, build.Standing(View(), is_here=False, proposal=Proposal()))
    assert machine.missing == ("b",)
    assert (machine.size, machine.least) == (1, 2)
    machine.meet(["b", "c", "d"])
    assert "d" in machine.missing
    machine.cannot_reach("d")
    assert machine.missing == ("b",)
    theirs = Proposal().having(_of(B)).joined(machine.proposal)
    machine.receive(B, build.Standing(View(), is_here=True, proposal=theirs))
    assert machine.view == View(1, (A, B), (-1, 0))


def _newcomer_does_not_accuse_members(build: ModuleType) -> None:
    machine = build.ElasticMember(C, 0)
    machine.come(build.Application(), ["a", "b"])
    there = View(4, (A, B), (0, 0))
    machine.receive(A, build.Standing(there, is_here=False, proposal=Proposal()))
    assert machine.view == there
    machine.lose(B)
    assert machine.is_here
    assert machine.proposal.accusations == frozenset()
    machine.lose(A)
    assert not machine.is_here
    assert machine.absent == ("a", "b")


def _deserted_group_is_begun_anew(build: ModuleType) -> None:
    machine = build.ElasticMember(C, 0)
    machine.come(build.Application(), ["a"])
    there = View(4, (A,), (0,))
    gone = Proposal(departures={A: 1})
    machine.receive(A, build.Standing(there, is_here=False, proposal=gone))
    assert machine.view == View(1, (C,), (-1,))


def _leaving_member_says_so_once(build: ModuleType) -> None:
    machine = _member(build, A, B)
    machine.leave()
    standing, names = machine.farewell
    assert names == ("b",)
    assert standing.proposal.has_left(A)
    assert not machine.outbox
    machine.farewell = None
    machine.leave()
    assert machine.farewell is None
    machine.receive(
        B, build.Standing(View(1, (B,), (0,)), is_here=True, proposal=Proposal())
    )
    assert list(machine.outbox) == ["b"]  # it is told that there is nothing here
    assert machine.standing.view == View()


def _waiting_member_tells_missing_ones_again(build: ModuleType) -> None:
    machine = _member(build, A, B, C)
    machine.repeat()
    assert not machine.outbox
    machine.come(build.Application())
    machine.outbox.clear()
    machine.repeat()
    assert set(machine.outbox) == {"b", "c"}


def _speaking_worker_is_not_lost(build: ModuleType) -> None:
    machine = _member(build, A, B)
    machine.lose(C)
    machine.receive(C, build.Standing(View(), is_here=True, proposal=Proposal()))
    theirs = Proposal().having(_of(C))
    machine.receive(C, build.Standing(View(), is_here=True, proposal=theirs))
    assert machine.newcomers == ("c",)


# --- views ---------------------------------------------------------------------------


def _proposals_are_joined_like_sets(build: ModuleType) -> None:
    first = build.Proposal({A: _of(A, 2)}, frozenset({Accusation(A, B)}), {C: 1})
    second = build.Proposal({A: _of(A), B: _of(B)}, departures={C: 3})
    joined = first.joined(second)
    assert joined == second.joined(first)
    assert joined.joined(first) == joined == joined.joined(second)
    assert joined.applicants[A].turn == 2
    assert joined.departures == {C: 3}
    assert joined.accusations == first.accusations
    assert joined.has_left(C)
    assert not joined.having(_of(C, 4)).has_left(C)
    assert joined.having(_of(C, 3)).has_left(C)


def _most_accused_member_is_left_out(build: ModuleType) -> None:
    view = build.View(1, (A, B, C), (0, 0, 0))

    def out(*pairs: tuple[WorkerId, WorkerId]) -> set[str]:
        accusations = frozenset(Accusation(*pair) for pair in pairs)
        proposal = build.Proposal({D: _of(D)}, accusations)
        return {worker.name for worker in build.excluded_by(view, proposal)}

    assert out() == set()
    assert out((A, C)) == {"c"}
    assert out((A, B), (B, A)) == {"b"}  # of equals the last
    assert out((A, B), (B, A), (C, A)) == {"a"}  # whose accusation counts no more
    assert out((A, B), (B, A), (D, A)) == {"a"}
    stranger = WorkerId("x", Incarnation(9))
    assert out((stranger, A)) == set()


def _members_keep_their_order(build: ModuleType) -> None:
    view = build.View(1, (C, A), (0, 0))
    ranked = Applicant(B, 1, 7, 3)
    applicants = {worker: _of(worker) for worker in (A, C, D)} | {B: ranked}
    following = build.next_view(view, build.Proposal(applicants))
    assert following.members == (C, A, B, D)
    assert following.steps == (0, 0, 3, 0)
    assert following.generation == 2
    assert build.awaited(view, build.Proposal({A: _of(A)})) == (C,)
    assert build.least_size(view, build.Proposal({A: _of(A, min_size=3)})) == 3
    assert build.View(2, (A,)).key > build.View(1, (A, B)).key
    assert build.View(1, (A, B)).key > build.View(1, (B,)).key


def _half_with_the_first_member_is_a_quorum(build: ModuleType) -> None:
    def has_quorum(size: int, lost: str, left: str = "", **terms: bool) -> bool:
        members = (A, B, C, D)[:size]
        here = next(member for member in members if member.name not in lost + left)
        accusations = frozenset(
            Accusation(here, other) for other in members if other.name in lost
        )
        departures = {other: 1 for other in members if other.name in left}
        proposal = build.Proposal({here: _of(here, **terms)}, accusations, departures)
        return bool(build.can_have_quorum(build.View(1, members), proposal))

    assert has_quorum(3, "a")
    assert not has_quorum(3, "ab")
    assert has_quorum(4, "cd")
    assert not has_quorum(4, "ab")
    assert has_quorum(4, "d", left="ac")  # of two, and it is the first
    assert not has_quorum(4, "b", left="ac")
    assert not has_quorum(4, "bc", left="a")
    assert has_quorum(4, "abc", needs_majority=False)
    # What a newcomer asks for does not count.
    newcomer = build.Proposal({D: _of(D)}, frozenset({Accusation(D, A)}))
    assert build.can_have_quorum(build.View(1, (A,)), newcomer)


def _terms_of_excluded_members_do_not_count(build: ModuleType) -> None:
    def has_quorum(view: tuple[WorkerId, ...], lost: str, **strict: bool) -> bool:
        applicants = {
            worker: _of(worker, needs_majority=strict[worker.name])
            for worker in view
            if worker.name in strict
        }
        here = next(worker for worker in view if worker.name not in lost)
        accusations = frozenset(
            Accusation(here, worker) for worker in view if worker.name in lost
        )
        proposal = build.Proposal(applicants, accusations)
        return bool(build.can_have_quorum(build.View(1, view), proposal))

    assert has_quorum((A, B, C), "bc", a=False, b=True)
    assert not has_quorum((A, B, C), "bc", a=True, b=False)
    assert not has_quorum((A, B, C, D), "ad", b=False, c=True)  # half, not the first
    assert has_quorum((A, B, C, D), "ad", b=False, c=False)
    assert not has_quorum((A, B), "a", a=True)  # nobody else has come


def _lost_member_that_was_late_stops_no_group(build: ModuleType) -> None:
    """Its word that it wants to join came after the view that it is in."""
    machine = _member(build, A, B, C)
    joining = build.Standing(View(), is_here=True, proposal=build.Proposal({B: _of(B)}))
    machine.receive(B, joining)
    machine.lose(B)
    machine.lose(C)
    machine.come(build.Application())
    assert not machine.has_quorum
    machine.come(build.Application(needs_majority=False))
    assert machine.view == View(2, (A,), (-1,))


ELASTIC: Final = Machine(
    name="A worker in an elastic group",
    about="Decides which workers are in the next generation of a group. All members "
    "tell each other what they know, and install the next view once all of its members "
    "have told the same.",
    source=reconfiguration,
    states="MemberState",
    starts=("OUTSIDE",),
    begin=lambda build, _: _OneMember(build),
    stories="""
it comes in, and goes from border to border:
    OUTSIDE -COME-> JOINING -INSTALL-> MEMBER -COME-> RECONFIGURING -INSTALL-> MEMBER
it is not let in in time: OUTSIDE -COME-> JOINING -GIVE_UP-> OUTSIDE -GIVE_UP-x
it leaves while it waits to be let in:
    OUTSIDE -COME-> JOINING -LEAVE-> OUTSIDE -LEAVE-> OUTSIDE
it does not wait for the others, who go on with it all the same:
    RECONFIGURING -GIVE_UP-> MEMBER -INSTALL-> MEMBER -GIVE_UP-x
it leaves between two borders: MEMBER -LEAVE-> OUTSIDE -INSTALL-x -EXCLUDE-x
it leaves at a border: RECONFIGURING -LEAVE-> OUTSIDE
it is taken to be lost, and comes again:
    MEMBER -EXCLUDE-> EXCLUDED -COME-> JOINING -EXCLUDE-x
it is taken to be lost at a border, and leaves:
    RECONFIGURING -EXCLUDE-> EXCLUDED -LEAVE-> OUTSIDE
it comes once at a time: JOINING -COME-x -INSTALL-> MEMBER -COME-> RECONFIGURING -COME-x
who is left out gets nothing: EXCLUDED -INSTALL-x -GIVE_UP-x -EXCLUDE-x
""",
    checks=(
        _small_groups_agree_in_every_order,
        _a_minority_stops,
        _lost_member_that_was_late_stops_no_group,
        _member_that_gives_up_counts_as_absent,
        _newcomers_begin_once_all_have_answered,
        _newcomer_does_not_accuse_members,
        _deserted_group_is_begun_anew,
        _leaving_member_says_so_once,
        _waiting_member_tells_missing_ones_again,
        _speaking_worker_is_not_lost,
        _larger_groups_agree_in_random_orders,
    ),
    guards=guards(r"""
other-proposals-do-not-matter:
    if member != self.me and self._heard.get(member) != self.proposal =>
    if member != self.me and member not in self._heard
absent-members-do-not-matter:
    if member != self.me and self._heard.get(member) != self.proposal => if False
a-newcomer-begins-before-all-have-answered:
    if self.view == NO_VIEW:\n            late |= => if False:\n            late |=
a-minority-goes-on: if not can_have_quorum(view, proposal): => if False:
changes-are-not-told:
    if self.proposal != self._announced and self._is_complete: => if False:
a-dead-worker-is-waited-for:
    self._accuse()\n        self._after_news()\n\n    def back =>
    self._after_news()\n\n    def back
later-view-is-not-told: return\n        self.outbox[sender.name] = None => return
a-later-view-is-not-taken:
    self._install(view)\n            self._on_same_view => self._on_same_view
a-newcomer-accuses-members: concerned -= set(self.view.members) => pass
speaking-member-stays-lost: self.back(sender) =>
a-group-that-is-too-small-begins:
    if is_in and self.size >= self.least and not self.missing: =>
    if is_in and not self.missing:
farewell-has-no-receivers:
    self.farewell = self.standing, tuple(self.outbox) =>
    self.farewell = self.standing, ()
standing-is-not-repeated:
    if self.is_here:\n            self.outbox |= dict.fromkeys =>
    if False:\n            self.outbox |= dict.fromkeys
"""),
    parts=(
        Part(
            views,
            checks=(
                _proposals_are_joined_like_sets,
                _most_accused_member_is_left_out,
                _members_keep_their_order,
                _half_with_the_first_member_is_a_quorum,
                _terms_of_excluded_members_do_not_count,
            ),
            guards=guards("""
an-earlier-turn-replaces-a-later-one:
    max(applicant, applicants.get(worker, applicant)) => applicant
accusations-of-excluded-members-count: and not {by, lost} & out: => and lost not in out:
strangers-accuse: if by in ranked and lost in ranked => if lost in ranked
the-first-of-equals-is-left-out:
    key=lambda worker: (counts[worker], ranked[worker]) =>
    key=lambda worker: (counts[worker], -ranked[worker])
half-is-always-a-quorum: and present[:1] == voters[:1]) => )
terms-of-excluded-members-count:
    asking = [member for member in came if member not in out] or came => asking = came
excluded-applicants-set-no-terms: if member not in out] or came => if member not in out]
departed-member-still-votes:
    voters = [member for member in view.members if not proposal.has_left(member)] =>
    voters = list(view.members)
returned-member-has-left: (applicant is None or applicant.turn <= turn) => True
newcomers-without-a-rank-come-first:
    return rank < 0, rank, worker => return rank >= 0, rank, worker
"""),
        ),
    ),
)

"""Collectives of a group: which belong together, and why they fail."""

from __future__ import annotations

import enum
from types import ModuleType
from typing import Any, Final

from asyncrpc.errors import MalformedError
from asyncrpc.parallel.collectives.machine import matching, operations
from tests.property.machines.collectives_world import visit
from tests.property.machines.spec import Machine, Part, guards


class _OneCollective:
    """The first collective of a rank."""

    def __init__(self, build: ModuleType) -> None:
        self._build: Any = build
        self._descriptor: Any = build.Descriptor("barrier")
        self._failure: Any = build.CollectiveFailure("", "", ())
        self.operations: Any = build.Operations()
        self._operation: Any = None

    @property
    def state(self) -> enum.Enum:
        """Where it is."""
        current: enum.Enum = self.operations.state(0)
        return current

    def on(self, event: enum.Enum) -> None:
        """Let an event happen to it."""
        match event.name:
            case "BEGIN" if self._operation is None:
                self._operation, _ = self.operations.begin(self._descriptor)
            case "END" if self._operation is not None:
                self.operations.end(self._operation)
            case "FAIL":
                self.operations.fail(0, self._failure)
            case _:  # there is no way to ask for it
                self._build.TRANSITIONS.after(self.state, event)


_PROGRAMS: Final = (("x", "x"), ("x", "y"), ("xx", "x"), ("", "x"), ("xx", "xx"))


def _mismatched_programs_fail_and_none_waits_for_ever(build: ModuleType) -> None:
    for programs in _PROGRAMS:
        for leaves in (None, 0):
            assert visit(build, programs, leaves=leaves) > 10


def _absent_ranks_are_late(build: ModuleType) -> None:
    machine = build.MatchedCollectives()
    machine.join("a group", ("a", "b", "c", "d"), 0)
    machine.begin(operations.Descriptor("barrier"))
    machine.give_up(0, 1.0, {1: 1, 2: 0, 3: None})
    (failing,) = machine.outbox
    assert failing.failure.ranks == ("c", "d")
    assert failing.is_news
    machine.operations.end(machine.operations.running[0])
    machine.give_up(0, 1.0, {1: 1, 2: 0, 3: None})
    assert len(machine.outbox) == 1


def _rank_speaks_only_for_itself(build: ModuleType) -> None:
    machine = build.MatchedCollectives()

    def refuses(name: str, rank: int | None = None) -> bool:
        try:
            machine.check_speaker(name, rank)
        except MalformedError:
            return True
        return False

    machine.join("a group", ("a", "b"), 0)
    assert refuses("d")
    assert refuses("d", 1)
    assert refuses("b", 0)
    assert refuses("b", 2)
    assert not refuses("b", 1)
    assert not refuses("b")


def _unended_operations_miss_a_rank_that_has_left(build: ModuleType) -> None:
    machine = build.MatchedCollectives()
    machine.join("a group", ("a", "b", "c"), 0)
    for _ in range(3):
        machine.begin(operations.Descriptor("barrier"))
    failures = [operations.CollectiveFailure(code, code, ()) for code in "bc"]
    assert machine.lose(failures[0], ended=2)
    assert not machine.lose(failures[1], ended=2)
    assert machine.lose(failures[1], ended=1)
    assert [failing.number for failing in machine.outbox] == [2, 1]
    assert machine.lost == failures[0]
    assert machine.last_lost == failures[1]
    assert [machine.lost_for(number) for number in range(4)] == [
        None,
        failures[1],
        failures[0],
        failures[0],
    ]
    assert machine.begin(operations.Descriptor("barrier")) == failures[0]
    assert machine.refuse("gives up") == failures[0]
    assert machine.operations.begun == 3
    assert machine.leave("has closed")[0] == 0


def _messages_of_ended_or_lost_operations_are_refused(build: ModuleType) -> None:
    machine = build.MatchedCollectives()
    machine.join("a group", ("a", "b", "c"), 0)
    barrier = operations.Descriptor("barrier")
    machine.operations.end(machine.begin(barrier))
    late = machine.refusal_of(0, 1, barrier)
    assert late.ranks == ("b", "a")
    assert "rank 0 ('a') has finished it and begun 1 collectives" in late.problem
    assert machine.refusal_of(1, 1, barrier) is None
    lost = machine.loss_of("c", "it has died")
    assert machine.loss_of("d", "it has died") is None
    assert machine.lose(lost)
    assert machine.refusal_of(1, 1, None) == lost
    assert machine.refusal_of(7, 1, barrier) == lost


def _earlier_news_of_other_ranks_count_at_the_beginning(build: ModuleType) -> None:
    barrier, other = map(operations.Descriptor, ("barrier", "broadcast"))
    machine = build.MatchedCollectives()
    machine.join("a group", ("a", "b"), 0)
    machine.receive(0, 1, other)
    mismatch = machine.begin(barrier)
    assert mismatch.ranks == ("b", "a")
    assert machine.operations.state(0) is operations.OVER
    assert machine.outbox.pop().is_news
    failure = operations.CollectiveFailure("", "it has failed at b", ("b",))
    machine.receive_failure(0, failure)  # it is over
    assert machine.outbox == []
    machine.receive_failure(1, failure)
    assert not machine.outbox.pop().is_news
    assert machine.begin(barrier) == failure
    running = machine.begin(barrier)
    machine.receive_failure(running.number, failure)
    machine.receive_failure(running.number, mismatch)
    assert running.failure == failure
    assert len(machine.outbox) == 1
    assert machine.refuse("gives up") is None
    assert machine.refusal_of(3, 1, barrier).ranks == ("a",)


COLLECTIVE: Final = Machine(
    name="A collective at a rank",
    about="Decides whether a message for a collective is kept, taken or refused. A "
    "collective fails on all ranks. A rank that is gone fails the collectives that it "
    "has not ended.",
    source=operations,
    states="CollectiveState",
    starts=("AHEAD",),
    begin=lambda build, _: _OneCollective(build),
    stories="""
all ranks come: AHEAD -BEGIN-> RUNNING -END-> OVER
a rank begins something else: AHEAD -BEGIN-> RUNNING -FAIL-> FAILED -END-> OVER
two ranks notice that: RUNNING -FAIL-> FAILED -FAIL-> FAILED
it has failed before this rank comes:
    AHEAD -FAIL-> DOOMED -FAIL-> DOOMED -BEGIN-> FAILED -END-> OVER
it fails elsewhere once this rank has ended it: OVER -FAIL-> OVER
it ends once: OVER -END-x
it begins once: AHEAD -END-x -BEGIN-> RUNNING -BEGIN-x
what has failed begins once: DOOMED -END-x -BEGIN-> FAILED -BEGIN-x
what is over is not begun: OVER -BEGIN-x
""",
    tests=("tests/unit/parallel/collectives/machine/test_operations.py",),
    guards=guards("""
a-failure-is-forgotten: self._failed[number] = failure => pass
early-messages-are-dropped: operation.arrived = self._early.pop(operation.number, {}) =>
a-message-comes-twice: if place in arrived: => if False:
earlier-descriptors-are-not-compared: if theirs != descriptor: => if False:
later-descriptors-are-not-compared: if operation.descriptor != theirs: => if False:
early-messages-are-unlimited:
    if kept >= EARLY_MAX or number - self.begun >= EARLY_MAX: => if False:
"""),
    parts=(
        Part(
            matching,
            checks=(
                _mismatched_programs_fail_and_none_waits_for_ever,
                _absent_ranks_are_late,
                _rank_speaks_only_for_itself,
                _unended_operations_miss_a_rank_that_has_left,
                _messages_of_ended_or_lost_operations_are_refused,
                _earlier_news_of_other_ranks_count_at_the_beginning,
            ),
            guards=guards(r"""
a-mismatch-is-no-failure:
    if mismatch is not None:\n            self.on_mismatch(number, mismatch) =>
a-mismatch-at-the-beginning-is-no-failure:
    self.on_mismatch(operation.number, mismatch) => pass
a-late-message-is-kept: if failure is None and operations.is_over(number): => if False:
a-lost-rank-is-waited-for:
    failure = self.lost_for(number) if self._gone else None => failure = None
running-operations-outlive-a-gone-rank:
    self.fail(number, failure, is_news=False)\n        self._gone =>
    pass\n        self._gone
later-operations-outlive-a-gone-rank: self._gone.append((ended, failure)) =>
ended-operations-miss-a-rank-that-leaves:
    if number >= ended and self.lost_for(number) is None: =>
    if self.lost_for(number) is None:
ended-operations-need-a-gone-rank: if number >= ended: => if True:
a-later-loss-hides-an-earlier-one:
    if self._gone and ended >= self._gone[-1][0]: => if self._gone:
leaving-rank-has-ended-running-operations:
    min(self.operations.running, default=self.operations.begun) => self.operations.begun
other-ranks-are-not-told:
    self.outbox.append(Failing(number, failure, messages, is_news)) =>
    self.outbox.append(Failing(number, failure, messages, False))
failures-of-others-are-not-heard:
    if not operations.is_over(number) and operations.failure_of =>
    if False and operations.failure_of
present-rank-is-late:
    if count is None or count <= number => if count is None or count <= number + 1
silent-rank-has-come:
    if count is None or count <= number => if count is not None and count <= number
a-member-speaks-for-another:
    is_it = rank < len(members) and members[rank] == name => is_it = name in members
"""),
        ),
    ),
)

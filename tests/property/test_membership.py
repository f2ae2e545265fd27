"""Members agree on who is there, whatever is lost, repeated and out of order.

Hypothesis plays every worker and the network.  Any record that was ever sent may come
again, to anybody, or never.  Workers crash, leave, come back under their names, and are
taken for dead while they live.  Somebody lies about all of them.  Safety: the
invariants below hold after every step.  Convergence: once workers can compare with
their successors, all who live know the same, and that is the truth.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from asyncrpc.core.ids import Incarnation, WorkerId
from asyncrpc.core.members import Member
from asyncrpc.core.membership.machine.membership import STEP_MAX, Membership
from asyncrpc.core.membership.machine.records import (
    Announce,
    Contest,
    Doubt,
    Effect,
    Record,
    Reply,
    Settle,
    Status,
    Warn,
)

NAMES = [f"w{number}" for number in range(6)]
LIAR = WorkerId("liar", Incarnation((1 << 64) - 1))
NUMBERS = st.one_of(
    st.integers(0, 9), st.sampled_from([1 << 16, 1 << 40, (1 << 62) - 1])
)
LIVES_MAX = 1 << 10  # their numbers are random: a lie names none that is to come
ROUNDS = 12 * len(NAMES)  # of comparing; far more than any run needs


def life(name: str, incarnation: int) -> Member:
    return Member(name, -1, Incarnation(incarnation), (f"mem://{name}",))


class Members(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.lives = 0
        self.tables: dict[str, Membership] = {}  # of those who run
        self.sent: list[Record] = []  # all of it, for ever: any of it may come again
        self.left: set[int] = set()  # incarnations that said so
        self.seen: dict[tuple[int, str], tuple[int, ...]] = {}

    @initialize(size=st.integers(2, len(NAMES) - 1))
    def begin(self, size: int) -> None:
        first = [
            Record(life(name, number), 1) for number, name in enumerate(NAMES[:size], 1)
        ]
        self.lives = size
        for record in first:
            table = Membership(record)
            table.begin(first, 0.0)
            self.tables[record.name] = table

    # --- the world -------------------------------------------------------------------

    @precondition(lambda self: self.sent and self.tables)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        """Something that was sent comes, perhaps again, to anybody."""
        record = data.draw(st.sampled_from(self.sent), label="record")
        name = data.draw(st.sampled_from(sorted(self.tables)), label="to")
        self.tell(name, record, is_linked=data.draw(st.booleans()))

    @precondition(lambda self: self.tables)
    @rule(
        data=st.data(),
        incarnation=st.integers(LIVES_MAX, 1 << 64),
        generation=NUMBERS,
        version=NUMBERS,
        status=st.sampled_from(Status),
        is_linked=st.booleans(),
    )
    def lie(
        self,
        data: st.DataObject,
        incarnation: int,
        generation: int,
        version: int,
        status: Status,
        *,
        is_linked: bool,
    ) -> None:
        """Somebody says of a worker, to anybody, whatever it likes."""
        about = data.draw(st.sampled_from(sorted(self.tables)), label="about")
        name = data.draw(st.sampled_from(sorted(self.tables)), label="to")
        true = self.tables[about].me
        if data.draw(st.booleans()):
            incarnation = true.incarnation
        record = Record(life(about, incarnation), generation, version, status)
        self.tell(name, record, is_linked=is_linked)

    def tell(self, name: str, record: Record, *, is_linked: bool) -> None:
        """One worker hears of another by a third."""
        known = self.tables[name].get(record.name)
        is_linked = is_linked and known is not None and self.runs(known)
        heard = self.tables[name].receive(record, 0.0, by=LIAR, is_linked=is_linked)
        self.apply(name, heard)

    @precondition(lambda self: len(self.tables) > 1)
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        del self.tables[data.draw(st.sampled_from(sorted(self.tables)))]

    @precondition(lambda self: len(self.tables) > 1)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.sampled_from(sorted(self.tables))))
        self.sent.append(table.leave(0.0))
        self.left.add(table.me.incarnation)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        """A worker takes another for dead: rightly, or because of the network."""
        table = self.tables[data.draw(st.sampled_from(sorted(self.tables)))]
        known = [known for known in table.records if known.name != table.me.name]
        if known:
            record = data.draw(st.sampled_from(known))
            lost = table.lose(record.name, record.incarnation, 0.0)
            self.apply(table.me.name, lost)

    @precondition(lambda self: self.tables and len(self.tables) < len(NAMES))
    @rule(data=st.data())
    def join(self, data: st.DataObject) -> None:
        """A name that nobody has, or whose worker has died, comes by way of anybody."""
        free = sorted(set(NAMES) - set(self.tables))
        name = data.draw(st.sampled_from(free), label="name")
        contact = self.tables[data.draw(st.sampled_from(sorted(self.tables)))]
        known = contact.get(name)
        if known is not None and known.is_alive:  # the contact has looked: it is dead
            lost = contact.lose(name, known.incarnation, 0.0)
            self.apply(contact.me.name, lost)
        self.lives += 1
        member = life(name, self.lives)
        self.apply(contact.me.name, contact.admit(member, 0.0))
        table = Membership(Record(member))
        table.begin(contact.welcome, 0.0)
        self.tables[name] = table

    @precondition(lambda self: len(self.tables) > 1)
    @rule(data=st.data())
    def compare_two(self, data: st.DataObject) -> None:
        pair = st.permutations(sorted(self.tables))
        first, other = data.draw(pair)[:2]
        self.compare(first, other)

    # --- what holds after every step -------------------------------------------------

    @invariant()
    def running_worker_is_present_to_itself(self) -> None:
        for name, table in self.tables.items():
            assert table.get(name) is table.me
            assert table.me.is_alive

    @invariant()
    def records_never_go_back(self) -> None:
        for table in self.tables.values():
            for name in NAMES:
                record = table.get(name)
                if record is not None:
                    key = (table.me.incarnation, name)
                    before = self.seen.get(key, record.order)
                    # Only a worker itself takes back what is absurd.
                    own = self.tables.get(name)
                    is_own = own is not None and own.me.order == record.order
                    fallen = before[0] - record.order[0], before[2] - record.order[2]
                    assert record.order >= before or is_own or max(fallen) > STEP_MAX
                    self.seen[key] = record.order

    @invariant()
    def ring_and_digest_match_the_records(self) -> None:
        for table in self.tables.values():
            alive = [record.name for record in table.records]
            assert sorted(table.alive) == sorted(alive)
            again = Membership(table.me)
            again.begin(table.records, 0.0)
            assert again.digests == table.digests

    # --- the end ---------------------------------------------------------------------

    def teardown(self) -> None:
        if not self.tables:
            return
        self.parts = self.connected()
        for turn in range(ROUNDS):
            for name in sorted(self.tables):
                self.round(name, turn)
        for table in self.tables.values():
            known = {record.incarnation for record in table.records}
            assert known == self.parts[table.me.name]
            assert not known & self.left

    def round(self, name: str, turn: int) -> None:
        """Do what a worker does every few seconds, on a network that works."""
        table = self.tables[name]
        successor = table.successor
        if successor:
            record = table.get(successor)
            assert record is not None
            if self.runs(record):
                self.compare(name, successor)
            else:
                lost = table.lose(successor, record.incarnation, 0.0)
                self.apply(name, lost)
        known = table.get(table.next_lost(turn))
        if known is not None and self.runs(known):
            self.meet(name, known.name)
            self.compare(name, known.name)

    def connected(self) -> dict[str, set[int]]:
        """Return who can hear of whom: two that nobody has told of each other cannot.

        That takes members who die after they have taken in others, unheard by anybody.
        """
        parts = {name: {name} for name in self.tables}
        for name, table in self.tables.items():
            for record in table.welcome:
                if self.runs(record) and record.name not in parts[name]:
                    parts[name] |= parts[record.name]
                    for member in parts[name]:
                        parts[member] = parts[name]
        return {
            name: {self.tables[member].me.incarnation for member in part}
            for name, part in parts.items()
        }

    # --- the plumbing ----------------------------------------------------------------

    def runs(self, record: Record) -> bool:
        table = self.tables.get(record.name)
        return table is not None and table.me.incarnation == record.incarnation

    def meet(self, first: str, other: str) -> None:
        self.apply(
            first, self.tables[first].meet(self.tables[other].me.member, 0.0), other
        )

    def compare(self, first: str, other: str) -> None:
        here, there = self.tables[first], self.tables[other]
        parts = here.differing(there.digests)
        ours = here.part(parts)
        theirs = there.better(parts, ours)
        for record in ours:
            self.apply(other, there.receive(record, 0.0), first)
        for record in theirs:
            self.apply(first, here.receive(record, 0.0), other)

    def ask(self, name: str, asked: Member) -> None:
        """A worker asks one that is said to have ended."""
        here = self.tables[name]
        known = here.get(asked.name)
        if self.runs(Record(asked)):
            there = self.tables[asked.name]
            if known is not None:
                self.apply(asked.name, there.receive(known, 0.0), name)
            self.hear_itself(name, there)
        elif known is not None and known.incarnation == asked.incarnation:
            self.apply(name, here.lose(asked.name, asked.incarnation, 0.0))
        else:
            here.confirm(asked.name)

    def hear_itself(self, name: str, table: Membership) -> None:
        """A worker says what is so, over its own link."""
        itself = WorkerId(table.me.name, table.me.incarnation)
        self.apply(name, self.tables[name].receive(table.me, 0.0, by=itself))

    def apply(self, name: str, effects: list[Effect], sender: str = "") -> None:
        """Carry out effects: answers arrive, what is for everyone may arrive."""
        for effect in effects:
            match effect:
                case Announce(record):
                    self.sent.append(record)
                case Reply(record) if sender in self.tables:
                    table, me = self.tables[sender], self.tables[name].me
                    by = WorkerId(me.name, me.incarnation)
                    self.apply(sender, table.receive(record, 0.0, by=by), name)
                case Doubt(asked):
                    self.ask(name, asked)
                case Settle(present, later) if self.runs(present):
                    table = self.tables[present.name]
                    self.apply(present.name, table.receive(later, 0.0), name)
                    self.hear_itself(name, table)
                case Contest(record):  # whoever it is, it does not live: names are free
                    table = self.tables[name]
                    self.apply(name, table.outlive(record), sender)
                case Warn(record) if self.runs(record):
                    table = self.tables[record.name]
                    self.apply(record.name, table.receive(record, 0.0), name)


Members.TestCase.settings = settings(max_examples=300, stateful_step_count=30)
TestMembers = Members.TestCase


def test_false_loss_is_refuted_by_a_third_member() -> None:
    """The shortest story in which a worker is lost, is told, and is back for all."""
    world = Members()
    world.begin(3)
    a, b, c = (world.tables[name] for name in NAMES[:3])
    world.apply("w0", a.lose("w1", b.me.incarnation, 0.0))
    (lost,) = world.sent
    assert lost.status is Status.LOST
    world.apply("w2", c.receive(lost, 0.0, is_linked=True))
    assert b.me.version == 1
    assert world.sent[-1] == b.me
    a.receive(b.me, 0.0)
    c.receive(b.me, 0.0)
    assert a.digest == b.digest == c.digest


@pytest.mark.parametrize("to", NAMES[1:3])
def test_member_denies_the_incarnation_of_a_newcomer(to: str) -> None:
    """Whoever believes it would refuse the newcomer, whose life it is."""
    world = Members()
    world.begin(3)
    newcomer = life("w3", 4)
    world.apply("w0", world.tables["w0"].admit(newcomer, 0.0))
    table = world.tables["w3"] = Membership(Record(newcomer))
    table.begin(world.tables["w0"].welcome, 0.0)
    world.tell(to, Record(life("w0", 4), 1), is_linked=False)
    world.teardown()
    assert world.tables["w0"].me.generation == 2

"""What one worker makes of news about members, case by case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from asyncrpc.core.ids import Incarnation, WorkerId
from asyncrpc.core.members import UNKNOWN_INCARNATION, Member
from asyncrpc.core.membership.machine import hearsay, membership
from asyncrpc.core.membership.machine.membership import (
    BUCKETS,
    STEP_MAX,
    TOMBSTONE_S,
    Membership,
)
from asyncrpc.core.membership.machine.records import (
    Announce,
    Changed,
    ChangeKind,
    Contest,
    Doubt,
    Effect,
    Forgotten,
    Record,
    Reply,
    Settle,
    Status,
    Warn,
)
from asyncrpc.core.membership.machine.ring import place_of

ALIVE, LOST, LEFT = Status
JOINED = ChangeKind.JOINED


def life(name: str, number: int) -> Incarnation:
    """Return the number of a life, which no other name has; 0 stays unknown."""
    return Incarnation(number and number + (int.from_bytes(name.encode()) << 64))


def member(name: str, incarnation: int = 1, rank: int = -1) -> Member:
    where = (f"mem://{name}",)
    return Member(name, rank, life(name, incarnation), where, "host")


def record(
    name: str,
    incarnation: int = 1,
    generation: int = 1,
    version: int = 0,
    status: Status = ALIVE,
) -> Record:
    return Record(member(name, incarnation), generation, version, status)


def table(*others: Record, static: bool = False) -> Membership:
    membership_table = Membership(record("me"), is_static=static)
    membership_table.begin([record("me"), *others], 0.0)
    return membership_table


def kinds(effects: Sequence[Effect]) -> list[ChangeKind | None]:
    return [effect.kind for effect in effects if isinstance(effect, Changed)]


# Every pair of what is known and what is heard, and what has become of the member.
KNOWN: list[tuple[Record, Record, list[ChangeKind | None]]] = [
    (record("b"), record("b"), []),
    (record("b"), record("b", status=LOST), [ChangeKind.LOST]),
    (record("b"), record("b", status=LEFT), [ChangeKind.LEFT]),
    (record("b"), record("b", version=1), [None]),
    (record("b", version=1), record("b", status=LOST), []),
    (record("b", status=LOST), record("b"), []),
    (record("b", status=LOST), record("b", version=1), [ChangeKind.BACK]),
    (record("b", status=LOST), record("b", status=LEFT), [None]),
    (record("b", status=LEFT), record("b"), []),
    (record("b", status=LEFT), record("b", status=LOST), []),
    (record("b"), record("b", 2, 2), [ChangeKind.RESTARTED]),
    (record("b", status=LOST), record("b", 2, 2), [ChangeKind.RESTARTED]),
    (record("b", status=LEFT), record("b", 2, 2), [ChangeKind.JOINED]),
    (record("b"), record("b", 2, 2, status=LOST), [ChangeKind.LOST]),
    (record("b"), record("b", 2, 2, status=LEFT), [ChangeKind.LEFT]),
    (record("b", status=LEFT), record("b", 2, 2, status=LOST), [None]),
    (record("b", 2, 2), record("b", 1, 1), []),
    (record("b", 2, 2), record("b", 1, 1, 9, LEFT), []),
    (record("b", 1, 1), record("b", 2, 1), [ChangeKind.RESTARTED]),  # two at once
    (record("b", 2, 1), record("b", 1, 1), []),
    (record("b", 0, 0), record("b", 5, 1), [None]),  # of a list, and met now
    (record("b", 0, 0, status=LOST), record("b", 5, 1), [ChangeKind.BACK]),
]


@pytest.mark.parametrize(("known", "heard", "expected"), KNOWN)
def test_later_of_two_records_counts(
    known: Record, heard: Record, expected: list[ChangeKind | None]
) -> None:
    mine = table(known)
    assert kinds(mine.receive(heard, 1.0)) == expected
    later = max(known, heard, key=lambda known_record: known_record.order)
    assert mine.get("b") == later
    assert ("b" in mine.alive) == later.is_placed
    assert ("b" in mine.lost) == (later.status is LOST)


def test_outdated_record_is_answered_with_the_known_one() -> None:
    known = record("b", 2, 2)
    assert table(known).receive(record("b"), 1.0) == [Reply(known)]


def test_new_name_joins() -> None:
    mine = table()
    assert mine.receive(record("b"), 1.0) == [
        Changed(JOINED, record("b"), Incarnation(0))
    ]
    assert [member_record.name for member_record in mine.records] == ["b", "me"]
    assert mine.successor == "b"


def test_death_that_comes_before_the_life_is_remembered() -> None:
    mine = table()
    assert mine.receive(record("b", status=LEFT), 1.0) == []
    assert kinds(mine.receive(record("b"), 2.0)) == []
    assert "b" not in mine.alive


def test_worker_without_a_known_life_is_ignored() -> None:
    mine = table()
    assert mine.receive(record("guest", generation=0), 1.0) == []
    assert mine.get("guest") is None


def test_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "MEMBERS_MAX", 3)
    mine = table(record("b"), record("c"))
    assert mine.receive(record("d"), 1.0) == []
    assert len(mine) == 3


# --- about oneself -------------------------------------------------------------------


@pytest.mark.parametrize("status", [LOST, LEFT])
def test_worker_refutes_its_own_death(status: Status) -> None:
    mine = table()
    effects = mine.receive(record("me", version=3, status=status), 1.0)
    alive = record("me", version=4)
    assert effects == [Reply(alive), Announce(alive)]
    assert mine.me == alive
    assert mine.receive(record("me", version=3, status=status), 1.0) == []


def test_worker_that_left_does_not_come_back() -> None:
    mine = table()
    assert mine.leave(1.0).status is LEFT
    assert mine.receive(record("me", status=LOST), 1.0) == []
    assert mine.receive(record("me", 7, 0), 1.0) == []
    assert mine.me.status is LEFT


def test_news_of_a_former_life_are_answered() -> None:
    mine = Membership(record("me", 5, 2))
    assert mine.receive(record("me", 9, 1), 1.0) == [Reply(mine.me)]
    assert mine.receive(record("me", 0, 0), 1.0) == []  # an entry of somebody's list


def test_worker_of_unknown_life_takes_the_next_life() -> None:
    mine = Membership(record("me", 5, 0))
    after = record("me", 5, 4)
    assert mine.receive(record("me", 9, 3), 1.0) == [Reply(after), Announce(after)]


def test_worker_of_unknown_life_learns_its_life() -> None:
    mine = Membership(record("me", 5, 0))
    assert mine.receive(record("me", 5, 1), 1.0) == []
    assert mine.me == record("me", 5, 1)


@pytest.mark.parametrize("status", [ALIVE, LOST])
def test_worker_whose_name_was_taken_contests_it(status: Status) -> None:
    """Also if it is said to be lost, which is but a hint."""
    mine, later = table(), record("me", 2, 7, status=status)
    assert mine.receive(later, 1.0) == [Contest(later)]
    assert mine.me == record("me")
    after = record("me", 1, 8)
    assert mine.outlive(later) == [Reply(after), Announce(after)]
    assert mine.outlive(later) == [Reply(after), Announce(after)]
    assert mine.me == after


def test_later_life_that_has_left_is_outlived() -> None:
    """The member that took this worker in did not know of that life."""
    mine, after = table(), record("me", 1, 8)
    effects = mine.receive(record("me", 2, 7, status=LEFT), 1.0)
    assert effects == [Reply(after), Announce(after)]


# --- verdicts and links --------------------------------------------------------------


def test_lost_worker_is_announced_once() -> None:
    mine, lost = table(record("b")), record("b", status=LOST)
    effects = mine.lose("b", life("b", 1), 1.0)
    assert effects == [Changed(ChangeKind.LOST, lost, life("b", 1)), Announce(lost)]
    assert mine.lose("b", life("b", 1), 1.0) == []
    assert mine.lose("b", life("b", 2), 1.0) == []
    assert mine.lose("c", life("c", 1), 1.0) == []


def test_hint_does_not_count_against_a_link() -> None:
    mine, lost = table(record("b")), record("b", status=LOST)
    assert mine.receive(lost, 1.0, is_linked=True) == [Warn(lost)]
    assert mine.get("b") == record("b")
    left = record("b", status=LEFT)
    assert mine.receive(left, 1.0, is_linked=True) == [Warn(left)]
    itself = WorkerId("b", life("b", 1))
    gone = mine.receive(left, 1.0, by=itself, is_linked=True)
    assert kinds(gone) == [ChangeKind.LEFT]


TELLER = WorkerId("teller", life("teller", 77))


def test_later_life_does_not_count_against_a_link() -> None:
    mine, later = table(record("b")), record("b", 2, 2)
    heard = mine.receive(later, 1.0, by=TELLER, is_linked=True)
    assert heard == [Settle(record("b"), later)]
    assert mine.get("b") == record("b")


@pytest.mark.parametrize(
    "heard",
    [record("b", status=LOST), record("b", status=LEFT), record("b", 2, 2)],
    ids=["lost", "left", "succeeded"],
)
def test_hint_without_a_link_is_believed_and_doubted(heard: Record) -> None:
    mine = table(record("b"))
    change, doubt = mine.receive(heard, 1.0, by=TELLER)
    assert isinstance(change, Changed)
    assert change.is_doubted == (heard.incarnation != life("b", 1))
    assert doubt == Doubt(member("b"))
    assert mine.get("b") == heard
    assert mine.refusal("b", life("b", 1)) == ""


def test_former_life_returns_by_its_own_word() -> None:
    mine = table(record("b"))
    mine.receive(record("b", 2, 2), 1.0, by=TELLER)
    again = record("b", 1, 3)
    itself = WorkerId("b", life("b", 1))
    assert kinds(mine.receive(again, 2.0, by=itself)) == [ChangeKind.RESTARTED]
    assert mine.get("b") == again
    assert mine.refusal("b", life("b", 1)) == ""


@pytest.mark.parametrize("status", [ALIVE, LOST, LEFT])
@pytest.mark.parametrize("name", ["b", "me", "c"])
@pytest.mark.parametrize("is_linked", [False, True])
def test_guest_speaks_of_itself_only(
    status: Status, name: str, *, is_linked: bool
) -> None:
    mine = table(record("b"))
    before = {known: mine.get(known) for known in ("b", "me", "c")}
    heard = record(name, 9, 9, 9, status)
    guest = WorkerId("guest", life("guest", 9))
    for teller in (guest, WorkerId(name, life(name, 1)), TELLER):
        effects = mine.receive(
            heard, 1.0, by=teller, is_guest=True, is_linked=is_linked
        )
        assert effects == []
    assert {known: mine.get(known) for known in before} == before


def test_guest_cannot_change_its_address_or_rank() -> None:
    guest = Member("guest", 3, life("guest", 5), ("relay://me",), "behind me")
    mine = table(Record(guest, 1))
    assert mine.guests_of("me") == ["guest"]
    assert "guest" not in mine.carriers
    itself = WorkerId("guest", life("guest", 5))
    claimed = replace(guest, rank=0, addresses=("tcp://10.0.0.1:1",))
    mine.receive(Record(claimed, 1, 1), 1.0, by=itself, is_guest=True)
    assert mine.get("guest") == Record(guest, 1, 1)


@pytest.mark.parametrize("incarnation", [1, 2])
def test_worker_refutes_false_claims_about_itself(incarnation: int) -> None:
    mine = table()
    claim = record("me", incarnation, STEP_MAX + 1, STEP_MAX, LOST)
    if incarnation == 1:
        mine.receive(claim, 1.0, by=TELLER)
    else:
        assert mine.receive(claim, 1.0, by=TELLER) == [Contest(claim)]
        mine.outlive(claim)
    assert mine.me.order > claim.order
    assert mine.me.is_alive


@pytest.mark.parametrize("incarnation", [1, 2])
@pytest.mark.parametrize("status", [ALIVE, LOST, LEFT])
def test_own_record_of_a_worker_overrides_absurd_claims(
    incarnation: int, status: Status
) -> None:
    mine, itself = table(record("b")), WorkerId("b", life("b", 1))
    for number in range(1, 9):  # each of them is near the one before
        far = record("b", incarnation, number * STEP_MAX, number * STEP_MAX, status)
        mine.receive(far, 1.0, by=TELLER)
    other = table()
    other.me = record("b")
    assert other.receive(far, 1.0, by=TELLER) == [Reply(record("b"))]
    assert other.me == record("b")
    mine.receive(record("b"), 2.0, by=itself)
    assert mine.get("b") == record("b")
    assert mine.refusal("b", life("b", 1)) == ""


def test_hint_does_not_change_an_address() -> None:
    mine = table(record("b"))
    elsewhere = replace(member("b", rank=0), addresses=("tcp://10.0.0.1:1",))
    mine.receive(Record(elsewhere, 1, 1), 1.0, by=TELLER)
    assert mine.get("b") == record("b", version=1)


def test_rank_stays_with_the_worker_that_has_it() -> None:
    mine = table(Record(member("b", rank=4), 1))
    mine.receive(Record(member("c", 2, rank=4), 1), 1.0, by=TELLER)
    itself = WorkerId("c", life("c", 2))
    mine.receive(Record(member("c", 2, rank=4), 1, 1), 1.0, by=itself)
    holder, other = mine.holder_of(4), mine.get("c")
    assert holder is not None
    assert other is not None
    assert (holder.name, other.member.rank) == ("b", -1)
    mine.lose("b", life("b", 1), 2.0)
    mine.receive(Record(member("c", 2, rank=4), 1, 2), 3.0, by=itself)
    holder = mine.holder_of(4)
    assert holder is not None
    assert holder.name == "c"


def test_records_from_a_single_teller_do_not_fill_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(membership, "MEMBERS_MAX", 8)
    mine = table(record("b"))
    for number in range(20):
        mine.receive(record(f"ghost{number}", number + 9), 1.0, by=TELLER)
    assert len(mine) == 8
    honest = WorkerId("b", life("b", 1))
    heard = mine.receive(record("c", 3), 1.0, by=honest)
    assert heard[0] == Forgotten("ghost0")
    assert kinds(heard) == [JOINED]
    assert mine.make_room() == [Forgotten("ghost1")]
    assert kinds(mine.admit(member("d", 4), 1.0)) == [JOINED]
    assert {"b", "c", "d", "me"} <= {
        member_record.name for member_record in mine.records
    }


def test_teller_has_a_share_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hearsay, "SHARE_MAX", 3)
    mine = table(record("b"))
    for number in range(5):
        mine.receive(record(f"ghost{number}", number + 9), 1.0, by=TELLER)
    assert mine.hearsay.names_from(TELLER.incarnation) == ["ghost0", "ghost1", "ghost2"]
    mine.meet(member("ghost1", 10), 1.0)
    assert mine.hearsay.names_from(TELLER.incarnation) == ["ghost0", "ghost2"]
    mine.hearsay.confirm(TELLER.incarnation)
    assert "ghost0" in mine.hearsay
    mine.hearsay.confirm(Incarnation(1))
    assert mine.hearsay.names_from(TELLER.incarnation) == []


def test_expected_worker_is_met_without_a_reply() -> None:
    mine = table(record("b"))
    assert mine.meet(member("b"), 1.0) == []
    assert mine.meet(member("guest"), 1.0) == []


def test_met_worker_that_was_lost_learns_of_it() -> None:
    lost = record("b", status=LOST)
    assert table(lost).meet(member("b"), 1.0) == [Reply(lost)]


def test_met_worker_of_another_life_gets_the_known_record() -> None:
    assert table(record("b")).meet(member("b", 2), 1.0) == [Reply(record("b"))]


def test_listed_worker_is_alive_once_met() -> None:
    mine = table(Record(member("b", 0)))
    assert "b" not in mine.alive
    assert [member_record.name for member_record in mine.records] == ["b", "me"]
    met = record("b", 7)
    effects = mine.meet(member("b", 7), 1.0)
    assert effects == [Changed(None, met, UNKNOWN_INCARNATION), Reply(met)]
    assert "b" in mine.alive


def test_names_of_a_static_group_are_fixed() -> None:
    mine = table(record("b"), static=True)
    assert mine.receive(record("c"), 1.0) == []
    assert "static" in mine.refusal("c", life("c", 1))
    assert mine.refusal("b", life("b", 2)) == ""
    assert kinds(mine.meet(member("b", 2), 1.0)) == [ChangeKind.RESTARTED]
    assert mine.get("b") == record("b", 2, 2)
    assert "later worker" in mine.refusal("b", life("b", 1))


def test_succeeded_worker_is_refused() -> None:
    mine = table(record("b"))
    assert mine.refusal("b", life("b", 1)) == ""
    mine.receive(record("b", 2, 2), 1.0, by=TELLER)
    assert mine.refusal("b", life("b", 1)) == ""  # it is only said so
    mine.meet(member("b", 2), 1.0)
    assert "a later worker has the name 'b'" in mine.refusal("b", life("b", 1))
    assert mine.refusal("b", life("b", 2)) == ""
    assert mine.refusal("unheard of", life("unheard of", 3)) == ""


def test_incarnation_belongs_to_the_worker_first_known_with_it() -> None:
    mine = table(record("b"))
    stolen = Record(Member("c", -1, life("b", 1), (), ""), generation=9)
    for status in Status:
        assert mine.receive(replace(stolen, status=status), 1.0, by=TELLER) == []
    assert mine.get("c") is None
    assert "that of worker 'b'" in mine.refusal("c", life("b", 1))
    assert "that of worker 'me'" in mine.refusal("c", life("me", 1))
    assert mine.refusal("b", life("b", 1)) == ""
    mine.receive(record("b", status=LEFT), 1.0, by=WorkerId("b", life("b", 1)))
    assert "that of worker 'b'" in mine.refusal("c", life("b", 1))
    mine.forget(2.0 + TOMBSTONE_S)
    assert mine.refusal("c", life("b", 1)) == ""


# --- joining -------------------------------------------------------------------------


def test_new_name_begins_its_first_life() -> None:
    mine = table()
    new = Record(member("b", 4, rank=3), 1)
    effects = mine.admit(member("b", 4, rank=3), 1.0)
    assert effects == [Changed(JOINED, new, UNKNOWN_INCARNATION), Announce(new)]
    assert mine.holder_of(3) == new
    assert mine.holder_of(9) is None
    assert mine.holder_of(-1) is None
    assert mine.admit(member("b", 4, rank=3), 1.0) == []  # it has asked twice


@pytest.mark.parametrize(
    ("status", "kind"), [(LOST, ChangeKind.RESTARTED), (LEFT, ChangeKind.JOINED)]
)
def test_returning_name_keeps_its_rank(status: Status, kind: ChangeKind) -> None:
    mine = table(Record(member("b", 1, rank=2), 4, 0, status))
    new = Record(member("b", 9, rank=2), 5)
    effects = mine.admit(member("b", 9), 1.0)
    assert effects == [Changed(kind, new, life("b", 1)), Announce(new)]
    assert mine.get("b") == new


@pytest.mark.parametrize("status", [LOST, LEFT])
def test_returning_name_may_have_another_rank(status: Status) -> None:
    mine = table(Record(member("b", 1, rank=2), 4))
    mine.receive(Record(member("b", 1, rank=2), 4, 0, status), 1.0)
    mine.admit(member("b", 9, rank=5), 1.0)
    assert mine.holder_of(2) is None
    holder = mine.holder_of(5)
    assert holder is not None
    assert holder.name == "b"


# --- forgetting ----------------------------------------------------------------------


def test_dead_workers_are_forgotten() -> None:
    mine = table(record("b"), record("c"), record("d"))
    mine.lose("b", life("b", 1), 10.0)
    mine.receive(record("c", status=LEFT), 20.0)
    assert mine.forget(9.0 + TOMBSTONE_S) == []
    assert mine.forget(10.0 + TOMBSTONE_S) == ["b"]
    assert mine.forget(20.0 + TOMBSTONE_S) == ["c"]
    assert mine.get("b") is mine.get("c") is None
    assert list(mine.lost) == []
    assert len(mine) == 2


def test_remembered_dead_workers_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "TOMBSTONES_MAX", 2)
    mine = table(*(record(name, number) for number, name in enumerate("bcde")))
    for number, name in enumerate("bcde"):
        mine.lose(name, life(name, number), 1.0)
    assert mine.forget(1.0) == ["b", "c"]
    lives = [life("x", number) for number in range(10, 20)]
    for number, itself in enumerate(lives, 10):
        mine.receive(record("x", number, number), 1.0, by=WorkerId("x", itself))
    assert sum(bool(mine.refusal("x", incarnation)) for incarnation in lives) == 2


def test_returned_worker_is_not_forgotten() -> None:
    mine = table(record("b"))
    mine.lose("b", life("b", 1), 1.0)
    mine.receive(record("b", version=1), 2.0)
    assert mine.forget(5.0 + TOMBSTONE_S) == []
    assert "b" in mine.alive


# --- comparing -----------------------------------------------------------------------


def compare(first: Membership, other: Membership) -> int:
    """Exchange what differs; return how many records were sent."""
    parts = first.differing(other.digests)
    ours = first.part(parts)
    theirs = other.better(parts, ours)
    for heard in ours:
        other.receive(heard, 1.0)
    for heard in theirs:
        for effect in first.receive(heard, 1.0):
            if isinstance(effect, Reply):
                other.receive(effect.record, 1.0)
    return len(ours) + len(theirs)


def test_equal_tables_exchange_nothing() -> None:
    names = [record(f"w{number}", number) for number in range(1, 200)]
    first, other = table(*names), table(*reversed(names))
    assert (first.digest, first.digests) == (other.digest, other.digests)
    assert len(first.digests) == BUCKETS
    assert compare(first, other) == 0


def test_differing_records_are_exchanged_with_little_else() -> None:
    names = [record(f"w{number}", number) for number in range(1, 1000)]
    first, other = table(*names[:-1]), table(*names[1:])
    first.lose("w5", life("w5", 5), 1.0)
    other.receive(record("w7", 8, 2), 1.0)
    assert 0 < compare(first, other) < 4 * 2 * 3 * 1000 / BUCKETS
    assert (first.records, first.digest) == (other.records, other.digest)
    lost = other.get("w5")
    assert lost is not None
    assert lost.status is LOST


def test_forgotten_dead_workers_are_not_told_again() -> None:
    first, other = table(record("b")), table(record("b"))
    first.lose("b", life("b", 1), 0.0)
    other.receive(record("b", status=LOST), 0.0)
    other.forget(TOMBSTONE_S)
    assert compare(first, other) == 0
    assert compare(other, first) == 0


def test_lost_neighbour_is_looked_for_by_one_worker() -> None:
    names = [f"w{number}" for number in range(30)]
    tables = {name: Membership(record(name)) for name in names}
    for each in tables.values():
        each.begin([record(member_name) for member_name in names], 0.0)
    gone = names[::3]
    left = [remaining for remaining in names if remaining not in gone]
    for name in left:
        for lost_name in gone:
            tables[name].lose(lost_name, life(lost_name, 1), 1.0)
    looked_for = [
        lost_name for name in left for lost_name in tables[name].lost_nearby()
    ]
    assert sorted(looked_for) == sorted(gone)
    order = sorted(names, key=place_of)
    for name in left:
        at = order.index(name)
        after = [order[(at + step) % len(order)] for step in range(1, len(order))]
        nearby = tables[name].lost_nearby()
        assert after[: len(nearby)] == nearby


def test_lone_worker_looks_for_all_lost_ones() -> None:
    mine = table(record("b"), record("c"))
    mine.lose("b", life("b", 1), 1.0)
    mine.lose("c", life("c", 1), 1.0)
    assert mine.successor == ""
    assert sorted(mine.lost_nearby()) == ["b", "c"]

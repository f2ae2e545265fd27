"""News go once along the ring; what is said of a worker is read, merged and sought."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from asyncrpc.core.ids import Incarnation, WorkerInfo
from asyncrpc.core.links.link import Link
from asyncrpc.core.members import Member
from asyncrpc.core.membership.changes import RESYNC, MemberChange, combined
from asyncrpc.core.membership.finder import ASKED_MAX, REFRESH_S, Finder
from asyncrpc.core.membership.gossip import BATCH_S, Gossip
from asyncrpc.core.membership.machine.membership import (
    Membership,
)
from asyncrpc.core.membership.machine.records import (
    ChangeKind,
    Record,
    Status,
)
from asyncrpc.core.membership.machine.ring import place_of
from asyncrpc.core.membership.messages import (
    SERVICE,
    AskMembers,
    ExchangeRecords,
    FindMember,
    MemberNews,
    News,
    fields_of,
    read_news,
)
from asyncrpc.core.services.schema import UnfitError
from asyncrpc.errors import MalformedError, UnknownWorkerError, WorkerLostError
from asyncrpc.testing.loop import SimLoop
from tests.unit.core.membership.peers import Company

loops = {"sim": SimLoop}  # of the coroutine tests here


def begun(company: Company) -> tuple[Gossip, Membership]:
    peers: Any = company
    gossip = Gossip(company, peers, lambda: BATCH_S)
    records = [Record(peer.member, 1) for peer in company.known]
    table = Membership(records[0])
    table.begin(records, company.loop.time())
    gossip.begin(table)
    return gossip, table


def news_sent(company: Company) -> dict[str, list[Any]]:
    """Return the records that each peer was told, by its name."""
    news: dict[str, list[Any]] = {}
    for peer in company.known:
        for service, method, (items,) in peer.new_link.sent:
            assert (service, method) == (SERVICE, "news")
            names = [read_news(item).record.name for item in items]
            news.setdefault(peer.member.name, []).append(names)
    return news


async def test_simultaneous_news_share_one_message() -> None:
    company = Company("a", "b")
    company.connect("b")
    gossip, table = begun(company)
    records = list(table.records)
    for record in records:
        gossip.announce(record)
    assert news_sent(company) == {}
    await asyncio.sleep(2 * BATCH_S)
    assert news_sent(company) == {
        "b": [[member_record.name for member_record in records]]
    }
    assert gossip.sent == 1


async def test_repeated_news_are_passed_on_once() -> None:
    company = Company("a", "b")
    company.connect("b")
    gossip, table = begun(company)
    for _ in range(3):
        gossip.announce(table.me)
        await asyncio.sleep(2 * BATCH_S)
    assert news_sent(company) == {"b": [["a"]]}


async def test_part_of_an_unreachable_worker_is_told_by_another() -> None:
    names = [f"w{number}" for number in range(12)]
    company = Company(*names)
    company.connect(*names[1:])
    gossip, table = begun(company)
    routes = dict(table.alive.routes("w0", place_of("w0")))
    past = {route: table.alive.route_past(route, routes[route]) for route in routes}
    gone, (instead, _) = next((name, to) for name, to in past.items() if to)
    company.find(gone).link = None
    company.fail(gone, WorkerLostError("gone", to="x", function="connect"))
    gossip.announce(table.me)
    await asyncio.sleep(10 * BATCH_S)
    assert set(news_sent(company)) == routes.keys() - {gone} | {instead}


async def test_closed_gossip_sends_nothing() -> None:
    company = Company("a", "b")
    company.connect("b")
    gossip, table = begun(company)
    gossip.announce(table.me)
    gossip.close()
    gossip.announce(table.me)
    await asyncio.sleep(2 * BATCH_S)
    assert news_sent(company) == {}


WHOLE = Record(
    Member("b", 7, Incarnation(2**64 - 1), ("mem://b",), "host"), 3, 4, Status.LOST
)


def test_record_survives_its_encoding() -> None:
    assert FindMember.answer.write(WHOLE) == fields_of(WHOLE)
    assert FindMember.read_answer("a", fields_of(WHOLE)) == WHOLE
    assert FindMember.read_answer("a", None) is None
    assert AskMembers.read_answer("a", [fields_of(WHOLE)]) == [WHOLE]
    exchange = ExchangeRecords([0, 63], [WHOLE])
    assert ExchangeRecords.record.read(exchange.pack()) == exchange


def test_fields_of_later_versions_are_ignored() -> None:
    assert FindMember.read_answer("a", [*fields_of(WHOLE), "later"]) == WHOLE


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        ([], "record"),
        ("record", "record"),
        (fields_of(WHOLE)[:-1], "record"),
        (fields_of(replace(WHOLE, member=replace(WHOLE.member, name=""))), "name"),
        (fields_of(replace(WHOLE, version=-1)), "version"),
        (fields_of(replace(WHOLE, generation=-1)), "generation"),
        ([*fields_of(WHOLE)[:-1], 3], "status"),
        ([*fields_of(WHOLE)[:-1], True], "status"),
        (["b", 0, 1, [1], "host", 1, 0, 0], "element 0 of addresses"),
        (["b", 2**31, 1, [], "host", 1, 0, 0], "rank"),
        (["b", 0, 1, ["x"] * 8_193, "host", 1, 0, 0], "addresses"),
        (["b", 0, 2**64, [], "host", 1, 0, 0], "incarnation"),
        (["b", 0, 1, [], "x" * 256, 1, 0, 0], "host_id"),
        (["b\x1b[2J", 0, 1, [], "host", 1, 0, 0], "name"),
        (["b" * 256, 0, 1, [], "host", 1, 0, 0], "name"),
        ([1, 0, 1, [], "host", 1, 0, 0], "name"),
    ],
)
def test_malformed_record_is_refused_with_its_field(broken: Any, problem: str) -> None:
    with pytest.raises(MalformedError, match=f"^{problem}( of record)?"):
        read_news([-1, broken])
    with pytest.raises(UnfitError, match=f"^({problem} of )?element 0 of records must"):
        ExchangeRecords.record.read([[0], [broken]])


def test_each_news_item_is_read_separately() -> None:
    news = MemberNews([News(5, WHOLE)])
    right, wrong = MemberNews.record.read([[*news.pack()[0], "wrong"]]).items
    assert read_news(right) == News(5, WHOLE)
    with pytest.raises(MalformedError):
        read_news(wrong)


STEPS_MAX = 5
A = WorkerInfo("a", 0)
AWAY: tuple[bool, int] = (False, 0)

State = tuple[bool, int]  # whether the worker is there, and its last life


def following(state: State) -> Iterator[MemberChange]:
    """Yield what can happen to a worker next."""
    is_there, life = state
    if is_there:
        yield MemberChange(ChangeKind.LEFT, A, life)
        yield MemberChange(ChangeKind.LOST, A, life)
        yield MemberChange(ChangeKind.RESTARTED, A, life + 1, life)
    else:
        yield MemberChange(ChangeKind.JOINED, A, life + 1)
        if life:
            yield MemberChange(ChangeKind.BACK, A, life)


def after(state: State, change: MemberChange) -> State:
    """Return what a program knows after a change."""
    return change.kind not in (ChangeKind.LEFT, ChangeKind.LOST), change.incarnation


def histories(state: State, steps: int) -> Iterator[list[MemberChange]]:
    yield []
    if steps:
        for change in following(state):
            for rest in histories(after(state, change), steps - 1):
                yield [change, *rest]


def state_after(state: State, changes: Sequence[MemberChange]) -> State:
    for change in changes:
        state = after(state, change)
    return state


def test_combined_changes_lead_to_the_same_knowledge() -> None:
    for start in (AWAY, (True, 1)):
        for history in histories(start, STEPS_MAX):
            changes = combined(history)
            assert len(changes) <= 1
            there, life = state_after(start, history)
            known_there, known_life = state_after(start, changes)
            assert known_there is there
            assert not there or known_life == life
            if changes and changes[0].kind is ChangeKind.RESTARTED:
                assert changes[0].previous == start[1] != changes[0].incarnation
            if changes and not there:
                assert changes[0].incarnation == start[1]  # the life that it knew


def test_changes_of_several_workers_stay_apart() -> None:
    b = WorkerInfo("b", 1)
    left, joined = (
        MemberChange(ChangeKind.LEFT, A, 1),
        MemberChange(ChangeKind.JOINED, b, 2),
    )
    for order in itertools.permutations([left, joined]):
        assert combined(order) == list(order)


def test_changes_before_a_resync_are_dropped() -> None:
    left = MemberChange(ChangeKind.LEFT, A, 1)
    assert combined([left, RESYNC]) == [RESYNC]
    assert combined([RESYNC, left]) == [RESYNC, left]


class Asking:
    """A finder, and the table that it asks for."""

    def __init__(self, company: Company) -> None:
        self.company = company
        records = [Record(peer.member, 1) for peer in company.known]
        self.table = Membership(records[0])
        self.table.begin(records, company.loop.time())
        peers: Any = company
        self.finder = Finder(peers, company, peers, self._take)

    def _take(self, record: Record, _limit: int, _link: Link) -> None:
        self.table.receive(record, self.company.loop.time(), is_linked=False)

    def names_asked(self) -> list[str]:
        return [peer.member.name for peer in self.company.known if peer.new_link.sent]


async def test_known_member_is_not_looked_up() -> None:
    asking = Asking(Company("a", "b", "c"))
    await asking.finder.find(asking.table, "b", 1.0)
    assert asking.names_asked() == []


async def test_member_known_to_others_is_found() -> None:
    company = Company("a", "b", "c")
    company.connect("b", "c")
    asking = Asking(company)
    late = Record(Member("late", -1, Incarnation(4), ("mem://b",)), 1)
    company.find("c").new_link.answers["find"] = fields_of(late)
    company.find("b").new_link.answers["find"] = None
    await asking.finder.find(asking.table, "late", 1.0)
    assert asking.table.get("late") is not None


async def test_lookup_asks_a_limited_number_of_members() -> None:
    names = [f"w{number}" for number in range(20)]
    company = Company(*names)
    company.connect(*names[1:])
    asking = Asking(company)
    with pytest.raises(UnknownWorkerError, match="'nobody'"):
        await asking.finder.find(asking.table, "nobody", 1.0)
    assert len(asking.names_asked()) == ASKED_MAX
    assert company.loop.time() == pytest.approx(1.0)
    assert not company.tasks


async def test_moved_worker_is_worth_another_dial() -> None:
    company = Company("a", "b", "c")
    company.connect("c")
    asking = Asking(company)
    there = company.find("b").member
    elsewhere = replace(
        there, incarnation=Incarnation(9), addresses=("mem://elsewhere",)
    )
    company.find("c").new_link.answers["find"] = fields_of(Record(elsewhere, 2))
    assert await asking.finder.refresh(asking.table, "b")
    assert asking.names_asked() == ["c"]


async def test_unmoved_worker_is_not_worth_another_dial() -> None:
    company = Company("a", "b", "c")
    company.connect("c")
    asking = Asking(company)
    assert not await asking.finder.refresh(asking.table, "b")
    assert company.loop.time() == pytest.approx(REFRESH_S)
    assert not await asking.finder.refresh(asking.table, "nobody")


async def test_worker_that_answered_under_another_life_is_dialed_again() -> None:
    company = Company("a", "b")
    asking = Asking(company)
    record = asking.table.get("b")
    assert record is not None
    company.find("b").member = replace(record.member, incarnation=99)  # type: ignore[arg-type]
    assert await asking.finder.refresh(asking.table, "b")
    assert company.find("b").member == record.member
    assert asking.names_asked() == []

"""Where a worker is, a few members are asked; what they say is taken as news."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from asyncrpc.core.ids import Incarnation
from asyncrpc.core.links.link import Link
from asyncrpc.core.members import Member
from asyncrpc.core.membership.finder import ASKED_MAX, REFRESH_S, Finder
from asyncrpc.core.membership.machine.membership import (
    Membership,
)
from asyncrpc.core.membership.machine.records import (
    Record,
)
from asyncrpc.core.membership.messages import fields_of
from asyncrpc.errors import UnknownWorkerError
from tests.unit.core.membership.peers import Company, run


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
        return [peer.member.name for peer in self.company.known if peer.made.sent]


def test_known_member_is_not_looked_up() -> None:
    async def main() -> None:
        asking = Asking(Company("a", "b", "c"))
        await asking.finder.find(asking.table, "b", 1.0)
        assert asking.names_asked() == []

    run(main())


def test_member_known_to_others_is_found() -> None:
    async def main() -> None:
        company = Company("a", "b", "c")
        company.connect("b", "c")
        asking = Asking(company)
        late = Record(Member("late", -1, Incarnation(4), ("mem://b",)), 1)
        company.find("c").made.answers["find"] = fields_of(late)
        company.find("b").made.answers["find"] = None
        await asking.finder.find(asking.table, "late", 1.0)
        assert asking.table.get("late") is not None

    run(main())


def test_lookup_asks_a_limited_number_of_members() -> None:
    async def main() -> None:
        names = [f"w{number}" for number in range(20)]
        company = Company(*names)
        company.connect(*names[1:])
        asking = Asking(company)
        with pytest.raises(UnknownWorkerError, match="'nobody'"):
            await asking.finder.find(asking.table, "nobody", 1.0)
        assert len(asking.names_asked()) == ASKED_MAX
        assert company.loop.time() == pytest.approx(1.0)
        assert not company.tasks

    run(main())


def test_moved_worker_is_worth_another_dial() -> None:
    async def main() -> None:
        company = Company("a", "b", "c")
        company.connect("c")
        asking = Asking(company)
        there = company.find("b").member
        elsewhere = replace(
            there, incarnation=Incarnation(9), addresses=("mem://elsewhere",)
        )
        moved = Record(elsewhere, 2)
        company.find("c").made.answers["find"] = fields_of(moved)
        assert await asking.finder.refresh(asking.table, "b")
        assert asking.names_asked() == ["c"]

    run(main())


def test_unmoved_worker_is_not_worth_another_dial() -> None:
    async def main() -> None:
        company = Company("a", "b", "c")
        company.connect("c")
        asking = Asking(company)
        assert not await asking.finder.refresh(asking.table, "b")
        assert company.loop.time() == pytest.approx(REFRESH_S)
        assert not await asking.finder.refresh(asking.table, "nobody")

    run(main())


def test_worker_that_answered_under_another_life_is_dialed_again() -> None:
    async def main() -> None:
        company = Company("a", "b")
        asking = Asking(company)
        record = asking.table.get("b")
        assert record is not None
        company.find("b").member = replace(record.member, incarnation=99)  # type: ignore[arg-type]
        assert await asking.finder.refresh(asking.table, "b")
        assert company.find("b").member == record.member
        assert asking.names_asked() == []

    run(main())

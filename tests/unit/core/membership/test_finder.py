"""Where a worker is, a few members are asked; what they say is taken as news."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asyncrpc.core.ids import Incarnation
from asyncrpc.core.members import Member
from asyncrpc.core.membership.finder import ASKED_MAX, REFRESH_S, Finder
from asyncrpc.core.membership.machine.membership import (
    Membership,
)
from asyncrpc.core.membership.machine.records import (
    Record,
)
from asyncrpc.core.membership.messages import fields_of
from asyncrpc.core.membership.ports import MemberLink
from asyncrpc.errors import UnknownWorkerError
from tests.unit.core.membership.peers import Company, run


class Asking:
    """A finder, and the table that it asks for."""

    def __init__(self, company: Company) -> None:
        self.company = company
        records = [Record(one.member, 1) for one in company.known]
        self.table = Membership(records[0])
        self.table.begin(records, company.loop.time())
        self.finder = Finder(company, company, company, self._take)

    def _take(self, record: Record, _limit: int, _link: MemberLink) -> None:
        self.table.receive(record, self.company.loop.time(), is_linked=False)

    def asked(self) -> list[str]:
        return [one.member.name for one in self.company.known if one.made.sent]


def test_a_member_that_is_known_is_not_asked_for() -> None:
    async def main() -> None:
        asking = Asking(Company("a", "b", "c"))
        await asking.finder.find(asking.table, "b", 1.0)
        assert asking.asked() == []

    run(main())


def test_one_that_others_know_is_found() -> None:
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


def test_of_many_members_only_a_few_are_asked() -> None:
    async def main() -> None:
        names = [f"w{number}" for number in range(20)]
        company = Company(*names)
        company.connect(*names[1:])
        asking = Asking(company)
        with pytest.raises(UnknownWorkerError, match="'nobody'"):
            await asking.finder.find(asking.table, "nobody", 1.0)
        assert len(asking.asked()) == ASKED_MAX
        assert company.loop.time() == pytest.approx(1.0)
        assert not company.tasks

    run(main())


def test_who_has_moved_is_worth_another_dial() -> None:
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
        assert asking.asked() == ["c"]

    run(main())


def test_who_has_not_moved_is_not() -> None:
    async def main() -> None:
        company = Company("a", "b", "c")
        company.connect("c")
        asking = Asking(company)
        assert not await asking.finder.refresh(asking.table, "b")
        assert company.loop.time() == pytest.approx(REFRESH_S)
        assert not await asking.finder.refresh(asking.table, "nobody")

    run(main())


def test_who_introduced_itself_as_somebody_else_is_dialed_where_he_is() -> None:
    async def main() -> None:
        company = Company("a", "b")
        asking = Asking(company)
        record = asking.table.get("b")
        assert record is not None
        company.find("b").member = replace(record.member, incarnation=99)  # type: ignore[arg-type]
        assert await asking.finder.refresh(asking.table, "b")
        assert company.find("b").member == record.member
        assert asking.asked() == []

    run(main())

"""What one member says of another is what others read, or they refuse it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from asyncrpc.core.ids import Incarnation
from asyncrpc.core.members import Member
from asyncrpc.core.membership.machine.records import (
    Record,
    Status,
)
from asyncrpc.core.membership.messages import (
    AskMembers,
    ExchangeRecords,
    FindMember,
    MemberNews,
    News,
    fields_of,
    read_news,
)
from asyncrpc.core.services.schema import UnfitError
from asyncrpc.errors import MalformedError

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
    came = MemberNews.record.read([[*news.pack()[0], "wrong"]])
    right, wrong = came.items
    assert read_news(right) == News(5, WHOLE)
    with pytest.raises(MalformedError):
        read_news(wrong)

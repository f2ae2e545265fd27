"""The workers that one worker knows: records alone, until one is wanted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from asyncrpc.core.ids import Incarnation
from asyncrpc.core.links.peer_table import PeerTable
from asyncrpc.core.members import Member
from asyncrpc.errors import UnknownWorkerError, UsageError


class Myself:
    name, incarnation = "me", Incarnation(1)


def member(number: int) -> Member:
    return Member(
        f"w{number}", number, Incarnation(100 + number), (f"mem://w{number}",)
    )


def table_of(*members: Member) -> PeerTable:
    table = PeerTable(Myself())  # type: ignore[arg-type]  # enough of it
    table.add(members)
    return table


def test_record_without_a_use_has_no_entry() -> None:
    """Thousands of entries, each with an event and a machine, would be megabytes."""
    table = table_of(*map(member, range(1000)))
    entry = table.find("w7")
    assert entry.member == member(7)
    assert [number for number in range(1000) if table.met(f"w{number}")] == [7]
    assert len(list(table)) == len(set(table)) == 1000


def test_record_look_up_creates_no_entry() -> None:
    table = table_of(member(3))
    assert table.member("w3") == table.member(3) == member(3)
    assert table.met("w3") is None
    table.find(3)
    assert table.member("w3") == table.member(3) == member(3)
    for unknown in ("w4", 4):
        with pytest.raises(UnknownWorkerError, match="known: 'w3'"):
            table.member(unknown)


def test_entry_is_created_once() -> None:
    table = table_of(member(3))
    assert table.find("w3") is table.find(3) is table.met("w3")


def test_newer_record_reaches_the_entry() -> None:
    table = table_of(member(1), member(2))
    entry = table.find("w1")
    later = [replace(member(number), incarnation=Incarnation(9)) for number in (1, 2)]
    table.add(later)
    assert [entry.member, table.get("w2")] == later
    assert [table.incarnation_of(f"w{number}") for number in (1, 2)] == [9, 9]
    assert sorted(member_record.name for member_record in table) == ["w1", "w2"]


@pytest.mark.parametrize("is_wanted", [False, True])
def test_forgotten_worker_is_unknown(is_wanted: bool) -> None:  # noqa: FBT001
    table = table_of(member(1), member(2))
    if is_wanted:
        table.find("w1")
    table.forget("w1")
    table.forget("w1")
    for name in ("w1", 1):
        with pytest.raises(UnknownWorkerError, match="known: 'w2'"):
            table.find(name)
    assert table.get("w1") is None
    assert table.incarnation_of("w1") is None


def test_worker_with_a_connection_is_not_forgotten() -> None:
    table = table_of(member(1))
    connection: Any = object()
    table.find("w1").machine.on_open(connection, dialed=True)
    table.forget("w1")
    assert table.find(1).machine.connection is connection


def test_rank_stays_with_its_first_worker_until_given_away() -> None:
    table = table_of(member(1), replace(member(2), rank=1))
    assert table.find(1).member.name == "w1"
    table.give_rank(1, "w2")
    table.forget("w1")
    assert table.find(1).member.name == "w2"


def test_key_must_be_a_name_or_a_rank() -> None:
    with pytest.raises(UsageError, match="name or the rank"):
        table_of().find(1.5)  # type: ignore[arg-type]


def test_error_lists_a_limited_number_of_names() -> None:
    with pytest.raises(UnknownWorkerError, match=r"'w0'.* and 936 more; ") as caught:
        table_of(*map(member, range(1000))).find("nobody")
    assert len(caught.value.known) == 1000
    assert len(str(caught.value)) < 1000

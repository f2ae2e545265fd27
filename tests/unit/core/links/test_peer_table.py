"""The workers that one worker knows, and the addresses that reach them from here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrpc import Options
from asyncrpc.core.host.this_host import HOST_ID
from asyncrpc.core.ids import Incarnation
from asyncrpc.core.links.peer_table import PeerTable
from asyncrpc.core.links.routes import Routes, default_addresses, open_connectors
from asyncrpc.core.members import Member
from asyncrpc.errors import UnknownWorkerError, UsageError
from asyncrpc.testing.network import Network


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
    assert table.find("w7").member == member(7)
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


ADDRESSES = ("tcp://10.0.0.7:1", "tcp://127.0.0.1:2", "uds:///run/b", "mem://b")


def routes_by(*schemes: str) -> Routes:
    return Routes(dict.fromkeys(schemes, Network(1).connector("a")), timeout_s=1.0)


def routes_to(host_id: str, *schemes: str) -> list[str]:
    routes = routes_by(*schemes)
    member = Member("b", 0, Incarnation(1), ADDRESSES, host_id)
    return [str(route) for route in routes.to(member)]


@pytest.mark.parametrize("host_id", ["", HOST_ID])
def test_local_routes_put_the_unix_socket_before_tcp(host_id: str) -> None:
    routes = routes_to(host_id, "tcp", "uds")
    assert routes == ["uds:///run/b", "tcp://10.0.0.7:1", "tcp://127.0.0.1:2"]


def test_remote_routes_leave_out_sockets_and_loopback() -> None:
    assert routes_to("another", "tcp", "uds") == ["tcp://10.0.0.7:1"]


@pytest.mark.parametrize(
    ("addresses", "says_how"),
    [(["uds:///run/b"], True), (["uds:///run/b", "tcp://127.0.0.1:2"], False)],
)
def test_error_explains_that_a_worker_without_a_secret_has_no_port(
    addresses: list[str], *, says_how: bool
) -> None:
    member = Member("b", 0, Incarnation(1), tuple(addresses), "another")
    why = routes_by("tcp", "uds").passed_over(member)
    assert "uds:///run/b: a socket in the file system of another host" in why
    assert ("'b' listens at no port" in why) is says_how
    assert ("ASYNCRPC_SECRET_FILE" in why) is says_how


def test_addresses_without_a_connector_are_skipped() -> None:
    assert routes_to(HOST_ID, "mem") == ["mem://b"]
    assert routes_to(HOST_ID) == []


def test_malformed_addresses_are_skipped() -> None:
    addresses = ("file:///etc/passwd", "", "tcp://\n", "tcp://10.0.0.7:1")
    member = Member("b", 0, Incarnation(1), addresses)
    routes = routes_by("tcp")
    assert [str(route) for route in routes.to(member)] == ["tcp://10.0.0.7:1"]
    assert not routes.passed_over(member)


def test_connectors_may_be_added_after_the_routes() -> None:
    network = Network(1).connector("a")
    connectors = open_connectors(Options(), network)
    assert connectors == {"mem": network}
    late: dict[str, object] = {}
    routes = Routes(late, timeout_s=1.0)  # type: ignore[arg-type]
    member = Member("b", 0, Incarnation(1), ADDRESSES)
    assert routes.to(member) == []
    late |= connectors
    assert [str(route) for route in routes.to(member)] == ["mem://b"]


def test_default_connectors_are_tcp_and_unix_sockets() -> None:
    assert set(open_connectors(Options(), None)) == {"tcp", "uds"}


def test_guarded_worker_alone_listens_at_interfaces() -> None:
    folder = Path("/run/asyncrpc")
    assert default_addresses(folder, is_guarded=False) == ["uds:///run/asyncrpc/worker"]
    schemes = [
        address.partition(":")[0]
        for address in default_addresses(folder, is_guarded=True)
    ]
    assert schemes == ["uds", "tcp"]

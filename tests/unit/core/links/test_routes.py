"""Of a worker's addresses those are used that reach it from here, best first."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrpc import Options
from asyncrpc.core.host.this_host import HOST_ID
from asyncrpc.core.ids import Incarnation
from asyncrpc.core.links.routes import Routes, default_addresses, open_connectors
from asyncrpc.core.members import Member
from asyncrpc.testing.network import Network

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

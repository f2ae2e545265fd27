"""Every process runs the same command, wherever the launcher has put which rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.network.hosts import Host, Network, Program, network, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces work")

MEET = """
import sys
from tests.clusters.network.programs import meet
meet(*sys.argv[1:])
"""
PLACE = "tcp://head:29500"


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Network]:
    with network(tmp_path) as created:
        yield created


def meet(host: Host, name: str, rank: int, place: str = PLACE, **more: str) -> Program:
    limit_s = more.pop("limit_s", "60")
    return host.start(MEET, name, str(rank), "2", place, limit_s, **more)


def test_process_at_the_address_hosts_the_meeting(net: Network) -> None:
    """As under srun, rank 0 is not on the host of MASTER_ADDR."""
    head, other = net.host("head", a="10.1.0.1"), net.host("other", a="10.1.0.2")
    for host in (head, other):
        host.names(head="10.1.0.1")
    programs = [meet(other, "w0", 0), meet(head, "w1", 1)]
    for program in programs:
        output = program.ends()
        assert "answer w0\n" in output
        assert "answer w1\n" in output


def test_a_name_that_resolves_late_is_waited_for(net: Network) -> None:
    head, other = net.host("head", a="10.1.0.1"), net.host("other", a="10.1.0.2")
    late = meet(other, "w1", 1)
    late.hears("begins")
    first = meet(head, "w0", 0)
    first.hears("begins")
    for host in (head, other):  # neither could resolve it until now
        host.names(head="10.1.0.1")
    assert "answer w0\n" in late.ends()
    assert "answer w1\n" in first.ends()


def test_a_name_that_never_resolves_is_named_with_its_reason(net: Network) -> None:
    other = net.host("other", a="10.1.0.2")
    output = meet(other, "w1", 1, limit_s="1").ends()
    assert "missing the meeting place head:29500 cannot be reached in 1 s: " in output
    assert "the name does not resolve" in output


def test_absent_host_and_refused_port_are_reported_differently(net: Network) -> None:
    net.host("head", a="10.1.0.1")
    other = net.host("other", a="10.1.0.2")
    other.names(head="10.1.0.1")
    assert (
        "refused: no process listens there" in meet(other, "w1", 1, limit_s="1").ends()
    )
    nowhere = meet(other, "w1", 1, "tcp://10.9.0.1:29500", limit_s="1").ends()
    assert "no route" in nowhere
    absent = meet(other, "w1", 1, "tcp://10.1.0.77:29500", limit_s="1").ends()
    assert "silent: no answer" in absent or "no route" in absent


RESET = """
import socket, struct, sys
server = socket.create_server(("10.1.0.1", 29500))
print("listens", flush=True)
for _ in range(3):
    sock, _ = server.accept()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
    print("reset", flush=True)
"""


def test_reset_connections_are_retried(net: Network) -> None:
    """A proxy resets them until its backend is there."""
    head, other = net.host("head", a="10.1.0.1"), net.host("other", a="10.1.0.2")
    for host in (head, other):
        host.names(head="10.1.0.1")
    proxy = head.start(RESET)
    proxy.hears("listens")
    early = meet(other, "w1", 1)
    proxy.ends()
    first = meet(head, "w0", 0)
    assert "answer w0\n" in early.ends()
    assert "answer w1\n" in first.ends()


def test_dead_network_of_two_costs_a_moment(net: Network) -> None:
    """Both are up at either end, and one leads nowhere; the other is remembered."""
    head = net.host("head", a="10.1.0.1", b="10.2.0.1")
    other = net.host("other", a="10.1.0.2", b="10.2.0.2")
    for host in (head, other):
        host.names(head="10.2.0.1")
    net.cut("a")
    programs = [meet(head, "w0", 0), meet(other, "w1", 1)]
    outputs = [program.ends() for program in programs]
    assert "by tcp://10.2.0." in "".join(outputs)
    assert "by tcp://10.1.0." not in "".join(outputs)


def test_an_interface_can_be_chosen_by_the_environment(net: Network) -> None:
    head = net.host("head", a="10.1.0.1", b="10.2.0.1")
    other = net.host("other", a="10.1.0.2", b="10.2.0.2")
    for host in (head, other):
        host.names(head="10.1.0.1")
    programs = [
        meet(host, f"w{rank}", rank, ASYNCRPC_INTERFACE="10.2.0.0/16,ethz*")
        for rank, host in enumerate((head, other))
    ]
    output = "".join(program.ends() for program in programs)
    assert "by tcp://10.2.0." in output
    assert "by tcp://10.1.0." not in output


def test_a_bridge_of_containers_is_tried_last(net: Network) -> None:
    """Every host has the same docker0, with the same address."""
    head, other = net.host("head", a="192.168.1.1"), net.host("other", a="192.168.1.2")
    for host in (head, other):
        host.names(head="192.168.1.1")
        host.run("ip", "link", "add", "docker0", "type", "bridge")
        host.run("ip", "address", "add", "172.17.0.1/16", "dev", "docker0")
        host.run("ip", "link", "set", "docker0", "up")
    programs = [meet(head, "w0", 0), meet(other, "w1", 1)]
    output = "".join(program.ends() for program in programs)
    assert "by tcp://192.168.1." in output
    assert "by tcp://172.17" not in output

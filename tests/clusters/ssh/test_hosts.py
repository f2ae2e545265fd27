"""A cluster by SSH on two hosts with networks of their own: namespaces, real sshds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from tests.clusters.network.hosts import Host, Network, Program, network, why_not
from tests.clusters.ssh.sshd import Sshd, missing_programs

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces work")

PROGRAM: Final = """
import os, sys
import asyncrpc

def network_here():
    return os.readlink("/proc/self/ns/net")

async def network_of(name):
    return await asyncrpc.rpc_async(name, network_here)

async def main():
    key, known_hosts, *hosts = sys.argv[1:]
    ssh = asyncrpc.SshOptions(client_keys=[key], known_hosts=known_hosts)
    async with asyncrpc.Cluster.ssh(
        hosts, ssh=ssh, start_timeout_s=300.0, threads=1
    ) as cluster:
        changes = cluster.changes()
        networks = {network_here()}
        for asked, other in (("w0", "w1"), ("w1", "w0")):  # each reaches the other
            networks.add(await cluster[asked].call(network_of, other))
        print("networks", len(networks))
        print("python", await cluster["w1"].call(os.getpid) > 0)
        sys.stdin.readline()
        change = await anext(changes)
        print("change", change.kind, change.worker)
        print("left", await cluster["w0"].call(len, "abc"), cluster.names)
    print("end")

asyncrpc.run(main())
"""


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Network]:
    pytest.importorskip("asyncssh", reason="needs asyncssh: the extra ssh")
    if missing := missing_programs():
        pytest.skip(f"needs {', '.join(missing)}: tests/clusters/install.sh")
    with network(tmp_path) as created:
        yield created


@pytest.fixture
def hosts(net: Network, tmp_path: Path) -> Iterator[tuple[Host, list[Host], list[str]]]:
    """Return the program's host, two others with an sshd, and arguments for it."""
    head = net.host("head", a="10.1.0.1")
    others = [net.host(f"host{n}", a=f"10.1.0.{n}") for n in (2, 3)]
    with ExitStack() as stack:
        sshds = [
            stack.enter_context(
                Sshd(
                    tmp_path,
                    f"10.1.0.{n}",
                    2222,
                    within=("nsenter", "-t", str(host.pid), "-n"),
                )
            )
            for n, host in zip((2, 3), others, strict=True)
        ]
        first = sshds[0]
        access = [str(first.key), str(first.known_hosts)]
        yield head, others, [*access, *(sshd.host for sshd in sshds)]


def test_workers_of_two_hosts_reach_one_another_and_one_is_lost(
    hosts: tuple[Host, list[Host], list[str]],
) -> None:
    head, (_, second), arguments = hosts
    program: Program = head.start(PROGRAM, *arguments)
    assert program.hears("networks") == "3"
    second.run("ip", "link", "set", "etha", "down")  # and nobody is told
    program.say("cut")
    assert program.hears("change") == "failed w1"
    assert program.hears("left") == "3 ['w0']"
    output = program.ends()
    assert output.endswith("end\n")

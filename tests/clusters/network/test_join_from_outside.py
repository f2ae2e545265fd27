"""A laptop that nobody can dial joins by one port of one member, and is called back.

    laptop ---- outside ---- gateway ---- inside ---- other

                           |
                        beyond ---- notebook

Nothing routes between the networks.  On the gateway one port listens; on the laptop
none does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.clusters.network.hosts import Host, Network, Program, network, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces work")

SERVE = """
import sys
from tests.clusters.network.programs import serve
serve(*sys.argv[1:])
"""
MEET = "tcp://10.1.0.1:29500"  # at the gateway, and inside
DOOR = "join://10.2.0.1:7000"


# A worker that is silent for so long is lost: on a busy machine any may be for seconds.
PATIENT: Final = ("600", "auto")
IMPATIENT: Final = ("10", "auto")  # where a loss is waited for


class World:
    """The three hosts, and the workers of the two inside."""

    def __init__(self, net: Network, liveness: tuple[str, str]) -> None:
        self.net = net
        self.liveness = liveness
        self.gateway = net.host(
            "gateway", inside="10.1.0.1", outside="10.2.0.1", beyond="10.3.0.1"
        )
        self.other = net.host("other", inside="10.1.0.2")
        self.outside = net.host("outside", outside="10.2.0.9")
        self.beyond = net.host("beyond", beyond="10.3.0.9")
        self.door = self.gateway.start(SERVE, "gateway", "0", "2", MEET, *liveness)
        self.far = self.other.start(SERVE, "other", "1", "2", MEET, *liveness)
        for program in (self.door, self.far):
            program.hears("ready")

    def token(self, name: str = "laptop", valid_s: float = 600.0) -> str:
        return reply_to(self.door, f"token {name} {valid_s}")

    def notebook(self) -> Program:
        """Start a worker in a third network; it has no secret."""
        token = self.token("notebook")
        return self.beyond.start(
            *(SERVE, "notebook", "-1", "0", "join://10.3.0.1:7000", *self.liveness),
            ASYNCRPC_SECRET="",
            ASYNCRPC_TOKEN=token,
        )

    def laptop(self, token: str, name: str = "laptop") -> Program:
        """Start a worker outside; it has no secret."""
        return self.outside.start(
            *(SERVE, name, "-1", "0", DOOR, *self.liveness),
            ASYNCRPC_SECRET="",
            ASYNCRPC_TOKEN=token,
        )


def reply_to(program: Program, command: str) -> str:
    """Have a program do something that must succeed; return what it came to."""
    program.say(command)
    return program.hears("done ")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with network(tmp_path) as net:
        yield World(net, PATIENT)


@pytest.fixture
def impatient(tmp_path: Path) -> Iterator[World]:
    with network(tmp_path) as net:
        yield World(net, IMPATIENT)


def listening(host: Host) -> set[str]:
    """Return the ports of TCP that a host listens at, in hexadecimal digits."""
    ports = set()
    for table in ("tcp", "tcp6"):
        lines = Path(f"/proc/{host.pid}/net/{table}").read_text().splitlines()[1:]
        for line in lines:
            _, local, _, state = line.split()[:4]
            if state == "0A":
                ports.add(local)
    return ports


def test_calls_go_both_ways_and_the_guest_leaves(world: World) -> None:
    laptop = world.laptop(world.token())
    laptop.hears("ready")
    assert listening(world.outside) == set()
    from_outside = [
        address
        for address in listening(world.gateway)
        if not address.startswith("0100010A")
    ]
    assert [address.partition(":")[2] for address in from_outside] == ["1B58"]  # 7000
    for member in ("gateway", "other"):
        assert reply_to(laptop, f"call {member}") == member
        assert reply_to(laptop, f"tensor {member} 2000000") == "True"
        assert reply_to(laptop, f"through {member} laptop") == "True"
        assert reply_to(laptop, f"reference {member}") == "abc"
        assert reply_to(laptop, f"stream {member}") == "4950"
    for program in (world.door, world.far):
        assert reply_to(program, "find laptop") == "laptop"
        assert reply_to(program, "call laptop") == "laptop"
        assert reply_to(program, "tensor laptop 2000000") == "True"
        assert reply_to(program, "reference laptop") == "abc"
    laptop.say("end")
    laptop.ends()
    for program in (world.door, world.far):
        program.hears("left laptop")


def test_guests_of_two_networks_call_each_other(world: World) -> None:
    laptop, notebook = world.laptop(world.token()), world.notebook()
    guests = {"laptop": laptop, "notebook": notebook}
    for program in guests.values():
        program.hears("ready")
    for program in guests.values():
        for name in guests:
            assert reply_to(program, f"find {name}") == name
    for program, to in ((laptop, "notebook"), (notebook, "laptop")):
        assert reply_to(program, f"call {to}") == to
        assert reply_to(program, f"tensor {to} 2000000") == "True"
        assert reply_to(program, f"reference {to}") == "abc"
        assert reply_to(program, f"stream {to}") == "4950"
    assert listening(world.outside) == listening(world.beyond) == set()
    notebook.say("end")
    notebook.ends()
    laptop.hears("left notebook")


def test_inside_worker_calls_a_guest_and_hears_of_its_loss(impatient: World) -> None:
    """Before, only the gateway was connected to the guest."""
    laptop = impatient.laptop(impatient.token())
    laptop.hears("ready")
    reply_to(impatient.far, "find laptop")
    assert reply_to(impatient.far, "call laptop") == "laptop"
    laptop.kill()
    for program in (impatient.door, impatient.far):
        program.hears("lost laptop")


def test_revoked_token_ends_its_guest(impatient: World) -> None:
    token = impatient.token()
    laptop = impatient.laptop(token)
    laptop.hears("ready")
    assert reply_to(laptop, "call other") == "other"
    # The loss of a member that it has not heard of is no news to it.
    impatient.far.hears("joined laptop")
    assert reply_to(impatient.door, f"revoke {token}") == "True"
    assert reply_to(impatient.door, f"revoke {token}") == "False"
    laptop.say("call gateway")
    laptop.hears("failed ")
    again = impatient.laptop(token)
    again.process.wait()
    told_again = again.process.stdout.read() if again.process.stdout else ""
    assert "the peer refused our token" in told_again
    impatient.far.hears("lost laptop")


def test_token_is_for_one_name_and_expires(world: World) -> None:
    other = world.laptop(world.token("laptop"), "notebook")
    assert other.process.wait() != 0
    assert other.process.stdout is not None
    assert "its token is that of worker 'laptop'" in other.process.stdout.read()
    late = world.laptop(world.token("laptop", 0.0))
    assert late.process.wait() != 0
    assert late.process.stdout is not None
    assert "the peer refused our token" in late.process.stdout.read()

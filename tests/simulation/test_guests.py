"""Guests join, call, leave and are lost, and their gateway dies, in virtual time.

Of the group inside, `a` is the gateway; to no other member is there a way from outside,
nor between two guests.  Whatever happens: each call comes to an end, who left in order
is told to have left, who died or lost its gateway is lost, and a gateway that lives
passes on nothing more for those that are gone.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from asyncrpc import (
    JoinRendezvous,
    LimitOptions,
    LivenessOptions,
    NetworkOptions,
    Options,
    Worker,
    WorkerLostError,
)
from asyncrpc.errors import AsyncRpcError
from asyncrpc.testing import Cluster
from asyncrpc.testing.cluster import sim_worker
from asyncrpc.testing.network import Network
from tests.simulated import play

OPTIONS = Options(
    drain_timeout_s=2.0,
    rendezvous_timeout_s=30.0,
    network=NetworkOptions(connect_timeout_s=3.0),
    liveness=LivenessOptions(heartbeat_s=2.0, lost_after_s=5.0),
    limits=LimitOptions(shared_memory_bytes=0, receive_pool_bytes=0),
)
GUESTS = ("g", "h", "i", "j")
SEEDS = range(12)


def guest(network: Network, name: str, gateway: Worker) -> Worker:
    """Make a guest, for which all ways but the one to its gateway are closed."""
    for other in ("b", "c", *GUESTS):
        if other != name:
            network.between(name, other).partition()
    token = gateway.tokens.issue(valid_s=3600.0, name=name)
    return sim_worker(
        name,
        network,
        rendezvous=JoinRendezvous(["mem://a"]),
        options=Options(
            token=token,
            drain_timeout_s=OPTIONS.drain_timeout_s,
            rendezvous_timeout_s=OPTIONS.rendezvous_timeout_s,
            network=OPTIONS.network,
            liveness=OPTIONS.liveness,
            limits=OPTIONS.limits,
        ),
    )


@asynccontextmanager
async def world(
    network: Network,
) -> AsyncIterator[tuple[list[Worker], dict[str, Worker]]]:
    """Run three members and four guests that know each other."""
    async with Cluster(3, network=network, options=OPTIONS) as (*inside,):
        guests = {name: guest(network, name, inside[0]) for name in GUESTS}
        try:
            for member in guests.values():
                await member.__aenter__()
            for member, name in itertools.product((*inside, *guests.values()), GUESTS):
                await member.find(name, timeout_s=30.0)
            yield inside, guests
        finally:
            for member in guests.values():
                await member.shutdown(drain_timeout_s=0.0)


async def call_all(callers: list[Worker], rng: random.Random) -> int:
    """Call everybody from everybody, some at the same moment; return the answers."""

    async def call(caller: Worker, name: str) -> int:
        await asyncio.sleep(rng.choice([0.0, 0.0, 0.01, 1.0]))
        with suppress(AsyncRpcError):
            return await caller.peer(name).call(len, "a")
        return 0

    names = [caller.name for caller in callers]
    pairs = [
        (caller, name) for caller in callers for name in names if name != caller.name
    ]
    return sum(await asyncio.gather(*(call(*pair) for pair in pairs)))


async def guests_call(network: Network) -> None:
    async with world(network) as (inside, guests):
        callers = [*inside, *guests.values()]
        assert await call_all(callers, network.rng) == 7 * 6


async def guests_leave_and_die(network: Network) -> None:
    rng = network.rng
    async with world(network) as (inside, guests):
        changes: dict[str, dict[str, str]] = {guest.name: {} for guest in inside}

        async def listen(member: Worker) -> None:
            async for change in member.members_changed():
                changes[member.name][change.member.name] = change.kind.value

        listening = [asyncio.create_task(listen(guest)) for guest in inside]
        callers = [*inside, *guests.values()]
        calling = asyncio.create_task(call_all(callers, rng))
        await asyncio.sleep(rng.choice([0.0, 0.005, 0.5, 5.0]))
        await guests["g"].shutdown(drain_timeout_s=2.0)
        network.crash("h", silent=rng.random() < 0.5)
        await calling
        await asyncio.sleep(60.0)
        for member in inside:
            assert changes[member.name] == {"g": "left", "h": "lost"}
            assert await member.peer("i").call(len, "a") == 1
        assert await guests["i"].peer("j").call(len, "a") == 1
        assert await guests["j"].peer("c").call(len, "a") == 1
        gone = {guests["g"].options.token, guests["h"].options.token}
        for token in gone:
            assert token is not None
            inside[0].tokens.revoke(token)
        await asyncio.sleep(1.0)
        for task in listening:
            task.cancel()


async def gateway_dies(network: Network) -> None:
    rng = network.rng
    async with world(network) as (inside, guests):
        gateway, *others = inside
        callers = [*others, *guests.values()]
        calling = asyncio.create_task(call_all(callers, rng))
        leaving = asyncio.create_task(guests["g"].shutdown(drain_timeout_s=1.0))
        await asyncio.sleep(rng.choice([0.0, 0.005, 0.5, 5.0]))
        network.crash(gateway.name, silent=rng.random() < 0.5)
        await asyncio.gather(calling, leaving)
        await asyncio.sleep(120.0)
        for other in others:
            assert [known.name for known in other.known_members] == ["b", "c"]
        for name in ("h", "i", "j"):
            for to in ("a", "b", "i" if name != "i" else "j"):
                with pytest.raises(WorkerLostError):
                    await guests[name].peer(to).call(len, "a")
        assert await others[0].peer("c").call(len, "a") == 1


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("scenario", [guests_call, guests_leave_and_die, gateway_dies])
def test_guests_keep_their_invariants_for_every_seed(
    scenario: object, seed: int
) -> None:
    play(scenario, seed)  # type: ignore[arg-type]

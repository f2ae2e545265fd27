"""The network of messages: late, lost, repeated, reordered, and repeatable."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from asyncrpc.errors import UsageError
from asyncrpc.testing.loop import SimLoop
from tests.message_network import MessageNetwork


def deliver(
    seed: int, configure: Callable[[MessageNetwork], None], messages: int = 200
) -> tuple[list[object], list[tuple[float, str]]]:
    """Send numbers from a to b; return what arrived and the trace."""
    arrived: list[object] = []

    async def main() -> list[tuple[float, str]]:
        network = MessageNetwork(seed)
        network.register("b", lambda _sender, message: arrived.append(message))
        configure(network)
        for number in range(messages):
            network.send("a", "b", number)
        await network.quiet()
        return list(network.trace)

    with asyncio.Runner(loop_factory=SimLoop) as runner:
        return arrived, runner.run(main())


def test_messages_are_reordered_and_not_lost_by_default() -> None:
    arrived, _ = deliver(1, lambda _network: None)
    assert arrived != list(range(200))
    assert sorted(arrived, key=str) == sorted(range(200), key=str)


def test_network_can_keep_the_order() -> None:
    arrived, _ = deliver(1, lambda n: n.between("b", "a").reorder(allowed=False))
    assert arrived == list(range(200))


def test_lossy_network_drops_messages() -> None:
    arrived, _ = deliver(1, lambda network: network.between("a", "b").lose(0.5))
    assert 60 < len(arrived) < 140


def test_repeating_network_duplicates_messages() -> None:
    arrived, _ = deliver(1, lambda network: network.between("a", "b").repeat(0.5))
    assert len(set(arrived)) == 200
    assert len(arrived) > 300


def test_class_of_messages_can_be_dropped() -> None:
    arrived, _ = deliver(1, lambda network: network.between("a", "b").drop(int))
    assert arrived == []


def test_partition_loses_messages_that_would_arrive_in_it() -> None:
    def cut(network: MessageNetwork) -> None:
        link = network.between("a", "b")
        link.delay(1.0)
        network.loop.call_later(1.0, link.partition)
        network.loop.call_later(2.0, link.heal)

    arrived, trace = deliver(1, cut)
    assert 0 < len(arrived) < 200
    assert all("lost" in event for at_s, event in trace if 1.0 < at_s < 2.0)


def test_crashed_name_receives_nothing() -> None:
    arrived, _ = deliver(1, lambda network: network.crash("b"))
    assert arrived == []


def test_same_seed_gives_the_same_run() -> None:
    def rules(network: MessageNetwork) -> None:
        network.between("a", "b").lose(0.2)
        network.between("a", "b").repeat(0.2)

    assert deliver(1, rules) == deliver(1, rules)
    assert deliver(1, rules) != deliver(2, rules)


def test_endless_fault_is_refused() -> None:
    with pytest.raises(UsageError, match="never ends"):
        deliver(1, lambda network: network.between("a", "b").repeat(1))
    with pytest.raises(UsageError, match=r"between 0 and 1"):
        deliver(1, lambda network: network.between("a", "b").lose(1.5))

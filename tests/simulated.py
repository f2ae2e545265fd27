"""Runs a scenario on a simulated network, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

from asyncrpc.testing.loop import SimLoop
from asyncrpc.testing.network import Network

LIMIT_S = 600.0  # of virtual time
Scenario: TypeAlias = Callable[[Network], Coroutine[Any, Any, Any]]


def play(scenario: Scenario, seed: int, limit_s: float = LIMIT_S) -> Network:
    """Run a scenario to its end; return the network, with what happened there."""

    async def within_limit() -> None:
        async with asyncio.timeout(limit_s):
            await scenario(network)

    with asyncio.Runner(loop_factory=SimLoop) as runner:
        network = Network(seed, runner.get_loop())
        runner.run(within_limit())
        return network

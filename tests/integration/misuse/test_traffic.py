"""The traffic around mistakes flows, and would be missed if it did not."""

from __future__ import annotations

from asyncrpc.testing import Cluster
from tests.integration.misuse.traffic import Traffic


async def test_traffic_of_all_kinds_flows() -> None:
    async with Cluster(2) as (a, _), Traffic(a).flowing() as traffic:
        before = dict(traffic.rounds)
        await traffic.another_round()
        assert all(traffic.rounds[kind] > rounds for kind, rounds in before.items())

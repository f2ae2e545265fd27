"""One worker with many peers and many calls: what it costs, and that nothing is lost.

Processes, since it is memory that is measured.  What a call costs with many callers is
counted in `tests.simulation.test_many_callers`.  The figures themselves, processor time
included: `python -m tests.bench.bench_at_rest`.
"""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest
import uvloop

from asyncrpc import LimitOptions, Options, Outcome, Worker
from asyncrpc.errors import OverloadedError
from asyncrpc.testing import Cluster, ProcessCluster
from tests.integration.core import fan_in
from tests.integration.core.fan_in import MIB
from tests.integration.core.groups import processes

PEERS = 64
IDLE_BYTES_MAX = 256 << 10  # of a peer that is connected; it takes some 60 KiB
SMALL_BYTES = 32 << 10  # goes with its message
CALLS = 10_000
CALL_BYTES_MAX = 8 << 10  # of a call in hand, at either end; a few are enough
GROWTH_BYTES_MAX = 8 * MIB  # from one time to the next; it takes 20 MiB each time

pytestmark = pytest.mark.slow


def _processes(
    names: list[str], transport: Literal["uds", "tcp"] = "uds"
) -> ProcessCluster:
    """Processes that have imported everything: nine that import torch take 20 s."""
    return processes(*names, transport=transport)


class TestProcesses:
    """The loop of the test itself makes no difference: it only asks the others."""

    loops = {"uvloop": uvloop.new_event_loop}  # noqa: RUF012

    @pytest.mark.parametrize(
        ("transport", "nbytes"), [("uds", SMALL_BYTES), ("tcp", MIB)]
    )
    async def test_64_idle_peers_cost_under_256_kib_each(
        self, transport: Literal["uds", "tcp"], nbytes: int
    ) -> None:
        """On TCP each of them has a bulk lane, too; what a slab holds is not idle."""
        hosts = ["w", "x"]
        async with _processes(["b", *hosts], transport) as worker:
            callee, group = worker.peer("b"), worker.group(hosts)
            addresses = worker.parts.directory.find("b").member.addresses
            await fan_in.call_some(callee, nbytes)
            before = await callee.call(fan_in.settled_memory)
            each = PEERS // len(hosts)
            await group.call(fan_in.gather_crowd, each, "b", addresses, nbytes)
            connected = await callee.call(fan_in.peers)
            assert len(connected) == len(set(connected))
            # Members tell each other news when they see fit: the hosts may be there.
            names = {f"{host}-{at}" for host in hosts for at in range(each)}
            assert names <= set(connected) <= names | {"a", *hosts}
            after = await callee.call(fan_in.settled_memory)
            await group.call(fan_in.dismiss_crowd)
        assert (after.rss - before.rss) / PEERS < IDLE_BYTES_MAX
        assert (after.pss - before.pss) / PEERS < IDLE_BYTES_MAX

    async def test_10_000_pending_calls_are_answered_in_bounded_memory(self) -> None:
        async with _processes(["b"]) as worker:
            await fan_in.call_some(worker.peer("b"))
            callee_bytes, caller_bytes, _ = await _hold_calls(worker)
            assert callee_bytes / CALLS < CALL_BYTES_MAX
            assert caller_bytes / CALLS < CALL_BYTES_MAX
            # The allocator takes more arenas in the second round, in the third none.
            _, _, after = await _hold_calls(worker)
            _, _, later = await _hold_calls(worker)
        assert later - after < GROWTH_BYTES_MAX

    async def test_10_000_plain_calls_wait_for_a_few_threads(self) -> None:
        async with _processes(["b"]) as worker:
            calls = [
                worker.parts.start_call("b", fan_in.give_back, (number,))
                for number in range(CALLS)
            ]
            assert await asyncio.gather(*calls) == list(range(CALLS))
            most = Options().threads
            assert await worker.peer("b").call(fan_in.threads_of_functions) <= most


async def test_calls_over_the_limit_are_refused_and_others_answered() -> None:
    cap = 100
    options = Options(limits=LimitOptions(inbound_calls_max=cap))
    async with Cluster(2, options=options) as (a, _):
        await a.peer("b").call(fan_in.close_gate)
        calls = [
            a.parts.start_call("b", fan_in.pass_gate, (n,)) for n in range(cap + 10)
        ]
        for call in calls[cap:]:
            with pytest.raises(OverloadedError, match="inbound_calls_max") as caught:
                await call
            assert caught.value.outcome is Outcome.NOT_EXECUTED
            assert caught.value.retry_after_s > 0
        fan_in.open_gate_here()
        assert await asyncio.gather(*calls[:cap]) == list(range(cap))
        assert await a.peer("b").call(fan_in.give_back, 1) == 1


async def _hold_calls(worker: Worker) -> tuple[int, int, int]:
    """Make many calls that wait for all to be there; check every answer.

    Returns:
        Bytes: what they took on the callee and here, what the callee had in the end.
    """
    callee = worker.peer("b")
    await callee.call(fan_in.close_gate)
    before, here = (await callee.call(fan_in.settled_memory), fan_in.memory_of())
    calls = [
        worker.parts.start_call("b", fan_in.pass_gate, (number,))
        for number in range(CALLS)
    ]
    # Behind the calls on the same connection: they are all in hand then.
    assert await callee.call(fan_in.calls_in_hand) == CALLS
    during, then = (await callee.call(fan_in.settled_memory), fan_in.memory_of())
    await callee.call(fan_in.open_gate)
    assert await asyncio.gather(*calls) == list(range(CALLS))
    assert await callee.call(fan_in.calls_in_hand) == 0
    after = await callee.call(fan_in.settled_memory)
    return during.rss - before.rss, then.rss - here.rss, after.rss

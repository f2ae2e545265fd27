"""The watchdog of waits: it names what is stuck, and leaves what has a cause.

What raises is a whole block: `all_end` looks when that has ended.
"""

# ruff: noqa: PT012

from __future__ import annotations

import asyncio
import gc
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from asyncrpc import Options, UsageError, Worker
from asyncrpc.core.barriers.service import BARRIER
from asyncrpc.core.calls.futures import CallFuture
from asyncrpc.core.calls.streams import StreamProducer
from asyncrpc.core.optim.turns import TurnQueue
from asyncrpc.core.rref.values import Value
from asyncrpc.testing import Cluster, StillPendingError, acting_as, all_end

AT_ONCE = Options(drain_timeout_s=0.0)
LONG_S = 60.0  # which only a hang takes

_begun: asyncio.Event
_go: asyncio.Event


@pytest.fixture(autouse=True)
async def gate() -> None:
    global _begun, _go
    _begun, _go = asyncio.Event(), asyncio.Event()


async def held() -> int:
    """Return when the test wants it."""
    _begun.set()
    await _go.wait()
    return 7


async def items() -> AsyncIterator[int]:
    """Yield one item, and the next when the test wants it."""
    yield 1
    yield await held()


async def end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def wait_for_turn(turns: TurnQueue) -> None:
    await turns.take({1})


class TestWhatIsStuck:
    """Each kind is named: what it is, where it stands, and why it never ends."""

    async def test_task_stuck_in_our_code_is_reported(self) -> None:
        turns = TurnQueue()
        await turns.take({1})
        with pytest.raises(StillPendingError) as caught:
            async with all_end(within_s=0.0):
                waiting = asyncio.create_task(wait_for_turn(turns), name="stepping")
                await asyncio.sleep(0)
        (wait,) = caught.value.waits
        assert re.search(
            r"task 'stepping' in TurnQueue\.take \(asyncrpc/core/optim/turns\.py"
            r":\d+\) < "
            r"wait_for_turn .*: nothing that asyncrpc knows of will end it",
            wait,
        )
        await end(waiting)

    async def test_stuck_generator_is_reported(self) -> None:
        credit = StreamProducer(1, 1)
        credit.spend(1)

        async def produce() -> AsyncIterator[int]:
            await credit.wait()
            yield 1

        async def take() -> None:
            async for _ in produce():
                pass

        with pytest.raises(
            StillPendingError, match=r"StreamProducer\.wait .*produce .*take"
        ):
            async with all_end(within_s=0.0):
                taking = asyncio.create_task(take())
                await asyncio.sleep(0)
        await end(taking)

    async def test_unsent_call_is_reported(self) -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(StillPendingError) as caught:
            async with all_end(within_s=0.0):
                call: CallFuture[int] = CallFuture(loop=loop, function="f", to="b")
        assert caught.value.waits == [
            "<CallFuture f on 'b' pending>: it was never sent"
        ]
        call.cancel()

    async def test_call_forgotten_by_its_link_is_reported(self) -> None:
        async with Cluster(2, options=AT_ONCE) as (a, b):
            with pytest.raises(StillPendingError) as caught:
                async with all_end(within_s=0.0):
                    call = a.parts.start_call("b", held, with_site=True)
                    await _begun.wait()
                    link = await a.parts.link_to("b")
                    link.pending.take(call.call_id)
            assert b.parts.active == 1
            (wait,) = caught.value.waits
            assert "<CallFuture held on 'b' pending made at " in wait
            assert "of worker 'a': its link does not know it any more" in wait
            call.cancel()

    async def test_call_dropped_by_the_callee_is_reported(self) -> None:
        async with Cluster(2, options=AT_ONCE) as (a, b):
            with pytest.raises(StillPendingError, match="'b' does not have it in hand"):
                async with all_end(within_s=0.0):
                    call = a.parts.start_call("b", held, with_site=True)
                    await _begun.wait()
                    _drop(b)
            call.cancel()

    async def test_stream_dropped_by_the_producer_is_reported(self) -> None:
        async with Cluster(2, options=AT_ONCE) as (a, b):

            async def take() -> list[int]:
                return [item async for item in a.peer("b").stream(items)]

            with pytest.raises(StillPendingError) as caught:
                async with all_end(within_s=0.0):
                    taking = asyncio.create_task(take())
                    await _begun.wait()
                    _drop(b)
            (wait,) = caught.value.waits
            assert re.search(
                r"StreamReceiver\.take .*consume .*Peer\.stream .*take", wait
            )
            assert "'b' does not have it in hand" in wait
            await end(taking)

    async def test_value_forgotten_by_its_owner_is_reported(self) -> None:
        async with Cluster(1, options=AT_ONCE) as (a,):
            with pytest.raises(StillPendingError, match="its owner"):
                async with all_end(within_s=0.0):
                    value = Value(a.loop)
            value.cancel()

    async def test_task_that_waits_for_a_closed_worker_is_reported(self) -> None:
        with pytest.raises(StillPendingError) as caught:
            async with all_end(within_s=0.0):
                async with Cluster(2, options=AT_ONCE) as (a, _):
                    pass
                waiting = asyncio.create_task(wait_for_others(a))
                await asyncio.sleep(0)
        assert "worker 'a' is closed" in caught.value.waits[0]
        await end(waiting)

    async def test_future_with_a_callback_of_ours_is_reported(self) -> None:
        loop = asyncio.get_running_loop()
        turns = TurnQueue()
        with pytest.raises(StillPendingError, match=r"TurnQueue\.end"):
            async with all_end(within_s=0.0):
                future: asyncio.Future[int] = loop.create_future()
                future.add_done_callback(turns.end)  # type: ignore[arg-type]
        future.remove_done_callback(turns.end)  # type: ignore[arg-type]
        future.cancel()

    async def test_failing_block_lists_pending_waits(self) -> None:
        turns = TurnQueue()
        await turns.take({1})
        with pytest.raises(ValueError, match="of the block") as caught:
            async with all_end(within_s=LONG_S):
                waiting = asyncio.create_task(wait_for_turn(turns))
                await asyncio.sleep(0)
                raise ValueError("of the block")
        assert "pending at that moment: task" in caught.value.__notes__[0]
        await end(waiting)


class TestWhatHasACause:
    """A healthy run is silent, and what ends soon is waited for."""

    async def test_workers_that_come_and_go_are_not_reported(self) -> None:
        async with all_end(within_s=LONG_S), Cluster(3) as (a, _, _):
            assert await a.peer("b").call(max, 1, 2) == 2
            assert [item async for item in a.peer("c").stream(numbers, 3)] == [0, 1, 2]

    async def test_served_call_of_an_open_worker_is_not_reported(self) -> None:
        async with Cluster(2, options=AT_ONCE) as (a, _):
            async with all_end(within_s=0.0):
                call = a.parts.start_call("b", held, with_site=True)
                await _begun.wait()
            _go.set()
            assert await call == 7

    async def test_call_to_oneself_is_not_reported(self) -> None:
        async with Cluster(1, options=AT_ONCE) as (a,):
            with acting_as(a):
                async with all_end(within_s=0.0):
                    rref = a.peer("a").remote(held)
                    waiting = asyncio.ensure_future(rref.to_here())
                    await _begun.wait()
                _go.set()
                assert await waiting == 7

    async def test_produced_stream_is_not_reported(self) -> None:
        async with Cluster(2, options=AT_ONCE) as (a, _):

            async def take() -> list[int]:
                return [item async for item in a.peer("b").stream(items)]

            async with all_end(within_s=0.0):
                taking = asyncio.create_task(take())
                await _begun.wait()
            _go.set()
            assert await taking == [1, 7]

    async def test_barrier_with_absent_members_is_not_reported(self) -> None:
        async with Cluster(2, options=AT_ONCE) as (a, b):
            async with all_end(within_s=0.0):
                waiting = asyncio.create_task(a.barrier())
                await asyncio.sleep(0)
            await b.barrier()
            await waiting

    async def test_foreign_wait_is_not_reported(self) -> None:
        async with all_end(within_s=0.0):
            waiting = asyncio.create_task(asyncio.Event().wait())
            await asyncio.sleep(0)
        await end(waiting)

    async def test_wait_from_before_the_block_is_not_reported(self) -> None:
        turns = TurnQueue()
        await turns.take({1})
        waiting = asyncio.create_task(wait_for_turn(turns))
        await asyncio.sleep(0)
        async with all_end(within_s=0.0), all_end(within_s=0.0):
            pass
        await end(waiting)

    async def test_wait_that_ends_in_time_is_awaited(self) -> None:
        turns = TurnQueue()
        held_turn = await turns.take({1})
        async with all_end(within_s=LONG_S):
            waiting = asyncio.create_task(wait_for_turn(turns))
            await asyncio.sleep(0)
            asyncio.get_running_loop().call_later(0.02, turns.end, held_turn)
        assert waiting.done()


async def test_nested_block_sees_its_own_waits_only() -> None:
    turns = TurnQueue()
    await turns.take({1})
    with pytest.raises(StillPendingError) as caught:
        async with all_end(within_s=0.0):
            first = asyncio.create_task(wait_for_turn(turns), name="outer")
            await asyncio.sleep(0)
            async with all_end(within_s=0.0):
                pass
    assert [wait.split()[1] for wait in caught.value.waits] == ["'outer'"]
    await end(first)


async def test_collector_is_left_as_it_was() -> None:
    before = gc.get_freeze_count()
    async with all_end(within_s=0.0):
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == before


@pytest.mark.parametrize("wrong", [None, -1.0, "1", True, float("nan")])
async def test_malformed_time_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match="within_s must be a number of seconds"):
        async with all_end(within_s=wrong):
            pass


async def numbers(count: int) -> AsyncIterator[int]:
    """Yield numbers."""
    for number in range(count):
        yield number


async def wait_for_others(worker: Worker) -> None:
    """Wait for a word of another worker of the group."""
    await worker.parts.barriers.participant(BARRIER).join(None)


def _drop(worker: Worker) -> None:
    """Forget the calls that a worker serves, as a defect would."""
    for link in worker.parts.directory.links:
        for inbound in link.served:
            link.served.end(inbound.call_id)

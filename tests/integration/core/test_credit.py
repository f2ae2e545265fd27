"""Large requests wait for room at the callee; every way they can end gives it back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
import torch

import asyncrpc
from asyncrpc import DeadlineExceededError, Options, Outcome, Worker, WorkerLostError
from asyncrpc.core.calls.machine import credit as machine
from asyncrpc.core.links.link import Link
from asyncrpc.errors import ConnectionLostError, DecodeError, RejectedError, RemoteError
from asyncrpc.testing import Cluster
from asyncrpc.testing.cluster import Wires
from tests.inner_state import CreditUse, credit_use
from tests.integration.core import remote
from tests.integration.core.groups import until

LIMIT_BYTES = 1 << 20
BYTES = 600_000  # two of them do not fit
GATES: dict[str, asyncio.Event] = {}
CAME: dict[str, asyncio.Semaphore] = {}


# --- what runs on the other side -----------------------------------------------------


async def hold(gate: str, value: torch.Tensor) -> int:
    CAME[gate].release()
    await GATES[gate].wait()
    return value.numel()


async def relay(to: list[str], value: torch.Tensor) -> int:
    """Call the next with the same value, and hold it meanwhile."""
    if not to:
        return value.numel()
    return 1 + await asyncrpc.current_worker().peer(to[0]).call(relay, to[1:], value)


async def count(value: torch.Tensor, items: int) -> AsyncIterator[int]:
    for number in range(items):
        yield number
    del value


# --- the tests' own ------------------------------------------------------------------


@asynccontextmanager
async def group(size: int = 2, wires: Wires = "mem") -> AsyncIterator[list[Worker]]:
    limits = asyncrpc.LimitOptions(inbound_bytes_max=LIMIT_BYTES)
    options = Options(limits=limits, drain_timeout_s=2.0)
    async with Cluster(size, network=wires, options=options) as all_:
        yield all_


@pytest.fixture
def gate(request: pytest.FixtureRequest) -> str:
    name: str = request.node.name
    GATES[name], CAME[name] = asyncio.Event(), asyncio.Semaphore(0)
    return name


def block(nbytes: int = BYTES) -> torch.Tensor:
    return torch.ones(nbytes, dtype=torch.uint8)


def use_of(worker: Worker) -> CreditUse:
    return credit_use(worker.parts.inbound_credit)


def link_of(worker: Worker, to: str) -> Link:
    link = worker.parts.directory.find(to).link
    assert link is not None
    return link


async def nothing_is_held(worker: Worker) -> None:
    await until(lambda: not use_of(worker).held_bytes and not use_of(worker).waiting)
    assert use_of(worker).promised_bytes <= LIMIT_BYTES // 8


class TestWaiting:
    async def test_small_calls_pass_a_request_without_room(self, gate: str) -> None:
        async with group() as (a, b):
            to = a.peer("b")
            calls = [a.parts.start_call("b", hold, (gate, block())) for _ in range(5)]
            await CAME[gate].acquire()
            await until(lambda: use_of(b).waiting == 4)
            assert use_of(b).held_bytes == BYTES
            assert await to.call(remote.add, 1) == 2
            assert len(link_of(a, "b").credit.waiting) == 4
            GATES[gate].set()
            assert await asyncio.gather(*calls) == [BYTES] * 5
            await nothing_is_held(b)

    async def test_requests_run_in_order(self) -> None:
        async with group() as (a, b):
            remote.watches["order"] = remote.Watch()
            await asyncio.gather(
                *(
                    a.peer("b").call(remote.note_async, "order", (number, block()))
                    for number in range(10)
                )
            )
            notes = remote.watches["order"].notes
            order: list[int] = [number for number, _ in notes]
            assert order == list(range(10))
            notes.clear()
            await nothing_is_held(b)

    async def test_requests_of_several_peers_take_turns(self, wires: Wires) -> None:
        async with group(3, wires) as (a, b, c):
            calls = [
                caller.peer("b").call(remote.echo_async, block())
                for _ in range(20)
                for caller in (a, c)
            ]
            for answer in await asyncio.gather(*calls):
                assert answer.numel() == BYTES
            await nothing_is_held(b)

    async def test_request_above_the_limit_is_admitted_alone(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with group() as (a, b):
            value = block(3 * LIMIT_BYTES)
            calls = [a.peer("b").call(remote.total, value) for _ in range(3)]
            assert await asyncio.gather(*calls) == [3.0 * LIMIT_BYTES] * 3
            await nothing_is_held(b)
        warnings = [
            record for record in caplog.records if "inbound_bytes_max" in record.message
        ]
        assert len(warnings) == 1
        assert "one by one" in warnings[0].message


class TestNested:
    async def test_chain_through_full_workers_completes(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Both workers are full with calls that wait for each other."""
        async with group() as (a, b):
            assert await a.peer("b").call(relay, ["a", "b", "a"], block()) == BYTES + 3
            await nothing_is_held(a)
            await nothing_is_held(b)
        beyond = [
            record for record in caplog.records if "exceeds the limit" in record.message
        ]
        assert len(beyond) == 2  # the second request to each

    async def test_nested_requests_pass_waiting_requests(self, gate: str) -> None:
        async with group(3) as (a, b, c):
            full = a.parts.start_call("b", hold, (gate, block()))
            await CAME[gate].acquire()
            others = [
                a.parts.start_call("b", remote.echo_async, (block(),)) for _ in "12"
            ]
            nested = a.parts.start_call("c", relay, (["b"], block()))
            await until(lambda: use_of(b).waiting == 3)
            first = b.parts.inbound_credit.budget._first(nested=True)  # noqa: SLF001
            assert first is not None
            assert first[0].peer.name == "c"
            GATES[gate].set()
            assert await full == BYTES
            assert await nested == BYTES + 1
            await asyncio.gather(*others)
            await nothing_is_held(c)

    async def test_stalled_nested_requests_are_logged_once(
        self,
        gate: str,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(machine, "STALLED_AFTER_S", 0.05)
        async with group() as (a, _):
            calls = [a.parts.start_call("b", hold, (gate, block())) for _ in range(2)]
            await until(lambda: "have waited" in caplog.text)
            GATES[gate].set()
            await asyncio.gather(*calls)
        assert caplog.text.count("have waited") == 1


class TestGivingUp:
    async def test_a_cancelled_request_is_never_sent(self, gate: str) -> None:
        async with group() as (a, b):
            full = a.parts.start_call("b", hold, (gate, block()))
            await CAME[gate].acquire()
            waiting = [a.parts.start_call("b", hold, (gate, block())) for _ in range(2)]
            await until(lambda: use_of(b).waiting == 2)
            waiting[0].cancel()
            await until(lambda: use_of(b).waiting == 1)
            GATES[gate].set()
            assert (await full, await waiting[1]) == (BYTES, BYTES)
            await CAME[gate].acquire()
            assert CAME[gate].locked()  # only two have come
            await nothing_is_held(b)

    async def test_expired_request_was_not_executed(self, gate: str) -> None:
        async with group() as (a, b):
            full = a.parts.start_call("b", hold, (gate, block()))
            await CAME[gate].acquire()
            value = block()
            with pytest.raises(DeadlineExceededError) as raised:
                async with asyncrpc.deadline(0.5):
                    await a.peer("b").call(hold, gate, value)
            assert raised.value.outcome is Outcome.NOT_EXECUTED
            assert "inbound_bytes_max" in raised.value.__notes__[0]
            GATES[gate].set()
            assert await full == BYTES
            await nothing_is_held(b)

    async def test_stream_closed_while_waiting_holds_nothing(self, gate: str) -> None:
        async with group() as (a, b):
            full = a.parts.start_call("b", hold, (gate, block()))
            await CAME[gate].acquire()
            items = a.peer("b").stream(count, block(), 3)
            first = asyncio.ensure_future(anext(items))
            await until(lambda: use_of(b).waiting == 1)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            await until(lambda: not use_of(b).waiting)
            GATES[gate].set()
            await full
            await nothing_is_held(b)

    @pytest.mark.parametrize("turns", range(8))
    async def test_cancellation_at_any_time_frees_room(
        self, wires: Wires, turns: int
    ) -> None:
        async with group(2, wires) as (a, b):
            await a.peer("b").call(remote.add, 1)
            calls = [
                a.parts.start_call("b", remote.echo_async, (block(),)) for _ in "12345"
            ]
            for _ in range(turns):
                await asyncio.sleep(0)
            for call in calls[:4]:
                call.cancel()
            assert (await calls[4]).numel() == BYTES
            await nothing_is_held(b)
            window = link_of(a, "b").credit.waiting.window
            assert window == link_of(b, "a").credit.account.window

    async def test_waiting_requests_of_lost_peer_were_not_run(self, gate: str) -> None:
        async with group() as (a, b):
            full = a.parts.start_call("b", hold, (gate, block()))
            await CAME[gate].acquire()
            waiting = a.parts.start_call("b", hold, (gate, block()))
            await until(lambda: use_of(b).waiting == 1)
            await b.shutdown(drain_timeout_s=0.0)
            with pytest.raises(WorkerLostError) as lost:
                await waiting
            assert lost.value.outcome is Outcome.NOT_EXECUTED
            with pytest.raises(WorkerLostError) as lost:
                await full
            assert lost.value.outcome is Outcome.UNKNOWN

    async def test_lost_caller_frees_its_room(self, gate: str) -> None:
        async with group(3) as (a, b, c):
            calls = [a.parts.start_call("b", hold, (gate, block())) for _ in range(3)]
            await CAME[gate].acquire()
            other = c.parts.start_call("b", remote.echo_async, (block(),))
            await until(lambda: use_of(b).waiting == 3)
            await a.shutdown(drain_timeout_s=0.0)
            assert (await other).numel() == BYTES
            await asyncio.gather(*calls, return_exceptions=True)
            await nothing_is_held(b)


class NoFunctionThere:
    """Can be called here, and arrives as what cannot."""

    def __call__(self) -> None:
        """Never run."""

    def __reduce__(self) -> Any:
        return int, ()


class TestHolding:
    async def test_thread_holds_its_request_after_its_caller_is_gone(self) -> None:
        """A thread cannot be stopped: until it ends, the memory is in use."""
        remote.watches["held"] = watch = remote.Watch()
        async with group() as (a, b):
            with pytest.raises(DeadlineExceededError):
                async with asyncrpc.deadline(2):
                    await a.peer("b").call(pass_with, "held", block())
            assert watch.begun.is_set()
            assert use_of(b).held_bytes == BYTES
            watch.gate.set()
            await nothing_is_held(b)

    async def test_coroutine_holds_its_request_to_its_end(self, gate: str) -> None:
        async with group() as (a, b):
            with pytest.raises(DeadlineExceededError):
                async with asyncrpc.deadline(2):
                    await a.peer("b").call(linger, gate, block())
            await CAME[gate].acquire()
            assert use_of(b).held_bytes == BYTES
            GATES[gate].set()
            await nothing_is_held(b)

    async def test_a_stream_holds_its_request_until_it_is_closed(self) -> None:
        async with group() as (a, b):
            async with aclosing(a.peer("b").stream(count, block(), 100)) as items:
                assert await anext(items) == 0
                assert use_of(b).held_bytes == BYTES
            await nothing_is_held(b)
            again = [item async for item in a.peer("b").stream(count, block(), 3)]
            assert again == [0, 1, 2]
            await nothing_is_held(b)

    @pytest.mark.parametrize(
        ("function", "error"),
        [
            (NoFunctionThere(), DecodeError),
            (remote.add_on_loop, RemoteError),
            (remote.no_future, RemoteError),
            (remote.count_to, RejectedError),
        ],
    )
    async def test_failed_call_holds_nothing(
        self, function: Any, error: type[Exception]
    ) -> None:
        async with group() as (a, b):
            with pytest.raises((error, RemoteError, asyncrpc.CallError)):
                await a.parts.start_call("b", function, (block(), "x", "y", "z"))
            await nothing_is_held(b)

    async def test_async_execution_holds_until_its_future_is_done(self) -> None:
        async with group() as (a, b):
            assert (await a.peer("b").call(passed_on, "a", block())).numel() == BYTES
            await nothing_is_held(a)
            await nothing_is_held(b)

    async def test_remote_calls_with_large_values_wait_for_room(self) -> None:
        async with group() as (a, b):
            references = [
                a.peer("b").remote(remote.echo_async, block()) for _ in range(4)
            ]
            for reference in references:
                assert (await reference.to_here()).numel() == BYTES
            await nothing_is_held(b)

    async def test_packed_requests_count_by_their_packed_size(self) -> None:
        async with group() as (a, b):
            to = a.peer("b").using(codec="zstd")
            noise = torch.randint(0, 255, (BYTES,), dtype=torch.uint8)
            values = [noise, block(4 * LIMIT_BYTES)] * 4
            answers = await asyncio.gather(*(to.call(remote.total, v) for v in values))
            assert answers == [float(v.double().sum()) for v in values]
            await nothing_is_held(b)

    async def test_shared_tensors_travel_beside_large_ones(self) -> None:
        async with group(2, "uds") as (a, b):
            shared = asyncrpc.share(torch.ones(1000))
            answers = await asyncio.gather(
                *(a.peer("b").call(remote.keywords, shared, block()) for _ in range(4))
            )
            assert [answer[0][1].numel() for answer in answers] == [BYTES] * 4
            await nothing_is_held(b)


class TestPeersThatBreakTheRules:
    async def test_a_flood_without_credit_ends_the_connection(
        self, wires: Wires, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.CRITICAL)
        async with group(2, wires) as (a, b):
            await a.peer("b").call(remote.add, 1)
            link_of(a, "b").credit.waiting.window = 1 << 40
            with pytest.raises((WorkerLostError, ConnectionLostError)):
                await a.peer("b").call(remote.echo_async, block(4 * LIMIT_BYTES))
            await nothing_is_held(b)


def pass_with(test: str, value: torch.Tensor) -> int:
    remote.pass_gate(test)
    return value.numel()


async def linger(gate: str, value: torch.Tensor) -> int:
    """Take one's time even when cancelled."""
    try:
        await asyncio.Event().wait()
    finally:
        CAME[gate].release()
        await GATES[gate].wait()
        del value
    return 0


@asyncrpc.functions.async_execution
def passed_on(to: str, value: torch.Tensor) -> Any:
    return asyncrpc.rpc_async(to, remote.echo_async, (value,))

"""One function on several peers: encoded once, answered as it comes, ended together."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch

import asyncrpc
from asyncrpc import DeadlineExceededError, RemoteError, UsageError, Worker
from asyncrpc.core.peers import group as group_module
from asyncrpc.errors import EncodeError, UnknownWorkerError
from asyncrpc.testing import Cluster, acting_as
from asyncrpc.testing.cluster import Wires
from tests.integration.core import remote
from tests.integration.core.company import calls_over
from tests.integration.core.groups import processes
from tests.integration.core.remote import Watch

MIB = 1 << 20
OTHERS = ["b", "c", "d"]


@pytest.fixture
async def four() -> AsyncIterator[list[Worker]]:
    async with Cluster(4, options=asyncrpc.Options(drain_timeout_s=2.0)) as workers:
        yield workers


@pytest.fixture
def watches() -> Iterator[dict[str, Watch]]:
    """One for each peer, by name."""
    for name in OTHERS:
        remote.watches[name] = Watch()
    yield remote.watches
    for name in OTHERS:
        del remote.watches[name]


async def wait_as_told(waiting: list[str]) -> str:
    """Return at once on most peers; on those that are named, never."""
    name = asyncrpc.current_worker().name
    if name in waiting:
        await remote.wait_for_ever(name)
    return name


async def fail_as_told(failing: list[str]) -> str:
    name = asyncrpc.current_worker().name
    if name in failing:
        raise ValueError(f"{name} fails")
    return name


async def in_turn(turns: list[str]) -> str:
    """Return after every worker that comes before this one in `turns`."""
    worker = asyncrpc.current_worker()
    place = turns.index(worker.name)
    if place:
        await remote.watches[turns[place - 1]].ended.wait()
    return worker.name


def encodings(worker: Worker) -> list[Any]:
    """Note every value that a worker encodes from now on, in whichever way."""
    values: list[Any] = []
    codec: Any = worker.parts.codec

    def noting(encode: Callable[..., Any], value_at: int) -> Callable[..., Any]:
        def note(*args: Any, **options: Any) -> Any:
            encoded = encode(*args, **options)
            if encoded is not None:
                values.append(args[value_at])
            return encoded

        return note

    codec.encode_slowly = noting(codec.encode_slowly, 0)
    codec.encode_quickly = noting(codec.encode_quickly, 0)
    codec.encode_for = noting(codec.encode_for, 1)
    return values


# --- results -------------------------------------------------------------------------


@pytest.mark.parametrize("network", ["mem", "uds", "tcp"])
async def test_results_come_in_the_order_of_the_group(network: Wires) -> None:
    async with Cluster(4, network=network) as (a, *_):
        group = a.group(["d", "b", a.peer("c"), 0])
        assert group.names == ("d", "b", "c", "a")
        names = [where[0] for where in await group.call(remote.where)]
        assert names == ["d", "b", "c", "a"]
        assert await group.call(remote.add, 2, y=3) == [5] * 4


async def test_replies_arrive_one_by_one(
    four: list[Worker], watches: dict[str, Watch]
) -> None:
    names = []
    async for reply in four[0].group(OTHERS).call(in_turn, ["c", "d", "b"]):
        assert reply.result() == reply.peer
        names.append(reply.peer)
        watches[reply.peer].ended.set()  # lets the next one end
    assert names == ["c", "d", "b"]


async def test_empty_group_has_no_results(four: list[Worker]) -> None:
    group = four[0].group([])
    assert await group.call(remote.add, 1) == []
    assert [reply async for reply in group.call(remote.add, 1)] == []


async def test_results_can_be_awaited_after_the_replies(four: list[Worker]) -> None:
    calls = four[0].group(OTHERS).call(remote.add, 1)
    assert sorted([reply.peer async for reply in calls]) == OTHERS
    assert await calls == [2, 2, 2]
    assert list(calls.futures) == OTHERS


async def test_replies_may_be_shared_by_two_tasks(four: list[Worker]) -> None:
    calls = four[0].group(OTHERS).call(remote.add, 1)

    async def take() -> list[str]:
        return [reply.peer async for reply in calls]

    first, second = await asyncio.gather(take(), take())
    assert sorted(first + second) == OTHERS


# --- encoded once --------------------------------------------------------------------


@pytest.mark.parametrize("is_connected", [True, False])
async def test_arguments_coded_once(four: list[Worker], *, is_connected: bool) -> None:
    a = four[0]
    group = a.group(OTHERS)
    if is_connected:
        await group.call(remote.add, 1)
    encoded = encodings(a)
    tensor = torch.arange(MIB, dtype=torch.float32)
    assert await group.call(remote.total, tensor) == [tensor.double().sum()] * 3
    assert len(encoded) == 1


async def test_strided_argument_is_gathered_once(four: list[Worker]) -> None:
    every_eighth = torch.arange(2 * MIB, dtype=torch.float32)[::8]
    calls = four[0].group(OTHERS).call(remote.total, every_eighth)
    assert await calls == [every_eighth.double().sum()] * 3
    copied = sum(future.stats.bytes_copied for future in calls.futures.values())
    assert copied == every_eighth.nbytes
    sent = [future.stats.bytes_sent for future in calls.futures.values()]
    assert sent == [every_eighth.nbytes] * 3


@pytest.mark.parametrize("is_connected", [True, False])
@pytest.mark.parametrize("mib", [0, 1])  # packed on the loop, and in a thread
async def test_a_codec_is_applied_once(
    four: list[Worker], mib: int, *, is_connected: bool
) -> None:
    a = four[0]
    group = a.group(OTHERS).using(codec="bf16")
    if is_connected:
        await group.call(remote.add, 1)
    encoded = encodings(a)
    tensor = torch.arange(mib * MIB + 64).remainder(256).float()
    calls = group.call(remote.total, tensor)
    assert await calls == [tensor.double().sum()] * 3  # small whole numbers are exact
    assert len(encoded) == 1
    stats = [future.stats for future in calls.futures.values()]
    assert {stat.bytes_sent for stat in stats} == {tensor.nbytes // 2}
    if mib:
        assert sorted(stat.bytes_copied for stat in stats) == [0, 0, tensor.nbytes // 2]


async def test_value_the_codec_cannot_hold_fails_each_call(four: list[Worker]) -> None:
    harmed = torch.full((MIB,), 1e30)
    group = four[0].group(OTHERS).using(codec="fp16")
    errors = {
        reply.peer: reply.error async for reply in group.call(remote.total, harmed)
    }
    assert {type(error) for error in errors.values()} == {EncodeError}
    assert [getattr(errors[name], "to", "") for name in OTHERS] == OTHERS


async def test_references_are_counted_for_each_peer(four: list[Worker]) -> None:
    a = four[0]
    with acting_as(a):
        rref = asyncrpc.RRef(remote.Counter(7))
    encoded = encodings(a)
    assert await a.group(OTHERS).call(remote.value_of, rref) == [7, 7, 7]
    assert len([value for value in encoded if value == [[rref], {}]]) == 3
    added = await a.group(["a", "b"]).call(remote.add_through, rref, 1)
    assert sorted(added) == [8, 9]


async def test_gradients_come_back_from_every_peer(four: list[Worker]) -> None:
    a = four[0]
    x = torch.randn(64, requires_grad=True)
    with acting_as(a):
        async with asyncrpc.autograd.context() as context:
            encoded = encodings(a)
            doubled = await a.group(OTHERS).call(remote.double, x)
            assert len([value for value in encoded if type(value) is list]) == 1
            loss = sum((result.pow(2).sum() for result in doubled), torch.zeros(()))
            await asyncrpc.autograd.backward(context, [loss])
            gradient = asyncrpc.autograd.get_gradients(context)[x]
    assert torch.allclose(gradient, 3 * 8 * x.detach())


# --- errors --------------------------------------------------------------------------


async def test_failed_call_leaves_the_other_replies(four: list[Worker]) -> None:
    replies = {
        reply.peer: reply
        async for reply in four[0].group(OTHERS).call(fail_as_told, ["c"])
    }
    assert replies["b"].result() == "b"
    assert replies["b"].error is None
    assert isinstance(replies["c"].error, ValueError)
    with pytest.raises(RemoteError, match="c fails"):
        replies["c"].result()
    assert replies["d"].result() == "d"


async def test_first_error_cancels_the_rest(
    four: list[Worker], watches: dict[str, Watch]
) -> None:
    calls = four[0].group(OTHERS).call(fail_or_wait, "c")
    with pytest.raises(RemoteError, match="c fails") as caught:
        await calls
    assert caught.value.to == "c"
    for name in ("b", "d"):
        await asyncio.wait_for(watches[name].ended.wait(), 30)
        assert watches[name].notes == [f"cancelled on {name}"]
        assert calls.futures[name].cancelled()


async def fail_or_wait(failing: str) -> None:
    """Fail here once the others wait; wait anywhere else."""
    name = asyncrpc.current_worker().name
    if name != failing:
        await remote.wait_for_ever(name)
    for other in OTHERS:
        if other != failing:
            await remote.watches[other].begun.wait()
    raise ValueError(f"{name} fails")


async def test_unsendable_argument_sends_no_call(four: list[Worker]) -> None:
    a = four[0]
    group = a.group(OTHERS)
    await group.call(remote.add, 1)
    with pytest.raises(EncodeError):
        group.call(remote.echo, threading.Lock())
    assert [calls_over(link) for link in a.parts.directory.links] == [[], [], []]


async def test_unsendable_argument_fails_unconnected_calls(four: list[Worker]) -> None:
    with pytest.raises(EncodeError):
        await four[0].group(OTHERS).call(remote.echo, threading.Lock())


async def test_a_group_is_checked_when_it_is_made(four: list[Worker]) -> None:
    a, b, *_ = four
    wrong: dict[str, list[Any]] = {
        "nobody": ["b", "nobody"],
        "must name each worker once": ["b", "c", 1],
        "another worker": [b.peer("c")],
        "options of its own": [a.peer("c").using(timeout_s=1.0)],
    }
    for words, members in wrong.items():
        with pytest.raises((UnknownWorkerError, UsageError), match=words):
            a.group(members)
    with pytest.raises(UsageError, match="one result"):
        a.group(["b"]).using(out=torch.zeros(1))


async def test_group_call_off_the_loop_is_refused(four: list[Worker]) -> None:
    group = four[0].group(OTHERS)
    with pytest.raises(UsageError, match="event loop"):
        await asyncio.to_thread(group.call, remote.add, 1)


async def test_closing_peer_fails_alone(four: list[Worker]) -> None:
    a, _, c, _ = four
    group = a.group(OTHERS)
    await group.call(remote.add, 1)
    await c.shutdown()
    replies = {reply.peer: reply async for reply in group.call(remote.add, 1)}
    assert replies["b"].result() == replies["d"].result() == 2
    error = replies["c"].error
    assert isinstance(error, asyncrpc.CallError)
    assert error.outcome is asyncrpc.Outcome.NOT_EXECUTED


# --- ends ----------------------------------------------------------------------------


@pytest.mark.parametrize("is_connected", [True, False])
async def test_cancelled_wait_cancels_every_call(
    four: list[Worker], watches: dict[str, Watch], *, is_connected: bool
) -> None:
    group = four[0].group(OTHERS)
    if is_connected:
        await group.call(remote.add, 1)
    calls = group.call(wait_as_told, OTHERS)

    async def wait() -> None:
        await calls

    task = asyncio.create_task(wait())
    await asyncio.gather(*(watches[name].begun.wait() for name in OTHERS))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for name in OTHERS:
        await asyncio.wait_for(watches[name].ended.wait(), 30)
        assert watches[name].notes == [f"cancelled on {name}"]


async def test_cancelled_iteration_cancels_every_call(
    four: list[Worker], watches: dict[str, Watch]
) -> None:
    calls = four[0].group(OTHERS).call(wait_as_told, ["b", "c"])
    replied: asyncio.Queue[str] = asyncio.Queue()

    async def iterate() -> None:
        async for reply in calls:
            replied.put_nowait(reply.peer)

    task = asyncio.create_task(iterate())
    await asyncio.gather(*(watches[name].begun.wait() for name in ("b", "c")))
    assert await replied.get() == "d"
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for name in ("b", "c"):
        await asyncio.wait_for(watches[name].ended.wait(), 30)


async def test_leaving_the_block_cancels_pending_calls(
    four: list[Worker], watches: dict[str, Watch]
) -> None:
    async with four[0].group(OTHERS).call(wait_as_told, ["b", "c"]) as calls:
        async for reply in calls:
            assert reply.peer == "d"  # the first is enough
            break
    assert calls.futures["b"].cancelled()
    assert calls.futures["c"].cancelled()


@pytest.mark.parametrize("is_connected", [True, False])
async def test_deadline_covers_all_calls_of_the_group(
    four: list[Worker], watches: dict[str, Watch], *, is_connected: bool
) -> None:
    group = four[0].group(OTHERS)
    if is_connected:
        await group.call(remote.add, 1)
    calls = group.using(timeout_s=1.0).call(wait_as_told, ["c"])
    replies = {reply.peer: reply async for reply in calls}
    assert replies["b"].result() == "b"
    assert isinstance(replies["c"].error, DeadlineExceededError)
    async with asyncrpc.deadline(0.0):
        late = group.call(remote.add, 1)
    assert {type(reply.error) async for reply in late} == {DeadlineExceededError}


async def test_group_may_exceed_limit_of_dials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "DIALS_MAX", 2)
    names = [f"w{number}" for number in range(8)]
    async with Cluster(names=names) as (first, *_):
        assert await first.group(names).call(remote.add, 1) == [2] * 8


async def test_tensors_reach_every_process() -> None:
    async with processes(*OTHERS) as worker:
        group = worker.group(OTHERS)
        pids = await group.call(os.getpid)
        assert len({os.getpid(), *pids}) == 4
        tensor = torch.rand(4 * MIB)
        for _ in range(3):
            sums = await group.call(remote.total, tensor)
            assert sums == [float(tensor.double().sum())] * 3
        back = await group.call(remote.double, tensor)
        assert all(torch.equal(result, tensor * 2) for result in back)


async def test_killed_process_fails_alone() -> None:
    async with (cluster := processes(*OTHERS)) as worker:
        group = worker.group(OTHERS)
        await group.call(remote.add, 1)
        calls = group.call(remote.sleep_long)
        cluster.kill("c")
        first = await anext(calls)
        assert first.peer == "c"
        assert isinstance(first.error, asyncrpc.WorkerLostError)
        calls.cancel()
        rest = [reply async for reply in calls]
        assert sorted(reply.peer for reply in rest) == ["b", "d"]
        assert {type(reply.error) for reply in rest} == {asyncio.CancelledError}

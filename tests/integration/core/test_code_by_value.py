"""Lambdas, closures and local classes, wherever values may be."""

from __future__ import annotations

import asyncio
import functools
import gc
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import asyncrpc
import asyncrpc.extend
from asyncrpc import LocalRendezvous, Options, Policy, Worker
from asyncrpc.core.calls import code
from asyncrpc.core.calls.code import PutCode
from asyncrpc.core.calls.context import current_worker_var
from asyncrpc.core.serde.by_value import CodeName, CodeTable
from asyncrpc.errors import DecodeError, EncodeError, RejectedError, RemoteError
from asyncrpc.nn import RemoteModule
from asyncrpc.testing import Cluster
from tests.integration.core.groups import processes, started


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Worker, Worker]]:
    async with Cluster(2) as cluster:
        yield cluster[0], cluster[1]


Pair = tuple[Worker, Worker]


def fail_locally() -> None:
    class LocalError(Exception):
        pass

    raise LocalError("it has a class")


def fail_locked() -> None:
    class LockedError(Exception):
        lock = threading.Lock()

    raise LockedError("no")


def rows_and_function() -> Any:
    return torch.arange(100_000), lambda: 7


def returning(number: int) -> Callable[[], int]:
    return lambda: number


def adding(step: int) -> Callable[[int], int]:
    return lambda value: value + step


async def test_lambda_is_sent_once(pair: Pair) -> None:
    a, b = pair
    step = 3
    add = lambda value: value + step  # noqa: E731
    assert [await a.peer("b").call(add, n) for n in range(3)] == [3, 4, 5]
    assert (a.counters.code_sent, b.counters.code_received) == (1, 1)


async def test_calls_at_once_send_code_once(pair: Pair) -> None:
    a, _ = pair
    results = await asyncio.gather(*(a.peer("b").call(returning(n)) for n in range(8)))
    assert results == [*range(8)]
    double = lambda n: 2 * n  # noqa: E731
    sent = a.counters.code_sent
    assert await asyncio.gather(*(a.peer("b").call(double, n) for n in range(8))) == [
        *range(0, 16, 2)
    ]
    assert a.counters.code_sent == sent + 1


async def test_call_sees_what_a_closure_is_now(pair: Pair) -> None:
    a, _ = pair
    step, history = 1, [1]

    def total() -> int:
        return step + sum(history)

    assert await a.peer("b").call(total) == 2
    step = 10
    assert await a.peer("b").call(total) == 11
    history.append(5)
    assert await a.peer("b").call(total) == 16


async def test_local_class_keeps_its_identity(pair: Pair) -> None:
    a, _ = pair

    @dataclass
    class Point:
        x: int

        def moved(self, by: int) -> Point:
            return Point(self.x + by)

    peer = a.peer("b")
    assert await peer.call(lambda: Point(1)) == Point(1)
    assert await peer.call(Point.moved, Point(1), 2) == Point(3)
    assert await peer.call(lambda point: type(point) is Point, Point(1))
    assert await peer.call(Point(4).moved, 1) == Point(5)
    assert await peer.call(functools.partial(Point, 7)) == Point(7)


async def test_local_exception_is_caught_by_its_class(pair: Pair) -> None:
    a, _ = pair

    class WrongError(Exception):
        pass

    def fail() -> None:
        raise WrongError("no", 3)

    for _ in range(2):
        with pytest.raises(WrongError) as caught:
            await a.peer("b").call(fail)
        assert caught.value.args == ("no", 3)


async def test_function_of_the_callee_comes_to_the_caller(pair: Pair) -> None:
    a, _ = pair
    add = await a.peer("b").call(lambda step: adding(step), 3)  # noqa: PLW0108
    assert add(1) == 4
    assert await a.peer("b").call(add, 2) == 5


async def test_function_is_an_argument_and_comes_back_as_itself(pair: Pair) -> None:
    a, _ = pair

    def local(value: int) -> int:
        return value + 1

    assert await a.peer("b").call(lambda function: function(1), local) == 2
    assert await a.peer("b").call(lambda function: function, local) is local


async def test_references_to_local_classes(pair: Pair) -> None:
    a, _ = pair

    class Counter:
        def __init__(self, start: int) -> None:
            self.count = start

        def add(self, step: int) -> int:
            self.count += step
            return self.count

    counter = a.peer("b").remote(Counter, 5)
    assert await counter.rpc_async().add(2) == 7
    arrived = await counter
    assert type(arrived) is Counter
    assert arrived.count == 7


async def test_remote_module_of_a_local_class(pair: Pair) -> None:
    a, _ = pair

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((2,), 3.0))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return rows * self.weight

    current_worker_var.set(a)
    module = RemoteModule("b", Net)
    assert (await module.forward_async(torch.ones(2))).tolist() == [3.0, 3.0]


async def test_stream_of_a_local_generator(pair: Pair) -> None:
    a, _ = pair
    step = 2

    async def numbers(count: int) -> AsyncIterator[int]:
        for number in range(count):
            yield number * step

    assert [item async for item in a.peer("b").stream(numbers, 3)] == [0, 2, 4]


async def test_group_call_of_a_lambda() -> None:
    async with Cluster(3) as cluster:
        peers = cluster[0].group(["b", "c"])
        for step in (1, 2):
            assert await peers.call(adding(step), 3) == [3 + step] * 2


async def test_call_with_a_codec(pair: Pair) -> None:
    a, _ = pair
    pytest.importorskip("lz4", reason="needs the extra [codecs]")
    peer = a.peer("b").using(codec="lz4")
    rows = torch.arange(100_000)
    result = await peer.call(lambda rows, scale: scale(rows), rows, lambda x: x * 2)
    assert torch.equal(result, rows * 2)


async def test_dead_functions_leave_the_callee(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code, "PIECES_MAX", 4)
    a, b = pair
    for number in range(12):
        assert await a.peer("b").call(returning(number)) == number
    assert b.parts.code.pieces == 4
    gc.collect()
    table = b.parts.functions.code
    assert table is not None
    assert len(table._received) == 4  # noqa: SLF001


async def test_code_of_a_lost_peer_is_let_go() -> None:
    async with (cluster := processes("b")) as a:
        assert (await a.peer("b").call(lambda: lambda: 7))() == 7
        assert a.parts.code.pieces == 1
        cluster.expect_death("b")
        changes = a.members_changed()
        cluster.kill("b")
        async for change in changes:
            if change.member.name == "b":
                break
        assert a.parts.code.pieces == 0


# --- what fails ----------------------------------------------------------------------


async def test_strict_worker_takes_no_code() -> None:
    meeting = LocalRendezvous(2)
    a = Worker("a", rank=0, rendezvous=meeting)
    b = Worker("b", rank=1, rendezvous=meeting, options=Options(policy=Policy.STRICT))
    async with started(a, b):
        for _ in range(2):
            with pytest.raises(
                EncodeError, match="receiver could import, and policy strict"
            ):
                await a.peer("b").call(lambda: 1)


async def test_strict_worker_sends_no_code() -> None:
    async with Cluster(2, options=Options(policy=Policy.STRICT)) as cluster:
        with pytest.raises(EncodeError, match="a lambda, and functions travel by name"):
            await cluster[0].peer("b").call(lambda: 1)


async def test_error_of_a_local_class_reaches_a_strict_caller() -> None:
    meeting = LocalRendezvous(2)
    a = Worker("a", rank=0, rendezvous=meeting, options=Options(policy=Policy.STRICT))
    b = Worker("b", rank=1, rendezvous=meeting)
    async with started(a, b):
        with pytest.raises(RemoteError, match="LocalError: it has a class") as caught:
            await a.peer("b").call(fail_locally)
        assert "in fail_locally" in caught.value.remote_traceback


async def test_error_whose_class_cannot_travel_keeps_its_text(pair: Pair) -> None:
    a, _ = pair
    with pytest.raises(RemoteError, match="LockedError: no") as caught:
        await a.peer("b").call(fail_locked)
    assert "in fail_locked" in caught.value.remote_traceback


async def test_large_call_of_a_lambda_to_a_strict_worker_leaves_nothing() -> None:
    meeting = LocalRendezvous(2)
    a = Worker("a", rank=0, rendezvous=meeting)
    b = Worker("b", rank=1, rendezvous=meeting, options=Options(policy=Policy.STRICT))
    async with started(a, b):
        link = await a.parts.link_to("b")
        for _ in range(2):
            with pytest.raises(EncodeError, match="policy strict"):
                await a.peer("b").call(lambda rows: rows, torch.ones(1 << 18))
        assert len(link.pending) == 0


async def test_answer_with_a_codec_waits_for_its_code(pair: Pair) -> None:
    a, _ = pair
    pytest.importorskip("lz4", reason="needs the extra [codecs]")
    rows, make = await a.peer("b").using(codec="lz4").call(rows_and_function)
    assert rows.shape == (100_000,)
    assert make() == 7


async def test_code_put_at_once_is_limited(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code, "PIECES_MAX", 2)
    a, b = pair
    link = await a.parts.link_to("b")
    names = [CodeTable().add(returning(number)) for number in range(6)]
    puts = [
        asyncrpc.extend.ask(link, PutCode(str(name), name.content, "", []))
        for name in names
    ]
    results = await asyncio.gather(*puts, return_exceptions=True)
    assert sum(isinstance(result, Exception) for result in results) == 4
    assert b.parts.code.pieces == 2


async def test_code_sent_to_a_strict_worker_all_the_same_is_refused() -> None:
    async with Cluster(2, options=Options(policy=Policy.STRICT)) as cluster:
        a = cluster[0]
        name = CodeTable().add(lambda: 1)
        link = await a.parts.link_to("b")
        with pytest.raises(RejectedError, match="policy is strict"):
            await asyncrpc.extend.ask(link, PutCode(str(name), name.content, "", []))


async def test_function_that_cannot_travel_costs_its_call_alone(pair: Pair) -> None:
    a, _ = pair
    lock = threading.Lock()
    for _ in range(2):
        with pytest.raises(EncodeError, match="closure variable 'lock'"):
            await a.peer("b").call(lambda: lock)
    assert await a.peer("b").call(lambda: 1) == 1


class Unloadable:
    def __reduce__(self) -> Any:
        return fail_to_load, ()


def fail_to_load() -> None:
    raise RuntimeError("not here")


async def test_code_that_does_not_load_fails_its_calls(pair: Pair) -> None:
    a, _ = pair
    value = Unloadable()
    function = lambda: value  # noqa: E731
    for _ in range(2):
        with pytest.raises(DecodeError, match=r"code of '.*lambda.*not here") as caught:
            await a.peer("b").call(function)
        assert caught.value.outcome is asyncrpc.Outcome.NOT_EXECUTED
    assert await a.peer("b").call(lambda: 1) == 1


async def test_cancelled_call_leaves_its_code_usable(pair: Pair) -> None:
    a, _ = pair
    function = lambda: 5  # noqa: E731
    call = asyncio.ensure_future(a.peer("b").call(function))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await a.peer("b").call(function) == 5


async def test_peer_that_lies_about_code_is_refused(pair: Pair) -> None:
    a, _ = pair
    name = CodeName.of(b"other", "step", "")
    link = await a.parts.link_to("b")
    with pytest.raises(DecodeError, match="not what its name says"):
        await asyncrpc.extend.ask(link, PutCode(str(name), b"junk", "", []))
    assert await a.peer("b").call(lambda: 1) == 1


async def test_peer_that_sends_too_much_code_is_refused(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _ = pair
    monkeypatch.setattr(code, "BYTES_MAX", 1000)
    link = await a.parts.link_to("b")
    name = CodeTable().add(lambda: b"x" * 1)
    big = CodeName.of(name.content + bytes(2000), "step", "")
    with pytest.raises(asyncrpc.AsyncRpcError, match="1000 bytes of code"):
        await asyncrpc.extend.ask(link, PutCode(str(big), big.content, "", []))

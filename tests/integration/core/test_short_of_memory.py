"""A process whose memory is used up: the caller hears, and the next call is answered.

The callee is a process whose address space is limited while a call is made.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

import asyncrpc
from asyncrpc import CallError, Outcome, Peer, RejectedError, RemoteError, RRef, Worker
from asyncrpc.autograd import backward, context, get_gradients
from asyncrpc.errors import DecodeError, EncodeError
from asyncrpc.nn import RemoteModule
from asyncrpc.testing import acting_as
from tests.integration.core import short_of_memory as short
from tests.integration.core.company import LIMIT_S, PATIENT, company, hears, told_by
from tests.integration.core.groups import processes
from tests.integration.core.loops_of_processes import kind_of_loop, processes_on
from tests.integration.core.short_of_memory import MIB

MUCH = 512 * MIB
OPTIONS = asyncrpc.Options(drain_timeout_s=2.0, liveness=PATIENT)


@pytest.fixture(params=["uds", "tcp"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Worker]:
    transport: Literal["uds", "tcp"] = request.param
    with processes_on(kind_of_loop()):
        async with processes("b", transport=transport, options=OPTIONS) as a:
            yield a


@asynccontextmanager
async def limited(worker: Worker, more_bytes: int) -> AsyncIterator[Peer]:
    """Have the callee short of memory, beside other work of the same two workers."""
    peer = worker.peer("b")
    async with company(worker):
        await peer.call(short.limit, more_bytes)
        try:
            yield peer
        finally:
            await peer.call(short.lift)


async def test_function_out_of_memory_fails_its_call_alone(pair: Worker) -> None:
    functions = [short.allocate, short.allocate_on_loop, short.allocate_in_coroutine]
    async with limited(pair, 64 * MIB) as peer:
        for how in ("numpy", "torch", "bytes", "text"):
            for function in functions:
                error = await hears(lambda: peer.call(function, how, MUCH))  # noqa: B023
                assert isinstance(error, RemoteError)
                assert error.outcome is Outcome.EXECUTED
                expected = RuntimeError if how == "torch" else MemoryError
                assert isinstance(error, expected), (how, error)
                assert how != "torch" or "memory" in str(error)
                assert await peer.call(len, "abc") == 3


@pytest.mark.parametrize(
    ("how", "nbytes", "step"), [("texts", 40 * MIB, 1), ("torch", 300 * MIB, 3)]
)
async def test_result_without_memory_fails_its_call(
    pair: Worker, how: str, nbytes: int, step: int
) -> None:
    peer = pair.peer("b")
    await peer.call(short.keep, how, nbytes)
    async with limited(pair, 20 * MIB):
        error = await hears(lambda: peer.call(short.give, step))
        assert isinstance(error, EncodeError)
        assert error.outcome is Outcome.EXECUTED
        assert "cannot be sent" in str(error)
        assert "memory" in str(error)
    value = await peer.call(short.give, step)
    total = sum(map(len, value)) if isinstance(value, list) else len(value)
    assert total == -(-nbytes // step)
    await peer.call(short.drop)


REQUESTS: dict[str, tuple[int, Callable[[], Any]]] = {
    "a tensor": (40, lambda: torch.ones(128 * MIB, dtype=torch.uint8)),
    "two tensors": (40, lambda: (torch.ones(32 * MIB), torch.ones(32 * MIB))),
    "an array": (40, lambda: np.ones(128 * MIB, np.uint8)),
    "bytes": (40, lambda: bytes(128 * MIB)),
    "a bytearray that has to be copied": (100, lambda: bytearray(64 * MIB)),
    "texts": (20, lambda: ["n" * (15 * MIB)] * 4),
    "texts that have to be copied": (64, lambda: ["n" * (15 * MIB)] * 4),
    "texts that become wider": (46, lambda: ["n" * (10 * MIB) + "\u0100"] * 4),
    "texts and a tensor": (
        20,
        lambda: (["n" * (15 * MIB)] * 4, torch.ones(8 * MIB), bytes(1000)),
    ),
}


@pytest.mark.parametrize("kind", REQUESTS)
async def test_request_out_of_memory_is_not_executed(pair: Worker, kind: str) -> None:
    more_mib, make = REQUESTS[kind]
    value = make()
    async with limited(pair, more_mib * MIB) as peer:
        error = await hears(lambda: peer.call(short.size, value))
        assert isinstance(error, DecodeError), error
        assert error.outcome is Outcome.NOT_EXECUTED
        assert "memory" in told_by(error)
        with pytest.raises(CallError):
            await anext(peer.stream(short.numbers, value))
        with pytest.raises(CallError):
            await peer.remote(short.size, value).to_here()
        assert await peer.call(len, "abc") == 3
    assert await pair.peer("b").call(short.size, value) == len(value)


async def test_call_without_a_thread_is_rejected(pair: Worker) -> None:
    peer = pair.peer("b")
    await peer.call(short.limit_threads)
    error = await hears(lambda: peer.call(len, "ab"))
    assert isinstance(error, RejectedError)
    assert error.outcome is Outcome.NOT_EXECUTED
    assert "the system cannot start one" in str(error)
    assert await peer.call(short.allocate_in_coroutine, "bytes", 10) == 10
    await peer.call(short.lift)
    assert await peer.call(len, "abc") == 3


async def test_call_waits_for_an_existing_thread(pair: Worker) -> None:
    """A held thread ends, and the waiting calls run; the worker ends in order."""
    peer = pair.peer("b")
    held = asyncio.ensure_future(peer.call(short.wait_at_gate))
    await asyncio.sleep(0)  # its request goes first
    await peer.call(short.limit_threads)
    waiting = [asyncio.ensure_future(peer.call(len, "ab")) for _ in range(3)]
    await peer.call(short.open_gate)
    async with asyncio.timeout(LIMIT_S):
        assert await held == "through"
        assert await asyncio.gather(*waiting) == [2, 2, 2]


async def test_waiting_call_gets_a_thread_once_possible(pair: Worker) -> None:
    peer = pair.peer("b")
    held = asyncio.ensure_future(peer.call(short.wait_at_gate))
    await asyncio.sleep(0)  # its request goes first
    await peer.call(short.limit_threads)
    waiting = asyncio.ensure_future(peer.call(len, "ab"))
    await asyncio.sleep(0)
    await peer.call(short.lift)
    assert await asyncio.wait_for(waiting, LIMIT_S) == 2
    assert not held.done()
    await peer.call(short.open_gate)
    assert await held == "through"


async def unpack(peer: Peer) -> object:
    """A request becomes longer when it is unpacked."""
    return await peer.using(codec="zstd").call(short.size, torch.zeros(32 * MIB))


async def share(peer: Peer) -> object:
    value = asyncrpc.share(torch.ones(32 * MIB))
    try:
        return await peer.call(short.size, value)
    except EncodeError as error:
        if "the two workers share no memory" not in str(error):
            raise
    return await peer.call(short.size, value.clone())


async def consume(peer: Peer) -> object:
    return await peer.call(short.consume, "a", 128 * MIB)


async def fetch(peer: Peer) -> object:
    return await peer.call(short.fetch, RRef(torch.ones(32 * MIB)))


async def reduce(peer: Peer) -> object:
    both = short.reduce(128 * MIB), peer.call(short.reduce, 128 * MIB)
    heard = await asyncio.gather(*both, return_exceptions=True)
    # The other rank hears that the group is closed.
    for result in reversed(heard):
        if isinstance(result, BaseException):
            raise result
    return heard[0]


async def train(peer: Peer) -> object:
    async with context() as ctx:
        inputs = torch.ones(32 * MIB, requires_grad=True)
        await backward(ctx, [(await peer.call(short.twice, inputs)).sum()])
        return get_gradients(ctx)[inputs]


async def make(peer: Peer) -> object:
    return await RemoteModule(peer.name, nn.Linear, (6000, 6000)).remote_parameters()


KINDS = {
    kind.__name__: kind for kind in (unpack, share, consume, fetch, reduce, train, make)
}


@pytest.mark.parametrize("kind", KINDS)
async def test_features_built_on_calls_name_the_memory_and_work_later(
    pair: Worker, kind: str
) -> None:
    peer = pair.peer("b")
    with acting_as(pair):
        async with asyncio.timeout(LIMIT_S):
            await peer.call(short.limit, 40 * MIB)
            try:
                with pytest.raises((asyncrpc.AsyncRpcError, RuntimeError)) as caught:
                    await KINDS[kind](peer)
                assert "memory" in told_by(caught.value)
                # Not in a thread, whose stack takes memory as well.
                assert await peer.call(short.allocate_on_loop, "bytes", 10) == 10
            finally:
                await peer.call(short.lift)
            assert await KINDS[kind](peer) is not None

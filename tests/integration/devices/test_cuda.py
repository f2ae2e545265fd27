"""What only CUDA has: streams.  Run by `make test-cuda`, where there is a GPU."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import torch

from asyncrpc import Worker
from asyncrpc.testing import Cluster
from tests.integration.devices import accelerators, remote
from tests.integration.devices.accelerators import TYPE

Pair = tuple[Worker, Worker]

pytestmark = pytest.mark.skipif(TYPE != "cuda", reason="it is about CUDA's streams")

HOME = "cuda:0"
ELEMENTS = 16 << 20
STEPS = 400
cuda: Any = torch.cuda


def counted(stream: Any) -> torch.Tensor:
    """Return a tensor that counts to `STEPS`, and does not for a while yet."""
    with cuda.stream(stream):
        value = torch.zeros(ELEMENTS, device=HOME)
        for _ in range(STEPS):
            value.add_(1)
    return value


async def test_tensor_is_sent_after_its_stream_has_computed_it(pair: Pair) -> None:
    """The device computes, on that stream and another, while tensors are copied."""
    there = pair[0].peer("b")
    stream, other = cuda.Stream(), cuda.Stream()
    with cuda.stream(other):
        noise = torch.rand(4096, 4096, device=HOME)
    for _ in range(5):
        value = counted(stream)
        with cuda.stream(stream):
            call = pair[0].parts.start_call("b", remote.double, (value,))
        assert not stream.query()  # the call has not waited for it
        with cuda.stream(other):
            for _ in range(20):
                noise = noise @ noise.t() / 4096
        result = await call
        is_doubled = bool((result == 2 * STEPS).all())
        assert is_doubled
    assert await there.call(remote.where, value) == [HOME]


async def test_stream_is_kept_while_the_call_waits_for_a_connection() -> None:
    options = accelerators.options(is_exclusive=False)
    async with Cluster(2, options=options) as (a, b):
        assert a.parts.directory.find(b.name).link is None
        stream = cuda.Stream()
        value = counted(stream)
        with cuda.stream(stream):
            call = a.parts.start_call(b.name, remote.double, (value,))
            calls = a.group([b.name]).call(remote.double, value)
        assert not stream.query()
        for result in (await call, *await calls):
            is_doubled = bool((result == 2 * STEPS).all())
            assert is_doubled


async def test_stream_of_the_calling_thread_counts(pair: Pair) -> None:
    await pair[0].peer("b").call(remote.where)

    def call() -> torch.Tensor:
        stream = cuda.Stream()
        value = counted(stream)
        with cuda.stream(stream):
            result: torch.Tensor = (
                pair[0].parts.start_call("b", remote.double, (value,)).wait()
            )
        return result

    for result in await asyncio.gather(*(asyncio.to_thread(call) for _ in range(4))):
        is_doubled = bool((result == 2 * STEPS).all())
        assert is_doubled


async def test_stream_of_a_coroutine_does_not_hide_the_default_stream(
    pair: Pair,
) -> None:
    """Functions compute on the default stream, and their answers are sent from it."""
    there = pair[0].peer("b")
    value = torch.zeros(ELEMENTS, device=HOME)
    with cuda.stream(cuda.Stream()):
        calls = [there.call(remote.counted_up, value, STEPS) for _ in range(4)]
        for result in await asyncio.gather(*calls):
            is_counted = bool((result == STEPS).all())
            assert is_counted


async def test_a_future_of_torch_carries_its_stream(pair: Pair) -> None:
    value = torch.zeros(ELEMENTS, device=HOME)
    for _ in range(4):
        result = await pair[0].peer("b").call(remote.counted_in_a_future, value, STEPS)
        is_counted = bool((result == STEPS).all())
        assert is_counted


async def test_received_tensor_is_ready_for_the_default_stream(pair: Pair) -> None:
    tensor = torch.arange(ELEMENTS, device=HOME)
    calls = [
        pair[0].parts.start_call("b", remote.same, (tensor + n,)) for n in range(8)
    ]
    for number, result in enumerate(await asyncio.gather(*calls)):
        is_same = bool((result - number == tensor).all())
        assert is_same


async def test_memory_freed_during_a_call_is_not_sent(pair: Pair) -> None:
    """The caller lets go of its tensor at once, and makes others in its place."""
    calls = []
    for number in range(20):
        value = torch.full((ELEMENTS // 16,), float(number), device=HOME)
        calls.append(pair[0].parts.start_call("b", remote.double, (value,)))
        del value
        torch.full((ELEMENTS // 16,), -1.0, device=HOME)
    for number, result in enumerate(await asyncio.gather(*calls)):
        is_doubled = bool((result == 2 * number).all())
        assert is_doubled


async def test_call_speed_beside_plain_copies_is_printed(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    """Printed, not asserted."""
    tensor = torch.rand(64 << 20, device=HOME)
    there = pair[0].peer("b")
    await there.call(remote.same, tensor)
    cuda.synchronize()
    began_s = time.perf_counter()
    tensor.cpu().to(HOME).cpu().to(HOME)
    cuda.synchronize()
    plain_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    result = await there.call(remote.same, tensor)
    cuda.synchronize()
    call_s = time.perf_counter() - began_s
    assert torch.equal(result, tensor)
    gigabytes = 2 * tensor.nbytes / 1e9
    with capsys.disabled():
        print(  # noqa: T201  (whoever runs it wants to know)
            f"\n256 MiB there and back: a call {gigabytes / call_s:.2f} GB/s, "
            f".cpu().to() {gigabytes / plain_s:.2f} GB/s"
        )

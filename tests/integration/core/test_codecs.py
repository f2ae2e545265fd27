"""Codecs of calls: payloads are smaller on the wire, in both directions."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch

import asyncrpc
from asyncrpc import NetworkOptions, Options, Outcome, Policy, UsageError, Worker
from asyncrpc.core.calls import preparation
from asyncrpc.core.options import CallOptions
from asyncrpc.core.wire.limits import MessageLimits
from asyncrpc.errors import DecodeError, EncodeError
from asyncrpc.testing import Cluster, acting_as
from tests.integration.core import remote
from tests.integration.core.conftest import Trio
from tests.integration.core.groups import processes

MIB = 1 << 20
CODECS = ["lz4", "zstd", "fp16", "bf16", "int8", "bf16+zstd", "int8+lz4"]


def lose(package: str) -> None:
    """Make this process one in which a package is not installed."""
    sys.modules[package] = None  # type: ignore[assignment]


@asyncrpc.on_loop
def count_up(kept: Any, _lent: Any, _tensor: torch.Tensor) -> None:
    kept.local_value().add()


def payload(size_bytes: int) -> torch.Tensor:
    """Return float32 numbers that every codec shortens, and none can lose a bit of."""
    pattern = torch.tensor([127.0, -1.0, 0.0, 5.0, 1.0, 64.0, -126.0, 2.0] * 128)
    return pattern.repeat(size_bytes // pattern.nbytes)


async def echoed(worker: Worker, codec: str | None, value: Any) -> tuple[Any, Any]:
    """Return what an echo through `codec` gave, and what it moved."""
    future = worker.parts.start_call(
        "b", remote.echo, (value,), options=CallOptions(codec=codec)
    )
    return await future, future.stats


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("size_bytes", [8 << 10, 4 * MIB])
async def test_codec_packs_both_ways(wired: Trio, codec: str, size_bytes: int) -> None:
    sent = payload(size_bytes)
    back, stats = await echoed(wired[0], codec, sent)
    assert back.dtype == sent.dtype
    torch.testing.assert_close(back, sent, rtol=0, atol=1e-4)
    assert 0 < stats.bytes_sent < 0.6 * sent.nbytes
    assert 0 < stats.bytes_received < 0.6 * sent.nbytes
    assert stats.bytes_copied >= stats.bytes_sent + sent.nbytes


async def test_codecs_shorten_payloads_between_processes() -> None:
    async with processes("b", transport="tcp") as a:
        sent = payload(8 * MIB)
        for codec in CODECS:
            back, stats = await echoed(a, codec, sent)
            torch.testing.assert_close(back, sent, rtol=0, atol=1e-4)
            assert stats.bytes_received < 0.6 * sent.nbytes
        back, stats = await echoed(a, None, sent)
        assert torch.equal(back, sent)
        assert stats.bytes_sent == sent.nbytes


async def test_missing_codec_package_is_reported_and_survived() -> None:
    async with processes("b") as a:
        peer = a.peer("b")
        await peer.call(lose, "zstandard")
        with pytest.raises(DecodeError, match="install 'zstandard'") as raised:
            await peer.using(codec="zstd").call(remote.echo, payload(MIB))
        assert raised.value.outcome is Outcome.NOT_EXECUTED
        # Its answers come without the codec.
        back, stats = await echoed(a, "zstd", [1])
        assert back == [1]
        assert not (await peer.using(codec="zstd").call(torch.zeros, 100_000)).any()
        back, stats = await echoed(a, "lz4", payload(MIB))
        assert stats.bytes_received < MIB


async def test_codec_of_a_call_overrides_that_of_the_peer() -> None:
    options = Options(network=NetworkOptions(codecs={"b": "fp16", "*": "zstd"}))
    async with Cluster(3, options=options) as (a, _, _):
        third = torch.full((3000,), 1 / 3)
        half = third.half().float()
        assert torch.equal(await a.peer("b").call(remote.echo, third), half)
        assert torch.equal(await a.peer("c").call(remote.echo, third), third)
        exact = a.peer("b").using(codec="")
        assert torch.equal(await exact.call(remote.echo, third), third)
        lossy = a.peer("c").using(codec="fp16")
        assert torch.equal(await lossy.call(remote.echo, third), half)


@pytest.mark.parametrize("size", [4, 1 << 20])
async def test_argument_the_codec_cannot_hold_is_named(trio: Trio, size: int) -> None:
    lossy = trio[0].peer("b").using(codec="fp16")
    labels = torch.zeros(size, dtype=torch.int64)
    with pytest.raises(EncodeError, match=r"kwargs\['y'\].*int64.*'fp16\+keep'") as r:
        await lossy.call(remote.add, torch.ones(size), y=labels)
    assert r.value.outcome is Outcome.NOT_EXECUTED
    with pytest.raises(EncodeError, match=r"args\[0\]\[1\].*100000.*65504.*'bf16'"):
        await lossy.call(remote.echo, [1, torch.full((size,), 1e5)])
    assert await lossy.call(remote.add, 1, 2) == 3


async def test_keep_option_sends_incompatible_tensors_unchanged(trio: Trio) -> None:
    value = [payload(MIB), torch.arange(5), torch.tensor([1e5]), torch.ones(2).double()]
    back, stats = await echoed(trio[0], "bf16+keep", value)
    assert stats.bytes_sent < 0.6 * MIB
    for mine, its in zip(value, back, strict=True):
        assert mine.dtype == its.dtype
        torch.testing.assert_close(its, mine, rtol=2**-8, atol=0)


async def test_result_incompatible_with_the_codec_comes_unchanged(trio: Trio) -> None:
    lossy = trio[0].peer("b").using(codec="fp16")
    assert (await lossy.call(torch.arange, 5)).tolist() == [0, 1, 2, 3, 4]
    large = await lossy.call(torch.full, (100_000,), 1e5)
    assert torch.equal(large, torch.full((100_000,), 1e5))


async def test_an_unknown_codec_is_refused_before_any_call(trio: Trio) -> None:
    with pytest.raises(UsageError, match=r"'gzip' is unknown.*'lz4'.*'int8'"):
        trio[0].peer("b").using(codec="gzip")
    with pytest.raises(UsageError, match=r"'bf16\+fp16' is unknown"):
        Options(network=NetworkOptions(codecs={"b": "bf16+fp16"}))


async def test_codecs_work_under_policy_strict() -> None:
    options = Options(policy=Policy.STRICT, allow=("tests.integration.core.remote:*",))
    async with Cluster(2, options=options) as (a, _):
        for codec in CODECS:
            value = [payload(MIB), b"text" * 9000, np.arange(5000)]
            back, _ = await echoed(a, codec, value)
            torch.testing.assert_close(back[0], value[0], rtol=0, atol=1e-4)
            assert back[1] == value[1]
            assert (back[2] == value[2]).all()


async def test_unpacked_size_is_limited_at_both_ends() -> None:
    limits = asyncrpc.LimitOptions(message=MessageLimits(unpacked_bytes_max=MIB))
    async with Cluster(2, options=Options(limits=limits)) as (a, _):
        zeros = torch.zeros(MIB)
        with pytest.raises(EncodeError, match="with a codec the limit is 1048576"):
            await a.peer("b").using(codec="zstd").call(remote.echo, zeros)
        assert torch.equal(await a.peer("b").call(remote.echo, zeros), zeros)


async def test_deadline_covers_the_packing(trio: Trio) -> None:
    late = trio[0].peer("b").using(codec="zstd", timeout_s=1e-6)
    with pytest.raises(asyncrpc.DeadlineExceededError) as raised:
        await late.call(remote.echo, payload(4 * MIB))
    assert raised.value.outcome is Outcome.NOT_EXECUTED


async def test_a_call_cancelled_while_it_is_packed_is_never_sent(trio: Trio) -> None:
    a, b, _ = trio
    await a.peer("b").call(remote.add, 1)
    call = a.parts.start_call(
        "b", remote.echo, (payload(4 * MIB),), options=CallOptions(codec="zstd")
    )
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert call.stats.bytes_sent == 0
    assert b.parts.active == 0
    assert await a.peer("b").call(remote.add, 1) == 2


async def test_a_call_cancelled_while_it_is_unpacked_does_not_run(
    a: Worker, b: Worker, c: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = asyncio.Event(), threading.Event()
    loop, unpacked = asyncio.get_running_loop(), preparation._unpacked  # noqa: SLF001

    def slowly(parcel: Any) -> Any:
        loop.call_soon_threadsafe(begun.set)
        go_on.wait(10)
        return unpacked(parcel)

    monkeypatch.setattr(preparation, "_unpacked", slowly)
    kept = a.peer("b").remote(remote.Counter)
    lent = a.peer("c").remote(remote.Counter)
    await kept.rpc_async().get()
    call = a.parts.start_call(
        "b", count_up, (kept, lent, payload(MIB)), options=CallOptions(codec="bf16")
    )
    await begun.wait()
    call.cancel()
    await a.peer("b").call(remote.add, 1)  # overtakes nothing: the cancel is there
    go_on.set()
    await echoed(a, "bf16", payload(8 * MIB))  # unpacked after the other
    assert await kept.rpc_async().get() == 0
    assert await lent.rpc_async().get() == 0
    assert b.parts.active == 0
    assert c.parts.active == 0


async def test_references_travel_beside_packed_tensors(a: Worker) -> None:
    reference = a.peer("b").remote(torch.ones, 3)
    codec = CallOptions(codec="bf16+lz4")
    mine, tensor = await a.parts.start_call(
        "b", remote.echo, ((reference, payload(MIB)),), options=codec
    )
    assert torch.equal(await mine.to_here(), torch.ones(3))
    assert torch.equal(tensor, payload(MIB))


async def test_gradients_go_through_a_lossy_call(trio: Trio) -> None:
    x = payload(MIB).requires_grad_()
    lossy = trio[0].peer("b").using(codec="bf16")
    with acting_as(trio[0]):
        async with asyncrpc.autograd.context() as context:
            y = await lossy.call(torch.mul, x, 3.0)
            await asyncrpc.autograd.backward(context, [y.sum()])
            gradient = asyncrpc.autograd.get_gradients(context)[x]
    assert torch.equal(gradient, torch.full_like(x, 3.0))


async def test_small_calls_go_on_while_large_payloads_are_packed(a: Worker) -> None:
    await a.peer("b").call(remote.add, 1)
    large = asyncio.gather(*(echoed(a, "zstd", payload(32 * MIB)) for _ in range(2)))
    answered = 0
    while not large.done():
        assert await a.peer("b").call(remote.add_async, 1) == 2
        answered += 1
    for back, _ in await large:
        assert torch.equal(back, payload(32 * MIB))
    assert answered > 10


async def test_a_group_and_out_work_with_a_codec(a: Worker) -> None:
    sent = payload(MIB)
    for back in await a.group(["b", "c"]).using(codec="bf16").call(remote.echo, sent):
        assert torch.equal(back, sent)
    out = torch.zeros_like(sent)
    call = a.peer("b").using(codec="bf16+zstd", out=out).call(remote.echo, sent)
    assert await call is out
    assert torch.equal(out, sent)

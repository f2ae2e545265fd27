"""Tensors on devices go into calls and come out of them as others do."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch

import asyncrpc
from asyncrpc import DeviceOptions, Options, Outcome, RemoteError, Worker
from asyncrpc.core.serde.tensors import DTYPES
from asyncrpc.errors import DecodeError, EncodeError
from asyncrpc.testing import Cluster, acting_as, fake_device
from tests.integration.core.groups import until
from tests.integration.devices import remote
from tests.integration.devices.accelerators import IS_FAKE, TYPE, Hands, options, set_up

Pair = tuple[Worker, Worker]

HOME = f"{TYPE}:0"
X = torch.arange(12.0).view(3, 4)

STRIDED = {
    name: dtype for name, dtype in DTYPES.items() if not name.startswith(("q", "bits"))
}

needs_two = pytest.mark.skipif(not IS_FAKE, reason="there is one such device here")


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.contiguous()
    return bytes(plain.view(-1).view(torch.uint8).tolist()) if plain.numel() else b""


async def test_a_tensor_arrives_on_its_device_and_comes_back(
    pair: Pair, hands: Hands
) -> None:
    there = pair[0].peer("b")
    sent = await hands.put(X)
    assert await there.call(remote.where, sent) == [HOME]
    result = await there.call(remote.double, sent)
    assert str(result.device) == HOME
    assert torch.equal(await hands.take(result), X * 2)


async def test_device_tensor_may_be_anywhere_in_a_value(
    pair: Pair, hands: Hands
) -> None:
    tensor = await hands.put(X)
    value = {"a": [tensor, X, (tensor, 3)], "b": tensor}
    result = await pair[0].peer("b").call(remote.same, value)
    assert result["a"][0] is result["b"]
    assert result["a"][2] == (result["b"], 3)
    assert str(result["b"].device) == HOME
    assert result["a"][1].is_cpu
    assert torch.equal(result["a"][1], X)
    assert torch.equal(await hands.take(result["b"]), X)


@pytest.mark.parametrize("size", [1, 200, 70_000, 5_000_000])
async def test_tensor_of_any_size_comes_back(
    pair: Pair, hands: Hands, size: int
) -> None:
    x = torch.arange(size, dtype=torch.float32)
    result = await pair[0].peer("b").call(remote.double, await hands.put(x))
    assert torch.equal(await hands.take(result), x * 2)


def _lying() -> dict[str, torch.Tensor]:
    base = torch.arange(24.0).view(2, 3, 4)
    return {
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "transposed": base.transpose(0, 2),
        "stepped": base[:, ::2],
        "expanded": torch.ones(1, 3).expand(4, 3),
        "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }


@pytest.mark.parametrize("name", list(_lying()))
async def test_tensor_of_any_layout_comes_back(
    pair: Pair, hands: Hands, name: str
) -> None:
    x = _lying()[name]

    def there() -> torch.Tensor:
        return x.to(HOME)  # as it lies; of some devices all is contiguous

    result = await pair[0].peer("b").call(remote.same, await hands.do(there))
    assert result.shape == x.shape
    assert torch.equal(await hands.take(result), x)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", sorted(STRIDED))
async def test_dtype_comes_back_bitwise_or_is_refused(
    pair: Pair, hands: Hands, name: str
) -> None:
    dtype, there = STRIDED[name], pair[0].peer("b")
    raw = torch.arange(64, dtype=torch.uint8)
    x = (raw % 2).to(dtype) if dtype is torch.bool else raw.view(dtype)
    try:
        tensor = await hands.put(x)
        holds = bits(await hands.take(tensor)) == bits(x)
    except (RuntimeError, TypeError):  # so says a device that does not hold a dtype
        holds = False
    if holds:
        result = await there.call(remote.same, tensor)
        assert result.dtype is dtype
        assert bits(await hands.take(result)) == bits(x)
    else:
        with pytest.raises(DecodeError, match=rf"tensor of {name} .* on {HOME}"):
            await there.using(device_map={"cpu": HOME}).call(remote.same, x)


def dense_of(x: torch.Tensor) -> torch.Tensor:
    return x.dequantize() if x.is_quantized else x.to_dense()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch 2.11, once
@pytest.mark.parametrize("layout", ["coo", "csr", "quantized"])
async def test_composite_tensors_travel_whole_or_are_refused(
    pair: Pair, hands: Hands, layout: str
) -> None:
    """No device tested so far holds all of them; some say so late, or not at all."""
    there = pair[0].peer("b")
    x = {
        "coo": lambda: torch.eye(3).to_sparse(),
        "csr": lambda: torch.eye(3).to_sparse_csr(),
        "quantized": lambda: torch.quantize_per_tensor(X, 0.5, 0, torch.qint8),
    }[layout]()
    dense = dense_of(x)
    try:
        tensor = await hands.put(x)
        holds = not tensor.is_cpu
    except (RuntimeError, TypeError):  # NotImplementedError among them
        holds = False
    to_device = there.using(device_map={"cpu": HOME})
    if not holds:
        with pytest.raises(DecodeError, match=rf"shape .* could not be put on {HOME}"):
            await to_device.call(remote.same, x)
        return
    try:
        came_back = await hands.take(tensor)
    except (RuntimeError, TypeError):  # what went there cannot come back
        with pytest.raises(EncodeError, match=rf"{layout} tensor on '{HOME}'.*cpu"):
            await there.call(remote.same, tensor)
        return
    assert torch.equal(dense_of(came_back), dense)
    if layout == "quantized":  # no device that holds them says what they are made of
        with pytest.raises(EncodeError, match="a quantized tensor on"):
            await there.call(remote.same, tensor)
        return
    result = await there.call(remote.same, tensor)
    assert (str(result.device), result.layout) == (HOME, x.layout)
    assert torch.equal(dense_of(await hands.take(result)), dense)
    assert await to_device.call(remote.where, x) == [HOME]
    to_host = there.using(device_map={HOME: "cpu"})
    assert await to_host.call(remote.where, tensor) == ["cpu"]


async def test_concurrent_calls_keep_their_tensors(pair: Pair, hands: Hands) -> None:
    there = pair[0].peer("b")
    tensors = [await hands.put(X + number) for number in range(20)]
    results = await asyncio.gather(
        *(there.call(remote.double, tensor) for tensor in tensors)
    )
    for number, result in enumerate(results):
        assert torch.equal(await hands.take(result), (X + number) * 2)


async def test_coroutine_function_takes_device_tensors(
    pair: Pair, hands: Hands
) -> None:
    result = await pair[0].peer("b").call(remote.double_awaited, await hands.put(X))
    assert torch.equal(await hands.take(result), X * 2)


async def test_function_may_call_back_with_device_tensors(
    pair: Pair, hands: Hands
) -> None:
    """Back to the first worker, awaited and blocking: nobody waits for the lock."""
    there = pair[0].peer("b")
    tensor = await hands.put(X)
    result = await there.call(remote.double_elsewhere, "a", tensor)
    assert torch.equal(await hands.take(result), X * 2)
    result = await there.call(remote.double_there, "a", tensor)
    assert torch.equal(await hands.take(result), X * 3)


async def test_error_may_hold_a_device_tensor(pair: Pair, hands: Hands) -> None:
    tensor = await hands.put(X)
    with pytest.raises(RemoteError) as caught:
        await pair[0].peer("b").call(remote.raising, tensor)
    error = caught.value
    assert isinstance(error, ValueError)
    assert "cannot" in await hands.do(lambda: str(error))


async def test_stream_yields_device_tensors(pair: Pair, hands: Hands) -> None:
    tensor = await hands.put(X)
    stream = pair[0].peer("b").stream(remote.counting, tensor, 5)
    items = [item async for item in stream]
    for number, result in enumerate(items):
        assert str(result.device) == HOME
        assert torch.equal(await hands.take(result), X + number)
    again = pair[0].peer("b").stream(remote.counting_awaited, tensor, 3)
    assert len([item async for item in again]) == 3


async def test_references_hold_device_tensors(pair: Pair, hands: Hands) -> None:
    table = pair[0].peer("b").remote(remote.Table, HOME)
    rows = torch.arange(6.0).view(3, 2)
    result = await table.rpc_async().rows()
    assert str(result.device) == HOME
    assert torch.equal(await hands.take(result), rows)
    moved = await table.rpc_async().add(await hands.put(torch.ones(2)))
    assert torch.equal(await hands.take(moved), rows + 1)
    kept = table.remote().rows()
    assert torch.equal(await hands.take(await kept.to_here()), rows + 1)
    mine = asyncrpc.RRef(await hands.put(X))
    result = await pair[0].peer("b").call(remote.fetched, mine)
    assert torch.equal(await hands.take(result), X)


async def test_group_call_takes_device_tensors(pair: Pair, hands: Hands) -> None:
    tensor = await hands.put(X)
    for result in await pair[0].group(["a", "b"]).call(remote.double, tensor):
        assert torch.equal(await hands.take(result), X * 2)


@pytest.mark.parametrize("codec", ["zstd", "bf16"])
async def test_codec_keeps_the_device(pair: Pair, hands: Hands, codec: str) -> None:
    for size in (16, 1 << 20):
        x = torch.ones(size)
        there = pair[0].peer("b").using(codec=codec)
        result = await there.call(remote.double, await hands.put(x))
        assert str(result.device) == HOME
        assert torch.equal(await hands.take(result), x * 2)


async def test_compressing_needs_no_device(pair: Pair, hands: Hands) -> None:
    """It is done in threads, and touches no device; as is passing on a first slab."""
    ended = threading.Event()
    using = asyncio.ensure_future(hands.do(lambda: ended.wait(10)))
    sent = torch.ones(1 << 20)
    for codec in ("zstd", ""):
        there = pair[0].peer("b").using(codec=codec)
        assert torch.equal(await there.call(remote.same_awaited, sent), sent)
    ended.set()
    assert await using  # it held the device all the time


async def test_call_may_be_cancelled_during_its_transfer(
    pair: Pair, hands: Hands
) -> None:
    a, b = pair
    tensor = await hands.put(torch.ones(4_000_000))
    remote.let_go.clear()
    for after_s in (0.0, 0.001, 0.005, 0.02):  # in this or that moment of its way
        call = a.parts.start_call("b", remote.hold, (tensor,))
        await asyncio.sleep(after_s)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    remote.let_go.set()
    result = await a.peer("b").call(remote.double, tensor)
    assert torch.equal(await hands.take(result), torch.full((4_000_000,), 2.0))
    await until(lambda: not b.parts.active)


async def test_deadline_passes_while_a_device_is_busy(pair: Pair, hands: Hands) -> None:
    tensor = await hands.put(X)
    remote.let_go.clear()
    with pytest.raises(asyncrpc.DeadlineExceededError):
        await pair[0].peer("b").using(timeout_s=0.05).call(remote.hold, tensor)
    remote.let_go.set()
    result = await pair[0].peer("b").call(remote.double, tensor)
    assert torch.equal(await hands.take(result), X * 2)


# --- device maps ---------------------------------------------------------------------


@needs_two
async def test_device_map_of_one_call_applies(pair: Pair, hands: Hands) -> None:
    tensor = await hands.put(X)
    there = pair[0].peer("b").using(device_map={HOME: f"{TYPE}:1"})
    assert await there.call(remote.where, tensor, X) == [f"{TYPE}:1", "cpu"]
    result = await there.call(remote.double, tensor)
    assert str(result.device) == HOME
    assert torch.equal(await hands.take(result), X * 2)
    items = [item async for item in there.stream(remote.counting, tensor, 2)]
    assert [str(item.device) for item in items] == [HOME, HOME]
    kept = there.remote(remote.same, tensor)
    assert str((await kept.to_here()).device) == f"{TYPE}:1"  # its own way back


async def test_device_map_to_and_from_the_host_applies(
    pair: Pair, hands: Hands
) -> None:
    tensor = await hands.put(X)
    to_host = pair[0].peer("b").using(device_map={HOME: "cpu"})
    assert await to_host.call(remote.where, tensor) == ["cpu"]
    result = await to_host.call(remote.double, tensor)
    assert str(result.device) == HOME
    assert torch.equal(await hands.take(result), X * 2)
    from_host = pair[0].peer("b").using(device_map={"cpu": TYPE})
    assert await from_host.call(remote.where, X, X[0].t()) == [HOME, HOME]
    result = await from_host.call(remote.double, X)
    assert torch.equal(result, X * 2)
    squeezed = from_host.using(codec="zstd")
    assert await squeezed.call(remote.where, torch.zeros(1 << 20)) == [HOME]


@needs_two
async def test_device_maps_of_a_worker_apply() -> None:
    set_up()
    maps = {"b": {0: "cpu"}, "*": {HOME: f"{TYPE}:1", f"{TYPE}:1": HOME}}
    tensor = X.to(HOME)
    chosen = options(is_exclusive=False, maps=maps)
    async with Cluster(3, options=chosen) as (a, _, _):
        with acting_as(a):
            assert await a.peer("b").call(remote.where, tensor) == [HOME]
            assert await a.peer("c").call(remote.where, tensor) == [f"{TYPE}:1"]
            result = await a.peer("c").call(remote.double, tensor)
            assert str(result.device) == HOME
            table = a.peer("c").remote(remote.Table, HOME)
            assert str((await table.rpc_async().rows()).device) == f"{TYPE}:1"
            whole = await a.peer("c").remote(remote.zeros, [2], HOME).to_here()
            assert str(whole.device) == f"{TYPE}:1"


@pytest.mark.parametrize(
    ("device_map", "words"),
    [
        (
            {"cuda:0": "cpu", "cuda:1": "cpu"},
            r"cuda:0 and cuda:1 to cpu.*not be mapped back",
        ),
        ({"cuda:0": "GPU"}, "'GPU' .* is not understood"),
        ({"cuda 0": "cpu"}, "'cuda 0' .* is not understood"),
        ({-1: "cpu"}, "-1 .* is not understood"),
        ({"cuda": "cpu", "cuda:0": "xla:0"}, "cuda:0 to both cpu and xla:0"),
    ],
)
def test_invalid_device_map_is_refused(device_map: dict[Any, str], words: str) -> None:
    with pytest.raises(asyncrpc.UsageError, match=words):
        Options(devices=DeviceOptions(maps={"b": device_map}))


# --- devices that are not there ------------------------------------------------------


async def test_device_missing_at_the_callee_is_named(pair: Pair, hands: Hands) -> None:
    tensor = await hands.put(X)
    there = pair[0].peer("b")
    for device, words in (
        (f"{TYPE}:7", rf"'b' has no device {TYPE}:7; it has cpu, {TYPE}:0"),
        ("abacus:0", r"'b' has no device abacus:0: its DeviceOptions.names are "),
    ):
        with pytest.raises(DecodeError, match=words) as caught:
            await there.using(device_map={HOME: device}).call(remote.double, tensor)
        assert caught.value.outcome is Outcome.NOT_EXECUTED
        assert "map the device" in str(caught.value)
    assert await there.call(remote.where, tensor) == [HOME]


async def test_result_on_a_device_missing_here_fails(pair: Pair, hands: Hands) -> None:
    """The function has run; the error is the caller's own."""
    tensor = await hands.put(X)
    there = pair[0].peer("b").using(device_map={"abacus:3": HOME})
    with pytest.raises(DecodeError, match="'a' has no device abacus:3") as caught:
        await there.call(remote.double, tensor)
    assert caught.value.outcome is Outcome.EXECUTED


async def test_worker_without_devices_refuses_device_tensors() -> None:
    set_up()
    chosen = Options(devices=DeviceOptions(names=()))
    tensor = torch.ones(2).to(HOME) if IS_FAKE else torch.ones(2)
    async with Cluster(2, options=chosen) as (a, _):
        if IS_FAKE:
            with pytest.raises(EncodeError, match=r"its DeviceOptions.names are none"):
                await a.peer("b").call(remote.double, tensor)
        there = a.peer("b").using(device_map={"cpu": HOME})
        with pytest.raises(DecodeError, match=rf"'b' has no device {HOME}"):
            await there.call(remote.double, torch.ones(2))


async def test_missing_device_in_the_options_is_refused() -> None:
    set_up()
    worker = Worker(
        "a", rendezvous={}, options=Options(devices=DeviceOptions(names=(f"{TYPE}:9",)))
    )
    words = rf"DeviceOptions.names lists {TYPE}:9, .* it has cpu, {TYPE}:0"
    with pytest.raises(asyncrpc.UsageError, match=words):
        async with worker:
            pass


# --- the loop ------------------------------------------------------------------------


async def test_tensors_do_not_move_on_the_loop(
    pair: Pair, hands: Hands, ledger: fake_device.Ledger | None
) -> None:
    if ledger is None:
        pytest.skip("only the device of host memory tells which thread has used it")
    sent = await hands.put(torch.ones(1 << 20))
    before = ledger.operations
    result = await pair[0].peer("b").call(remote.same, sent)
    assert torch.equal(await hands.take(result), torch.ones(1 << 20))
    assert ledger.operations > before
    assert ledger.on_loop == []

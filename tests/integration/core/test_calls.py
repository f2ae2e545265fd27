"""A call runs the function there, as it would here, and gives back what it returned."""

from __future__ import annotations

import datetime as dt
import enum
import fractions
import threading
from typing import Any

import numpy as np
import pytest
import torch

import asyncrpc
from asyncrpc import Worker
from asyncrpc.errors import EncodeError, UnknownWorkerError
from asyncrpc.testing import Cluster, acting_as
from tests.integration.core import remote
from tests.integration.core.conftest import Trio
from tests.integration.core.remote import Point

MIB = 1 << 20


class Color(enum.Enum):
    RED = 1


@pytest.mark.parametrize("function", [remote.add, remote.add_async, remote.add_on_loop])
async def test_each_kind_of_function_gets_arguments(wired: Trio, function: Any) -> None:
    a, b, _ = wired
    assert await a.peer("b").call(function, 2, 3) == 5
    assert await a.peer("b").call(function, 2) == 3
    assert await a.peer("b").call(function, 2, y=5) == 7
    assert await b.peer("a").call(function, x=1, y=1) == 2


async def test_functions_run_in_a_thread_or_on_the_loop(a: Worker) -> None:
    name, _, thread, on_loop = await a.peer("b").call(remote.where)
    assert (name, on_loop) == ("b", False)
    assert thread.startswith("asyncrpc-b-")
    assert (await a.peer("c").call(remote.where_async))[::3] == ("c", True)
    assert (await a.peer("c").call(remote.where_on_loop))[::3] == ("c", True)


async def test_builtins_and_library_functions_are_callable(trio: Trio) -> None:
    peer = trio[0].peer("b")
    assert await peer.call(max, 1, 7) == 7
    assert await peer.call(len, "four") == 4
    ones = await peer.call(torch.add, torch.ones(3), torch.ones(3), alpha=2)
    assert ones.tolist() == [3.0, 3.0, 3.0]
    assert await peer.call(torch.Tensor.sum, torch.ones(3)) == 3
    assert await peer.call(str.upper, "a") == "A"


async def test_small_tensors_need_no_thread_for_torch(a: Worker, b: Worker) -> None:
    small, large = torch.ones(16), torch.ones(1 << 15)
    assert (await a.peer("b").call(torch.add, small, 1)).sum() == 32
    assert await a.peer("b").call(torch.Tensor.sum, small) == 16
    assert b.parts.pool.threads == 0
    await a.peer("b").call(torch.add, large, 1)
    assert b.parts.pool.threads == 1


async def test_running_on_the_loop_can_be_switched_off() -> None:
    options = asyncrpc.Options(limits=asyncrpc.LimitOptions(on_loop_bytes_max=0))
    async with Cluster(2, options=options) as (a, b):
        assert await a.peer(b.name).call(torch.sum, torch.ones(2)) == 2
        assert b.parts.pool.threads == 1


async def test_classes_and_methods_are_callable(trio: Trio) -> None:
    peer = trio[0].peer("b")
    assert await peer.call(Point, 1, y=2) == Point(1, 2)
    assert await peer.call(Point.origin) == Point(0, 0)
    assert await peer.call(Point.diagonal, 3) == Point(3, 3)
    assert await peer.call(Point(1, 1).plus, Point(2, 2)) == Point(3, 3)
    assert await peer.call(Point(1, 1).plus_async, Point(2, 2)) == Point(3, 3)


async def test_keyword_arguments_arrive_unchanged(trio: Trio) -> None:
    args, kwargs = await trio[0].peer("b").call(remote.keywords, 1, "ü", k=[2], _x={})
    assert (args, kwargs) == ((1, "ü"), {"k": [2], "_x": {}})


async def test_a_worker_may_call_itself(wired: Trio) -> None:
    a, _, _ = wired
    assert await a.peer("a").call(remote.add, 1, 2) == 3
    assert (await a.peer(0).call(remote.where_async))[0] == "a"
    large = torch.arange(MIB, dtype=torch.float64)
    assert torch.equal(await a.peer("a").call(remote.echo, large), large)


async def test_unsendable_argument_is_refused_and_nothing_is_sent(
    a: Worker, b: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await a.peer("b").call(remote.add, 1)
    link = b.parts.directory.find("a").link
    assert link is not None
    seen: list[Any] = []
    monkeypatch.setattr(link.requests, "_admit", seen.append)
    lock = threading.Lock()
    with pytest.raises(EncodeError, match="closure variable 'lock'"):
        await a.peer("b").call(lambda: lock)
    with pytest.raises(EncodeError):
        await a.peer("b").call(remote.echo, (number for number in range(3)))
    await a.peer("b").call(remote.add, 1)
    assert len(seen) == 1


async def test_unknown_worker_is_named_with_the_known_ones(trio: Trio) -> None:
    with pytest.raises(UnknownWorkerError, match="'x' is unknown; known: 'a', 'b'"):
        trio[0].peer("x")


VALUES = [
    None,
    True,
    -1,
    1 << 100,
    1.5,
    float("inf"),
    2 + 3j,
    "ü\x00\udcff".encode("utf-8", "surrogatepass"),
    "ü€😀",
    b"\x00" * 100_000,
    bytearray(b"abc"),
    [1, [2]],
    (1, (2,)),
    {1: "a", "b": (2,), (3, 4): None},
    {1, 2},
    frozenset({3}),
    Color.RED,
    Point(1, 2),
    fractions.Fraction(1, 3),
    dt.datetime(2026, 1, 2, tzinfo=dt.UTC),
    range(3),
    slice(1, 2),
    torch.float32,
    torch.Size([1, 2]),
    torch.device("cpu"),
    remote.add,
    Point,
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
async def test_values_come_back_equal_and_of_their_type(trio: Trio, value: Any) -> None:
    back = await trio[0].peer("b").call(remote.echo, value)
    assert back == value
    assert type(back) is type(value)


async def test_arrays_come_back_equal(trio: Trio) -> None:
    for array in (np.arange(6.0).reshape(2, 3)[:, ::2], np.array([], "i2")):
        back = await trio[0].peer("b").call(remote.echo, array)
        assert back.dtype == array.dtype
        assert np.array_equal(back, array)


TENSORS = {
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 3),
    "small": torch.arange(6).reshape(2, 3),
    "large": torch.arange(3 * MIB, dtype=torch.float32),
    "transposed": torch.arange(12.0).reshape(3, 4).t(),
    "strided": torch.arange(MIB, dtype=torch.float32)[::2],
    "expanded": torch.arange(3.0).expand(4, 3),
    "bool": torch.tensor([True, False]),
    "bfloat16": torch.arange(4).to(torch.bfloat16),
    "complex": torch.tensor([1 + 2j]).conj(),
    "sparse": torch.eye(3).to_sparse(),
}


@pytest.mark.parametrize("name", TENSORS)
async def test_tensors_come_back_equal(wired: Trio, name: str) -> None:
    tensor = TENSORS[name]
    back = await wired[0].peer("b").call(remote.echo, tensor)
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(back.to_dense(), tensor.to_dense())


async def test_message_may_hold_large_and_small_tensors(wired: Trio) -> None:
    sent: dict[str, Any] = {
        "large": torch.rand(MIB),
        "small": [torch.rand(3), torch.rand(1000)],
    }
    back = await wired[0].peer("b").call(remote.echo_async, sent)
    assert torch.equal(back["large"], sent["large"])
    for received, expected in zip(back["small"], sent["small"], strict=True):
        assert torch.equal(received, expected)


async def test_views_of_one_storage_stay_aliases(trio: Trio) -> None:
    base = torch.ones(1000)
    assert await trio[0].peer("b").call(remote.alias_is_kept, [base, base[10:20]])
    assert bool((base == 1).all())  # the callee has memory of its own


async def test_call_counts_moved_and_copied_bytes(wired: Trio) -> None:
    a, _, _ = wired
    sent = torch.rand(MIB)
    call = a.parts.start_call("b", remote.double, (sent,))
    assert torch.equal(await call, sent * 2)
    assert call.stats.bytes_sent == call.stats.bytes_received == 4 * MIB
    assert call.stats.bytes_copied == 0
    strided = a.parts.start_call("b", remote.total, (sent[::64],))
    await strided
    assert strided.stats.bytes_copied == strided.stats.bytes_sent == MIB // 16


async def test_small_call_overtakes_a_large_one_of_its_function(wired: Trio) -> None:
    """The name travels with the first call, whose payload may arrive last."""
    a, _, _ = wired
    await a.peer("b").call(remote.add, 0)
    first = a.parts.start_call("b", remote.total, (torch.ones(8 * MIB),))
    assert await a.parts.start_call("b", remote.total, (torch.ones(3),)) == 3
    assert await first == 8 * MIB


async def test_concurrent_calls_get_their_own_answers(wired: Trio) -> None:
    a, b, _ = wired
    calls = [
        (caller.parts.start_call(to, remote.add_on_loop, (i, i)), i)
        for i in range(300)
        for caller, to in ((a, "b"), (b, "a"), (a, "c"))
    ]
    for call, i in calls:
        assert await call == 2 * i


async def test_torch_names_call_the_worker(a: Worker) -> None:
    with acting_as(a):
        info = asyncrpc.get_worker_info("b")
        assert (info.name, info.id) == ("b", 1)
        assert await asyncrpc.rpc_async(info, remote.add, args=(1, 2)) == 3
        assert await asyncrpc.rpc_async(1, remote.add, (1,), {"y": 4}) == 5
        assert await asyncrpc.remote("b", remote.add, (1,)).to_here() == 2
        with pytest.raises(asyncrpc.UsageError, match="rpc_async"):
            asyncrpc.rpc_sync("b", remote.add, (1,))


async def test_call_to_an_ended_worker_is_explained(a: Worker, b: Worker) -> None:
    await b.shutdown()
    with pytest.raises(asyncrpc.WorkerLostError) as caught:
        await a.peer("b").call(remote.add, 1)
    assert caught.value.outcome is asyncrpc.Outcome.NOT_EXECUTED
    with pytest.raises(asyncrpc.errors.NotStartedError, match="shut down"):
        b.peer("a")


async def test_process_may_hold_fifty_workers() -> None:
    names = [f"w{i}" for i in range(50)]
    async with Cluster(names=names) as workers:
        first: Worker = workers[0]
        places = [await first.peer(name).call(remote.where_async) for name in names]
        assert [name for name, *_ in places] == names

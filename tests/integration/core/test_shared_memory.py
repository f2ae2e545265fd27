"""Large payloads between workers of one host: through shared memory, and back."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import asyncrpc
from asyncrpc import LimitOptions, Options, Worker, WorkerLostError
from asyncrpc.core.payloads import mover as moving
from asyncrpc.core.payloads import sharing
from asyncrpc.core.services.ports import PeerLink
from asyncrpc.core.transport import descriptors
from asyncrpc.core.wire.frames import FrameKind
from asyncrpc.testing import Cluster
from tests import raw_messages
from tests.inner_state import held_bytes, routes_of, slab_bytes
from tests.integration.core import remote
from tests.integration.core.conftest import Trio
from tests.integration.core.groups import LIMIT_S, processes, started, until

MIB = 1 << 20
KEPT: list[Any] = []
FILES = Path("/dev/shm")  # noqa: S108  (where memory with a name would be)


# --- what runs on the other side -----------------------------------------------------


def keep(value: Any) -> None:
    KEPT.append(value)


def drop_kept() -> None:
    KEPT.clear()


def kept_sum() -> float:
    return float(KEPT[-1].sum())


def overwrite(value: torch.Tensor) -> torch.Tensor:
    return value.fill_(5)


@pytest.fixture(autouse=True)
def nothing_is_left_of_others() -> None:
    """Let go of what tests before have left in cycles: it may hold a slab."""
    gc.collect()


def mapped_slabs() -> int:
    """Count the mappings of slabs of this process."""
    maps = Path("/proc/self/maps").read_text(encoding="ascii")
    return maps.count("memfd:asyncrpc-slab")


def open_slabs() -> int:
    """Count the descriptors of slabs of this process."""
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            count += "memfd:asyncrpc-slab" in str(entry.readlink())
        except FileNotFoundError:
            continue
    return count


async def numbers(count: int, size: int) -> AsyncIterator[torch.Tensor]:
    for index in range(count):
        yield torch.full((size,), float(index))


# --- watching ------------------------------------------------------------------------


async def mover_to(worker: Worker, name: str) -> moving.SlabMover:
    mover = (await worker.parts.link_to(name)).connection.payloads.mover
    assert isinstance(mover, moving.SlabMover)
    return mover


async def warm(worker: Worker, name: str, nbytes: int) -> moving.SlabMover:
    """Send until there is a slab with room for payloads of a size."""
    mover = await mover_to(worker, name)
    pool = worker.parts.memory.pool
    room = sum(slab_bytes(pool, slab) for slab in mover.attached)
    while pool.find_room(nbytes, without=()) is None or not room:
        await worker.peer(name).call(remote.add, torch.zeros(nbytes // 4))
        await until(lambda: not mover.is_busy)
        room = len(mover.attached)
    return mover


@pytest.fixture
async def trio() -> AsyncIterator[Trio]:
    """Workers of this process, each with its own mapping."""
    options = Options(drain_timeout_s=2.0)
    async with Cluster(3, network="uds", options=options) as (a, b, c):
        yield a, b, c


async def stats_of_call(
    worker: Worker, function: Any, *args: Any
) -> asyncrpc.CallStats:
    call = worker.parts.start_call("b", function, args)
    await call
    return call.stats


# --- values --------------------------------------------------------------------------


def strided() -> torch.Tensor:
    return torch.arange(900 * 700, dtype=torch.float32).view(900, 700).t()


VALUES = {
    "float32": lambda: torch.randn(300, 500),
    "bfloat16": lambda: torch.randn(300, 500).bfloat16(),
    "complex64": lambda: torch.randn(300, 500, dtype=torch.complex64),
    "bool": lambda: torch.rand(300, 500) > 0.5,
    "uint8": lambda: torch.randint(256, (200_000,), dtype=torch.uint8),
    "float64": lambda: torch.randn(100_001, dtype=torch.float64),
    "float8": lambda: torch.randn(200_000).to(torch.float8_e4m3fn),
    "transposed": strided,
    "with holes": lambda: torch.randn(900, 700)[::2, 1:],
    "expanded": lambda: torch.randn(1, 70_000).expand(3, -1),
    "conjugate": lambda: torch.randn(50_000, dtype=torch.complex64).conj(),
    "sparse": lambda: torch.eye(400, 400).to_sparse(),
    "several": lambda: [torch.randn(size) for size in (5, 20_000, 300_000, 0, 4_096)],
    "many short": lambda: [torch.full((900,), float(i)) for i in range(100)],
    "aliases": lambda: [(base := torch.randn(100_000)), base[50:90_000]],
    "array": lambda: np.arange(100_000, dtype=np.int64),
    "bytes": lambda: os.urandom(300_000),
}


def same(value: Any, other: Any) -> bool:
    if isinstance(value, list):
        return len(value) == len(other) and all(map(same, value, other))
    if isinstance(value, torch.Tensor):
        if value.is_sparse:
            value, other = value.to_dense(), other.to_dense()
        if value.dtype is torch.float8_e4m3fn:
            value, other = value.view(torch.uint8), other.view(torch.uint8)
        return value.dtype == other.dtype and torch.equal(value, other)
    if isinstance(value, np.ndarray):
        return np.array_equal(value, other)
    return bool(value == other)


@pytest.mark.parametrize("make", VALUES.values(), ids=VALUES)
async def test_value_comes_back_unchanged(trio: Trio, make: Callable[[], Any]) -> None:
    a, b, _ = trio
    await warm(a, "b", 4 * MIB)
    await warm(b, "a", 4 * MIB)
    value = make()
    assert same(await a.peer("b").call(remote.echo, value), value)


@pytest.mark.parametrize(
    "size", [1, 65_536, 65_537, 131_072, 2 * MIB, 2 * MIB + 1, 5 * MIB + 3]
)
async def test_payload_of_any_size_arrives_whole(a: Worker, size: int) -> None:
    await warm(a, "b", 8 * MIB)
    value = torch.randint(256, (size,), dtype=torch.uint8)
    assert torch.equal(await a.peer("b").call(remote.echo, value), value)


async def test_aliases_stay_aliases(a: Worker, b: Worker) -> None:
    await warm(a, "b", 4 * MIB)
    await warm(b, "a", 4 * MIB)
    base = torch.zeros(200_000)
    whole, part = await a.peer("b").call(remote.echo, [base, base[7:]])
    part.fill_(1)
    assert whole.sum() == 200_000 - 7


async def test_a_payload_is_copied_once_into_the_slab_never_out(trio: Trio) -> None:
    a, b, _ = trio
    await warm(a, "b", 4 * MIB)
    await warm(b, "a", 4 * MIB)
    value = torch.randn(MIB)
    call = a.parts.start_call("b", remote.echo, (value,))
    assert torch.equal(await call, value)
    assert call.stats.bytes_copied == value.nbytes  # ours; the result cost b a copy
    assert call.stats.bytes_received == value.nbytes
    assert (await b.parts.link_to("a")).connection.bytes_copied == value.nbytes


async def test_write_of_the_receiver_is_not_seen_by_the_sender(trio: Trio) -> None:
    a, b, _ = trio
    await warm(a, "b", 4 * MIB)
    await warm(b, "a", 4 * MIB)
    value = torch.zeros(MIB)
    result = await a.peer("b").call(overwrite, value)
    assert value.sum() == 0
    assert result.sum() == 5 * MIB
    result.zero_()
    assert (await a.peer("b").call(overwrite, value)).sum() == 5 * MIB


async def test_a_stream_of_large_items_comes_in_order(a: Worker, b: Worker) -> None:
    await warm(b, "a", 8 * MIB)
    items = a.peer("b").stream(numbers, 12, MIB)
    assert [float(item[-1]) async for item in items] == [float(i) for i in range(12)]


# --- room ----------------------------------------------------------------------------


async def test_memory_is_free_without_receivers_tensors(a: Worker, b: Worker) -> None:
    await warm(a, "b", 4 * MIB)
    pool = a.parts.memory.pool
    await a.peer("b").call(keep, torch.zeros(MIB))
    assert held_bytes(pool) == 4 * MIB
    part = KEPT[-1][5:7]
    drop_kept()
    await a.peer("b").call(remote.add, 1)
    assert held_bytes(pool) == 4 * MIB  # a view of it lives
    assert len(b.parts.memory.leases) == 1
    del part
    await until(lambda: held_bytes(pool) == 0)
    assert len(b.parts.memory.leases) == 0


async def test_consecutive_calls_reuse_the_same_memory(a: Worker) -> None:
    await warm(a, "b", 16 * MIB)
    size_bytes = a.parts.memory.pool.size_bytes
    for _ in range(20):  # each is given back before its answer
        stats = await stats_of_call(a, remote.total, torch.ones(2 * MIB))
        assert stats.bytes_copied == 8 * MIB
    assert a.parts.memory.pool.size_bytes == size_bytes


async def test_payload_goes_by_socket_when_slabs_are_full(a: Worker) -> None:
    a.parts.memory.pool.limit_bytes = 16 * MIB
    await warm(a, "b", 4 * MIB)
    value = torch.ones(MIB)
    for _ in range(8):
        await a.peer("b").call(keep, value)
    assert held_bytes(a.parts.memory.pool) == 16 * MIB
    assert a.parts.memory.pool.size_bytes == 16 * MIB
    assert {float(tensor.sum()) for tensor in KEPT} == {float(MIB)}
    assert (await stats_of_call(a, remote.total, value)).bytes_copied == 0
    drop_kept()
    await until(lambda: held_bytes(a.parts.memory.pool) == 0)
    assert (await stats_of_call(a, remote.total, value)).bytes_copied == value.nbytes


async def test_payload_over_half_the_limit_goes_by_socket() -> None:
    options = Options(
        limits=LimitOptions(shared_memory_bytes=16 * MIB), drain_timeout_s=2.0
    )
    async with Cluster(2, network="uds", options=options) as (a, _):
        for _ in range(3):
            stats = await stats_of_call(a, remote.total, torch.ones(2 * MIB + 1))
            assert stats.bytes_copied == 0
        assert a.parts.memory.pool.size_bytes == 0


@pytest.mark.parametrize("off", ["a", "b"])
async def test_payload_goes_by_socket_without_shared_memory(off: str) -> None:
    meeting = asyncrpc.LocalRendezvous(2)

    def worker(rank: int, name: str) -> Worker:
        limits = LimitOptions(shared_memory_bytes=0 if name == off else 1 << 30)
        options = Options(drain_timeout_s=2.0, limits=limits)
        return Worker(name, rank=rank, rendezvous=meeting, options=options)

    a, b = worker(0, "a"), worker(1, "b")
    async with started(a, b):
        for _ in range(3):
            stats = await stats_of_call(a, remote.total, torch.ones(MIB))
            assert stats.bytes_copied == 0
            mover = (await a.parts.link_to("b")).connection.payloads.mover
            if isinstance(mover, moving.SlabMover):
                await until(lambda slab_mover=mover: not slab_mover.is_busy)  # type: ignore[misc]


async def test_unused_slabs_are_returned_to_the_system(
    a: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "SWEEP_S", 3600.0)
    mover = await mover_to(a, "b")
    assert mapped_slabs() == 0
    await a.peer("b").call(remote.total, torch.ones(MIB))
    memory = a.parts.memory
    await until(lambda: memory.pool.size_bytes > 0 and bool(mover.attached))
    async with asyncio.timeout(LIMIT_S):
        while memory.pool.size_bytes:
            memory._sweep()  # noqa: SLF001  (by itself it comes each hour)
            await asyncio.sleep(0)
    assert not mover.attached
    await until(lambda: mapped_slabs() == 0)
    monkeypatch.setattr(sharing, "SWEEP_S", 30.0)
    await warm(a, "b", 4 * MIB)
    stats = await stats_of_call(a, remote.total, torch.ones(MIB))
    assert stats.bytes_copied == 4 * MIB


# --- giving up -----------------------------------------------------------------------


@pytest.mark.parametrize("turns", [0, 1, 2, 5])
async def test_call_cancelled_while_copied_never_runs(trio: Trio, turns: int) -> None:
    a, b, _ = trio
    await warm(a, "b", 32 * MIB)
    call = a.parts.start_call("b", keep, (torch.ones(8 * MIB),))
    for _ in range(turns):
        await asyncio.sleep(0)
    assert held_bytes(a.parts.memory.pool) == 32 * MIB
    call.cancel()
    await until(lambda: held_bytes(a.parts.memory.pool) == 0)
    assert not KEPT
    assert await a.peer("b").call(remote.add, 1) == 2
    assert not b.parts.active


async def test_a_deadline_passes_while_a_payload_is_copied(a: Worker) -> None:
    await warm(a, "b", 32 * MIB)
    with pytest.raises(asyncrpc.DeadlineExceededError):
        async with asyncrpc.deadline(1e-4):
            await a.peer("b").call(remote.total, torch.ones(8 * MIB))
    await until(lambda: held_bytes(a.parts.memory.pool) == 0)


async def test_small_calls_pass_a_payload_that_is_being_copied(a: Worker) -> None:
    await warm(a, "b", 128 * MIB)
    large = a.parts.start_call("b", remote.total, (torch.ones(32 * MIB),))
    assert await a.peer("b").call(remote.add_on_loop, 1) == 2
    assert not large.done()
    assert await large == 32 * MIB


async def test_end_of_a_peer_frees_its_memory() -> None:
    options = Options(drain_timeout_s=2.0)
    async with Cluster(2, network="uds", options=options) as (a, b):
        await warm(a, "b", 4 * MIB)
        await a.peer("b").call(keep, torch.ones(MIB))
        assert held_bytes(a.parts.memory.pool) == 4 * MIB
        await b.shutdown()
        await until(lambda: held_bytes(a.parts.memory.pool) == 0)
        assert KEPT[-1].sum() == MIB  # the mapping lives as long as the tensor
        drop_kept()


# --- tensors made in a slab ----------------------------------------------------------


async def test_a_tensor_of_worker_empty_is_sent_without_a_copy(a: Worker) -> None:
    value = a.empty(1024, 1024).fill_(3.0)
    await a.peer("b").call(remote.total, value)  # passes the slab, by the socket
    mover = await mover_to(a, "b")
    await until(lambda: bool(mover.attached))
    await a.peer("b").call(keep, value[512:])
    received = KEPT.pop()
    stats = await stats_of_call(a, remote.total, value)
    assert (stats.bytes_sent, stats.bytes_copied) == (value.nbytes, 0)
    value.fill_(4.0)
    assert received.sum() == 4.0 * 512 * 1024  # it is the same memory
    del value
    await until(lambda: held_bytes(a.parts.memory.pool) == 4 * MIB)
    await asyncio.sleep(0)
    assert held_bytes(a.parts.memory.pool) == 4 * MIB  # the receiver has it still
    del received
    await until(lambda: held_bytes(a.parts.memory.pool) == 0)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64]
)
async def test_worker_empty_equals_torch_empty(a: Worker, dtype: torch.dtype) -> None:
    for shape in ((300, 1000), (5,), (0, 3), ()):
        tensor = a.empty(*shape, dtype=dtype)
        assert (tensor.shape, tensor.dtype) == (torch.empty(shape).shape, dtype)
        assert tensor.is_contiguous()
    assert a.empty((300, 1000)).shape == (300, 1000)


async def test_worker_empty_in_a_thread_uses_the_same_memory(a: Worker) -> None:
    tensor = await asyncio.to_thread(a.empty, MIB)
    assert held_bytes(a.parts.memory.pool) == 4 * MIB
    del tensor
    await until(lambda: held_bytes(a.parts.memory.pool) == 0)


async def test_worker_empty_without_room_makes_a_plain_tensor(a: Worker) -> None:
    a.parts.memory.pool.limit_bytes = 16 * MIB
    tensors = [a.empty(MIB) for _ in range(6)]
    assert held_bytes(a.parts.memory.pool) == 16 * MIB
    assert tensors[5].fill_(1).sum() == MIB


# --- processes -----------------------------------------------------------------------


async def test_workers_in_processes_share_memory_with_each_other() -> None:
    async with processes("b", "c") as a:
        value = torch.randn(MIB)
        for name in ("b", "c"):
            await warm(a, name, 4 * MIB)
            assert torch.equal(await a.peer(name).call(remote.echo, value), value)
        assert a.parts.memory.pool.size_bytes == 16 * MIB  # one slab is enough for both
        assert await a.peer("c").call(mapped_slabs) >= 1
        await asyncio.gather(*(a.peer(name).call(keep, value) for name in "bbccbc"))
        sums = await asyncio.gather(*(a.peer(name).call(kept_sum) for name in "bc"))
        assert sums == [float(value.sum())] * 2
        await asyncio.gather(*(a.peer(name).call(drop_kept) for name in "bc"))
        await until(lambda: held_bytes(a.parts.memory.pool) == 0)


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
async def test_killed_receiver_holds_no_memory(signal_number: int) -> None:
    async with (cluster := processes("b", "c")) as a:
        await warm(a, "b", 4 * MIB)
        await warm(a, "c", 4 * MIB)
        await a.peer("b").call(keep, torch.ones(MIB))
        await a.peer("c").call(keep, torch.ones(MIB))
        assert held_bytes(a.parts.memory.pool) == 8 * MIB
        pending = a.parts.start_call("b", keep, (torch.ones(8 * MIB),))
        cluster.kill("b", signal_number)
        with pytest.raises(WorkerLostError):
            await pending
        await until(lambda: held_bytes(a.parts.memory.pool) == 4 * MIB)
        assert await a.peer("c").call(kept_sum) == MIB


async def test_received_tensors_outlive_a_killed_sender() -> None:
    async with (cluster := processes("b")) as a:
        result = await a.peer("b").call(torch.ones, MIB)
        await until(lambda: mapped_slabs() > 0)
        while not len(a.parts.memory.leases):
            result = await a.peer("b").call(torch.ones, MIB)
        slabs = mapped_slabs()
        cluster.kill("b")
        await until(lambda: (a.parts.directory.find("b").link) is None)
        assert result.sum() == MIB
        assert mapped_slabs() == slabs
        del result
        gc.collect()
        await until(lambda: mapped_slabs() == 0)
        assert open_slabs() == 0


async def test_slab_mapped_after_its_sender_is_gone_is_released(
    a: Worker, b: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox, came, go_on = b.parts.memory.inbox, asyncio.Event(), asyncio.Event()
    claim = inbox.claim

    async def claim_late(token: bytes) -> int:
        descriptor = await claim(token)
        came.set()
        await go_on.wait()
        return descriptor

    monkeypatch.setattr(inbox, "claim", claim_late)
    await a.peer("b").call(remote.total, torch.ones(MIB))
    await came.wait()
    await a.shutdown()
    await until(lambda: b.parts.directory.find("a").link is None)
    (attaching,) = (task for task in asyncio.all_tasks() if "._attach" in str(task))
    gc.disable()  # links are in cycles: what they hold may stay for long
    try:
        go_on.set()
        await asyncio.wait([attaching])
        assert open_slabs() == 0
        assert mapped_slabs() == 0
    finally:
        gc.enable()


async def test_shared_memory_leaves_no_files() -> None:
    before = set(FILES.iterdir())  # noqa: ASYNC240
    async with processes("b") as a:
        await warm(a, "b", 4 * MIB)
        assert set(FILES.iterdir()) == before  # noqa: ASYNC240
        directory = Path(a.addresses[0].removeprefix("uds://")).parent
        assert any(entry.name.endswith(".fd") for entry in directory.iterdir())
    assert not directory.exists()


# --- peers that break the rules ------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "value"),
    [
        ("attach", [0, 4096]),
        ("attach", [1 << 20, 4096, bytes(16)]),
        ("attach", [0, -1, bytes(16)]),
        ("attached", ["0", ""]),
        ("detach", [[5]]),
        ("detach", None),
        ("unheard of", []),
    ],
)
async def test_invalid_slab_messages_are_dropped(
    a: Worker, method: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    link = await a.parts.link_to("b")
    raw_messages.tell(link, "memory", method, value)
    assert await a.peer("b").call(remote.add, 1) == 2
    assert f"notice of 'a' could not be taken: memory.{method}" in caplog.text
    assert await a.parts.link_to("b") is link


@pytest.mark.parametrize("wire", ["uds", "mem"])
async def test_return_of_a_slab_never_lent_ends_the_connection(wire: Any) -> None:
    async with Cluster(2, network=wire, options=Options(drain_timeout_s=2.0)) as (a, _):
        (await a.parts.link_to("b")).connection.send(FrameKind.FREE, 4096)
        with pytest.raises(WorkerLostError):
            await a.peer("b").call(remote.sleep_long)


def note(notices: list[Any], method: str, _link: PeerLink, value: Any) -> None:
    notices.append((method, value))


@pytest.mark.parametrize("token", [bytes(16), b"short"])
async def test_slab_that_never_arrives_fails_its_message_only(
    a: Worker, b: Worker, token: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptors, "CLAIM_TIMEOUT_S", 0.05)
    link = await a.parts.link_to("b")
    notices: list[Any] = []
    for route in routes_of(a.parts.router, "memory"):
        route.handle = partial(note, notices, route.method)
    raw_messages.tell(link, "memory", "attach", [0, 4096, token])
    await until(lambda: bool(notices))
    assert notices == [("attached", [0, "its descriptor has not arrived"])]
    assert await a.peer("b").call(remote.add, 1) == 2
    assert not b.parts.active

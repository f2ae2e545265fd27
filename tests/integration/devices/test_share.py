"""Memory of a device that processes share: who may use it, and how long it lives."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import asyncrpc
from asyncrpc import Options, Worker, WorkerLostError
from asyncrpc.core.payloads import loans, regions
from asyncrpc.core.payloads.messages import OpenRegion
from asyncrpc.core.serde.shared import can_share
from asyncrpc.errors import EncodeError
from asyncrpc.testing import Cluster, ProcessCluster, fake_device
from tests.integration.core.groups import until
from tests.integration.devices.accelerators import IS_FAKE, TYPE, set_up

HOME = f"{TYPE}:0"
KEPT: list[Any] = []

set_up()
is_shareable = can_share(torch.empty(0, device=HOME).device)
needs_sharing = pytest.mark.skipif(
    not is_shareable, reason=f"processes cannot share memory of {TYPE}"
)


def on_device(host: torch.Tensor) -> torch.Tensor:
    """Return a copy on the device that processes can share."""
    return fake_device.in_shared_memory(host) if IS_FAKE else host.to(HOME)


def keep(value: Any) -> None:
    KEPT.append(value)


def kept_sum() -> float:
    return float(KEPT[-1].cpu().sum())


def drop_kept() -> None:
    KEPT.clear()
    gc.collect()


def add_in_place(value: torch.Tensor, amount: float) -> None:
    value.add_(amount)
    if TYPE == "cuda":
        torch.cuda.synchronize()


def make_shared(size: int) -> torch.Tensor:
    return asyncrpc.share(on_device(torch.ones(size)))


def back() -> torch.Tensor:
    value: torch.Tensor = KEPT[-1]
    return value


async def pass_on(name: str) -> None:
    await asyncrpc.current_worker().peer(name).call(keep, KEPT[-1])


async def close_its_connections() -> None:
    """Leave the group in all but name: its process, and what it holds, lives on."""
    worker: Any = asyncrpc.current_worker()
    for connection in tuple(worker.parts.directory.connections.live):
        connection.close()


def processes(*names: str) -> ProcessCluster:
    options = Options(drain_timeout_s=2.0)
    return ProcessCluster(names, options=options, method="forkserver")


@pytest.fixture
async def a(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Worker, Any]]:
    """A worker here, and `b` and `c` in processes of their own."""
    monkeypatch.setattr(regions, "IDLE_S", 0.05)
    cluster = processes("b", "c")
    async with cluster as worker:
        for name in cluster.names:
            await worker.peer(name).call(set_up_there)
        yield worker, cluster
    KEPT.clear()


def set_up_there() -> None:
    set_up()
    regions.IDLE_S = 0.05  # type: ignore[misc]


@needs_sharing
async def test_write_is_seen_by_the_other_process(a: Any) -> None:
    worker, _ = a
    value = asyncrpc.share(on_device(torch.zeros(1000)))
    there = worker.peer("b")
    await there.call(keep, value)
    assert await there.call(kept_sum) == 0
    await there.call(add_in_place, value[10:20], 2.0)
    assert value.cpu().sum() == 20
    value += 1
    if TYPE == "cuda":
        torch.cuda.synchronize()
    assert await there.call(kept_sum) == 1020
    call = worker.parts.start_call("b", add_in_place, (value, 1.0))
    await call
    assert call.stats.bytes_sent < 200
    assert call.stats.bytes_copied == 0


@needs_sharing
async def test_memory_lives_while_another_process_holds_it(a: Any) -> None:
    worker, _ = a
    value = asyncrpc.share(on_device(torch.ones(1000)))
    memory = weakref.ref(value.untyped_storage())
    lent = worker.parts.memory.regions.loans
    await worker.peer("b").call(keep, value)
    await worker.peer("c").call(keep, value)
    assert len(lent) == 2
    del value
    gc.collect()
    await until(lambda: not len(worker.parts.memory.regions))
    assert memory() is not None
    assert await worker.peer("b").call(kept_sum) == 1000
    mine = await worker.peer("b").call(back)  # it is the worker's own again
    assert mine.untyped_storage() is memory()
    mine += 1
    if TYPE == "cuda":
        torch.cuda.synchronize()
    assert await worker.peer("c").call(kept_sum) == 2000
    del mine
    await worker.peer("b").call(drop_kept)
    await until(lambda: len(lent) == 1)
    await worker.peer("c").call(drop_kept)
    await until(lambda: not len(lent))
    await until(lambda: memory() is None)


@needs_sharing
@pytest.mark.parametrize("dies", [True, False])
async def test_killed_worker_holds_no_memory_and_a_cut_off_one_does(
    a: Any,
    dies: bool,  # noqa: FBT001
) -> None:
    worker, cluster = a
    value = asyncrpc.share(on_device(torch.ones(1000)))
    memory = weakref.ref(value.untyped_storage())
    lent = worker.parts.memory.regions.loans
    await worker.peer("b").call(keep, value)
    del value
    assert len(lent) == 1
    if dies:
        cluster.kill("b", signal.SIGKILL)
        with pytest.raises(WorkerLostError):
            await worker.peer("b").call(kept_sum)
        await until(lambda: not len(lent))
        await until(lambda: memory() is None)
    else:
        with pytest.raises(asyncrpc.AsyncRpcError):
            await worker.peer("b").call(close_its_connections)
        await until(lambda: not len(worker.parts.memory.regions))
        assert len(lent) == 1
        assert memory() is not None


@needs_sharing
async def test_shared_result_is_writable_by_its_maker(a: Any) -> None:
    worker, _ = a
    value = await worker.peer("b").call(make_shared, 100)
    assert str(value.device) == HOME
    await worker.peer("b").call(add_in_place, value, 1.0)
    assert value.cpu().sum() == 200


@needs_sharing
async def test_shared_memory_is_sent_by_its_owner_only(a: Any) -> None:
    worker, _ = a
    value = asyncrpc.share(on_device(torch.ones(10)))
    await worker.peer("b").call(keep, value)
    with pytest.raises(EncodeError, match=r"only the worker that shares memory.*clone"):
        await worker.peer("b").call(pass_on, "c")
    await worker.peer("c").call(keep, value)
    assert await worker.peer("c").call(kept_sum) == 10


@needs_sharing
async def test_closed_loans_stay_with_their_holders() -> None:
    cluster = processes("b")
    async with cluster as worker:
        await worker.peer("b").call(set_up_there)
        value = asyncrpc.share(on_device(torch.ones(1000)))
        memory = weakref.ref(value.untyped_storage())
        await worker.peer("b").call(keep, value)
        del value
        loans = worker.parts.memory.regions.loans
        loans.close()  # as when the worker closes before `b`
        gc.collect()
        assert await worker.peer("b").call(kept_sum) == 1000
        assert memory() is not None
    await until(lambda: memory() is None)  # its process has ended


@needs_sharing
async def test_loans_beyond_the_limit_are_refused(
    a: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, _ = a
    monkeypatch.setattr(loans, "LOANS_MAX", 1)
    first, second = (asyncrpc.share(on_device(torch.ones(10))) for _ in range(2))
    await worker.peer("b").call(keep, first)
    with pytest.raises(EncodeError, match="at most 1 pieces of device memory"):
        await worker.peer("b").call(keep, second)


@needs_sharing
async def test_peer_without_the_device_refuses_shared_memory(a: Any) -> None:
    worker, _ = a
    value = asyncrpc.share(on_device(torch.ones(10)))
    with pytest.raises(EncodeError, match="nowhere:0"):
        await _sent_as(worker, value, "nowhere:0")
    await until(lambda: not len(worker.parts.memory.regions.loans))
    assert await worker.peer("b").call(os.getpid)


async def _sent_as(worker: Worker, value: torch.Tensor, device: str) -> None:
    """Send a tensor as one of another device."""
    memory: Any = worker.parts.memory.regions
    asking = memory._ask  # noqa: SLF001

    async def ask(link: Any, request: Any) -> Any:
        if isinstance(request, OpenRegion):
            request = replace(request, device=device)
        return await asking(link, request)

    memory._ask = ask  # noqa: SLF001
    await worker.peer("b").call(keep, value)


@needs_sharing
async def test_sharing_within_a_process_is_refused_on_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA cannot; the device made of host memory can, and lets go all the same."""
    monkeypatch.setattr(regions, "IDLE_S", 0.05)
    async with Cluster(2, network="uds") as (worker, _):
        value = asyncrpc.share(on_device(torch.ones(10)))
        if not IS_FAKE:
            with pytest.raises(EncodeError, match="process that made it"):
                await worker.peer("b").call(keep, value)
            return
        await worker.peer("b").call(keep, value)
        await worker.peer("b").call(add_in_place, value, 1.0)
        assert KEPT[-1].data_ptr() != value.data_ptr()
        assert kept_sum() == 20
        drop_kept()
        await until(lambda: not len(worker.parts.memory.regions.loans))


@pytest.mark.skipif(is_shareable, reason="this one's can be")
def test_sharing_from_an_unsupported_device_is_refused() -> None:
    with pytest.raises(asyncrpc.UsageError, match=f"'{HOME}' cannot be shared"):
        asyncrpc.share(torch.empty(2, device=HOME))

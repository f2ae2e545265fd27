"""Memory is used again when nothing refers to it any more, and only then."""

from __future__ import annotations

import asyncio
import gc
import threading

import numpy as np
import pytest
import torch

from asyncrpc import LimitOptions, Options, UsageError
from asyncrpc.core.payloads import receive_pool
from asyncrpc.core.payloads.receive_pool import POOLED_BYTES_MIN, ReceivePool
from asyncrpc.testing.loop import SimLoop

MIB = 1 << 20
LIMIT = 64 * MIB


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def pool_of(limit_bytes: int = LIMIT) -> ReceivePool:
    return ReceivePool(asyncio.get_running_loop(), limit_bytes)


class TestReuse:
    async def test_freed_block_is_reused(self) -> None:
        pool = pool_of()
        view = pool.make(8 * MIB)
        where = address(view)
        del view
        assert pool.idle_bytes == 8 * MIB
        again = pool.make(8 * MIB - 5)
        assert address(again) == where
        assert again.nbytes == 8 * MIB - 5
        assert not again.readonly
        assert pool.idle_bytes == 0
        pool.close()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
    async def test_block_is_not_reused_while_a_view_lives(
        self, dtype: torch.dtype
    ) -> None:
        """However far the view is from what was given out."""
        pool = pool_of()
        view = pool.make(2 * MIB)
        array = np.ndarray((2 * MIB,), np.uint8, view)
        tensor = torch.from_numpy(array).view(dtype)
        last = tensor[5:9].detach().view(2, 2).t()
        slice_of_it = view[100:200]
        del view, array, tensor
        gc.collect()
        assert pool.idle_bytes == 0
        storage = last.untyped_storage()
        del last
        assert pool.idle_bytes == 0
        del storage
        assert pool.idle_bytes == 0
        kept = np.frombuffer(slice_of_it, np.uint8)[3:]
        del slice_of_it
        assert pool.idle_bytes == 0
        del kept
        assert pool.idle_bytes == 2 * MIB
        pool.close()

    async def test_concurrent_blocks_share_nothing(self) -> None:
        pool = pool_of()
        first, two = pool.make(2 * MIB), pool.make(2 * MIB)
        first[:] = b"1" * first.nbytes
        two[:] = b"2" * two.nbytes
        assert bytes(first[:9]) == b"1" * 9
        assert bytes(first[-9:]) == b"1" * 9
        pool.close()

    async def test_small_blocks_are_left_to_the_allocator(self) -> None:
        pool = pool_of()
        for nbytes in (0, 1, POOLED_BYTES_MIN - 1):
            assert pool.make(nbytes).nbytes == nbytes
        assert pool.idle_bytes == 0

    async def test_limit_of_zero_keeps_nothing(self) -> None:
        pool = pool_of(0)
        assert pool.make(4 * MIB).nbytes == 4 * MIB
        assert pool.idle_bytes == 0

    async def test_closed_pool_keeps_nothing(self) -> None:
        pool = pool_of()
        view, kept = pool.make(4 * MIB), pool.make(4 * MIB)
        del view
        pool.close()
        assert pool.idle_bytes == 0
        assert kept.nbytes == 4 * MIB
        del kept
        assert pool.idle_bytes == 0
        assert pool.make(4 * MIB).nbytes == 4 * MIB


def test_limit_below_zero_is_refused() -> None:
    with pytest.raises(UsageError, match="receive_pool_bytes"):
        Options(limits=LimitOptions(receive_pool_bytes=-1))


class TestThreads:
    async def test_tensor_may_die_in_any_thread(self) -> None:
        pool = pool_of()
        held = [pool.make(MIB) for _ in range(32)]
        threads = [threading.Thread(target=held.pop) for _ in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert pool.idle_bytes == 32 * MIB
        pool.close()

    def test_tensor_may_outlive_the_loop(self) -> None:
        async def make() -> tuple[ReceivePool, list[memoryview]]:
            pool = pool_of()
            return pool, [pool.make(MIB), pool.make(MIB)]

        pool, views = asyncio.run(make())
        views.clear()
        assert not pool._returned  # noqa: SLF001  (nothing of it may pile up)


class TestTime:
    loops = {"virtual": SimLoop}  # noqa: RUF012

    async def test_idle_memory_is_freed_by_a_timer(self) -> None:
        pool = pool_of()
        early, late = pool.make(MIB), pool.make(2 * MIB)
        del early
        await asyncio.sleep(receive_pool.IDLE_S / 2)
        del late
        await asyncio.sleep(receive_pool.IDLE_S * 0.75)
        assert pool.idle_bytes == 2 * MIB
        await asyncio.sleep(receive_pool.IDLE_S / 2)
        assert pool.idle_bytes == 0

    async def test_empty_pool_has_no_timer(self) -> None:
        pool = pool_of()
        view = pool.make(MIB)
        assert pool._timer is None  # noqa: SLF001
        del view
        await asyncio.sleep(0)
        assert pool._timer is not None  # noqa: SLF001
        await asyncio.sleep(2 * receive_pool.IDLE_S)
        assert pool._timer is None  # noqa: SLF001

    async def test_reused_memory_is_not_freed_by_the_timer(self) -> None:
        pool = pool_of()
        view = pool.make(MIB)
        del view
        await asyncio.sleep(receive_pool.IDLE_S / 2)
        view = pool.make(MIB)
        view[:] = b"x" * MIB
        await asyncio.sleep(2 * receive_pool.IDLE_S)
        assert pool.idle_bytes == 0
        assert bytes(view) == b"x" * MIB

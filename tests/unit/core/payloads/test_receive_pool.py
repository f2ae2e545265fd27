"""Memory for payloads: pooled, leased, claimed by a caller, and filled in turns."""

from __future__ import annotations

import asyncio
import gc
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from asyncrpc import LimitOptions, Options, UsageError
from asyncrpc.core.payloads import receive_pool
from asyncrpc.core.payloads.mover import COPY_PIECE_BYTES, Copying, CopyQueue
from asyncrpc.core.payloads.receive_pool import (
    POOLED_BYTES_MIN,
    IncomingPayloads,
    ReceivePool,
    fresh,
)
from asyncrpc.core.payloads.sharing import Leases
from asyncrpc.core.shm.slab import Slab
from asyncrpc.core.wire.frames import FrameKind
from asyncrpc.core.wire.limits import MessageLimits
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


PLACE_BYTES = 4096


class Lenders:
    """Takes places back; the loop of these tests is closed, so none comes."""

    def take_back(self, locations: list[int]) -> None:
        pytest.fail(f"{locations} came back after the loop")


def drop_here(views: list[Any]) -> None:
    views.clear()


def drop_in_a_thread(views: list[Any]) -> None:
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()


@pytest.mark.parametrize("drop", [drop_here, drop_in_a_thread])
def test_shared_block_may_die_after_the_loop(drop: Any) -> None:
    """A program may keep a tensor for longer than the worker that received it."""
    loop = asyncio.new_event_loop()
    leases = Leases(loop)
    slab = Slab.create(PLACE_BYTES)
    views = [leases.lend(Lenders(), slab, 0, PLACE_BYTES)]
    assert len(leases) == 1
    loop.close()
    drop(views)
    assert not leases.dead


PIECES = 3


def source(byte: int, pieces: int = PIECES) -> memoryview:
    return memoryview(bytes([byte]) * (pieces * COPY_PIECE_BYTES - 1))


def target() -> memoryview:
    return memoryview(bytearray(PIECES * COPY_PIECE_BYTES - 1))


class TestQueue:
    loops = {"sim": SimLoop}  # noqa: RUF012  (read once, by the conftest)

    async def test_copies_take_turns_piece_by_piece(self) -> None:
        queue = CopyQueue(asyncio.get_running_loop())
        whole: list[int] = []
        targets = [target(), target()]
        for number, place in enumerate(targets):
            copies = [(place, source(number + 1))]
            queue.add(Copying(copies, partial(whole.append, number)))
        assert targets[0][COPY_PIECE_BYTES - 1] == 1  # the first piece, at once
        assert targets[0][COPY_PIECE_BYTES] == 0
        assert targets[1][0] == 0
        for _ in range(2 * PIECES - 1):
            await asyncio.sleep(0)
        assert whole == [0, 1]
        assert [bytes(place) for place in targets] == [
            bytes(source(1)),
            bytes(source(2)),
        ]

    async def test_removed_copy_is_copied_no_further(self) -> None:
        queue = CopyQueue(asyncio.get_running_loop())
        place, whole = target(), []
        copying = Copying([(place, source(1))], lambda: whole.append(1))
        queue.add(copying)
        queue.remove(copying)
        for _ in range(2 * PIECES):
            await asyncio.sleep(0)
        assert place[COPY_PIECE_BYTES] == 0
        assert whole == []


def test_short_copies_share_a_piece() -> None:
    places = [memoryview(bytearray(3)) for _ in range(4)]
    copying = Copying([(place, memoryview(b"abc")) for place in places], lambda: None)
    assert copying.step()
    assert [bytes(place) for place in places] == [b"abc"] * 4


class Nobody:
    def on_message(self, *_message: object) -> None:
        raise AssertionError

    def on_transfer_dropped(self, kind: int, call_id: int) -> None:
        raise AssertionError


def incoming_with(nbytes: int) -> tuple[IncomingPayloads, memoryview]:
    incoming = IncomingPayloads(Nobody(), MessageLimits(), fresh)
    claimed = memoryview(bytearray(nbytes))
    incoming.claim(7, claimed)
    return incoming, claimed


class TestClaims:
    def test_single_buffer_of_the_response_lands_in_the_claim(self) -> None:
        incoming, claimed = incoming_with(10)
        assert incoming.allocate(FrameKind.RESPONSE, 7, (10,))[0] is claimed

    @pytest.mark.parametrize(
        ("kind", "call_id", "lengths"),
        [
            (FrameKind.RESPONSE, 8, (10,)),
            (FrameKind.REQUEST, 7, (10,)),
            (FrameKind.ERROR, 7, (10,)),
            (FrameKind.RESPONSE, 7, (9,)),
            (FrameKind.RESPONSE, 7, (11,)),
            (FrameKind.RESPONSE, 7, (5, 5)),
            (FrameKind.RESPONSE, 7, (10, 0)),
        ],
    )
    def test_other_messages_do_not_land_in_the_claim(
        self, kind: int, call_id: int, lengths: tuple[int, ...]
    ) -> None:
        incoming, claimed = incoming_with(10)
        buffers = incoming.allocate(kind, call_id, lengths)
        assert [buffer.nbytes for buffer in buffers] == list(lengths)
        assert all(buffer is not claimed for buffer in buffers)

    def test_released_claim_is_not_used(self) -> None:
        incoming, claimed = incoming_with(10)
        incoming.release_claim(7)
        assert incoming.allocate(FrameKind.RESPONSE, 7, (10,))[0] is not claimed

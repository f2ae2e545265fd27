"""Fresh memory has its pages before the loop writes to it; nobody waits in vain."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
from collections.abc import AsyncIterator

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio

from asyncrpc.core.loop.threads import Done, Job, ThreadPool
from asyncrpc.core.payloads import prefaulting as module
from asyncrpc.core.payloads.prefaulting import (
    AHEAD_BYTES_MAX,
    STEP_BYTES,
    Prefaulting,
)
from asyncrpc.core.payloads.receive_pool import ReceivePool
from asyncrpc.core.shm.slab import populate
from asyncrpc.errors import ClosedError, RejectedError

MIB = 1 << 20
SIZE = 4 * STEP_BYTES
Bytes = npt.NDArray[np.uint8]


class HeldPool:
    """A pool whose jobs run when the test says so, in the test's own thread."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Job, Done]] = []
        self.is_closed = False

    def submit(self, job: Job, done: Done) -> None:
        if self.is_closed:
            raise RejectedError("the worker is closing")
        self.jobs.append((job, done))

    async def run(self) -> None:
        """Run the first job, as a thread does; let the loop hear of it."""
        job, done = self.jobs.pop(0)
        done(job(), None)
        heard = asyncio.Event()
        asyncio.get_running_loop().call_soon_threadsafe(heard.set)
        await heard.wait()


def fresh(nbytes: int = SIZE) -> Bytes:
    """Return memory without a page, all zeros."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return np.frombuffer(mmap.mmap(-1, nbytes, flags), np.uint8)


def begin(pages: Prefaulting, memory: Bytes) -> None:
    """Take memory whose payload comes at once."""
    pages.begin(memory)
    pages.is_ready(memory.data, lambda: None)


def resident(memory: Bytes) -> int:
    """Return how many pages of memory there are; see mincore(2)."""
    vector = (ctypes.c_ubyte * (memory.nbytes // mmap.PAGESIZE))()
    library = ctypes.CDLL(None, use_errno=True)
    library.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    result = library.mincore(memory.ctypes.data, memory.nbytes, vector)
    assert not result, ctypes.get_errno()
    return sum(byte & 1 for byte in vector)


@pytest.fixture
def pool() -> HeldPool:
    return HeldPool()


@pytest_asyncio.fixture
async def pages(pool: HeldPool) -> AsyncIterator[Prefaulting]:
    prefaulting = Prefaulting(asyncio.get_running_loop(), pool.submit)
    yield prefaulting
    prefaulting.close()


class TestReady:
    async def test_memory_is_ready_before_a_thread_has_begun(
        self, pool: HeldPool, pages: Prefaulting
    ) -> None:
        """All threads may be busy with functions that wait for this payload."""
        memory = fresh()
        begin(pages, memory)
        assert pool.jobs
        assert pages.is_ready(memory.data, pytest.fail)

    async def test_memory_with_pages_is_ready_and_the_rest_is_not(
        self, pool: HeldPool, pages: Prefaulting, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        memory = fresh()
        view = memory.data
        other = memoryview(bytearray(100))
        notified: list[int] = []
        steps: list[int] = []

        def step(address: int, nbytes: int) -> bool:
            begun = address - memory.ctypes.data
            steps.append(nbytes)
            if begun:
                assert pages.is_ready(view[:begun], pytest.fail)
            assert pages.is_ready(other, pytest.fail)
            assert not pages.is_ready(
                view[begun : begun + 1], lambda: notified.append(1)
            )
            assert not pages.is_ready(
                view[max(begun - 1, 0) :], lambda: notified.append(2)
            )
            return populate(address, nbytes)

        monkeypatch.setattr(module, "populate", step)
        begin(pages, memory)
        await pool.run()
        assert sum(steps) == SIZE
        assert max(steps) == STEP_BYTES
        assert (memory.ctypes.data + steps[0]) % STEP_BYTES == 0
        assert pages.is_ready(view, pytest.fail)
        assert sorted(notified) == [1] * len(steps) + [2] * len(steps)

    async def test_waiter_is_notified_once_its_part_has_pages(self) -> None:
        loop = asyncio.get_running_loop()
        threads = ThreadPool("of a test", 1, loop)
        pages = Prefaulting(loop, threads.submit)
        memory = fresh()
        begin(pages, memory)
        for at in range(0, SIZE, MIB):
            part = memory.data[at : at + MIB]
            notified = asyncio.Event()
            while not pages.is_ready(part, notified.set):
                await notified.wait()
                notified.clear()
        pages.close()
        await threads.close(10.0)

    async def test_single_thread_prefaults_all_memory_in_order(
        self, pool: HeldPool, pages: Prefaulting, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first, second, third = fresh(), fresh(), fresh()
        order: list[int] = []

        def step(address: int, nbytes: int) -> bool:
            if not order:
                begin(pages, third)
                for other in (second, third):
                    assert not pages.is_ready(other.data, lambda: None)
            order.append(address)
            return populate(address, nbytes)

        monkeypatch.setattr(module, "populate", step)
        begin(pages, first)
        begin(pages, second)
        assert pages.is_ready(second.data, lambda: None)
        await pool.run()
        assert not pool.jobs
        starts = [block.ctypes.data for block in (first, second, third)]
        assert [start for start in order if start in starts] == starts
        for memory in (first, second, third):
            assert resident(memory) == SIZE // mmap.PAGESIZE

    async def test_ended_thread_begins_anew(
        self, pool: HeldPool, pages: Prefaulting
    ) -> None:
        begin(pages, fresh())
        await pool.run()
        memory = fresh()
        begin(pages, memory)
        assert pages.is_ready(memory.data, pytest.fail)
        await pool.run()
        assert resident(memory) == SIZE // mmap.PAGESIZE

    async def test_memory_is_ready_where_no_threads_exist(
        self, pool: HeldPool, pages: Prefaulting
    ) -> None:
        pool.is_closed = True
        memory = fresh()
        begin(pages, memory)
        assert pages.is_ready(memory.data, pytest.fail)
        pool.is_closed = False  # a thread can be had again
        later = fresh()
        begin(pages, later)
        await pool.run()
        assert resident(later) == SIZE // mmap.PAGESIZE
        assert not resident(memory)

    async def test_memory_is_ready_once_a_thread_has_failed(
        self, pool: HeldPool, pages: Prefaulting, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: int) -> bool:
            raise MemoryError

        monkeypatch.setattr(module, "populate", fail)
        notified: list[bool] = []
        memory, after = fresh(), fresh()
        begin(pages, memory)
        begin(pages, after)
        job, done = pool.jobs.pop()
        with pytest.raises(MemoryError):
            job()
        assert not pages.is_ready(after.data, lambda: notified.append(True))
        with pytest.raises(MemoryError):  # it is reported, by the pool's loop
            done(None, MemoryError())
        assert notified
        assert pages.is_ready(after.data, pytest.fail)

    async def test_end_of_the_worker_is_no_failure(
        self, pool: HeldPool, pages: Prefaulting
    ) -> None:
        memory = fresh()
        begin(pages, memory)
        _, done = pool.jobs.pop()
        done(None, ClosedError("the worker was shut down before it ran"))
        assert pages.is_ready(memory.data, pytest.fail)

    async def test_memory_is_ready_where_the_kernel_refuses(
        self, pool: HeldPool, pages: Prefaulting, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tries: list[int] = []
        memory = fresh()

        def refuse(address: int, _: int) -> bool:
            tries.append(address)
            return False

        monkeypatch.setattr(module, "populate", refuse)
        begin(pages, memory)
        await pool.run()
        assert tries == [memory.ctypes.data]
        assert pages.is_ready(memory.data, pytest.fail)


class TestAhead:
    async def test_announced_memory_gets_no_pages_before_data_arrives(
        self, pool: HeldPool, pages: Prefaulting
    ) -> None:
        for _ in range(100):
            pages.begin(fresh())
        assert not pool.jobs

    async def test_pages_are_made_ahead_in_proportion_to_received_data(
        self, pool: HeldPool, pages: Prefaulting
    ) -> None:
        memory = fresh(64 * STEP_BYTES)
        pages.begin(memory)
        for end in range(STEP_BYTES, 64 * STEP_BYTES + 1, STEP_BYTES):
            pages.is_ready(memory.data[end - STEP_BYTES : end], lambda: None)
            if pool.jobs:
                await pool.run()
            resident_bytes = resident(memory) * mmap.PAGESIZE
            assert end <= resident_bytes <= end + min(end, AHEAD_BYTES_MAX) + STEP_BYTES
        assert resident(memory) == memory.nbytes // mmap.PAGESIZE

    async def test_data_far_ahead_makes_its_own_pages(
        self, pool: HeldPool, pages: Prefaulting
    ) -> None:
        memory = fresh(64 * STEP_BYTES)
        pages.begin(memory)
        assert pages.is_ready(memory.data[-1:], pytest.fail)
        assert not pool.jobs

    async def test_forgotten_memory_gets_no_pages(
        self, pool: HeldPool, pages: Prefaulting
    ) -> None:
        memory = fresh()
        pages.begin(memory)
        pages.forget(memory)
        assert pages.is_ready(memory.data, pytest.fail)
        assert not pool.jobs


class TestClosing:
    async def test_closing_wakes_waiters_and_ends_the_thread(
        self, pool: HeldPool, pages: Prefaulting, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        memory = fresh()
        notified: list[int] = []
        steps: list[int] = []

        def close(address: int, nbytes: int) -> bool:
            steps.append(nbytes)
            assert not pages.is_ready(memory.data, lambda: notified.append(1))
            pages.close()
            return populate(address, nbytes)

        monkeypatch.setattr(module, "populate", close)
        begin(pages, memory)
        await pool.run()
        assert len(steps) == 1
        assert notified == [1]
        assert pages.is_ready(memory.data, pytest.fail)


class TestPages:
    async def test_thread_makes_all_pages_and_keeps_written_data(self) -> None:
        loop = asyncio.get_running_loop()
        threads = ThreadPool("of a test", 1, loop)
        pages = Prefaulting(loop, threads.submit)
        memory = fresh()
        assert resident(memory) == 0
        memory[: STEP_BYTES : mmap.PAGESIZE] = 7
        ended = asyncio.Event()
        begin(pages, memory)
        threads.submit(lambda: None, lambda *_: ended.set())  # after it
        await ended.wait()
        assert resident(memory) == SIZE // mmap.PAGESIZE
        assert (memory[: STEP_BYTES : mmap.PAGESIZE] == 7).all()
        assert not memory[STEP_BYTES :: mmap.PAGESIZE].any()
        pages.close()
        await threads.close(10.0)


class TestPool:
    async def test_long_fresh_blocks_alone_are_prefaulted(self, pool: HeldPool) -> None:
        loop = asyncio.get_running_loop()
        memory = ReceivePool(loop, 64 * MIB, Prefaulting(loop, pool.submit))
        small = memory.make(2 * MIB)
        assert memory.is_ready(small, pytest.fail)
        assert not pool.jobs
        large = memory.make(8 * MIB)
        assert memory.is_ready(large, pytest.fail)
        assert len(pool.jobs) == 1
        await pool.run()
        del large, small
        await asyncio.sleep(0)
        again = memory.make(8 * MIB)
        assert not pool.jobs
        assert memory.is_ready(again, pytest.fail)
        memory.close()

    async def test_pool_without_threads_has_all_memory_ready(self) -> None:
        memory = ReceivePool(asyncio.get_running_loop(), 64 * MIB)
        assert memory.is_ready(memory.make(8 * MIB), pytest.fail)
        memory.close()

"""Shared memory: slabs, the lock in it, and descriptors that are passed beside it."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrpc.core.serde.shared import seal
from asyncrpc.core.shm.channel import RobustMutex
from asyncrpc.core.shm.machine.pool import HUGE_PAGE_BYTES
from asyncrpc.core.shm.passing import DescriptorPassage, close_all, new_pair
from asyncrpc.core.shm.slab import Slab
from asyncrpc.errors import MalformedError

SIZE_BYTES = 4 << 20


def mappings() -> int:
    return (
        Path("/proc/self/maps").read_text(encoding="ascii").count("memfd:asyncrpc-slab")
    )


def test_both_mappings_see_the_same_memory() -> None:
    ours = Slab.create(SIZE_BYTES).prefault()
    theirs = Slab.attach(os.dup(ours.descriptor), SIZE_BYTES).prefault()
    ours.view(ours, 100, 3)[:] = b"abc"
    theirs.view(theirs, 102, 3)[:] = b"xyz"
    assert bytes(ours.view(ours, 100, 6)) == b"abxyz\0"
    assert theirs.descriptor == -1


@pytest.mark.parametrize("nbytes", [4096, HUGE_PAGE_BYTES, SIZE_BYTES // 4 * 3])
@pytest.mark.parametrize("start", [0, 4096, HUGE_PAGE_BYTES // 2, HUGE_PAGE_BYTES])
def test_prefault_makes_every_page_and_keeps_content(start: int, nbytes: int) -> None:
    slab = Slab.create(2 * SIZE_BYTES)
    slab.view(slab, start, 3)[:] = b"abc"
    slab.prefault_part(start, nbytes)
    assert os.fstat(slab.descriptor).st_blocks * 512 >= nbytes
    assert bytes(slab.view(slab, start, 4)) == b"abc\0"


def test_slab_starts_at_a_huge_page_boundary() -> None:
    assert Slab.create(SIZE_BYTES).address % HUGE_PAGE_BYTES == 0


def test_slab_cannot_be_shrunk_by_another_process() -> None:
    slab = Slab.create(SIZE_BYTES)
    with pytest.raises(PermissionError):
        os.ftruncate(slab.descriptor, 0)


def test_view_keeps_the_mapping_alive_until_it_ends() -> None:
    slab = Slab.create(SIZE_BYTES)
    view = slab.view(slab, 0, 10)
    descriptor = slab.descriptor
    del slab
    gc.collect()
    view[:] = bytes(10)
    assert mappings() == 1
    del view
    assert mappings() == 0
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)


def unsealed() -> tuple[int, int]:
    descriptor = os.memfd_create("x", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, SIZE_BYTES)
    return descriptor, SIZE_BYTES


def shorter_than_said() -> tuple[int, int]:
    slab = Slab.create(SIZE_BYTES)  # whose end closes it
    return os.dup(slab.descriptor), 2 * SIZE_BYTES


def no_memory_at_all() -> tuple[int, int]:
    reading, writing = os.pipe()
    os.close(writing)
    return reading, SIZE_BYTES


def of_huge_pages() -> tuple[int, int]:
    """There may be none: then whoever touches it ends with SIGBUS."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB
    descriptor = os.memfd_create("x", flags)
    os.ftruncate(descriptor, HUGE_PAGE_BYTES)
    seal(descriptor)
    return descriptor, HUGE_PAGE_BYTES


@pytest.mark.parametrize(
    "make", [unsealed, shorter_than_said, of_huge_pages, no_memory_at_all]
)
def test_malformed_slab_is_refused_and_closed(make: object) -> None:
    assert callable(make)
    descriptor, size_bytes = make()
    with pytest.raises(MalformedError):
        Slab.attach(descriptor, size_bytes)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)


REPOSITORY = Path(__file__).parents[4]
HOLDER = """
import signal, sys
from asyncrpc.core.shm.channel import RobustMutex
from asyncrpc.core.shm.slab import Slab

slab = Slab(int(sys.argv[1]), 4096)
RobustMutex(slab.address).acquire()
print("held", flush=True)
signal.pause()
"""


@pytest.fixture
def slab() -> Iterator[Slab]:
    mutex_slab = Slab.create(4096)
    RobustMutex(mutex_slab.address).create()
    yield mutex_slab
    mutex_slab.close_descriptor()


def take_and_release(mutex: RobustMutex) -> None:
    mutex.acquire()
    mutex.release()


def test_mutex_admits_one_thread_at_a_time(slab: Slab) -> None:
    mutex = RobustMutex(slab.address)
    counts = [0]

    def count() -> None:
        for _ in range(2000):
            mutex.acquire()
            counts[0] = counts[0] + 1
            mutex.release()

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [8000]


def test_mutex_refuses_a_second_acquire_and_a_foreign_release(slab: Slab) -> None:
    mutex = RobustMutex(slab.address)
    mutex.release()  # nobody has it
    mutex.acquire()
    with pytest.raises(OSError) as caught:  # noqa: PT011  its number is looked at
        mutex.acquire()
    assert caught.value.errno == errno.EDEADLK
    stranger = threading.Thread(target=mutex.release)
    stranger.start()
    stranger.join()
    with pytest.raises(OSError, match="lock in shared memory"):
        mutex.acquire()
    mutex.release()
    mutex.acquire()
    mutex.release()


def test_mutex_is_free_after_its_holder_was_killed(slab: Slab) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(slab.descriptor)],
        pass_fds=[slab.descriptor],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        mutex = RobustMutex(slab.address)
        waiting = threading.Thread(target=take_and_release, args=(mutex,))
        waiting.start()
        holder.send_signal(signal.SIGKILL)
        waiting.join(60.0)
        assert not waiting.is_alive()
    mutex.acquire()  # and usable as before
    mutex.release()


@pytest.fixture
def passage() -> Iterator[DescriptorPassage]:
    ends = new_pair()
    yield DescriptorPassage(ends)
    close_all(ends)


@pytest.fixture
def file() -> Iterator[int]:
    descriptor = os.memfd_create("passed")
    yield descriptor
    os.close(descriptor)


def inode(descriptor: int) -> int:
    return os.fstat(descriptor).st_ino


def test_many_descriptors_arrive_in_order(
    passage: DescriptorPassage, file: int
) -> None:
    other = os.memfd_create("other")
    assert passage.send((1, 5), [file] * 599 + [other])
    descriptors = passage.peek((1, 5), 600)
    descriptors += passage.take_rest(600)
    assert [inode(descriptor) for descriptor in descriptors] == [inode(file)] * 599 + [
        inode(other)
    ]
    close_all([*descriptors, other])


def test_peek_takes_nothing(passage: DescriptorPassage, file: int) -> None:
    passage.send((1, 1), [file])
    for _ in range(3):
        descriptors = passage.peek((1, 1), 1)
        assert [inode(descriptor) for descriptor in descriptors] == [inode(file)]
        close_all(descriptors)
    assert passage.take_rest(1) == []
    with pytest.raises(BlockingIOError):
        passage.peek((1, 1), 1)


def test_descriptors_of_unsent_items_are_dropped(
    passage: DescriptorPassage, file: int
) -> None:
    passage.send((1, 7), [file] * 300)  # never put: its sender was killed
    passage.send((2, 7), [file])
    descriptors = passage.peek((2, 7), 1)
    assert len(descriptors) == 1
    close_all(descriptors)


def test_full_passage_refuses_a_send(passage: DescriptorPassage, file: int) -> None:
    sent = 0
    while passage.send((1, sent), [file]):
        sent += 1
        assert sent < 100_000
    assert sent > 10
    for serial in range(sent):
        close_all(passage.peek((1, serial), 1))
        passage.take_rest(1)

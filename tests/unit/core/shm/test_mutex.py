"""The lock in shared memory: one holder, and none when it is dead."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrpc.core.shm.mutex import RobustMutex
from asyncrpc.core.shm.slab import Slab

REPOSITORY = Path(__file__).parents[4]
HOLDER = """
import signal, sys
from asyncrpc.core.shm.mutex import RobustMutex
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
            before = counts[0]
            counts[0] = before + 1
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

"""Processes that are killed, and limits of the system: the queue goes on."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import queue as standard
import random
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrpc.multiprocessing import Queue
from tests.integration.core.multiprocessing import queue_targets as targets

CONTEXT = multiprocessing.get_context("forkserver")
REPOSITORY = Path(__file__).parents[4]


@contextlib.contextmanager
def running(target: Any, *args: Any) -> Iterator[BaseProcess]:
    process = CONTEXT.Process(target=target, args=args)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()
        process.close()


@contextlib.contextmanager
def descriptors_at_most(count: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def named_memory(*pids: int) -> set[str]:
    """Return the names of shared memory that bear the numbers of processes."""
    numbers = set(map(str, pids))
    return {
        path.name
        for path in Path("/dev/shm").iterdir()  # noqa: S108  what would be left is here
        if numbers & set(re.findall(r"\d+", path.name))
    }


def test_items_outlive_their_killed_producer() -> None:
    queue: Queue[Any] = Queue()
    with running(targets.put_and_die, queue) as process:
        process.join()
    assert queue.get(timeout_s=1.0).eq(7.0).all()
    assert queue.get(timeout_s=1.0) == {"text": "x" * 100_000}
    assert queue.get(timeout_s=1.0).eq(8.0).all()
    queue.close()


def test_the_memory_of_a_killed_consumer_comes_back() -> None:
    queue: Queue[Any] = Queue(memory_bytes=1 << 20)
    reports: Queue[int] = Queue()
    whole = torch.ones(1 << 20, dtype=torch.uint8)
    with running(targets.hold_one, queue, reports) as process:
        queue.put(whole)
        assert reports.get(timeout_s=60.0) == 1 << 20
        with pytest.raises(standard.Full):
            queue.put_nowait(whole)
        waiting = threading.Thread(target=queue.put, args=(whole, 60.0))
        waiting.start()
        process.kill()
        waiting.join(60.0)  # nobody tells of a death; it looks
        assert not waiting.is_alive()
    assert queue.get(timeout_s=1.0).sum() == 1 << 20
    queue.close()
    reports.close()


@pytest.mark.parametrize("seed", range(2))
def test_producer_killed_at_any_time_blocks_no_process(seed: int) -> None:
    """What came is whole and in order; then the queue is as good as new."""
    chance = random.Random(seed)
    queue: Queue[Any] = Queue(maxsize=16, memory_bytes=4 << 20)
    for _ in range(2):
        with running(targets.put_without_end, queue) as process:
            last = -1
            for _ in range(chance.randrange(1, 300)):
                last = follows(queue.get(timeout_s=60.0), last)
            process.kill()
            process.join()
            with contextlib.suppress(standard.Empty):
                while True:
                    last = follows(queue.get_nowait(), last)
        use_all_of(queue)
    queue.close()


def follows(item: tuple[int, torch.Tensor], last: int) -> int:
    serial, tensor = item
    assert serial == last + 1
    assert tensor.numel() == serial * 997 % 50_000 + 1
    assert tensor.eq(float(serial)).all()
    return serial


def use_all_of(queue: Queue[Any]) -> None:
    """All places and all memory can be used: nobody has kept any."""
    whole = torch.full((4 << 20,), 3, dtype=torch.uint8)
    queue.put(whole, timeout_s=10.0)
    assert torch.equal(queue.get(timeout_s=10.0), whole)
    for value in range(16):
        queue.put_nowait(value)
    assert [queue.get_nowait() for _ in range(16)] == list(range(16))


@pytest.mark.parametrize("seed", range(2))
def test_consumer_killed_at_any_time_blocks_no_process(seed: int) -> None:
    """Among those killed, one takes at most the item along that it was getting."""
    chance = random.Random(seed)
    queue: Queue[Any] = Queue(maxsize=16, memory_bytes=4 << 20)
    for _ in range(2):
        with running(targets.get_without_end, queue) as process:
            for serial in range(chance.randrange(50, 300)):
                queue.put(torch.full((serial * 97 % 5000 + 1,), 1.0), timeout_s=60.0)
            process.kill()
            process.join()
        with contextlib.suppress(standard.Empty):
            while True:
                assert queue.get_nowait().eq(1.0).all()
        use_all_of(queue)
    queue.close()


# A program of its own: pytest would keep what it sees struck in callbacks alive.
STRUCK = """
import contextlib, queue as standard, random, signal, sys
import torch
from asyncrpc.multiprocessing import Queue

class Struck(KeyboardInterrupt):
    pass

armed = []

def strike(signum, frame):
    if armed:
        armed.clear()
        raise Struck

def rearm(lost):  # in a weak reference's callback nothing can be raised
    armed.append(True)

def put_and_get(queue):
    for turn in range(1_000_000):
        with contextlib.suppress(standard.Full):
            queue.put_nowait((turn, torch.full((3000,), float(turn))))
        if turn % 2 or queue.full():
            drain(queue)

def drain(queue):
    with contextlib.suppress(standard.Empty):
        while True:
            turn, tensor = queue.get_nowait()
            assert tensor.eq(float(turn)).all()

sys.unraisablehook = rearm
queue = Queue(maxsize=4, memory_bytes=1 << 20)
chance = random.Random(int(sys.argv[1]))
signal.signal(signal.SIGALRM, strike)
for _ in range(300):
    signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, 3e-3), 0.01)
    try:
        armed.append(True)
        put_and_get(queue)
    except Struck:
        pass
    signal.setitimer(signal.ITIMER_REAL, 0)
drain(queue)
queue.put(torch.ones(1 << 20, dtype=torch.uint8), timeout_s=10.0)
assert queue.get_nowait().sum() == 1 << 20
print("whole")
"""


def test_queue_survives_an_exception_from_a_signal_anywhere(tmp_path: Path) -> None:
    """Some hundred times, wherever it strikes: an item is put or not, got or not."""
    done = run_script(tmp_path, STRUCK, arguments=("5",))
    assert done.stdout == "whole\n", done.stderr


def test_thousands_of_tensors_need_no_descriptors() -> None:
    queue: Queue[Any] = Queue(maxsize=5000)
    before = named_memory(os.getpid())
    opened = open_descriptors()
    with descriptors_at_most(opened + 4):
        for value in range(5000):
            queue.put_nowait(torch.full((50,), float(value)))
        kept = [queue.get_nowait() for _ in range(5000)]
        assert open_descriptors() <= opened
    assert all(tensor.eq(float(value)).all() for value, tensor in enumerate(kept))
    assert named_memory(os.getpid()) == before
    queue.close()


def test_item_stays_while_no_descriptor_is_left() -> None:
    queue: Queue[Any] = Queue()
    with running(targets.put_and_die, queue) as process:
        process.join()
    queue.get_nowait()
    queue.get_nowait()
    with descriptors_at_most(3):  # 0 to 2 are taken
        with pytest.raises(OSError, match="too many open"):
            queue.get_nowait()
        assert queue.qsize() == 1
    assert queue.get_nowait().eq(8.0).all()
    queue.close()
    gc.collect()  # frames of the error hold a slab, and other tests count those


KILLED = """
import os, signal, sys
import torch
from asyncrpc.multiprocessing import Queue, launch
from tests.integration.core.multiprocessing import queue_targets as targets
from tests.integration.core.multiprocessing.test_queue_deaths import memories

if __name__ == "__main__":
    queue, told = Queue(), Queue()
    processes = launch(targets.hold_one_of_rank, (queue, told), nprocs=2, join=False)
    for _ in range(3):
        queue.put(torch.ones(1 << 18))
    told.get(), told.get()
    print(os.getpid(), *processes.pids)
    print(*memories(), flush=True)
    for pid in processes.pids:
        os.kill(pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_processes_leave_no_memory(tmp_path: Path) -> None:
    done = run_script(tmp_path, KILLED)
    assert done.returncode == -signal.SIGKILL
    pids, inodes = (line.split() for line in done.stdout.splitlines())
    assert len(pids) == 3
    assert len(inodes) >= 2
    assert named_memory(*map(int, pids)) == set()
    assert memories("[0-9]*").isdisjoint(inodes)


def memories(process: str = "self") -> set[str]:
    """Return the memfds of queues that a process has, or any of several, by inode."""
    inodes = set()
    for link in Path("/proc").glob(f"{process}/fd/*"):
        with contextlib.suppress(OSError):
            if "asyncrpc-slab" in str(link.readlink()):
                inodes.add(f"{link.stat().st_ino}")
    return inodes


FORGOTTEN = """
import torch
from asyncrpc.multiprocessing import Queue

queue = Queue()
queue.put([torch.ones(100_000), torch.ones(3).share_memory_()])
kept = queue.get()
queue.put(torch.zeros(5))
"""


def test_program_with_an_open_queue_ends_quietly(tmp_path: Path) -> None:
    options = ("-X", "dev", "-W", "ignore::DeprecationWarning")
    done = run_script(tmp_path, FORGOTTEN, *options)
    assert (done.returncode, done.stderr) == (0, "")


def run_script(
    folder: Path, text: str, *options: str, arguments: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run it until the last process that has its pipes has ended."""
    script = folder / "script.py"
    script.write_text(text)
    return subprocess.run(
        [sys.executable, *options, str(script), *arguments],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=300.0,
        check=False,
    )

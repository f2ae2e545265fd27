"""What keeps a process busy beside its calls: a thread, in Python or in torch.

python      a loop of bytecode: it gives the GIL away only when it must, after the
            switch interval
matmul      products of 512 x 512: each runs for milliseconds without the GIL
small ops   sums of 1 KiB: it asks for the GIL every few microseconds
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import torch

SIDE: Final = 512


def _python(is_stopped: Callable[[], bool]) -> int:
    rounds = 0
    while not is_stopped():
        for _ in range(1000):
            rounds += 1
    return rounds


def _matmul(is_stopped: Callable[[], bool]) -> int:
    factor = torch.rand(SIDE, SIDE)
    rounds = 0
    while not is_stopped():
        factor @ factor
        rounds += 1
    return rounds


def _small(is_stopped: Callable[[], bool]) -> int:
    vector = torch.rand(256)
    rounds = 0
    while not is_stopped():
        vector + vector
        rounds += 1
    return rounds


LOADS: Final = {"python": _python, "matmul": _matmul, "small ops": _small}


class Load:
    """A thread at work until it is stopped."""

    def __init__(self, name: str) -> None:
        self._stopped = threading.Event()
        self._work = LOADS[name]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.per_second = 0.0  # rounds per second, once it has been stopped

    def _run(self) -> None:
        start_s = time.perf_counter()
        rounds = self._work(self._stopped.is_set)
        self.per_second = rounds / (time.perf_counter() - start_s)

    def stop(self) -> float:
        """End it; return its rounds per second."""
        self._stopped.set()
        self._thread.join()
        return self.per_second


_running: list[Load] = []


def set_load(name: str, switch_interval_s: float) -> float:
    """Change what this process does beside its calls; no name stops it."""
    rate = _running.pop().stop() if _running else 0.0
    sys.setswitchinterval(switch_interval_s)
    if name:
        _running.append(Load(name))
    return rate


def cpu_seconds() -> float:
    """Return the processor time that this process has used."""
    times = os.times()
    return times.user + times.system


async def used_by(peer: Any, work: Awaitable[object]) -> list[float]:
    """Return the processor time of this process and of a peer's during some work."""
    before_s = [cpu_seconds(), await peer.call(cpu_seconds)]
    await work
    after_s = [cpu_seconds(), await peer.call(cpu_seconds)]
    return [late - early for early, late in zip(before_s, after_s, strict=True)]


def count_for(seconds: float) -> float:
    """Loop in this thread; return rounds per second."""
    end_s = time.perf_counter() + seconds
    return _python(lambda: time.perf_counter() >= end_s) / seconds


if __name__ == "__main__":  # a process that computes and does nothing else
    print("ready", flush=True)
    print(count_for(float(sys.argv[1])), flush=True)

"""When a worker loads what answers a look: as its process is idle, or at last."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrpc.tools.inspection import local_socket
from asyncrpc.tools.inspection.local_socket import LocalDoor

LIMIT_S = 60.0


@pytest.mark.parametrize(
    ("cpu_s", "load_by_s", "reads_min", "reads_max"),
    [
        ([*range(7), *itertools.repeat(6, 100)], 3600.0, 8, 100),
        (range(10_000), 0.0, 2, 2),
    ],
    ids=["idle after a while", "busy for too long"],
)
def test_a_busy_process_loads_later(
    monkeypatch: pytest.MonkeyPatch,
    cpu_s: Iterable[float],
    load_by_s: float,
    reads_min: int,
    reads_max: int,
) -> None:
    loaded, reads, reads_at_load = threading.Event(), itertools.count(1), 0
    times = iter(cpu_s)

    def process_cpu_s() -> float:
        next(reads)
        return float(next(times))

    def load() -> None:
        nonlocal reads_at_load
        if not loaded.is_set():  # the thread reads the clock again when it ends
            reads_at_load = next(reads) - 1
            loaded.set()

    monkeypatch.setattr(local_socket, "LOAD_AFTER_S", 0.001)
    monkeypatch.setattr(local_socket, "LOAD_BY_S", load_by_s)
    monkeypatch.setattr(local_socket, "process_cpu_s", process_cpu_s)
    monkeypatch.setattr(local_socket, "_load", load)
    incarnation = int.from_bytes(os.urandom(8))
    worker: Any = SimpleNamespace(identity=SimpleNamespace(incarnation=incarnation))
    door = LocalDoor(worker, SimpleNamespace())  # type: ignore[arg-type]
    door.open([])
    try:
        assert loaded.wait(LIMIT_S)
    finally:
        door.close()
    assert reads_min <= reads_at_load <= reads_max

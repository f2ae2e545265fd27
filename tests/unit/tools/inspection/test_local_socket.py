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
    ("cpu_s", "load_by_s", "ticks_max"),
    [
        ([*range(7), *itertools.repeat(6, 100)], 3600.0, 100),
        (range(10_000), 0.0, 3),
    ],
    ids=["idle after a while", "busy for too long"],
)
def test_a_busy_process_loads_later(
    monkeypatch: pytest.MonkeyPatch,
    cpu_s: Iterable[float],
    load_by_s: float,
    ticks_max: int,
) -> None:
    loaded, reads = threading.Event(), 0
    times = iter(cpu_s)

    def process_cpu_s() -> float:
        nonlocal reads
        reads += 1
        return float(next(times))

    monkeypatch.setattr(local_socket, "LOAD_AFTER_S", 0.001)
    monkeypatch.setattr(local_socket, "LOAD_BY_S", load_by_s)
    monkeypatch.setattr(local_socket, "process_cpu_s", process_cpu_s)
    monkeypatch.setattr(local_socket, "_load", loaded.set)
    incarnation = int.from_bytes(os.urandom(8))
    worker: Any = SimpleNamespace(identity=SimpleNamespace(incarnation=incarnation))
    door = LocalDoor(worker, SimpleNamespace())  # type: ignore[arg-type]
    door.open([])
    try:
        assert loaded.wait(LIMIT_S)
    finally:
        door.close()
    if load_by_s:
        assert reads > 7
    assert reads <= ticks_max

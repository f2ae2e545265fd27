"""What the programs of all libraries have in common: the object, and the clock."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from typing import Final

import torch

OUTSTANDING: Final = 256
WARM_UPS: Final = 20


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self, step: int) -> int:
        self.count += step
        return self.count


def computed() -> float:
    """Return something that needs torch."""
    return float(torch.ones(4).sum())


def per_second(call: Callable[[], object], seconds: float, count: int = 1) -> float:
    """Return how often a blocking call ends in a second; it counts for `count`."""
    for _ in range(WARM_UPS):
        call()
    rounds, begun_s = 0, time.perf_counter()
    while (taken_s := time.perf_counter() - begun_s) < seconds:
        call()
        rounds += 1
    return rounds * count / taken_s


async def awaited_per_second(
    call: Callable[[], Awaitable[object]], seconds: float, count: int = 1
) -> float:
    """Do the same for a call that is awaited."""
    for _ in range(WARM_UPS):
        await call()
    rounds, begun_s = 0, time.perf_counter()
    while (taken_s := time.perf_counter() - begun_s) < seconds:
        await call()
        rounds += 1
    return rounds * count / taken_s


def tell(figures: dict[str, float]) -> None:
    print(json.dumps(figures), flush=True)

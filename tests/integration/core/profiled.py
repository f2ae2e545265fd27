"""What the tests of profiling run on other workers, and how they read a trace."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity


@dataclass(frozen=True)
class Range:
    """A range of a trace; times in microseconds."""

    name: str
    begin_us: float
    took_us: float
    thread: str

    @property
    def end_us(self) -> float:
        return self.begin_us + self.took_us


def new_profile(*, all_threads: bool = False) -> torch.profiler.profile:
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=all_threads)  # noqa: SLF001
    return torch.profiler.profile(
        activities=[ProfilerActivity.CPU], experimental_config=config
    )


class Trace:
    """What a profile exports, once: the ranges in the order of their beginning."""

    def __init__(self, profile: torch.profiler.profile) -> None:
        self._ranges = _exported(profile)

    def of(self, start: str = "rpc_") -> list[Range]:
        """Return those whose names begin so."""
        return [span for span in self._ranges if span.name.startswith(start)]

    def names(self, start: str = "rpc_") -> list[str]:
        return [span.name for span in self.of(start)]

    def named(self, name: str) -> Range:
        (span,) = [span for span in self._ranges if span.name == name]
        return span


def _exported(profile: torch.profiler.profile) -> list[Range]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    ranges = [
        Range(event["name"], float(event["ts"]), float(event["dur"]), str(event["tid"]))
        for event in events
        if event.get("ph") == "X"
    ]
    return sorted(ranges, key=lambda span: span.begin_us)


def add(x: torch.Tensor, y: float) -> torch.Tensor:
    return x + y


async def add_later(x: torch.Tensor, y: float) -> torch.Tensor:
    await asyncio.sleep(0)
    return x + y


async def count(items: int) -> AsyncIterator[int]:
    for number in range(items):
        yield number


def fail() -> None:
    raise ValueError("it fails")


class Gate:
    """Where a function waits until the test lets it go on."""

    open_ones: dict[str, Gate] = {}  # noqa: RUF012  (workers find them by name)

    def __init__(self, name: str) -> None:
        self.open_ones[name] = self
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()


async def wait(gate: str) -> None:
    entry = Gate.open_ones.pop(gate)
    entry.reached.set()
    await entry.opened.wait()


class Adder:
    """Has a method."""

    def add(self, x: float) -> float:
        return x + 1


class Recorder:
    """Profiles the process that it is in."""

    async def begin(self) -> None:
        self.profile: Any = new_profile()
        self.profile.start()

    async def end(self) -> list[str]:
        self.profile.stop()
        return Trace(self.profile).names()

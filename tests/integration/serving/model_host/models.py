"""The models of these tests, and what the tests ask of the process that has one."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import asyncrpc
from asyncrpc.serving import Batcher
from asyncrpc.testing.leaks import open_descriptors, running_tasks

FOLDER = "ASYNCRPC_TEST_FOLDER"  # where the tests of a process leave files


class Model(torch.nn.Module):
    """Weights, and methods of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((4,), 2.0), requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * self.weight

    def total(self, rows: torch.Tensor) -> float:
        return float(rows.sum())

    async def pid(self) -> int:
        return os.getpid()

    async def frozen(self) -> int:
        """Return how many objects are nothing to the collector of cycles."""
        return gc.get_freeze_count()

    async def end(self) -> None:
        """Let the process end."""
        await end_here()

    async def refuse_calls(self) -> None:
        """Take no more calls, as while the worker shuts down; note who comes then."""
        parts: Any = asyncrpc.current_worker().parts
        parts.lifecycle.is_draining = True

        def look() -> None:
            if parts.admission.refused:
                _path("refused").touch()
            else:
                parts.loop.call_later(0.01, look)

        look()

    async def wait_forever(self) -> None:
        _path("waiting").touch()
        await asyncio.Event().wait()


def make_model() -> Model:
    """Make a model, and count how often that is done."""
    _count("made")
    return Model()


def make_nothing() -> Model:
    _count("tried")
    raise ValueError("no weights here")


def make_if_told() -> Model:
    """Make a model once there is a file that says so."""
    if not _path("weights").exists():
        raise FileNotFoundError("weights")
    return Model()


def die_before() -> Model:
    _count("died")
    os._exit(3)


def make_slowly() -> Model:
    """Make a model once there is a file that says so, and wait until then."""
    _path("began").touch()
    with _path("go").open(
        "rb"
    ) as pipe:  # a FIFO: blocks until it is opened for writing
        pipe.read()
    return Model()


async def make_in_coroutine() -> Model:
    await asyncio.sleep(0)
    assert asyncrpc.current_worker().name == "model"
    return Model()


class BatchedModel:
    """A model that all web workers share one batcher of."""

    def __init__(self, batched: Batcher[float, float]) -> None:
        self.predict = batched.__call__


@contextlib.asynccontextmanager
async def make_batched() -> AsyncIterator[BatchedModel]:
    """Make a model that gathers what three web workers ask."""

    async def double(items: list[float]) -> list[float]:
        return [2 * item + 100 * len(items) for item in items]

    async with Batcher(double, 3, 3600.0) as batched:
        yield BatchedModel(batched)
    _path("left").touch()


def _path(name: str) -> Path:
    return Path(os.environ[FOLDER]) / name


def _count(name: str) -> None:
    with _path(name).open("a", encoding="ascii") as file:
        file.write(f"{os.getpid()}\n")


# --- what is asked of the model's process --------------------------------------------


class Inside(NamedTuple):
    """What a model's process has."""

    attached: int
    links: int
    tasks: int
    descriptors: int
    references: int
    resident_kib: int


COUNTS = tuple(name for name in Inside._fields if name != "resident_kib")


async def look_inside() -> Inside:
    """Return what the process of the model has now."""
    gc.collect()
    worker: Any = asyncrpc.current_worker()
    return Inside(
        attached=worker.parts.service("model_host").occupancy.attached,
        links=len(worker.parts.directory.links),
        tasks=len(running_tasks()),
        descriptors=len(open_descriptors()),
        references=len(worker.rrefs()),
        resident_kib=_resident_kib(),
    )


def _resident_kib() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


async def end_here() -> None:
    """Let this process end, as a signal of an operator would."""
    os.kill(os.getpid(), signal.SIGTERM)


def mapped_slabs() -> int:
    """Count the mappings of slabs in this process."""
    maps = Path("/proc/self/maps").read_text(encoding="ascii")
    return maps.count("memfd:asyncrpc-slab")

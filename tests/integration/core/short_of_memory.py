"""Functions of a process whose memory is limited while it runs, by RLIMIT_AS."""

from __future__ import annotations

import resource
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

import asyncrpc
from tests.integration.core.company import LIMIT_S

MIB: Final = 1 << 20
STACK_BYTES: Final = 64 * MIB  # of threads that are started from `limit_threads` on
_PAGE_BYTES: Final = resource.getpagesize()

_kept: list[Any] = []
_gate = threading.Event()


@asyncrpc.on_loop
def limit(more_bytes: int) -> None:
    """Let this process have so many bytes of address space more than it has now."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + more_bytes, hard))


@asyncrpc.on_loop
def limit_threads() -> None:
    """Let this process start no further thread, and do else what it wants."""
    threading.stack_size(STACK_BYTES)
    limit(STACK_BYTES // 2)


@asyncrpc.on_loop
def lift() -> None:
    """Let this process have what memory it wants."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def make(how: str, nbytes: int) -> Any:
    """Return something of that size."""
    if how == "numpy":
        return np.ones(nbytes, np.uint8)
    if how == "torch":
        return torch.ones(nbytes, dtype=torch.uint8)
    if how == "texts":
        return ["n" * (nbytes // 4)] * 4
    return bytes(nbytes) if how == "bytes" else "n" * nbytes


def allocate(how: str, nbytes: int) -> int:
    return len(make(how, nbytes))


@asyncrpc.on_loop
def allocate_on_loop(how: str, nbytes: int) -> int:
    return allocate(how, nbytes)


async def allocate_in_coroutine(how: str, nbytes: int) -> int:
    return allocate(how, nbytes)


def keep(how: str, nbytes: int) -> None:
    """Make something while there is memory."""
    _kept.append(make(how, nbytes))


def drop() -> None:
    _kept.clear()


def give(step: int = 1) -> Any:
    """Return it when there is less; with a step, it has to be gathered."""
    return _kept[-1][::step] if step > 1 else _kept[-1]


def size(value: Any) -> int:
    """Return how long something is that had to be received."""
    return len(value)


def numbers(value: Any) -> Iterator[int]:
    yield len(value)


def wait_at_gate() -> str:
    """Hold a thread until the gate is opened."""
    _gate.wait()
    return "through"


@asyncrpc.on_loop
def open_gate() -> None:
    _gate.set()


def make_tensor(nbytes: int) -> torch.Tensor:
    return torch.ones(nbytes // 4)


def twice(value: torch.Tensor) -> torch.Tensor:
    return value * 2


async def fetch(reference: asyncrpc.RRef[torch.Tensor]) -> int:
    return len(await reference.to_here())


async def feed(nbytes: int) -> AsyncIterator[torch.Tensor]:
    for _ in range(3):
        yield make_tensor(nbytes)


async def consume(name: str, nbytes: int) -> int:
    peer = asyncrpc.current_worker().peer(name)
    return sum([len(item) async for item in peer.stream(feed, nbytes)])


async def reduce(nbytes: int) -> int:
    """Take part in a collective of all, in a group of its own."""
    async with asyncrpc.Group(asyncrpc.current_worker(), timeout_s=LIMIT_S) as group:
        return len(await group.all_reduce(make_tensor(nbytes)))

"""Functions that do not end as they should, or go on when they have ended."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import torch

import asyncrpc

open_gate = threading.Event()
_threads: list[threading.Thread] = []


def block_the_loop(seconds: float) -> str:
    time.sleep(seconds)
    return "slept"


async def block_in_coroutine(seconds: float) -> str:
    return block_the_loop(seconds)


@asyncrpc.on_loop
def block_on_loop(seconds: float) -> str:
    return block_the_loop(seconds)


async def swallow_cancellations() -> str:
    """Go on, however often it is cancelled, until the gate is open."""
    while not open_gate.is_set():
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            continue
    return "nobody wants it"


async def wait_in_finally() -> None:
    """Wait for ever, and when that is cancelled, a second time."""
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.Event().wait()


async def yield_in_finally() -> AsyncIterator[int]:
    """Ignore that it is being closed."""
    try:
        while True:
            yield 1
    finally:
        yield 2


def yield_in_finally_in_thread() -> Iterator[int]:
    try:
        while True:
            yield 1
    finally:
        yield 2


async def stream_that_waits_in_finally() -> AsyncIterator[int]:
    try:
        yield 1
        await asyncio.Event().wait()
    finally:
        await asyncio.Event().wait()


async def close_itself() -> AsyncIterator[int]:
    """Yield, and be closed from elsewhere meanwhile."""
    yield 1
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)
    yield 2


def leave_a_thread() -> str:
    """Start a thread that outlives the call, and perhaps the worker."""
    thread = threading.Thread(target=open_gate.wait, daemon=True)
    thread.start()
    _threads.append(thread)
    return "it runs on"


def join_threads() -> None:
    open_gate.set()
    while _threads:
        _threads.pop().join()


def exit_at_once() -> None:
    os._exit(3)


_writers: list[tuple[threading.Event, threading.Thread]] = []


def _keep_changing(change: Any) -> None:
    """Change something from a thread, over and over, until told to stop."""
    ended = threading.Event()

    def run() -> None:
        number = 0
        while not ended.is_set():
            change(number)
            number += 1

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    _writers.append((ended, thread))


def stop_changing() -> None:
    while _writers:
        ended, thread = _writers.pop()
        ended.set()
        thread.join()


def changing_dict() -> dict[int, int]:
    changed: dict[int, int] = dict.fromkeys(range(50_000), 0)

    def change(number: int) -> None:
        changed[50_000 + number % 2000] = number
        changed.pop(50_000 + (number + 1000) % 2000, None)

    _keep_changing(change)
    return changed


def changing_list() -> list[Any]:
    changed: list[Any] = [{"a": torch.ones(1)} for _ in range(300)]

    def change(number: int) -> None:
        if number % 2:
            changed.append({"b": [number]})
        else:
            del changed[-1]

    _keep_changing(change)
    return changed


def changing_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return what was given, and write to it from then on."""
    _keep_changing(tensor.fill_)
    return tensor


class Adding:
    """Adds to the dictionary that it is in while that is encoded."""

    def __init__(self, home: dict[str, Any]) -> None:
        self.home = home

    def __reduce__(self) -> Any:
        self.home[f"key {len(self.home)}"] = 1
        return str, ()


def grows_while_it_is_encoded() -> dict[str, Any]:
    home: dict[str, Any] = {}
    home["one"] = Adding(home)
    home["two"] = 2
    return home

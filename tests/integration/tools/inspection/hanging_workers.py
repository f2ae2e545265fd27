"""Workers that hang at their start or end, at a device or for want of room.

What workers run for `test_worker_hangs`.
"""

from __future__ import annotations

import asyncio
import threading

import torch

import asyncrpc
from asyncrpc import Worker, devices

LARGE_BYTES = 900_000  # of a request; two are more than the limit of these workers

_kept: set[asyncio.Task[None]] = set()
let_go, kept = threading.Event(), threading.Event()


async def wait_for_event() -> None:
    never = asyncio.Event()
    await never.wait()


# --- the end -------------------------------------------------------------------------


async def begin_end() -> None:
    """Ask for the end of the group, in a task that outlives this call."""
    worker = asyncrpc.current_worker()
    task = asyncio.create_task(
        worker.shutdown(graceful=True, drain_timeout_s=3600.0), name="ending"
    )
    _kept.add(task)


async def an_end_to_which_one_does_not_come(worker: Worker) -> None:
    await worker.peer("ps").call(begin_end)
    await worker.shutdown(graceful=True)


async def an_end_with_a_call_in_flight(worker: Worker) -> None:
    for name in ("ps", "cache"):
        await worker.peer(name).call(begin_end)
    call = asyncio.ensure_future(worker.peer("ps").call(wait_for_event))
    try:
        await worker.shutdown(graceful=True, drain_timeout_s=3600.0)
    finally:
        call.cancel()


# --- devices -------------------------------------------------------------------------


def hold_device(held: threading.Event) -> None:
    with devices.lock():
        held.set()
        let_go.wait()


async def begin_holding() -> None:
    held = threading.Event()
    holder = threading.Thread(target=hold_device, args=(held,), name="holder")
    holder.daemon = True
    holder.start()
    await asyncio.to_thread(held.wait)


def use_device() -> None:
    pass


def hold_pool() -> None:
    let_go.wait()


async def a_turn_on_a_device(worker: Worker) -> None:
    await worker.peer("ps").call(begin_holding)
    await worker.peer("ps").call(use_device)


async def a_thread_that_another_call_has(worker: Worker) -> None:
    first = asyncio.ensure_future(worker.peer("ps").call(hold_pool))
    try:
        await asyncio.sleep(0)
        await worker.peer("ps").call(use_device)
    finally:
        first.cancel()


# --- room ----------------------------------------------------------------------------


async def keep(_: torch.Tensor) -> None:
    kept.set()
    never = asyncio.Event()
    await never.wait()


def until_kept() -> None:
    kept.wait()


async def keep_more(_: torch.Tensor) -> None:
    pass


async def a_large_request_that_waits_for_room(worker: Worker) -> None:
    """Not from a function of a call: such a one may go beyond the limit."""
    tensor = torch.zeros(LARGE_BYTES, dtype=torch.uint8)
    made = worker.peer("ps").remote(keep, tensor)  # for which nobody waits
    await worker.peer("ps").call(until_kept)
    await worker.peer("ps").call(keep_more, tensor)
    del made

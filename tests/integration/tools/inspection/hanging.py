"""Programs that hang, each in its own way: what workers run for `test_hangs`.

The worker `trainer` starts each by one coroutine, which never ends by itself; `ps` and
`cache` are in other processes.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import torch

import asyncrpc
from asyncrpc import Group, Worker
from asyncrpc.collectives import rendezvous

_made: dict[tuple[int, str], Any] = {}


def once(name: str, make: Any) -> Any:
    """Return what the functions of this hang share in this process and loop."""
    key = id(asyncio.get_running_loop()), name
    if key not in _made:
        _made[key] = make()
    return _made[key]


def call(to: str, function: Any, *arguments: Any) -> asyncio.Future[Any]:
    return asyncrpc.rpc_async(to, function, arguments, timeout_s=None)


# --- locks ---------------------------------------------------------------------------


async def evict() -> None:
    table = once("table", asyncio.Lock)
    async with table:
        await call("trainer", rows)


async def rows() -> None:
    await call("ps", apply)


async def apply() -> None:
    table = once("table", asyncio.Lock)
    async with table:
        pass


async def cycle_of_a_lock_over_two_workers(worker: Worker) -> None:
    await worker.peer("ps").call(evict)


async def first_of_three() -> None:
    ring = once("ring", asyncio.Lock)
    async with ring:
        await call("cache", second_of_three)


async def second_of_three() -> None:
    await call("trainer", third_of_three)


async def third_of_three() -> None:
    await call("ps", first_of_three)


async def cycle_of_a_lock_over_three_workers(worker: Worker) -> None:
    await worker.peer("ps").call(first_of_three)


async def both_ways() -> None:
    left, right = asyncio.Lock(), asyncio.Lock()
    has_left, has_right = asyncio.Event(), asyncio.Event()

    async def left_first() -> None:
        async with left:
            has_left.set()
            await has_right.wait()
            async with right:
                pass

    async def right_first() -> None:
        async with right:
            has_right.set()
            await has_left.wait()
            async with left:
                pass

    await asyncio.gather(left_first(), right_first())


async def two_locks_in_two_orders(worker: Worker) -> None:
    await worker.peer("ps").call(both_ways)


async def enter_twice() -> None:
    table = asyncio.Lock()
    async with table, table:
        pass


async def a_lock_taken_twice(worker: Worker) -> None:
    await worker.peer("ps").call(enter_twice)


@asynccontextmanager
async def guarded(gate: asyncio.Semaphore) -> AsyncIterator[None]:
    async with gate:
        yield


async def all_places_taken() -> None:
    gate, never = asyncio.Semaphore(2), asyncio.Event()

    async def hold() -> None:
        async with guarded(gate):
            await never.wait()

    holders = [asyncio.create_task(hold(), name=f"holder{n}") for n in range(2)]
    try:
        await asyncio.sleep(0)
        async with gate:
            pass
    finally:
        for holder in holders:
            holder.cancel()


async def a_semaphore_whose_holders_wait(worker: Worker) -> None:
    await worker.peer("ps").call(all_places_taken)


async def not_released() -> None:
    table = asyncio.Lock()
    await table.acquire()
    await table.acquire()


async def a_lock_that_was_not_released(worker: Worker) -> None:
    await worker.peer("ps").call(not_released)


# --- what nobody does ----------------------------------------------------------------


async def wait_for_notice() -> None:
    ready = asyncio.Condition()
    async with ready:
        ready.notify()  # too early: nobody waits
    async with ready:
        await ready.wait()


async def a_lost_notify(worker: Worker) -> None:
    await worker.peer("ps").call(wait_for_notice)


async def wait_for_event() -> None:
    done = asyncio.Event()
    await done.wait()


async def an_event_that_nobody_sets(worker: Worker) -> None:
    await worker.peer("ps").call(wait_for_event)


async def wait_for_future() -> None:
    result = asyncio.get_running_loop().create_future()
    await result


async def a_future_that_nobody_sets(worker: Worker) -> None:
    await worker.peer("ps").call(wait_for_future)


async def wait_for_setter() -> None:
    done = asyncio.Event()

    async def set_it(event: asyncio.Event) -> None:
        event.set()

    forgotten = set_it(done)  # and not awaited
    try:
        await done.wait()
    finally:
        forgotten.close()


async def a_coroutine_that_nobody_awaits(worker: Worker) -> None:
    await worker.peer("ps").call(wait_for_setter)


async def fill() -> None:
    batches: asyncio.Queue[int] = asyncio.Queue(2)
    for batch in range(3):
        await batches.put(batch)


async def a_full_queue(worker: Worker) -> None:
    await worker.peer("ps").call(fill)


async def drain() -> None:
    batches: asyncio.Queue[int] = asyncio.Queue()
    await batches.get()


async def an_empty_queue(worker: Worker) -> None:
    await worker.peer("ps").call(drain)


async def join_queue() -> None:
    batches: asyncio.Queue[int] = asyncio.Queue()
    batches.put_nowait(1)
    batches.get_nowait()  # without `task_done`
    await batches.join()


async def a_queue_whose_work_is_never_done(worker: Worker) -> None:
    await worker.peer("ps").call(join_queue)


async def come_alone() -> None:
    gate = asyncio.Barrier(2)
    await gate.wait()


async def a_barrier_of_tasks_short_of_one(worker: Worker) -> None:
    await worker.peer("ps").call(come_alone)


# --- tasks ---------------------------------------------------------------------------


async def a_gather_of_which_one_waits(worker: Worker) -> None:
    ps = worker.peer("ps")
    await asyncio.gather(ps.call(int), ps.call(wait_for_event), ps.call(int))


async def in_a_group() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(wait_for_event(), name="reader")


async def a_task_group_of_which_one_waits(worker: Worker) -> None:
    await worker.peer("ps").call(in_a_group)


async def shielded() -> None:
    task = asyncio.create_task(wait_for_event(), name="reader")
    try:
        await asyncio.wait_for(asyncio.shield(task), 3600.0)
    finally:
        task.cancel()


async def a_shielded_task(worker: Worker) -> None:
    await worker.peer("ps").call(shielded)


# --- threads -------------------------------------------------------------------------


async def wait_for_end() -> None:
    await once("end", asyncio.Event).wait()


async def end() -> None:
    once("end", asyncio.Event).set()


def ask_and_block() -> None:
    asyncrpc.rpc_sync("cache", wait_for_end, timeout_s=None)


async def a_thread_that_waits_for_a_call(worker: Worker) -> None:
    try:
        await worker.peer("ps").call(ask_and_block)
    finally:
        await worker.peer("cache").call(end)


let_go = threading.Event()


def hold_thread() -> None:
    let_go.wait()


def free_threads() -> None:
    let_go.set()


async def a_thread_that_waits(worker: Worker) -> None:
    try:
        await worker.peer("ps").call(hold_thread)
    finally:
        await worker.peer("ps").call(free_threads)


async def use_up_threads() -> None:
    go = threading.Event()
    loop = asyncio.get_running_loop()
    busy = [loop.run_in_executor(None, go.wait) for _ in range(64)]
    try:
        await loop.run_in_executor(None, int)
    finally:
        go.set()
        await asyncio.gather(*busy)


async def a_thread_pool_that_is_used_up(worker: Worker) -> None:
    await worker.peer("ps").call(use_up_threads)


# --- streams and references ----------------------------------------------------------


async def numbers() -> AsyncIterator[int]:
    number = 0
    while True:
        yield number
        number += 1


async def take_one_and_wait() -> None:
    never = asyncio.Event()
    stream = asyncrpc.core.worker.current_worker().peer("cache").stream(numbers)
    async for _ in stream:
        await never.wait()


async def a_stream_whose_consumer_waits(worker: Worker) -> None:
    await worker.peer("ps").call(take_one_and_wait)


async def silent() -> AsyncIterator[int]:
    never = asyncio.Event()
    await never.wait()
    yield 1


async def a_stream_whose_producer_waits(worker: Worker) -> None:
    async for _ in worker.peer("ps").stream(silent):
        pass


async def slow_value() -> int:
    never = asyncio.Event()
    await never.wait()
    return 1


async def a_reference_whose_value_is_not_made(worker: Worker) -> None:
    reference = worker.peer("ps").remote(slow_value)
    await reference.to_here(timeout_s=None)


# --- all together --------------------------------------------------------------------


async def come_to_barrier() -> None:
    await asyncrpc.core.worker.current_worker().barrier()


async def a_barrier_short_of_one(worker: Worker) -> None:
    await asyncio.gather(worker.barrier(), worker.peer("ps").call(come_to_barrier))


async def come_to_rendezvous(tag: str) -> None:
    await rendezvous(asyncrpc.core.worker.current_worker(), tag)


async def a_rendezvous_under_two_tags(worker: Worker) -> None:
    await asyncio.gather(
        rendezvous(worker, "saved"),
        worker.peer("ps").call(come_to_rendezvous, "saved"),
        worker.peer("cache").call(come_to_rendezvous, "loaded"),
    )


async def reduce_in(name: str) -> None:
    worker = asyncrpc.core.worker.current_worker()
    async with Group(worker, ["trainer", "ps"], name=name, timeout_s=None) as group:
        await group.all_reduce(torch.ones(2))


async def reduce_twice(name: str, times: int) -> None:
    worker = asyncrpc.core.worker.current_worker()
    async with Group(worker, ["trainer", "ps"], name=name, timeout_s=None) as group:
        for _ in range(times):
            await group.all_reduce(torch.ones(2))
        never = asyncio.Event()
        await never.wait()


async def a_rank_that_skips_a_collective(worker: Worker) -> None:
    await asyncio.gather(
        reduce_twice("skipped", 2), worker.peer("ps").call(reduce_twice, "skipped", 1)
    )


async def ranks_in_different_groups(worker: Worker) -> None:
    await asyncio.gather(reduce_in("left"), worker.peer("ps").call(reduce_in, "right"))


# --- the whole worker ----------------------------------------------------------------


async def sleep_on_the_loop(seconds: float) -> None:
    time.sleep(seconds)  # noqa: ASYNC251  (that is the point)


async def hold_the_interpreter(_: float) -> None:
    re.match(r"(a+)+$", "a" * 40 + "b")  # written in C: it never lets go

"""Each program that hangs is named exactly: who waits for whom, and who is at fault."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

import pytest
import pytest_asyncio

from asyncrpc import AsyncRpcError, Worker
from asyncrpc.testing import ProcessCluster
from asyncrpc.tools.inspection.machine.graph import find_hangs
from asyncrpc.tools.inspection.machine.wording import tree
from tests.integration.tools.inspection import hanging
from tests.integration.tools.inspection.looks import (
    AFTER_S,
    GENEROUS_S,
    OPTIONS,
    TRAINER,
    look,
    until_said,
)

Program = Callable[[Worker], Awaitable[None]]

# What is said of each, from the start of the sentence.
HANGS: Final[dict[Program, str]] = {
    hanging.cycle_of_a_lock_over_two_workers: (
        r"ps `evict`, which waits for trainer `rows`, which waits for ps `apply`, "
        r"which waits for Lock `table` held by ps task `evict`: a cycle, which nothing "
        r"can end"
    ),
    hanging.cycle_of_a_lock_over_three_workers: (
        r"ps `first_of_three`, which waits for cache `second_of_three`, which waits "
        r"for trainer `third_of_three`, which waits for ps `first_of_three`, which "
        r"waits for Lock `ring` held by ps task `first_of_three`: a cycle"
    ),
    hanging.two_locks_in_two_orders: (
        r"ps `both_ways`, which waits for task `\S+(left|right)_first`, which waits "
        r"for Lock `(left|right)` held by ps task `\S+`, which waits for Lock "
        r"`(left|right)` held by ps task `\S+`: a cycle"
    ),
    hanging.a_lock_taken_twice: (
        r"ps `enter_twice`, which waits for Lock `table` held by ps task "
        r"`enter_twice`: a cycle"
    ),
    hanging.a_semaphore_whose_holders_wait: (
        r"ps `all_places_taken`, which waits for Semaphore `gate` held by ps task "
        r"`holder\d`, which waits for Event `never`"
    ),
    hanging.a_lock_that_was_not_released: (
        r"ps `not_released`, which waits for Lock `table`: nothing else refers to it, "
        r"so nothing can release it"
    ),
    hanging.a_lost_notify: (
        r"ps `wait_for_notice`, which waits for Condition `ready`: nothing else refers "
        r"to it, so nothing can notify it \(hanging.py:\d+ in wait_for_notice\)"
    ),
    hanging.an_event_that_nobody_sets: (
        r"ps `wait_for_event`, which waits for Event `done`: nothing else refers to it"
    ),
    hanging.a_future_that_nobody_sets: (
        r"ps `wait_for_future`, which waits for a future \(hanging.py:\d+ in wait_for"
    ),
    hanging.a_coroutine_that_nobody_awaits: (
        r"ps `wait_for_setter`, which waits for Event `done`: nothing else refers to it"
    ),
    hanging.a_full_queue: (
        r"ps `fill`, which waits for room in Queue `batches`: nothing else refers to "
        r"it, so nothing can take an item from it"
    ),
    hanging.an_empty_queue: r"ps `drain`, which waits for an item of Queue `batches`",
    hanging.a_queue_whose_work_is_never_done: (
        r"ps `join_queue`, which waits for all work of Queue `batches`"
    ),
    hanging.a_barrier_of_tasks_short_of_one: (
        r"ps `come_alone`, which waits for Barrier `gate`"
    ),
    hanging.a_gather_of_which_one_waits: (
        r"task `Peer.call`, which waits for ps `wait_for_event`, which waits for Event"
    ),
    hanging.a_task_group_of_which_one_waits: (
        r"ps `in_a_group`, which waits for task `reader`, which waits for Event `done`"
    ),
    hanging.a_shielded_task: (
        r"ps `shielded`, which waits for task `reader`, which waits for Event `done`"
    ),
    hanging.a_thread_that_waits_for_a_call: (
        r"ps `ask_and_block`, which waits for cache `wait_for_end`, which waits for an "
        r"Event"
    ),
    hanging.a_thread_that_waits: (
        r"ps `hold_thread`, which runs `let_go.wait\(\)` \(hanging.py:\d+ in hold_"
    ),
    hanging.a_thread_pool_that_is_used_up: (
        r"ps `use_up_threads`, which waits for a free thread of its executor \(\d+ are "
        r"busy\)"
    ),
    hanging.a_stream_whose_consumer_waits: (
        r"ps `take_one_and_wait`, which waits for Event `never`"
    ),
    hanging.a_stream_whose_producer_waits: (
        r"ps `silent`, which waits for Event `never`"
    ),
    hanging.a_reference_whose_value_is_not_made: (
        r"a value of ps, which waits for Event `never`"
    ),
    hanging.a_barrier_short_of_one: (
        r"task `Peer.call`, which waits for ps `come_to_barrier`, which waits for "
        r"barrier \d+, to which cache has not come|task `Worker.barrier`, which waits "
        r"for barrier \d+, to which cache has not come"
    ),
    hanging.a_rendezvous_under_two_tags: (
        r".*rendezvous \d+ of 'saved', to which cache has not come: cache task "
        r"`come_to_rendezvous`, which waits for rendezvous \d+ of 'loaded', to which"
    ),
    hanging.a_rank_that_skips_a_collective: (
        r".*ps (task )?`reduce_twice`, which waits for Event"
    ),
    hanging.ranks_in_different_groups: (
        r".*all_reduce \d+ of group '(left|right)' of 2, to which (ps|trainer) has not "
        r"come: (ps|trainer) task `reduce_in`, which waits for all_reduce"
    ),
}


@pytest_asyncio.fixture
async def trainer() -> AsyncIterator[Worker]:
    cluster = ProcessCluster(
        ["ps", "cache"], name="trainer", method="forkserver", options=OPTIONS
    )
    async with cluster as worker:
        yield worker


@pytest.mark.parametrize("hang", HANGS, ids=lambda hang: hang.__name__)
async def test_hang_is_named_exactly(trainer: Worker, hang: Program) -> None:
    async def train() -> None:
        await hang(trainer)

    task = asyncio.create_task(train(), name="train")
    try:
        view = await until_said(trainer, TRAINER + f"({HANGS[hang]})")
        assert not view.silent
        for stall in find_hangs(view.graph, after_s=AFTER_S):
            assert tree(view.graph, stall)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_stopped_process_is_named(trainer: Worker) -> None:
    pid = await trainer.peer("ps").call(os.getpid)
    os.kill(pid, signal.SIGSTOP)
    task = asyncio.create_task(called(trainer), name="train")
    try:
        said = TRAINER + rf"ps, which is stuck: .* stopped, process {pid}"
        await until_said(trainer, said)
    finally:
        os.kill(pid, signal.SIGCONT)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def called(worker: Worker) -> None:
    await worker.peer("ps").call(hanging.wait_for_event)


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (hanging.sleep_on_the_loop, r"runs `time.sleep\(seconds\)` \(hanging.py:\d+"),
        (hanging.hold_the_interpreter, r"is stuck: its interpreter is held"),
    ],
    ids=["loop", "interpreter"],
)
async def test_a_worker_that_cannot_answer_is_named(
    function: Callable[..., Awaitable[None]], wanted: str
) -> None:
    cluster = ProcessCluster(
        ["ps"], name="trainer", method="forkserver", options=OPTIONS
    )
    async with cluster as worker:
        pid = await worker.peer("ps").call(os.getpid)

        async def train() -> None:
            await worker.peer("ps").call(function, 3600.0)

        task = asyncio.create_task(train(), name="train")
        await until_said(worker, TRAINER + f"ps.*, which {wanted}")
        cluster.kill("ps")
        with pytest.raises(AsyncRpcError):
            await task
        assert pid


async def test_progressing_work_is_not_named(trainer: Worker) -> None:
    async def work() -> None:
        while True:
            await trainer.peer("ps").call(int)

    async def rest() -> None:
        await asyncio.Event().wait()

    tasks = [asyncio.create_task(function()) for function in (work, work, rest)]
    for _ in range(20):
        view = await look(trainer)
        assert find_hangs(view.graph, after_s=GENEROUS_S) == [], view
        assert not view.silent
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

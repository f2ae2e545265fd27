"""`Queue`: what goes in comes out, wherever that is, and nothing waits in vain."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import queue as standard
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing
from torch import nn

import asyncrpc
from asyncrpc.errors import UsageError
from asyncrpc.multiprocessing import Queue, launch
from tests.integration.core.multiprocessing import queue_targets as targets

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.uint16),
]
FORMS = {
    "plain": lambda t: t,
    "transposed": lambda t: t.t(),
    "every other": lambda t: t[:, ::2],
    "expanded": lambda t: t[:1].expand(7, 8),
    "one": lambda t: t[0, 0],
    "none": lambda t: t[:0],
    "offset": lambda t: t[2:, 3:],
}


@pytest.fixture
def queue() -> Any:
    created: Queue[Any] = Queue()
    yield created
    created.close()


def through(queue: Queue[Any], value: Any) -> Any:
    queue.put(value)
    return queue.get(timeout_s=10.0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensor_of_any_dtype_and_form_arrives(
    queue: Queue[Any], dtype: torch.dtype, form: str
) -> None:
    sent = FORMS[form](torch.arange(48).reshape(6, 8).to(dtype))
    received = through(queue, sent)
    assert (received.dtype, received.shape) == (dtype, sent.shape)
    assert received.stride() == sent.stride()
    assert torch.equal(received.to(torch.complex128), sent.to(torch.complex128))


def test_special_tensors_modules_and_arrays_arrive(queue: Queue[Any]) -> None:
    for sent in (torch.eye(4).to_sparse(), torch.tensor([1 + 2j]).conj()):
        received = through(queue, sent)
        assert received.layout == sent.layout
        assert torch.equal(received.to_dense(), sent.to_dense())
    model = through(queue, nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    assert isinstance(model[0].weight, nn.Parameter)
    names = ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert [name for name, _ in model.named_buffers()] == names
    array = np.arange(10_000).reshape(100, 100)
    received = through(queue, (array, {"text": "x" * 5000}))
    assert np.array_equal(received[0], array)
    received[0][0, 0] = 5  # it is writable
    assert received[1] == {"text": "x" * 5000}


def test_views_stay_aliases_and_only_their_span_is_copied(queue: Queue[Any]) -> None:
    base = torch.arange(1_000_000.0)
    a, b, c = through(queue, (base[10:20], base[15:25].view(torch.int32), base[12:14]))
    a[5] = -1.0
    assert b.view(torch.float32)[0] == -1.0
    assert c.untyped_storage() is a.untyped_storage()
    assert a.untyped_storage().nbytes() < 1000
    assert base[15] == 15.0  # the sender's own is another


def test_tensors_carry_their_gradients_and_not_their_graphs(queue: Queue[Any]) -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), 2.0)
    received = through(queue, parameter)
    assert type(received) is nn.Parameter
    assert received.grad is not None
    assert received.grad.tolist() == [2.0] * 3
    assert through(queue, nn.Parameter(torch.ones(2))).grad is None
    assert through(queue, torch.ones(2, requires_grad=True)).requires_grad
    with pytest.raises(UsageError, match=r"send tensor\.detach\(\)"):
        queue.put(parameter * 2)
    assert queue.empty()


def test_shared_tensor_is_not_copied(queue: Queue[Any]) -> None:
    shared = asyncrpc.share(torch.zeros(4))
    received = through(queue, [shared, shared[1:]])
    assert received[0].untyped_storage() is shared.untyped_storage()
    assert received[1].data_ptr() == shared[1:].data_ptr()
    once = through(queue, torch.ones(100))
    twice = through(queue, once)
    twice[3] = 5.0
    assert once.data_ptr() == twice.data_ptr()
    assert once[3] == 5.0
    by_torch: Any = torch.zeros(4)
    assert through(queue, by_torch.share_memory_()).is_shared()


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_memory_is_the_same_in_both_processes(method: Any) -> None:
    inbox: Queue[Any] = Queue()
    outbox: Queue[Any] = Queue()
    shared = asyncrpc.share(torch.ones(1000))
    with launch(targets.double, (inbox, outbox), method=method, join=False):
        inbox.put(shared)
        back = outbox.get(timeout_s=60.0)
        assert shared.eq(2.0).all()
        back[0] = 5.0
        assert shared[0] == 5.0
        inbox.put(torch.ones(500_000))
        copied = outbox.get(timeout_s=60.0)
        assert copied.eq(2.0).all()
        inbox.put(copied)  # there, it came from the other queue: a copy
        assert outbox.get(timeout_s=60.0).eq(4.0).all()
        inbox.put(None)
    inbox.close()
    outbox.close()


@pytest.mark.parametrize("package", [multiprocessing, torch.multiprocessing])
def test_queue_works_in_a_process_of_multiprocessing(package: Any) -> None:
    inbox: Queue[Any] = Queue()
    outbox: Queue[Any] = Queue()
    context = package.get_context("forkserver")
    process = context.Process(target=targets.double_in_process, args=(inbox, outbox))
    process.start()
    inbox.put(torch.ones(5))
    assert outbox.get(timeout_s=60.0).tolist() == [2.0] * 5
    inbox.put(None)
    process.join()
    assert process.exitcode == 0
    process.close()


def test_queue_serves_many_producers_and_consumers() -> None:
    work: Queue[Any] = Queue(maxsize=16, memory_bytes=1 << 20)
    counts: Queue[int] = Queue()
    with launch(
        targets.consume, (work, counts), nprocs=2, method="forkserver", join=False
    ):
        launch(targets.produce, (work, 150), nprocs=3, method="forkserver")
        work.put(None)
        work.put(None)
        received = [counts.get(timeout_s=60.0) for _ in range(2)]
    assert sum(received) == 3 * 150
    assert work.empty()


async def test_queue_can_be_awaited() -> None:
    inbox: Queue[Any] = Queue(maxsize=1)
    outbox: Queue[Any] = Queue(maxsize=1)
    arguments = (inbox, outbox)
    async with launch(targets.double_async, arguments, method="forkserver", join=False):

        async def feed() -> None:
            for value in range(20):
                await inbox.put_async(torch.tensor([float(value)]))
            await inbox.put_async(None)

        async with asyncio.timeout(60.0), asyncio.TaskGroup() as tasks:
            tasks.create_task(feed())
            received = [(await outbox.get_async()).item() for _ in range(20)]
    assert received == [2.0 * value for value in range(20)]


async def test_cancelled_get_takes_no_item(queue: Queue[Any]) -> None:
    waiting = [asyncio.create_task(queue.get_async()) for _ in range(3)]
    for _ in range(5):
        await asyncio.sleep(0)
    queue.put_nowait("kept")
    for task in waiting:  # readable, and cancelled before it could look
        task.cancel()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    assert await queue.get_async() == "kept"


async def test_cancelled_put_adds_no_item() -> None:
    queue: Queue[int] = Queue(maxsize=1)
    queue.put_nowait(1)
    task = asyncio.create_task(queue.put_async(2))
    for _ in range(5):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert queue.get_nowait() == 1
    assert queue.empty()


def test_cancelled_tasks_of_another_process_lose_no_item() -> None:
    queue: Queue[Any] = Queue(maxsize=8)
    with launch(
        targets.drain_async, (queue,), method="forkserver", join=False
    ) as there:
        for value in range(500):
            queue.put(value)
        queue.put(None)
        assert there.wait() == [500]


def test_queue_keeps_its_limits() -> None:
    queue: Queue[Any] = Queue(maxsize=2, memory_bytes=1 << 20)
    queue.put_nowait(1)
    queue.put_nowait(2)
    assert queue.full()
    assert queue.qsize() == 2
    with pytest.raises(standard.Full):
        queue.put_nowait(3)
    with pytest.raises(standard.Full):
        queue.put(3, timeout_s=0.06)
    assert [queue.get(), queue.get_nowait()] == [1, 2]
    with pytest.raises(standard.Empty):
        queue.get_nowait()
    with pytest.raises(standard.Empty):
        queue.get(timeout_s=0.01)
    with pytest.raises(UsageError, match="larger `memory_bytes`"):
        queue.put(torch.zeros(1 << 20))
    for wrong in ({"maxsize": 0}, {"memory_bytes": 10}):
        with pytest.raises(UsageError):
            Queue(**wrong)


def test_memory_held_by_receivers_counts_and_comes_back() -> None:
    queue: Queue[Any] = Queue(memory_bytes=4 << 20)
    mebibyte = torch.ones(1 << 18)
    held = [through(queue, mebibyte) for _ in range(4)]
    with pytest.raises(standard.Full):
        queue.put_nowait(mebibyte)
    held.pop()
    queue.put_nowait(mebibyte)
    assert queue.get().eq(1.0).all()


def test_memory_taken_from_the_system_stays_within_the_limit() -> None:
    queue: Queue[Any] = Queue(memory_bytes=16 << 20)
    for power in range(12, 23):
        held = []
        while True:
            try:
                queue.put_nowait(torch.ones(1 << power, dtype=torch.uint8))
            except standard.Full:
                break
            held.append(queue.get_nowait())
        assert len(held) == min((16 << 20) >> power, 16 << 20)
    descriptor = queue._channel.ends.memory  # noqa: SLF001  its pages are no secret
    used_bytes = os.fstat(descriptor).st_blocks * 512
    control_bytes = 4 << 20  # what entries and holds take, at most
    assert used_bytes <= (16 << 20) + control_bytes


def test_queue_is_pickled_at_process_start_only(queue: Queue[Any]) -> None:
    with pytest.raises(UsageError, match="only when the process starts"):
        pickle.dumps(queue)


async def test_blocking_get_and_put_on_a_loop_are_refused(queue: Queue[Any]) -> None:
    with pytest.raises(UsageError, match="get_async"):
        queue.get()
    with pytest.raises(UsageError, match="put_async"):
        queue.put(1)


def test_a_forked_process_is_refused(queue: Queue[Any]) -> None:
    queue.put(torch.ones(10))
    held = queue.get()
    child = os.fork()
    if not child:
        code = 1
        try:
            del held  # must not free the parent's memory
            queue.put_nowait(1)
        except UsageError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert through(queue, torch.zeros(10)).sum() == 0.0
    assert held.sum() == 10.0


def test_unpicklable_item_fails_at_once(queue: Queue[Any]) -> None:
    with pytest.raises(UsageError, match="the item cannot be put into a queue"):
        queue.put(lambda: None)
    assert through(queue, "next") == "next"


def test_closed_queue_refuses_and_received_items_stay() -> None:
    queue: Queue[Any] = Queue()
    held = through(queue, torch.ones(5000))
    queue.close()
    queue.close()
    with pytest.raises(UsageError, match="closed"):
        queue.put_nowait(1)
    with pytest.raises(UsageError, match="closed"):
        queue.qsize()
    assert held.add_(1).sum() == 10_000.0

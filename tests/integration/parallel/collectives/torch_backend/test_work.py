"""What torch gets for a collective: it can be waited for, asked, and chained."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from asyncrpc.errors import (
    ClosedError,
    CollectiveError,
    CollectiveTimeoutError,
    UsageError,
)
from asyncrpc.multiprocessing import launch
from tests.integration.parallel.collectives.torch_backend.playing import (
    Scenario,
    play,
    same,
    world,
)


def others() -> bool:
    return dist.get_rank() != 0


def release() -> None:
    """Let rank 0 go on: what it waits for begins after it has looked."""
    if others():
        dist.recv(torch.zeros(1), 0, tag=99)
    else:
        for rank in range(1, dist.get_world_size()):
            dist.send(torch.zeros(1), rank, tag=99)


def check_asking(_gloo: dist.ProcessGroup) -> None:
    size = dist.get_world_size()
    mine = torch.ones(3)
    if others():
        release()
    work: Any = dist.all_reduce(mine, async_op=True)
    if not others():
        assert not work.is_completed()
        assert not work.is_success()
        assert work.exception() is None
        assert "under way" in repr(work)
        with pytest.raises(RuntimeError, match="all_reduce has not ended: wait"):
            work.result()
        with pytest.raises(RuntimeError, match=r"all_reduce has not ended in 0\.01 s"):
            work.wait(timedelta(seconds=0.01))
        release()
    assert work.wait() is True
    assert work.wait(timedelta(seconds=5)) is True
    work.synchronize()
    assert work.is_completed()
    assert work.is_success()
    assert work.source_rank() == -1
    same(work.result(), [torch.full((3,), float(size))])
    assert "done" in repr(work)


def check_waiting_in_threads(_gloo: dist.ProcessGroup) -> None:
    """Any number of threads may wait for one work."""
    if others():
        release()
    work: Any = dist.all_reduce(torch.ones(3), async_op=True)
    threads = [threading.Thread(target=work.wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    if not others():
        release()
    for thread in threads:
        thread.join()
    assert work.is_success()


def check_chaining(_gloo: dist.ProcessGroup) -> None:
    """What is chained may wait for other collectives, however many do."""
    size = dist.get_world_size()

    def again(future: Any) -> torch.Tensor:
        [tensor] = future.value()
        following: Any = dist.all_reduce(tensor, async_op=True)
        total: torch.Tensor = following.get_future().wait()[0]
        return total

    late: Any = dist.all_reduce(torch.ones(2), async_op=True)
    late.wait()
    same(late.get_future().wait(), [torch.full((2,), float(size))])
    assert late.get_future().done()
    # One after the other: their order has to be the same at all ranks.
    for _ in range(3):
        work: Any = dist.all_reduce(torch.ones(2), async_op=True)
        same(work.get_future().then(again).wait(), torch.full((2,), float(size**2)))
    # All at once: each in a group of its own, so none can come before another's.
    groups = [dist.new_group() for _ in range(24)]

    def again_in(group: Any) -> Any:
        def chained(future: Any) -> torch.Tensor:
            following: Any = dist.all_reduce(
                future.value()[0], group=group, async_op=True
            )
            total: torch.Tensor = following.get_future().wait()[0]
            return total

        return chained

    futures = []
    for group in groups:
        work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
        futures.append(work.get_future().then(again_in(group)))
    for total in torch.futures.wait_all(futures):
        same(total, torch.full((2,), float(size**2)))


def check_many(_gloo: dist.ProcessGroup) -> None:
    """Many under way at once are matched in the order in which they were begun."""
    size = dist.get_world_size()
    tensors = [torch.full((1 + 997 * n,), float(n)) for n in range(80)]
    works: list[Any] = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    same(
        tensors,
        [torch.full_like(tensor, float(size * n)) for n, tensor in enumerate(tensors)],
    )


def check_wrong_arguments(_gloo: dist.ProcessGroup) -> None:
    """They are the caller's fault, and begin nothing."""
    size = dist.get_world_size()
    premultiplied = dist._make_nccl_premul_sum(2.0)  # type: ignore[attr-defined]  # noqa: SLF001  no other way
    with pytest.raises(ValueError, match="PREMUL_SUM: multiply") as caught:
        dist.all_reduce(torch.ones(2), premultiplied)
    assert type(caught.value.__cause__) is UsageError
    cases: list[tuple[Any, str]] = [
        (lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND), "is not defined"),
        (lambda: dist.all_reduce(torch.ones(2).long(), dist.ReduceOp.AVG), "use 'sum'"),
        (lambda: dist.broadcast(torch.ones(2, device="meta"), 0), "'meta'"),
        (lambda: dist.broadcast(torch.ones(2).to_sparse(), 0), "sparse_coo"),
        (
            lambda: dist.all_gather_into_tensor(torch.ones(3), torch.ones(2)),
            f"is not {size} times",
        ),
        (
            lambda: dist.all_gather_into_tensor(
                torch.ones(2, 2 * size).t()[::2], torch.ones(2)
            ),
            "not contiguous",
        ),
        (lambda: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(3)), "is not"),
        (lambda: dist.all_to_all([torch.ones(1)], [torch.ones(1)] * size), "1 outputs"),
        (
            lambda: dist.all_to_all_single(torch.ones(size), torch.ones(size + 1)),
            "equal parts",
        ),
    ]
    for begin, says in cases:
        with pytest.raises(ValueError, match=says):
            begin()
    with pytest.raises(ValueError, match="only implemented for GLOO"):
        dist.monitored_barrier()  # torch asks for its own; ours is the group's
    world().monitored_barrier()
    work: Any = dist.all_reduce(torch.ones(2), premultiplied, async_op=True)
    with pytest.raises(RuntimeError, match="PREMUL_SUM"):
        work.get_future().wait()
    assert isinstance(work.exception(), ValueError)
    got = torch.ones(2)
    dist.all_reduce(got)
    same(got, torch.full((2,), float(size)))


def check_mismatch(_gloo: dist.ProcessGroup) -> None:
    """Ranks that do not agree are told so, all of them; the next collective works."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with pytest.raises(dist.DistBackendError, match="do not agree") as caught:
        dist.all_reduce(torch.ones(5 if rank == 1 else 4))
    cause = caught.value.__cause__
    assert isinstance(cause, CollectiveError)
    assert "rank1" in cause.ranks
    assert "(5,)" in str(cause)
    with pytest.raises(dist.DistBackendError, match="output 0 is"):
        dist.all_gather([torch.ones(2) for _ in range(size)], torch.ones(3))
    if rank == 0:
        dist.send(torch.ones(3), 1)
    if rank == 1:
        with pytest.raises(
            dist.DistBackendError, match=r"rank 0 sent 12 bytes of torch"
        ):
            dist.recv(torch.ones(2), 0)
    got = torch.ones(2)
    dist.all_reduce(got)
    same(got, torch.full((2,), float(size)))


def check_own_thread(_gloo: dist.ProcessGroup) -> None:
    """On the loop's thread a wait would wait for itself."""
    host = world().participant.thread
    outcome: list[BaseException] = []
    looked = threading.Event()

    def wait_there() -> None:
        work: Any = dist.barrier(async_op=True)
        try:
            work.wait()
        except RuntimeError as error:
            outcome.append(error)
        looked.set()

    host.soon(wait_there)
    looked.wait()
    assert "thread of asyncrpc's event loop" in str(outcome[0])


def check_timeouts(_gloo: dist.ProcessGroup) -> None:
    """The group's limit, another for one barrier, and what the others see."""
    slow = dist.new_group(timeout=timedelta(seconds=1.5))
    assert slow is not None
    dist.barrier(slow)
    if others():
        with pytest.raises(
            dist.DistBackendError, match="have not begun it: rank 0"
        ) as caught:
            dist.all_reduce(torch.ones(2), group=slow)
        cause = caught.value.__cause__
        assert isinstance(cause, CollectiveTimeoutError)
        assert cause.ranks == ("rank0",)
    dist.barrier()
    if not others():
        with pytest.raises(dist.DistBackendError, match="have not begun it"):
            dist.all_reduce(torch.ones(2), group=slow)
    opts = dist.BarrierOptions()
    opts.timeout = timedelta(seconds=0.2)
    if not others():
        work: Any = world().barrier(opts)
        with pytest.raises(
            dist.DistBackendError, match=r"exceeded its timeout of 0\.2 s"
        ):
            work.wait()
        release()
    else:
        release()
        with pytest.raises(dist.DistBackendError, match=r"rank 0 .* cancelled it"):
            dist.barrier()
    world().set_timeout(timedelta(seconds=77))
    assert world().group.timeout_s == 77.0
    dist.barrier()


def check_after_the_end(_gloo: dist.ProcessGroup) -> None:
    """A group that is destroyed says so; so does a fork, in which nothing runs."""
    group: Any = dist.new_group()
    work: Any = dist.all_reduce(torch.ones(2), group=group, async_op=True)
    dist.destroy_process_group(group)  # waits for what is under way
    assert work.is_success()
    with pytest.raises(dist.DistBackendError, match="has been destroyed") as caught:
        group.allreduce([torch.ones(2)])
    assert isinstance(caught.value.__cause__, ClosedError)
    child = os.fork()
    if not child:
        try:
            dist.all_reduce(torch.ones(1))
        except dist.DistBackendError as error:
            os._exit(0 if "fork" in str(error) else 2)
        os._exit(3)
    assert os.waitpid(child, 0)[1] == 0
    dist.barrier()


SCENARIOS = [
    check_asking,
    check_waiting_in_threads,
    check_chaining,
    check_many,
    check_wrong_arguments,
    check_mismatch,
    check_own_thread,
    check_timeouts,
    check_after_the_end,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_work_object_behaves_as_torchs(scenario: Scenario) -> None:
    launch(play, args=(scenario,), nprocs=3, method="forkserver", timeout_s=60.0)

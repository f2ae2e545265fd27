"""A worker whose end is announced saves, leaves in order, and says so by its code."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import random
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import asyncrpc
from asyncrpc.core.loop.loops import running_loop
from asyncrpc.errors import NotStartedError, UsageError

SAVED, NOT_SAVED = 75, 143


def tell() -> None:
    """Announce the end, as a scheduler does."""
    os.kill(os.getpid(), signal.SIGTERM)


def whoami() -> str:
    return asyncrpc.current_worker().name


@contextlib.contextmanager
def exits() -> Iterator[list[object]]:
    """Expect the end of the process; the code is in the list then."""
    codes: list[object] = []
    try:
        yield codes
    except SystemExit as ended:
        codes.append(ended.code)
    assert codes, "the process would have gone on"


async def forever() -> None:
    await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def alone(name: str = "a") -> AsyncIterator[asyncrpc.Worker]:
    """Run a worker of a group of one."""
    where = asyncrpc.LocalRendezvous(1)
    async with asyncrpc.Worker(name, rank=0, rendezvous=where) as worker:
        yield worker


async def test_callbacks_run_in_order_then_the_worker_leaves() -> None:
    log: list[Any] = []
    with exits() as ended:
        async with alone() as worker, asyncrpc.Preemption(worker) as preemption:

            @preemption.on_preempt
            async def first() -> None:
                log.append(await worker.peer("a").call(whoami))  # calls work
                assert not worker.is_draining

            @preemption.on_preempt
            def second() -> None:
                in_thread = threading.current_thread() is not threading.main_thread()
                log.append((whoami(), in_thread))

            tell()
            try:
                await forever()
            except asyncio.CancelledError:
                log.append("cancelled")
                assert preemption.is_requested
                assert 0 < preemption.left_s < 28
                raise
    assert ended == [SAVED]
    assert log == ["a", ("a", True), "cancelled"]
    assert worker.is_closed


async def test_preemption_without_callbacks_leaves_at_once() -> None:
    with exits() as ended:
        async with alone() as worker, asyncrpc.Preemption(worker):
            tell()
            await forever()
    assert ended == [SAVED]


async def test_failed_callback_sets_the_exit_code(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = []
    with exits() as ended:
        async with alone() as worker, asyncrpc.Preemption(worker) as preemption:
            preemption.on_preempt(lambda: 1 / 0)
            preemption.on_preempt(lambda: log.append("second"))
            tell()
            await forever()
    assert ended == [NOT_SAVED]
    assert log == ["second"]
    assert "ZeroDivisionError" in caplog.text


async def test_hanging_callback_ends_with_its_share_of_the_grace() -> None:
    with exits() as ended:
        async with (
            alone() as worker,
            asyncrpc.Preemption(worker, grace_s=0.5) as preemption,
        ):
            preemption.on_preempt(forever)
            tell()
            await forever()
    assert ended == [NOT_SAVED]
    assert worker.is_closed


async def test_step_ends_before_the_callbacks_and_is_the_last() -> None:
    log = []
    with exits() as ended:
        async with alone() as worker, asyncrpc.Preemption(worker) as preemption:
            preemption.on_preempt(lambda: log.append("saved"))
            async with preemption.step():
                tell()
                await preemption.wait_requested()
                await worker.peer("a").call(whoami)
                log.append("step")
            async with preemption.step():
                log.append("another step")
    assert ended == [SAVED]
    assert log == ["step", "saved"]


async def test_hanging_step_is_waited_for_within_the_grace() -> None:
    log = []
    with exits() as ended:
        async with (
            alone() as worker,
            asyncrpc.Preemption(worker, grace_s=0.5) as preemption,
        ):
            preemption.on_preempt(lambda: log.append("saved"))
            async with preemption.step():
                tell()
                await forever()
    assert ended == [NOT_SAVED], "what was saved may be of mid-step"
    assert log == ["saved"]


async def test_a_block_may_end_by_itself() -> None:
    log = []
    with exits() as ended:
        async with alone() as worker, asyncrpc.Preemption(worker) as preemption:
            preemption.on_preempt(lambda: log.append("saved"))
            tell()
            await preemption.wait_requested()
            log.append("block")
    assert ended == [SAVED]
    assert log == ["block", "saved"]


async def test_a_program_may_go_on_after_the_block() -> None:
    async with alone() as worker:
        async with asyncrpc.Preemption(worker, exits=False) as preemption:
            tell()
            await forever()
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        assert preemption.is_requested
        assert worker.is_closed


async def test_block_without_a_signal_changes_nothing() -> None:
    async with alone() as worker:
        async with asyncrpc.Preemption(worker, grace_s=9) as preemption:
            preemption.on_preempt(forever)
            async with preemption.step():
                assert await worker.peer("a").call(whoami) == "a"
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
            assert preemption.left_s == 9
        assert not preemption.is_requested
        assert not worker.is_closed
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


async def test_error_of_the_program_is_raised() -> None:
    log = []
    with pytest.raises(ZeroDivisionError):  # noqa: PT012  (a block, and its end)
        async with alone() as worker, asyncrpc.Preemption(worker) as preemption:
            preemption.on_preempt(lambda: log.append("saved"))
            tell()
            await preemption.wait_requested()
            raise ZeroDivisionError
    assert log == ["saved"]


async def test_call_error_after_a_signal_does_not_change_the_code(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with exits() as ended:
        async with alone() as worker, asyncrpc.Preemption(worker) as preemption:
            tell()
            await preemption.wait_requested()
            raise asyncrpc.WorkerLostError("b is gone")
    assert ended == [SAVED]
    assert "b is gone" in caplog.text


async def test_preemption_defaults_to_the_current_worker() -> None:
    with exits():
        async with alone("current") as worker, asyncrpc.Preemption() as preemption:
            preemption.request("a cloud said so")
            preemption.request("and said it again")
            await forever()
    assert worker.is_closed


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
async def test_chosen_signal_sets_the_exit_code(number: signal.Signals) -> None:
    with exits() as ended:
        async with (
            alone() as worker,
            asyncrpc.Preemption(worker, signals=[number]) as preemption,
        ):
            preemption.on_preempt(lambda: 1 / 0)
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            os.kill(os.getpid(), number)
            await forever()
    assert ended == [128 + number]
    assert signal.getsignal(number) is signal.SIG_DFL


# --- groups ---------------------------------------------------------------------------


async def run_group(size: int, member: Any) -> list[str | int | None]:
    """Run `member(worker)` in a worker for each rank; return their exit codes."""
    where = asyncrpc.LocalRendezvous(size)

    async def run_member(rank: int) -> str | int | None:
        try:
            async with asyncrpc.Worker(
                f"w{rank}", rank=rank, rendezvous=where
            ) as worker:
                await member(worker)
        except SystemExit as ended:
            return ended.code
        return 0

    async with asyncio.TaskGroup() as tasks:
        codes = [tasks.create_task(run_member(rank)) for rank in range(size)]
    return [code.result() for code in codes]


@pytest.mark.parametrize("seed", range(4))
async def test_workers_in_lockstep_end_with_the_same_step(seed: int) -> None:
    """Each is told at another moment: some in a step, some between two."""
    saved: dict[int, int] = {}
    draw = random.Random(seed)

    async def member(worker: asyncrpc.Worker) -> None:
        steps = 0
        async with asyncrpc.Preemption(
            worker, signals=(), lockstep=True, grace_s=600
        ) as preemption:
            preemption.on_preempt(lambda: saved.__setitem__(worker.rank, steps))
            worker.loop.call_later(draw.uniform(0.0, 0.2), preemption.request)
            while True:
                async with preemption.step():
                    await worker.barrier()  # each needs all others in each step
                    steps += 1

    assert await run_group(3, member) == [SAVED] * 3
    assert len(saved) == 3
    assert len(set(saved.values())) == 1, saved


async def test_worker_without_steps_agrees_with_workers_that_step() -> None:
    saved: list[int] = []

    async def member(worker: asyncrpc.Worker) -> None:
        async with asyncrpc.Preemption(
            worker, signals=(), lockstep=True, grace_s=600
        ) as preemption:
            steps = 0
            while worker.rank:
                async with preemption.step():
                    assert await worker.peer(0).call(whoami) == "w0"
                    steps += 1
                if steps == 3:
                    preemption.on_preempt(functools.partial(saved.append, steps))
                    requested.set()
                    preemption.request()
            await requested.wait()
            preemption.request()
            await forever()

    requested = asyncio.Event()
    assert await run_group(2, member) == [SAVED] * 2
    assert saved == [3]


async def test_a_worker_serves_until_the_others_have_saved() -> None:
    """One that only serves has nothing to save, and waits for the others."""
    server_waits, served = asyncio.Event(), []

    async def member(worker: asyncrpc.Worker) -> None:
        async with asyncrpc.Preemption(worker, signals=(), grace_s=600) as preemption:
            if worker.rank == 0:
                preemption.request()
                server_waits.set()
                await worker.shutdown(graceful=True)  # as a server's program ends
                served.append("left in order")
                return

            @preemption.on_preempt
            async def save() -> None:
                served.append(await worker.peer(0).call(whoami))

            await server_waits.wait()
            preemption.request()
            await forever()

    assert await run_group(2, member) == [SAVED] * 2
    assert served == ["w0", "left in order"]


async def test_worker_alone_leaves_without_the_others() -> None:
    others_saw: list[tuple[str, str]] = []

    async def member(worker: asyncrpc.Worker) -> None:
        if worker.rank == 0:
            changes = worker.members_changed()
            await worker.peer(1).call(whoami)
            ready.set()
            async for change in changes:
                others_saw.append((change.member.name, change.kind))
                return
        async with asyncrpc.Preemption(
            worker, signals=(), graceful=False
        ) as preemption:
            await ready.wait()
            preemption.request()
            await forever()

    ready = asyncio.Event()
    assert await run_group(2, member) == [0, SAVED]
    assert others_saw == [("w1", "left")]


# --- mistakes -------------------------------------------------------------------------


async def test_existing_signal_handler_is_not_replaced() -> None:
    loop = running_loop()
    assert loop is not None
    loop.add_signal_handler(signal.SIGTERM, lambda: None)
    try:
        async with alone() as worker:
            with pytest.raises(UsageError, match="SIGTERM already has a handler"):
                await asyncrpc.Preemption(worker).__aenter__()
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


async def test_preemption_is_entered_once() -> None:
    async with alone() as worker:
        preemption = asyncrpc.Preemption(worker)
        with pytest.raises(NotStartedError):
            preemption.request()
        async with preemption:
            with pytest.raises(UsageError, match="entered once"):
                await preemption.__aenter__()


async def test_two_preemptions_cannot_share_a_signal() -> None:
    async with alone() as worker, asyncrpc.Preemption(worker):
        with pytest.raises(UsageError, match="SIGTERM"):
            await asyncrpc.Preemption(worker).__aenter__()


async def test_signals_need_the_main_thread() -> None:
    def in_thread() -> str:
        async def main() -> str:
            async with alone() as worker:
                async with asyncrpc.Preemption(worker, signals=()):
                    pass
                with pytest.raises(UsageError) as refused:
                    await asyncrpc.Preemption(worker).__aenter__()
                return str(refused.value)

        return asyncio.run(main())

    assert "main thread" in await asyncio.to_thread(in_thread)


@pytest.mark.parametrize(
    "wrong",
    [
        {"worker": "a"},
        {"grace_s": 0},
        {"grace_s": "soon"},
        {"signals": ["SIGTERM"]},
        {"signals": 3},
        {"graceful": 1},
        {"exits": None},
        {"lockstep": "yes"},
    ],
    ids=str,
)
def test_wrong_arguments_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        asyncrpc.Preemption(**wrong)


async def test_a_callback_must_be_callable() -> None:
    with pytest.raises(UsageError, match="callback"):
        asyncrpc.Preemption().on_preempt("save")  # type: ignore[type-var]


async def test_preemption_needs_a_worker() -> None:
    with pytest.raises(NotStartedError):
        await asyncrpc.Preemption().__aenter__()

"""Who runs twice: what is declared idempotent, and nothing else."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

import asyncrpc
from asyncrpc import Options, Outcome, Worker, WorkerLostError
from tests.integration.core.groups import LIMIT_S, processes
from tests.integration.core.multiprocessing.pidfds import have_ended, opened

OPTIONS = Options(secret="known to all of the group", drain_timeout_s=0.5)


def note_run(path: str) -> int:
    """Note a run where it outlives the process; return how many there were."""
    with Path(path).open("a") as log:
        log.write("run\n")
    return len(Path(path).read_text().splitlines())


async def die_at_first(path: str) -> int:
    runs = note_run(path)
    if runs == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return runs


@asyncrpc.idempotent
async def read(path: str) -> int:
    return await die_at_first(path)


@pytest.mark.parametrize("declared", ["by decorator", "by option"])
async def test_idempotent_call_is_retried_on_the_restarted_worker(
    declared: str, tmp_path: Path
) -> None:
    log = str(tmp_path / "runs")
    async with (cluster := processes("b", options=OPTIONS)) as a:
        cluster.expect_death("b")
        places = a.parts.directory.member("b").addresses
        with opened([cluster.pid("b")]) as descriptors:
            if declared == "by option":
                peer = a.peer("b").using(idempotent=True)
                call = asyncio.ensure_future(peer.call(die_at_first, log))
            else:
                call = asyncio.ensure_future(a.peer("b").call(read, log))
            await asyncio.sleep(0)
            assert await asyncio.to_thread(have_ended, descriptors, LIMIT_S)
        options = replace(OPTIONS, network=replace(OPTIONS.network, listen=places))
        async with Worker("b", rendezvous={"b": places}, options=options):
            assert await asyncio.wait_for(call, LIMIT_S) == 2


async def test_plain_call_is_not_retried(tmp_path: Path) -> None:
    log = str(tmp_path / "runs")
    async with (cluster := processes("b", options=OPTIONS)) as a:
        cluster.expect_death("b")
        with pytest.raises(WorkerLostError) as caught:
            await a.peer("b").call(die_at_first, log)
        assert caught.value.outcome is Outcome.UNKNOWN
    assert (tmp_path / "runs").read_text() == "run\n"


async def test_error_of_a_function_is_not_retried(tmp_path: Path) -> None:
    log = str(tmp_path / "runs")
    async with processes("b", options=OPTIONS) as a:
        with pytest.raises(ZeroDivisionError):
            await a.peer("b").using(idempotent=True).call(fail, log)
        assert (tmp_path / "runs").read_text() == "run\n"


def fail(path: str) -> None:
    note_run(path)
    raise ZeroDivisionError


async def test_attempts_end_with_the_deadline_and_the_caller(tmp_path: Path) -> None:
    log = str(tmp_path / "runs")
    async with (cluster := processes("b", options=OPTIONS)) as a:
        cluster.expect_death("b")
        with pytest.raises(TimeoutError):
            async with asyncrpc.deadline(3.0):  # a process has to start in it
                await a.peer("b").call(read, log)
        call = asyncio.ensure_future(a.peer("b").call(read, log))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    assert (tmp_path / "runs").read_text() == "run\n"

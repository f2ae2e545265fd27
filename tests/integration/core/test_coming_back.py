"""A rank that is killed and comes back finds the group, also if it hosted the store.

Each rank is a process, with the variables of an indexed Job whose pods share a host.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
from collections.abc import Iterator
from typing import Final

import pytest

from tests.forked import ForkedProgram, forked
from tests.integration.core.groups import LIMIT_S
from tests.ports import free_port

PATIENCE_S: Final = 300.0  # for one line, beside busy processes
SIZE: Final = 3
RANK: Final = """
import asyncio
import operator
from asyncrpc import LivenessOptions, Options, Worker

async def main():
    liveness = LivenessOptions(heartbeat_s=0.2)
    options = Options(rendezvous_timeout_s=600, liveness=liveness)
    async with Worker(options=options) as worker:
        changes = worker.members_changed()
        print("met", worker.name, len(worker.known_members), flush=True)
        for one in worker.known_members:
            assert await worker.peer(one.name).call(operator.neg, 1) == -1
        print("called", flush=True)
        async for change in changes:
            print(change.kind, change.member.name, flush=True)

asyncio.run(main())
"""


class Rank:
    """One life of a rank."""

    def __init__(self, program: ForkedProgram) -> None:
        self._program = program
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._heard: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self._program.output:
            self._lines.put(line.strip())
        self._lines.put(None)

    def hears(self, wanted: str) -> None:
        """Wait for a line that was not heard before; those before it are passed."""
        while (line := self._lines.get(timeout=PATIENCE_S)) is not None:
            self._heard.append(line)
            if line == wanted:
                return
        output = "\n".join(self._heard)
        raise AssertionError(f"{wanted!r} never came:\n{output}")

    def kill(self) -> None:
        """Let it end at once."""
        self._program.kill()

    def stop(self) -> None:
        """Let it stand still."""
        self._program.send_signal(signal.SIGSTOP)

    def close(self) -> None:
        """Leave nothing behind."""
        self.kill()
        self._reader.join(LIMIT_S)


class Job:
    """Starts ranks, as often as is asked for."""

    def __init__(self, stack: contextlib.ExitStack, **variables: str) -> None:
        self._stack = stack
        self._variables = {
            "WORLD_SIZE": str(SIZE),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "ASYNCRPC_SECRET": "known to all of these ranks",
            **variables,
        }

    def start(self, rank: int, **more: str) -> Rank:
        """Start a rank."""
        variables = self._variables | {"JOB_COMPLETION_INDEX": str(rank)} | more
        process = Rank(self._stack.enter_context(forked(RANK, **variables)))
        self._stack.callback(process.close)
        return process

    def start_all(self) -> list[Rank]:
        """Start every rank; return once each has called all."""
        ranks = [self.start(rank) for rank in range(SIZE)]
        for number, rank in enumerate(ranks):
            rank.hears(f"met worker{number} {SIZE}")
            rank.hears("called")
        return ranks


@pytest.fixture
def job() -> Iterator[Job]:
    with contextlib.ExitStack() as stack:
        yield Job(stack, ASYNCRPC_RUN_ID="of this test")


def test_rank_0_comes_back_alone(job: Job) -> None:
    """Its store went with it; the others tell the next one that they run."""
    first, *others = job.start_all()
    for _ in range(2):
        first.kill()
        for other in others:
            other.hears("lost worker0")
        first = job.start(0)
        first.hears(f"met worker0 {SIZE}")
        first.hears("called")
        for other in others:
            other.hears("restarted worker0")


def test_restart_count_does_not_prevent_a_return(job: Job) -> None:
    first, *others = job.start_all()
    first.kill()
    first = job.start(0, JOBSET_RESTART_ATTEMPT="1")
    first.hears(f"met worker0 {SIZE}")
    for other in others:
        other.hears("restarted worker0")


def test_returning_half_rejoins_the_old_group(job: Job) -> None:
    """In whichever order they return."""
    first, second, third = job.start_all()
    first.kill()
    second.kill()
    second = job.start(1)
    first = job.start(0)
    for rank in (first, second):
        rank.hears("called")
    third.hears("restarted worker0")


def test_returning_ranks_form_a_new_group(job: Job) -> None:
    for rank in job.start_all():
        rank.kill()
    job.start_all()


def test_second_rank_returns_after_the_first(job: Job) -> None:
    """The store that rank 0 hosts now has had no meeting of all."""
    first, second, third = job.start_all()
    first.kill()
    third.hears("lost worker0")
    first = job.start(0)
    first.hears("called")
    second.kill()
    third.hears("lost worker1")
    second = job.start(1)
    second.hears(f"met worker1 {SIZE}")
    second.hears("called")


def test_group_forms_anew_when_the_offering_members_die(job: Job) -> None:
    """The word that a group runs is not the last one: all that are left meet anew."""
    first, second, third = job.start_all()
    first.kill()
    second.hears("lost worker0")
    third.hears("lost worker0")
    for member in (second, third):
        member.stop()
    ranks = [job.start(0)]
    second.kill()
    third.kill()
    ranks += [job.start(rank) for rank in (1, 2)]
    for number, rank in enumerate(ranks):
        rank.hears(f"met worker{number} {SIZE}")
        rank.hears("called")


def test_survivors_ignore_another_run_at_their_address(job: Job) -> None:
    """The other run hosts its own store there."""
    first, second, _ = job.start_all()
    first.kill()
    second.hears("lost worker0")
    other = {"ASYNCRPC_RUN_ID": "of another test"}
    for number, rank in enumerate([job.start(rank, **other) for rank in range(SIZE)]):
        rank.hears(f"met worker{number} {SIZE}")
        rank.hears("called")

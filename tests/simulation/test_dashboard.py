"""What the dashboard asks of a large group: counted, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest

from asyncrpc import LimitOptions, LivenessOptions, Options, Worker
from asyncrpc.core.loop.tasks import Tasks
from asyncrpc.serving.dashboard.look import Seen, SharedLook
from asyncrpc.serving.dashboard.machine.query import ViewQuery, read_query
from asyncrpc.serving.dashboard.views import (
    CallsView,
    OverviewView,
    ReferencesView,
    TrainingView,
    ViewContext,
)
from asyncrpc.testing import Cluster
from asyncrpc.testing.network import Network
from asyncrpc.tools.inspection.machine.graph import NODES_MAX
from asyncrpc.tools.inspection.machine.slices import SLICE_MAX, Slices
from asyncrpc.tools.inspection.polling import InnerQuestions
from tests.simulation.seeds import simulated

OPTIONS: Final = Options(
    drain_timeout_s=1.0,
    liveness=LivenessOptions(heartbeat_s=60.0, lost_after_s=600.0),
    limits=LimitOptions(shared_memory_bytes=0, receive_pool_bytes=0),
)
EVERY_S: Final = 2.0
SUMMARY: Final = "inspection.summary"
SUMMARY_BYTES_MAX: Final = 1500  # question and answer of one worker, with its links
SIZES: Final = [64, pytest.param(1000, marks=pytest.mark.slow)]
LIMIT_S: Final = 7200.0  # of virtual time


def give_back(value: int) -> int:
    return value


def context_of(worker: Worker) -> ViewContext:
    loop = asyncio.get_running_loop()
    questions = InnerQuestions(worker)
    return ViewContext(questions, Tasks(loop), EVERY_S, 10.0)


@asynccontextmanager
async def watched(
    network: Network, size: int, kind: Any = OverviewView
) -> AsyncIterator[tuple[list[Worker], Any]]:
    """A group, and a view of it at its first worker."""
    names = [f"w{number}" for number in range(size)]
    async with Cluster(names=names, network=network, options=OPTIONS) as (*workers,):
        context = context_of(workers[0])
        yield workers, kind(context)
        await context.tasks.cancel(1.0)


def query_of(view: Any, text: str = "") -> ViewQuery:
    parameters: Iterator[tuple[str, str]] = (
        (name, value)
        for name, _, value in (pair.partition("=") for pair in text.split("&") if pair)
    )
    return read_query(parameters, keys=view.keys, sort=view.sort, is_up=view.is_up)


def shown(work: Slices[Any]) -> tuple[Any, int]:
    """Return what came of some work, and the most that was done at once."""
    most = 0
    while True:
        try:
            most = max(most, next(work))
        except StopIteration as end:
            return end.value, most


def questions_of(workers: list[Worker]) -> list[int]:
    """Return how often each worker was asked for its summary."""
    return [
        sum(
            served.function == SUMMARY for served in worker.parts.recorder.served.recent
        )
        for worker in workers
    ]


async def call_some(workers: list[Worker]) -> None:
    """Let each call its neighbour."""
    others = [*workers[1:], workers[0]]
    pairs = zip(workers, others, strict=True)
    await asyncio.gather(*(a.peer(b.name).call(give_back, 1) for a, b in pairs))


@pytest.mark.parametrize("size", SIZES)
@simulated([1], LIMIT_S)
async def test_look_asks_each_worker_once_for_a_few_bytes(
    network: Network, size: int
) -> None:
    async with watched(network, size) as (workers, view):
        await call_some(workers)
        await view.look.newest()  # makes the links
        before, sent = questions_of(workers), network.sent_bytes
        seen = await view.look.after(1)
        after = questions_of(workers)
        assert [b - a for a, b in zip(before, after, strict=True)] == [1] * size
        assert (network.sent_bytes - sent) / size < SUMMARY_BYTES_MAX
        check_pages(view, seen, size)


def check_pages(view: OverviewView, seen: Seen[Any], size: int) -> None:
    """All pages have all workers, each once; none is made in one go."""
    assert (seen.workers, seen.silent) == (size, {})
    names = list[str]()
    per_page = 50
    for page in range(1, -(-size // per_page) + 1):
        text = f"sort=worker&order=up&page={page}"
        look, most = shown(view.show(seen, query_of(view, text)))
        assert most <= SLICE_MAX
        assert look["first"] == len(names) + 1
        names += [row["worker"] for row in look["rows"]]
    assert names == sorted(f"w{number}" for number in range(size))
    last, most = shown(view.show(seen, query_of(view, "sort=made_per_s&per_page=200")))
    assert most <= SLICE_MAX
    assert len(last["links"]["cells"]) <= 32
    assert last["links"]["left_out"] == size - len(last["links"]["workers"])


@simulated([2])
async def test_idle_dashboard_asks_no_worker(network: Network) -> None:
    async with watched(network, 8) as (workers, view):
        first = await view.look.newest()
        again = await view.look.newest()
        assert first is again  # within the period
        asked = questions_of(workers)
        await asyncio.sleep(100 * EVERY_S)
        assert questions_of(workers) == asked


@simulated([3])
async def test_viewers_share_one_look_of_each_period(network: Network) -> None:
    async def follow(look: SharedLook[Any, Any], looks: int) -> list[float]:
        number, times = 0, []
        for _ in range(looks):
            seen = await look.after(number)
            number = seen.number
            times.append(seen.taken_at_s)
        return times

    async with watched(network, 8) as (workers, view):
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        await asyncio.gather(*(follow(view.look, 10) for _ in range(20)))
        assert questions_of(workers) == [10] * 8
        assert loop.time() - begun_s >= 9 * EVERY_S


@simulated([4])
async def test_viewer_that_leaves_does_not_end_the_look_of_others(
    network: Network,
) -> None:
    async with Cluster(8, network=network, options=OPTIONS) as (first, *_):
        context = context_of(first)
        view = OverviewView(context)
        leaving = asyncio.ensure_future(view.look.newest())
        staying = asyncio.ensure_future(view.look.newest())
        await asyncio.sleep(0)
        leaving.cancel()
        seen = await staying
        assert seen.workers == 8
        assert seen.silent == {}
        await context.tasks.cancel(1.0)


@simulated([5])
async def test_silent_workers_delay_no_other_and_are_seen_when_back(
    network: Network,
) -> None:
    size, silent = 64, 16
    async with watched(network, size) as (workers, view):
        number = (await view.look.newest()).number
        cut = [worker.name for worker in workers[-silent:]]
        links = [network.between("w0", name) for name in cut]
        for link in links:
            link.partition()
        loop = asyncio.get_running_loop()
        while len((seen := await view.look.after(number)).silent) < silent:
            number = seen.number
        assert set(seen.silent) == set(cut)
        assert seen.digest is not None
        states = {row["worker"]: row["state"] for row in seen.digest.rows}
        assert {states[name] for name in cut} == {"silent"}
        begun_s, asked = loop.time(), questions_of(workers[1:2])
        await view.look.after(seen.number)
        assert loop.time() - begun_s < 2 * EVERY_S
        assert questions_of(workers[1:2]) == [asked[0] + 1]
        for link in links:
            link.heal()
        while (seen := await view.look.after(seen.number)).silent:
            pass


@pytest.mark.parametrize("kind", [CallsView, ReferencesView, TrainingView])
@pytest.mark.parametrize("size", SIZES)
@simulated([6], LIMIT_S)
async def test_lists_come_in_slices(network: Network, kind: Any, size: int) -> None:
    async with watched(network, size, kind) as (workers, view):
        held = [
            worker.peer(workers[0].name).remote(give_back, 1) for worker in workers[1:]
        ]
        seen = await (await view.look_for(query_of(view))).newest()
        look, most = shown(view.show(seen, query_of(view, "per_page=200")))
        assert most <= max(SLICE_MAX, NODES_MAX)
        assert len(look["rows"]) == min(200, look["total"])
        for reference in held:
            reference.release()

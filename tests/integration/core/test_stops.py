"""Processes that are stopped and go on: every wait for them ends, and names them.

Whoever is stopped is caller and callee, consumer and producer, owner and trainer of the
others all at once.  What has come for it meanwhile counts first.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import pytest
import torch
from aiohttp import ClientSession, web
from torch import nn

import asyncrpc
from asyncrpc import Options, Worker, WorkerLostError, current_worker, on_loop, serving
from asyncrpc.autograd import backward, context
from asyncrpc.errors import CollectiveError, OptimizerError
from asyncrpc.nn import RemoteModule
from asyncrpc.optim import DistributedOptimizer
from asyncrpc.testing import ProcessCluster, acting_as
from tests.integration.core import stopped_work
from tests.integration.core.company import LIMIT_S, PATIENT
from tests.integration.core.groups import processes, until
from tests.integration.core.loops_of_processes import kind_of_loop, processes_on
from tests.integration.core.stopped_work import KINDS, Key

Transport: TypeAlias = Literal["uds", "tcp"]
OPTIONS = Options(
    # A tenth of the defaults: what they promise is in proportion.
    liveness=asyncrpc.LivenessOptions(heartbeat_s=0.2, lost_after_s=1.0),
    network=asyncrpc.NetworkOptions(connect_timeout_s=1.0),
    drain_timeout_s=2.0,
)
TIMEOUT_S = 2.0  # of the caller that is stopped while its answer comes
ANSWER = torch.ones(1 << 12)  # is read in several turns of a loop
_asked: list[asyncio.Task[torch.Tensor]] = []
_held: list[asyncio.Event] = []


@pytest.fixture(params=["uds", "tcp"])
def transport(request: pytest.FixtureRequest) -> Transport:
    chosen: Transport = request.param
    return chosen


@asynccontextmanager
async def three(
    transport: Transport, options: Options
) -> AsyncIterator[tuple[ProcessCluster, Worker]]:
    """Have `a` here, and `b` and `c` in processes, all on the same kind of loop."""
    with processes_on(kind_of_loop()):
        cluster = processes("b", "c", transport=transport, options=options)
        async with cluster as a:
            yield cluster, a


@contextmanager
def stopped(cluster: ProcessCluster, name: str) -> Iterator[None]:
    cluster.kill(name, signal.SIGSTOP)
    try:
        yield
    finally:
        cluster.kill(name, signal.SIGCONT)


# --- under load ----------------------------------------------------------------------


class Watch:
    """Looks at the work of all three."""

    def __init__(self, a: Worker) -> None:
        self._peers = {name: a.peer(name) for name in "abc"}
        self.ended: dict[str, dict[Key, int]] = {}
        self.raised: dict[str, dict[Key, list[str]]] = {}
        self.lost: dict[str, int] = {}

    async def tell(self, what: Callable[[], object], names: str = "abc") -> None:
        """Tell some workers; one that was stopped may not be reached the first time."""
        for name in names:
            async with asyncio.timeout(LIMIT_S):
                while True:
                    try:
                        await self._peers[name].call(what)
                        break
                    except WorkerLostError as error:
                        if error.outcome is not asyncrpc.Outcome.NOT_EXECUTED:
                            raise

    async def until(
        self, is_so: Callable[[str, Key], bool], names: str = "abc"
    ) -> None:
        """Wait until something is so of each kind of work of some workers."""
        works = itertools.product(names, KINDS, "abc")
        keys = [(name, (kind, to)) for name, kind, to in works if to != name]
        try:
            async with asyncio.timeout(LIMIT_S):
                while keys:
                    for name in names:
                        result = await self._peers[name].call(stopped_work.progress)
                        self.ended[name], self.raised[name], self.lost[name] = result
                    keys = [key for key in keys if not is_so(*key)]
        except TimeoutError:
            raise AssertionError(f"{keys}: {self.raised}") from None

    def has_ended(self, name: str, key: Key) -> bool:
        return self.ended[name].get(key, 0) > 1

    def goes_on_or_is_lost(self, name: str, key: Key) -> bool:
        texts = self.raised[name].get(key, []) if key[1] == "b" else []
        return self.has_ended(name, key) or any("WorkerLost" in text for text in texts)

    def goes_on_or_is_late(self, name: str, key: Key) -> bool:
        is_late = self.raised[name].get(key) or key[0] != "limited"
        return bool(is_late) if key[1] == "b" else self.has_ended(name, key)


@pytest.mark.slow
async def test_work_with_a_stopped_worker_names_it(transport: Transport) -> None:
    """It is lost; the others go on with each other, and all do once it goes on."""
    async with three(transport, OPTIONS) as (cluster, a):
        watch = Watch(a)
        await watch.tell(stopped_work.begin)
        await watch.until(watch.has_ended)
        with stopped(cluster, "b"):
            await watch.tell(stopped_work.forget, "ac")
            await watch.until(watch.goes_on_or_is_lost, "ac")
            for name in "ac":
                assert watch.lost[name] == 1
                for (_, to), texts in watch.raised[name].items():
                    assert to == "b", texts
                    assert all("'b'" in text for text in texts), texts
            said = str(watch.raised)
            assert "its process is stopped, by a signal or a debugger" in said
        await watch.tell(stopped_work.forget)
        await watch.until(watch.has_ended)
        await watch.tell(stopped_work.end)


@pytest.mark.slow
async def test_short_stop_fails_only_calls_with_deadlines(transport: Transport) -> None:
    """The stop outlasts many heartbeats, and no link is lost."""
    liveness = asyncrpc.LivenessOptions(heartbeat_s=0.1, lost_after_s=LIMIT_S)
    async with three(transport, replace(OPTIONS, liveness=liveness)) as (cluster, a):
        watch, link = Watch(a), await a.parts.link_to("b")
        await watch.tell(stopped_work.begin)
        await watch.until(watch.has_ended)
        with stopped(cluster, "b"):
            await watch.tell(stopped_work.forget, "ac")
            await watch.until(watch.goes_on_or_is_late, "ac")
        await watch.until(watch.has_ended)
        for name in "abc":
            assert not watch.lost[name]
            assert {kind for kind, _ in watch.raised[name]} <= {"limited"}
        assert await a.parts.link_to("b") is link
        await watch.tell(stopped_work.end)


# --- one kind at a time ---------------------------------------------------------------


async def answer_later() -> torch.Tensor:
    _held.append(asyncio.Event())
    await _held[-1].wait()
    return ANSWER


@on_loop
def count_held() -> int:
    return len(_held)


@on_loop
def let_go() -> None:
    _held.pop().set()


async def ask(name: str) -> None:
    """Ask for what is answered once it is let go, within a time."""
    peer = current_worker().peer(name).using(timeout_s=TIMEOUT_S)
    _asked.append(asyncio.ensure_future(peer.call(answer_later)))
    while not await peer.call(count_held):
        pass


async def answer() -> str:
    try:
        return f"{len(await _asked.pop())} elements"
    except TimeoutError as error:
        return str(error)


async def test_answer_received_during_a_stop_counts(transport: Transport) -> None:
    """The deadline of the call has passed by then."""
    async with three(transport, Options(liveness=PATIENT)) as (cluster, a):
        b, c, now_s = a.peer("b"), a.peer("c"), asyncio.get_running_loop().time
        rounds = 0
        while rounds < 2:
            begun_s = now_s()
            await c.call(ask, "b")
            with stopped(cluster, "c"):
                await b.call(let_go)
                passed_s = now_s() - begun_s
                await asyncio.sleep(TIMEOUT_S + 0.5)  # the deadline is long over
            received = await asyncio.wait_for(c.call(answer), LIMIT_S)
            if passed_s < TIMEOUT_S / 2:  # else the answer was late on a busy machine
                rounds += 1
                assert received == f"{len(ANSWER)} elements"


# --- a consumer, ranks, and owners ----------------------------------------------------

_kept: dict[str, Any] = {}  # of a process, between two calls


async def feed() -> AsyncIterator[torch.Tensor]:
    """Produce until the consumer is given up."""
    ended = _kept["ended"] = asyncio.Event()
    try:
        while True:
            yield ANSWER
    finally:
        ended.set()


async def consume(name: str) -> str:
    """Consume without an end; return what ends it."""
    try:
        async for _ in current_worker().peer(name).stream(feed):
            _kept["items"] += 1
    except asyncrpc.AsyncRpcError as error:
        return f"{type(error).__name__}: {error}"
    return "it ended"


async def keep_consuming(name: str) -> None:
    _kept["items"] = 0
    _kept["consuming"] = asyncio.ensure_future(consume(name))
    await until(lambda: _kept["items"] > 0)


async def consumed() -> str:
    return str(await _kept.pop("consuming"))


@pytest.mark.slow
async def test_stopped_consumer_ends_its_producer_and_hears_it(
    transport: Transport,
) -> None:
    async with three(transport, OPTIONS) as (cluster, a):
        await a.peer("b").call(keep_consuming, "a")
        with stopped(cluster, "b"):
            await asyncio.wait_for(_kept["ended"].wait(), LIMIT_S)
            assert a.counters.workers_lost == 1
        text = await asyncio.wait_for(a.peer("b").call(consumed), LIMIT_S)
        assert "WorkerLostError: feed on 'a'" in text
        await a.peer("b").call(keep_consuming, "a")  # another one is fed
        assert not _kept.pop("ended").is_set()


async def reduce_anew() -> float:
    """Make a group of all, and reduce in it; it is kept if that fails."""
    if "group" in _kept:
        _kept.pop("group").close()
    group = _kept["group"] = asyncrpc.Group(current_worker(), timeout_s=LIMIT_S)
    return float((await group.all_reduce(torch.ones(1000)))[0])


async def reduce_on() -> str:
    """Reduce again and again; return what ends it."""
    group = _kept["group"]
    try:
        while True:
            await group.all_reduce(torch.ones(1 << 18))
    except CollectiveError as error:
        return f"{type(error).__name__} {error.ranks}: {error}"


async def greet(name: str) -> None:
    assert await current_worker().peer(name).call(len, "ab") == 2


@on_loop
def close_group() -> None:
    _kept.pop("group").close()


@pytest.mark.slow
async def test_stopped_rank_is_lost_and_named_by_all(transport: Transport) -> None:
    async with three(transport, OPTIONS) as (cluster, a):
        with acting_as(a):
            peers = [a.peer(name) for name in "abc"]
            sums = await asyncio.gather(*(peer.call(reduce_anew) for peer in peers))
            assert sums == [3.0] * 3
            reducing = [asyncio.ensure_future(peer.call(reduce_on)) for peer in peers]
            with stopped(cluster, "b"):
                async with asyncio.timeout(LIMIT_S):
                    for reduction in (reducing[0], reducing[2]):
                        text = await reduction
                        assert text.startswith("RankLostError ('b',)"), text
            async with asyncio.timeout(LIMIT_S):
                (failure,) = await asyncio.gather(reducing[1], return_exceptions=True)
                # Of `a`, if that has lost it itself; else its own word.
                assert "LostError" in f"{type(failure).__name__} {failure}"
                for peer in (peers[0], peers[2]):
                    await peer.call(greet, "b")  # it is there again
                sums = await asyncio.gather(*(peer.call(reduce_anew) for peer in peers))
                assert sums == [3.0] * 3
                for peer in peers:
                    await peer.call(close_group)


@pytest.mark.slow
async def test_step_with_a_stopped_owner_names_it(transport: Transport) -> None:
    """The other owner steps, or not: the error says; the next one is whole."""
    async with three(transport, OPTIONS) as (cluster, a):
        with acting_as(a):

            async def make() -> tuple[list[RemoteModule], DistributedOptimizer]:
                stages = [RemoteModule(name, nn.Linear, (3, 3)) for name in "bc"]
                parameters = [await stage.remote_parameters() for stage in stages]
                every = [*parameters[0], *parameters[1]]
                return stages, DistributedOptimizer(torch.optim.SGD, every, lr=0.1)

            async def step(stop: AbstractContextManager[None]) -> None:
                async with context() as ctx:
                    out = torch.ones(4, 3)
                    for stage in stages:
                        out = await stage.forward_async(out)
                    await backward(ctx, [out.square().sum()])
                    with stop:
                        await optimizer.step(ctx)

            stages, optimizer = await make()
            async with asyncio.timeout(LIMIT_S):
                await step(nullcontext())
                words = "'b'.*its process is stopped"
                with pytest.raises(OptimizerError, match=words):
                    await step(stopped(cluster, "b"))
                stages, optimizer = await make()
                await step(nullcontext())


# --- an application ------------------------------------------------------------------


async def ask_on(_: web.Request) -> web.Response:
    return web.Response(text=await current_worker().peer("c").call(name_here))


def name_here() -> str:
    return current_worker().name


async def open_application() -> int:
    """Serve HTTP from this process; return the port."""
    app = web.Application(middlewares=[serving.middleware()])
    app[serving.WORKER] = current_worker()
    app.router.add_get("/", ask_on)
    runner = _kept["runner"] = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port: int = runner.addresses[0][1]
    return port


async def close_application() -> None:
    await _kept.pop("runner").cleanup()


@pytest.mark.slow
async def test_stopped_application_answers_or_waits(transport: Transport) -> None:
    """Requests are answered with the reason, or later; the next ones as before."""
    async with three(transport, OPTIONS) as (cluster, a), ClientSession() as session:
        port = await a.peer("b").call(open_application)

        async def get() -> tuple[int, str]:
            async with session.get(f"http://127.0.0.1:{port}/") as response:
                return response.status, await response.text()

        async def served() -> None:
            while await get() != (200, "c"):
                pass

        async with asyncio.timeout(LIMIT_S):
            await served()
            with stopped(cluster, "c"):
                status, text = await get()
            assert status == 503
            assert "'c'" in text
            assert "its process is stopped" in text
            await served()
            with stopped(cluster, "b"):
                request = asyncio.ensure_future(get())
                await until(lambda: a.counters.workers_lost == 1)
                assert not request.done()
            assert (await request)[0] in (200, 503)  # `c` may have lost it, too
            await served()
            await a.peer("b").call(close_application)

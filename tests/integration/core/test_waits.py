"""Whoever waits is told of an end, whatever goes wrong and whoever goes first.

Each of these waits once had no end: what it waited for had been dropped, or could not
come any more.  Nothing here waits for a time; `LIMIT_S` is what a hang takes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

from asyncrpc import DeviceOptions, Options, Worker
from asyncrpc.core.barriers.service import BARRIER
from asyncrpc.core.calls.futures import CallFuture
from asyncrpc.core.hosting import LoopThread
from asyncrpc.errors import (
    BarrierBrokenError,
    BarrierTimeoutError,
    ClosedError,
    ConnectionLostError,
    NotStartedError,
    RRefDeletedError,
)
from asyncrpc.testing import Cluster, acting_as
from tests.integration.core.conftest import Trio
from tests.integration.core.groups import until
from tests.integration.core.remote import count_to

LIMIT_S: Final = 60.0
AT_ONCE = Options(drain_timeout_s=0.0)

_begun: asyncio.Event
_go: asyncio.Event


@pytest.fixture
async def gate() -> None:
    """Events of this test's loop."""
    global _begun, _go
    _begun, _go = asyncio.Event(), asyncio.Event()


async def number() -> int:
    """Return when the test wants it."""
    _begun.set()
    await _go.wait()
    return 7


class Nameless:
    """What does not even say its name."""

    def __call__(self) -> int:
        """Be callable."""
        return 1

    def __getattr__(self, name: str) -> Any:
        """Raise, and not AttributeError."""
        raise ValueError(f"a {name} of its own")


class Odd:
    """Something with a property that raises, and one whose value does."""

    @property
    def nameless(self) -> Nameless:
        """Return what cannot be described."""
        return Nameless()

    @property
    def broken(self) -> Callable[[], int]:
        """Raise, and not AttributeError."""
        raise ValueError("a property of its own")


async def odd() -> Odd:
    """Return one when the test wants it."""
    await number()
    return Odd()


async def in_time(waited: Any) -> Any:
    """Await something that must not hang."""
    return await asyncio.wait_for(waited, LIMIT_S)


class Cut:
    """Ends the first connection of a worker in the very turn in which it is made."""

    def __init__(self, entry: Any) -> None:
        self._entry = entry
        self.links: list[Any] = []

    async def when_dialed(self) -> None:
        """Wait until the dial is under way; then it is cut when it has ended."""
        await until(lambda: self._entry.dial is not None, step_s=0.0)
        self._entry.dial.add_done_callback(self._cut)

    def _cut(self, dial: asyncio.Task[Any]) -> None:
        self.links.append(dial.result())
        dial.result().connection.end(ConnectionLostError("cut by the test"))


class TestALinkLostAsItIsMade:
    """Between the end of a dial and the turn of who waits for it, it may be lost."""

    async def test_call_uses_the_next_link_after_a_loss(self, a: Worker) -> None:
        cut = Cut(a.parts.directory.find("b"))
        call = a.peer("b").call(max, 1, 2)
        await cut.when_dialed()
        assert await in_time(call) == 2
        assert [link.is_lost for link in cut.links] == [True]

    async def test_stream_uses_the_next_link_after_a_loss(self, a: Worker) -> None:
        cut = Cut(a.parts.directory.find("b"))

        async def take() -> list[int]:
            return [item async for item in a.peer("b").stream(count_to, 3)]

        taking = asyncio.create_task(take())
        await cut.when_dialed()
        assert await in_time(taking) == [0, 1, 2]
        assert [link.is_lost for link in cut.links] == [True]


async def test_failed_start_of_a_call_is_raised_in_its_thread(a: Worker) -> None:
    """Any error on the loop ends the wait of the thread."""
    assert await a.peer("b").call(max, 1, 2) == 2

    def refuse(_link: Any) -> None:
        raise LookupError("of the link")

    def begin() -> int:
        call: CallFuture[int] = a.parts.new_call("max", "b")
        a.parts.begin(call, "builtins:max", ([1, 2], {}), on_link=refuse)
        return call.wait(LIMIT_S)

    with pytest.raises(LookupError, match="of the link"):
        await asyncio.to_thread(begin)


async def test_barrier_timeout_counts_while_another_barrier_runs(trio: Trio) -> None:
    first = asyncio.create_task(trio[0].barrier())
    await asyncio.sleep(0)
    with pytest.raises(BarrierTimeoutError, match="so this call did not begin"):
        await in_time(trio[0].barrier(timeout_s=0.01))
    await asyncio.gather(trio[1].barrier(), trio[2].barrier())
    await first
    await asyncio.gather(*(worker.barrier() for worker in trio))  # none was left out


class TestTheEndOfAWorker:
    async def test_job_without_a_thread_fails_at_shutdown(self) -> None:
        # In turns: else another thread would be started for the second one.
        options = Options(
            threads=1, devices=DeviceOptions(exclusive=True), drain_timeout_s=0.0
        )
        go = threading.Event()
        try:
            async with Cluster(1, options=options) as (a,):
                held = a.parts.run_in_thread(lambda: go.wait(LIMIT_S))
                waiting = a.parts.run_in_thread(int)
            with pytest.raises(ClosedError, match="shut down before it ran"):
                await in_time(waiting)
        finally:
            go.set()
        assert await in_time(held)

    async def test_shutdown_ends_a_waiting_barrier(self) -> None:
        """The worker is linked to no missing worker."""
        async with Cluster(12, options=AT_ONCE) as workers:
            a, absent = workers[0], 5
            barriers = [
                asyncio.create_task(worker.barrier())
                for worker in workers
                if worker.rank != absent
            ]
            series = a.parts.barriers.table.series(BARRIER)
            await until(lambda: series.missing == [absent])
            await a.shutdown()
            with pytest.raises(BarrierBrokenError, match=r"'a'\) gave .* shuts down"):
                await in_time(barriers[0])
        await in_time(asyncio.gather(*barriers, return_exceptions=True))

    @pytest.mark.usefixtures("gate")
    async def test_shutdown_ends_a_wait_for_a_local_value(self) -> None:
        async with Cluster(1, options=AT_ONCE) as (a,):
            with acting_as(a):
                rref = a.peer("a").remote(number)
            waiting = asyncio.ensure_future(rref.to_here())
            await _begun.wait()
        with pytest.raises(ClosedError):
            await in_time(waiting)

    async def test_shutdown_ends_queued_barriers(self) -> None:
        async with Cluster(2, options=AT_ONCE) as (a, _):
            barriers = [asyncio.create_task(a.barrier()) for _ in "12"]
            await asyncio.sleep(0)
            await a.shutdown()
            first, second = await in_time(
                asyncio.gather(*barriers, return_exceptions=True)
            )
            assert isinstance(first, BarrierBrokenError)
            assert isinstance(second, NotStartedError)


@pytest.mark.usefixtures("gate")
class TestAValueThatIsStillToBeMade:
    async def test_release_ends_a_wait_for_the_value(self, a: Worker) -> None:
        with acting_as(a):
            rref = a.peer("a").remote(number)
            waiting = asyncio.ensure_future(rref.to_here())
            await _begun.wait()
            rref.release()
            with pytest.raises(RRefDeletedError, match="before it was made"):
                await in_time(waiting)
            _go.set()

    @pytest.mark.parametrize("name", ["broken", "nameless"])
    async def test_error_of_a_property_is_raised(self, trio: Trio, name: str) -> None:
        a = trio[0]
        with acting_as(a):
            rref = a.peer("b").remote(odd)
            asking = asyncio.ensure_future(getattr(rref.rpc_async(), name)())
            await _begun.wait()
            links = trio[1].parts.directory.links
            await until(lambda: sum(len(link.served) for link in links) == 2)
            _go.set()
            with pytest.raises(ValueError, match="of its own"):
                await in_time(asking)


@pytest.fixture
def aside() -> Iterator[Callable[[Callable[[], Any]], list[BaseException]]]:
    """Runs a function in a thread of its own, which does not keep the process."""
    threads: list[threading.Thread] = []

    def run(function: Callable[[], Any]) -> list[BaseException]:
        raised: list[BaseException] = []

        def call() -> None:
            try:
                function()
            except BaseException as error:  # noqa: BLE001
                raised.append(error)

        threads.append(threading.Thread(target=call, daemon=True))
        threads[-1].start()
        return raised

    yield run
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()


Aside = Callable[[Callable[[], Any]], list[BaseException]]


class TestAThreadThatWaitsForALoop:
    """A loop that is closed calls nobody back."""

    def test_wait_fails_when_its_loop_is_closed(self, aside: Aside) -> None:
        loop = asyncio.new_event_loop()
        call: CallFuture[int] = CallFuture(loop=loop, function="f", to="b")
        raised = aside(call.wait)
        while not call._callbacks:  # noqa: SLF001
            loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        _await(lambda: raised)
        assert isinstance(raised[0], ClosedError)

    def test_wait_on_a_closed_loop_fails(self) -> None:
        loop = asyncio.new_event_loop()
        call: CallFuture[int] = CallFuture(loop=loop, function="f", to="b")
        loop.close()
        with pytest.raises(ClosedError):
            call.wait()

    def test_wait_on_a_closed_loop_returns_a_finished_result(self) -> None:
        loop = asyncio.new_event_loop()
        call: CallFuture[int] = CallFuture(loop=loop, function="f", to="b")
        call.succeed(7)
        loop.close()
        assert call.wait() == 7

    def test_stopped_loop_thread_fails_its_waiters(self, aside: Aside) -> None:
        thread, begun = LoopThread("a loop of a test"), threading.Event()

        def never() -> asyncio.Future[None]:
            begun.set()
            return thread.loop.create_future()

        raised = aside(lambda: thread.do(never))
        assert begun.wait(LIMIT_S)
        thread.stop()
        _await(lambda: raised)
        assert isinstance(raised[0], ClosedError)


def _await(happened: Callable[[], object]) -> None:
    """Wait for another thread."""
    poll = threading.Event()  # never set: a way to wait
    for _ in range(int(LIMIT_S / 0.01)):
        if happened():
            return
        poll.wait(0.01)
    pytest.fail("it waits for ever")

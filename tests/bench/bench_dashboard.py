"""What does the dashboard cost the event loops of a large group?

    $ make bench ONLY=dashboard
    $ python -m tests.bench.bench_dashboard --workers 1000 --rounds 200 --views overview

*At a worker*: how long one answer takes its loop, with full rings of events, in the
median and at most.  *At the dashboard*: the longest that its loop is held in one go by
a look at so many workers and by what one browser is sent of it, 200 rows; of each look
in turn, and of the first, which pays for what runs for the first time.  The answers are
those of `full_answers`: of workers that have much to tell.  They come over a stand-in
for connections that reads them as those do, eight in one turn of the loop.

Times at most are processor time of the loop's thread, so they are those of a machine at
rest also on a busy one.  Garbage is not collected meanwhile: a full collection in a
process that has imported torch takes 0.1 s, whatever has made the garbage.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
from collections.abc import Callable, Sequence
from statistics import median
from time import thread_time
from typing import Any, Final, Self

import msgpack

import asyncrpc
from asyncrpc import Worker
from asyncrpc.core.ids import Incarnation, WorkerId
from asyncrpc.core.loop.clock import now_s
from asyncrpc.core.loop.tasks import Tasks
from asyncrpc.core.members import Member
from asyncrpc.core.services.schema import Request
from asyncrpc.serving.dashboard.look import in_slices
from asyncrpc.serving.dashboard.machine.answers import encoded
from asyncrpc.serving.dashboard.machine.query import PER_PAGE_MAX, read_query
from asyncrpc.serving.dashboard.mounting import views_by_name
from asyncrpc.serving.dashboard.views import ViewContext
from asyncrpc.serving.machine import server_sent_events as sse
from asyncrpc.testing import Cluster
from asyncrpc.tools.inspection.ages import WaitAges
from asyncrpc.tools.inspection.collecting import snapshot_of
from asyncrpc.tools.inspection.machine.rates import percentile
from asyncrpc.tools.inspection.summarizing import summary_of
from asyncrpc.tools.inspection.worker_answers import calls_of, details_of, training_of
from asyncrpc.trace import OK, RECENT_MAX, CallEnded, CallServed
from tests.bench.full_answers import ANSWERS, name_of

HELD_MS: Final = 5.0  # what no loop may be held for
VIEWS: Final = ("overview", "calls", "references", "training", "collectives", "hangs")


def fill(worker: Worker) -> None:
    """Fill the rings of a worker, as if it did 2,000 of each in the last seconds."""
    recorder = worker.parts.recorder
    end_s = recorder.now_s()
    for number in range(RECENT_MAX):
        at_s = end_s - (RECENT_MAX - number) * 1e-3
        peer = WorkerId(f"w{number % 64}", Incarnation(1))
        function = f"module:function_{number % 50}"
        began_s = at_s - 1e-3
        # By their classes, so that a field that is added cannot be forgotten here.
        recorder.calls.record(
            CallEnded(at_s, began_s, peer, function, number, OK, 64, 64, task="")
        )
        recorder.served.record(
            CallServed(at_s, began_s, began_s, peer, function, number, OK)
        )


def longest_ms(work: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """Return how long some work takes, in milliseconds: the median, and the most."""
    took = []
    for _ in range(rounds):
        begun_s = thread_time()
        work()
        took.append(1e3 * (thread_time() - begun_s))
    return median(took), max(took)


class ManyAnswers:
    """Answers of many workers that have much to tell; a `GroupQuestions`."""

    secret = None

    def __init__(self, count: int) -> None:
        self._members = [
            Member(name_of(number), number, Incarnation(number + 1), (), "host")
            for number in range(count)
        ]
        self._packed: dict[str, list[bytes]] = {}
        self.held: list[HeldLoop] = []  # what measures meanwhile

    async def members(self) -> list[Member]:
        return self._members

    def _pack(self, key: str, request: Request[Any]) -> None:
        """Pack all answers; workers do that elsewhere, so that it does not count."""
        make, write = ANSWERS[type(request)], type(request).answer.write
        count = len(self._members)
        self._packed[key] = [
            msgpack.packb(write(make(request, number, count)))
            for number in range(count)
        ]
        for held in self.held:
            held.skip()

    async def ask(self, member: Member, request: Request[Any], **options: Any) -> Any:
        key = repr(request)
        if key not in self._packed:
            self._pack(key, request)
        packed = self._packed[key]
        await asyncio.sleep(0)
        return request.read_answer(member.name, msgpack.unpackb(packed[member.rank]))

    def close(self) -> None:
        """Nothing was made."""


class HeldLoop:
    """Notes how long the loop is held between two of its turns."""

    def __init__(self) -> None:
        self.most_ms = 0.0
        self._loop = asyncio.get_running_loop()
        self._is_over = False
        self._last_s = thread_time()

    def _turn(self) -> None:
        at_s = thread_time()
        self.most_ms = max(self.most_ms, 1e3 * (at_s - self._last_s))
        self._last_s = at_s
        if not self._is_over:
            self._loop.call_soon(self._turn)

    def skip(self) -> None:
        self._last_s = thread_time()

    def __enter__(self) -> Self:
        gc.disable()
        self._last_s = thread_time()
        self._loop.call_soon(self._turn)
        return self

    def __exit__(self, *_: object) -> None:
        self._turn()
        self._is_over = True
        gc.enable()
        gc.collect()


async def measure_dashboard(
    count: int, rounds: int, names: Sequence[str] = VIEWS
) -> None:
    """Print how long the dashboard's loop is held by each view, for one browser."""
    loop = asyncio.get_running_loop()
    questions = ManyAnswers(count)
    context = ViewContext(questions, Tasks(loop), 0.0, 10.0)
    views = views_by_name(context)
    print(f"\nat the dashboard, {count} workers: its loop is held at most")
    print(f"{'':>12} {'median':>9} {'99 %':>9} {'most':>9} {'first':>9} {'a look':>8}")
    for name in names:
        view = views[name]
        query = read_query(
            [("per_page", str(PER_PAGE_MAX))] if view.keys else [],
            keys=view.keys,
            sort=view.sort,
            is_up=view.is_up,
        )
        look = await view.look_for(query)
        number, held, took = 0, list[float](), list[float]()
        for _ in range(rounds):
            begun_s = now_s()
            with HeldLoop() as held_loop:
                questions.held = [held_loop]
                seen = await look.after(number)
                answer = await in_slices(view.show(seen, query))
                sse.encoded(
                    sse.ServerSentEvent(await in_slices(encoded(answer)), "look"), str
                )
            number = seen.number
            del seen, answer  # or this frame frees the look, all at once
            held.append(held_loop.most_ms)
            took.append(now_s() - begun_s)
        first, late = held[0], sorted(held[1:]) or held
        print(
            f"{name:>12} {median(late):6.2f} ms {percentile(late, 0.99):6.2f} ms "
            f"{late[-1]:6.2f} ms {first:6.2f} ms {median(took):6.2f} s"
        )


def measure_worker(worker: Worker, rounds: int) -> None:
    """Print how long a worker's loop is held by each answer."""
    parts: Any = worker.parts
    ages = WaitAges(asyncio.get_running_loop())
    asked: dict[str, Callable[[], Any]] = {
        "summary": lambda: summary_of(parts, running_s=0.0, lag_s=0.0, tasks=0),
        "calls": lambda: calls_of(parts, 500),
        "training": lambda: training_of(parts, 50),
        "details": lambda: details_of(parts),
        "snapshot *": lambda: snapshot_of(parts, ages, is_thorough=False),
    }
    print("at a worker with full rings (* in a thread of its own)")
    for name, work in asked.items():
        middle, most = longest_ms(work, rounds)
        print(f"{name:>12} {middle:6.2f} ms, most {most:6.2f} ms")
    print(f"wanted: at most {HELD_MS:g} ms")


async def measure(count: int, rounds: int, names: Sequence[str] = VIEWS) -> None:
    """Measure both ends."""
    async with Cluster(3) as (a, b, _):
        await a.peer("b").call(max, 1, 2)
        for worker in (a, b):
            fill(worker)
        measure_worker(a, max(100, rounds))
    await measure_dashboard(count, rounds, names)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=20, help="looks of each view")
    parser.add_argument("--views", nargs="*", choices=VIEWS, metavar="VIEW")
    options = parser.parse_args()
    asyncrpc.run(measure(options.workers, options.rounds, options.views or VIEWS))


if __name__ == "__main__":
    main()

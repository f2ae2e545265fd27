"""The watch for stalls: a worker logs by itself why something in it is stuck.

A thread wakes a few times in `Options.stall_after_s` and checks only whether any task
or call here has waited for so long, which takes microseconds.  If there is such a wait
that it has not judged yet, it takes a snapshot of this worker.  Most such waits are
idle, like that of a server for its next request.  Otherwise the loop asks the workers
that the wait leads to, within limits, and the finding goes into the log.

A loop that does not run cannot ask; then the thread logs where the loop is blocked.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from typing import Final, TypeVar

from asyncrpc.core.loop.clock import now_s
from asyncrpc.core.loop.threads import in_new_thread
from asyncrpc.core.parts import Parts
from asyncrpc.tools.inspection.ages import LOOKS, WaitAges
from asyncrpc.tools.inspection.collecting import snapshot_of
from asyncrpc.tools.inspection.group import GroupView
from asyncrpc.tools.inspection.look_from_worker import graph_of_seen, inner_look
from asyncrpc.tools.inspection.loop_state import blocked_for_s, silent_for_s
from asyncrpc.tools.inspection.machine.graph import AwaitGraph, find_hangs, graph_of
from asyncrpc.tools.inspection.machine.reported_stalls import SaidHangs
from asyncrpc.tools.inspection.machine.wording import blocked, sentence
from asyncrpc.tools.inspection.records import WorkerSnapshot

logger = logging.getLogger("asyncrpc")

T = TypeVar("T")

PAUSE_MIN_S: Final = 0.05
PAUSE_MAX_S: Final = 5.0
SHARE_MAX: Final = 0.02  # of the time that looks at this worker may take
SAID_MAX: Final = 10  # of one look


class StallWatch:
    """The watch of one worker.

    Attributes:
        judged: the long waits that it has looked at.
    """

    def __init__(self, ports: _WatchedWorker, ages: WaitAges, after_s: float) -> None:
        self._ports = ports
        self._ages = ages
        self._after_s = after_s
        self._pause_s = min(max(after_s / LOOKS, PAUSE_MIN_S), PAUSE_MAX_S)
        self._reported = SaidHangs(ports.name)
        self.judged: frozenset[Hashable] = frozenset()
        self._rest_until_s = 0.0  # no look before this time
        self._again_s = 0.0  # when the judged waits are looked at again
        self._patience_s = after_s
        self._is_blocked = False
        self._is_looking = False
        self._closed = threading.Event()

    @property
    def open(self) -> int:
        """How many stalls have been logged and are not over."""
        return len(self._reported)

    def start(self) -> None:
        """Start the watching thread."""
        threading.Thread(target=self._run, name="asyncrpc-stalls", daemon=True).start()

    def close(self) -> None:
        """Stop watching; the thread ends at once, or after its current look."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(self._pause_s):
            try:
                self._tick()
            except Exception:
                if self._closed.is_set():  # parts of the worker are closed already
                    return
                logger.exception("worker %r could not look for stalls", self._name)

    @property
    def _name(self) -> str:
        return self._ports.name

    def _tick(self) -> None:
        blocked_s = self._blocked_for_s()
        if blocked_s:
            if blocked_s >= self._after_s and not self._is_blocked:
                self._is_blocked = True
                self._say_blocked(blocked_s)
            return
        self._is_blocked = False
        if not self._is_looking:
            self._look_at_waits()

    def _blocked_for_s(self) -> float:
        """Return how long the loop has not run, if that is long; else 0."""
        ticked_ns, loop = self._ports.ticked_ns, self._ports.loop
        if ticked_ns is not None and silent_for_s(ticked_ns) < self._after_s:
            return 0.0
        return blocked_for_s(loop, ticked_ns)

    def _say_blocked(self, blocked_s: float) -> None:
        snapshot = self._ports.take(blocked_s, is_thorough=False)
        text = blocked(snapshot)
        if not self._closed.is_set():
            logger.warning("worker %r is stuck: %s", self._name, text)

    # --- waits -----------------------------------------------------------------------

    def _look_at_waits(self) -> None:
        """Find out whether there is something new to look at; if so, look."""
        overdue = frozenset(self._overdue())
        if not overdue:
            self.judged = overdue
            self._reported.forget()
            return
        begun_s = now_s()
        # While a stall is reported, an ended wait counts as well: it may be over.
        is_new = overdue != self.judged if self._reported else overdue - self.judged
        # A wait that was idle or made progress may get stuck: look again, ever later.
        is_due = begun_s >= self._again_s
        if not (is_new or is_due) or begun_s < self._rest_until_s:
            return
        self._patience_s = self._after_s / 2 if is_new else 2 * self._patience_s
        self.judged = overdue
        is_at_rest = not self._reported and not self._is_anything_late()
        self._rest_until_s = begun_s + (now_s() - begun_s) / SHARE_MAX
        self._again_s = begun_s + self._patience_s
        if not is_at_rest:
            self._is_looking = True
            self._ports.loop.call_soon_threadsafe(self._begin)

    def _overdue(self) -> set[Hashable]:
        after_s = self._after_s
        return {*self._ages.overdue(after_s), *self._ports.long_calls(after_s)}

    def _is_anything_late(self) -> bool:
        """Return whether any long wait is not idle."""
        own = self._ports.take(is_thorough=False)
        is_served = any(call.for_s >= self._after_s for call in own.served)
        return is_served or bool(find_hangs(graph_of([own]), after_s=self._after_s))

    def _begin(self) -> None:
        """Look at the other workers; called on the loop."""
        if self._closed.is_set():
            return
        self._ports.start_task(self._look_around())

    async def _look_around(self) -> None:
        begun_s = now_s()
        try:
            view = await self._ports.look_along(self._after_s)
            await self._ports.in_thread(lambda: self._say(view))
        except Exception:
            logger.exception("worker %r could not find out why it waits", self._name)
        finally:
            ended_s = now_s()
            self._rest_until_s = ended_s + max(self._after_s / 2, ended_s - begun_s)
            self._again_s = ended_s + self._patience_s
            self._is_looking = False

    def _say(self, view: GroupView) -> None:
        graph: AwaitGraph = graph_of_seen(view)
        hangs = find_hangs(graph, after_s=self._after_s)
        for hang in self._reported.news(graph, hangs)[:SAID_MAX]:
            logger.warning("worker %r is stuck: %s", self._name, sentence(graph, hang))


class _WatchedWorker:
    """A worker as the watch for stalls sees it."""

    def __init__(self, worker: Parts, ages: WaitAges) -> None:
        self._worker = worker
        self._ages = ages
        self.name = worker.identity.name
        self.loop = worker.loop
        self.start_task = worker.start_task

    @property
    def ticked_ns(self) -> int | None:
        """When the loop last ran; None: unknown."""
        return self._worker.sidecar.ticked_ns

    def take(self, blocked_s: float = 0.0, *, is_thorough: bool) -> WorkerSnapshot:
        """Take a snapshot of the worker; from any thread."""
        return snapshot_of(
            *(self._worker, self._ages),
            is_thorough=is_thorough,
            blocked_for_s=blocked_s,
        )

    def long_calls(self, after_s: float) -> set[Hashable]:
        """Return the calls made and served here that have lasted for so long."""
        before_s = self.loop.time() - after_s
        return {
            (direction, link.peer.incarnation, call.call_id)
            for link in self._worker.directory.links
            for direction, calls in (("made", link.pending), ("served", link.served))
            for call in calls
            if 0 < call.began_s <= before_s
        }

    async def look_along(self, after_s: float) -> GroupView:
        """Look at the workers that long waits of this worker lead to."""
        look = await inner_look(self._worker, self._ages)
        return await look.along(after_s)

    async def in_thread(self, job: Callable[[], T]) -> T:
        """Run a slow job in a thread, so that it does not hold the loop."""
        return await in_new_thread(self.loop, job)


def watch(worker: Parts, ages: WaitAges, after_s: float) -> StallWatch:
    """Watch a worker from now on."""
    stalls = StallWatch(_WatchedWorker(worker, ages), ages, after_s)
    stalls.start()
    return stalls

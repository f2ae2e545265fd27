"""This process among the ranks: a worker, on an event loop in a thread of its own.

The process groups of one process share it; it ends with the last of them, or with the
process.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import os
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.util import Finalize
from typing import Any, Final, TypeAlias

from asyncrpc.core.host.this_host import HOST_ID
from asyncrpc.core.hosting import LoopThread
from asyncrpc.core.loop.tasks import eager_task
from asyncrpc.core.members import Member, Rendezvous
from asyncrpc.core.membership.stores import StoreRendezvous
from asyncrpc.core.options import Options
from asyncrpc.core.parts import Parts
from asyncrpc.core.services.registry import OBSERVATION
from asyncrpc.core.transport.address import Address
from asyncrpc.core.worker import Worker
from asyncrpc.errors import ClosedError, UsageError
from asyncrpc.parallel.collectives.group import Group
from asyncrpc.parallel.collectives.service import CollectivesService
from asyncrpc.parallel.collectives.torch_backend.work import CollectiveWork, destroyed

# What is done on the loop; of a `recv` it returns the sender's rank.
Doing: TypeAlias = Callable[[], Coroutine[Any, Any, int | None]]

EXIT_S: Final = 1.0  # for work under way when the process ends
CANCEL_S: Final = 0.2  # for cancelled work, which does not wait


class RankWorker(Worker):
    """A worker with collectives, which admits observers."""

    @staticmethod
    def _extend(parts: Parts) -> None:
        parts.services.add(CollectivesService(parts))
        for add in OBSERVATION:
            add(parts)


class StoreMeeting(StoreRendezvous):
    """A meeting at torch's store."""

    async def leave(self, timeout_s: float) -> None:
        """Wait until all ranks have read, except while the interpreter ends.

        No thread can be started then; torch itself keeps the store for a moment.
        """
        with suppress(RuntimeError):
            await super().leave(timeout_s)


class RankRuntime:
    """The worker of one process, and what torch's threads ask of it.

    Attributes:
        names: of the workers, by their rank where they met.
        worker: this process's.
        is_exclusive: `DeviceOptions.exclusive`, for the program's threads.
    """

    def __init__(
        self, rendezvous: Rendezvous, names: Sequence[str], rank: int, options: Options
    ) -> None:
        self.names = tuple(names)
        self._pid = os.getpid()
        self._drain_s = options.drain_timeout_s
        self.is_exclusive = options.devices.exclusive
        self._groups: set[Group] = set()
        self._works: set[CollectiveWork] = set()
        self._tasks: dict[asyncio.Task[None], Group] = {}
        self.worker = RankWorker(
            names[rank],
            rank=rank,
            world_size=len(names),
            rendezvous=rendezvous,
            # Devices are the program's threads' business, see `staged`.  A thread that
            # holds the lock may wait for what the worker does in threads of its own.
            options=replace(
                options, devices=replace(options.devices, names=(), exclusive=False)
            ),
        )
        self.thread = LoopThread(f"asyncrpc-{names[rank]}")
        try:
            self.thread.run(self._start())
        except BaseException:
            self.thread.stop()
            raise
        # After the thread's own, so that it is called before.  Processes of
        # multiprocessing call finalizers of its own, and none of the interpreter's.
        atexit.register(self._stop, EXIT_S)
        self._finalizer = Finalize(None, self._stop, (EXIT_S,), exitpriority=0)
        self.is_open = True

    async def _start(self) -> None:
        await self.worker.__aenter__()
        try:
            check_reach(self.worker.parts.directory.members)
        except BaseException:
            await self.worker.shutdown(drain_timeout_s=0.0)
            raise

    # --- groups ----------------------------------------------------------------------

    def open_group(
        self, members: Sequence[str], name: str, timeout_s: float | None
    ) -> Group:
        """Make a group of some of the workers; `close_group` must follow."""

        def make() -> Group:
            return Group(self.worker, members, name=name, timeout_s=timeout_s)

        group = self.thread.do_at_once(make)
        self._groups.add(group)
        return group

    def close_group(self, group: Group, *, drain: bool) -> None:
        """Leave a group; with the last one the worker ends.  Idempotent."""
        if group not in self._groups or not self._is_usable():
            return
        self._groups.remove(group)
        drain_s = self._drain_s if drain else 0.0
        if self._groups:
            self.thread.run(self._close(group, drain_s))
        else:
            self._stop(drain_s)

    async def _close(self, group: Group, drain_s: float) -> None:
        await self._drain(group, drain_s)
        group.close()

    async def _drain(self, group: Group | None, limit_s: float) -> None:
        """Wait until all work in a group, or in all groups, has ended, well or not."""
        tasks = [task for task, its in self._tasks.items() if group in (None, its)]
        if tasks and limit_s > 0:
            await asyncio.wait(tasks, timeout=limit_s)

    def close_if_unused(self) -> None:
        """End the worker if it has no group."""
        if not self._groups:
            self._stop(0.0)

    def _stop(self, drain_s: float) -> None:
        """End the worker, and the thread of its loop."""
        if not self._is_usable():
            return
        self.is_open = False
        self._groups.clear()  # nothing begins from now on
        atexit.unregister(self._stop)
        self._finalizer.cancel()
        try:
            self.thread.run(self._end(drain_s))
        finally:
            self.thread.stop()
            for work in tuple(self._works):  # nothing else will end them
                work.end(destroyed(work.operation))
                work.tell()

    async def _end(self, drain_s: float) -> None:
        await self._drain(None, drain_s)
        await self.worker.shutdown(drain_timeout_s=drain_s)  # work that is left fails
        for task in tuple(self._tasks):
            task.cancel()
        await self._drain(None, CANCEL_S)

    def _is_usable(self) -> bool:
        """Return whether there is a loop: not after the end, and not in a fork."""
        return self.is_open and os.getpid() == self._pid

    # --- work ------------------------------------------------------------------------

    def submit(self, group: Group, work: CollectiveWork, doing: Doing) -> None:
        """Begin an operation on the loop, after all that were submitted before."""
        problem = self._problem(group)
        if problem:
            work.end(ClosedError(f"{work.operation} cannot begin: {problem}"))
            work.wait()
        self._works.add(work)
        try:
            self.thread.loop.call_soon_threadsafe(self._begin, group, work, doing)
        except RuntimeError:  # the loop has been closed just now
            work.end(destroyed(work.operation))

    def _problem(self, group: Group) -> str:
        """Return why no work can begin in a group; empty if it can."""
        if group not in self._groups:
            return "the process group has been destroyed"
        if os.getpid() != self._pid:
            return "this process is a fork of the one that made the process group"
        return ""

    def _begin(self, group: Group, work: CollectiveWork, doing: Doing) -> None:
        # Its first step at once: that is when it takes its place among the collectives.
        own = contextvars.Context()
        task = eager_task(self.thread.loop, _do(work, doing), own)
        if not task.done():
            self._tasks[task] = group
            task.add_done_callback(self._tasks.pop)

    # --- what work asks --------------------------------------------------------------

    def is_on_loop(self) -> bool:
        """Return whether this is the loop's thread."""
        return self.thread.is_here

    def run_in_thread(self, job: Callable[[], None]) -> None:
        """Run a function in a thread of the worker; called on the loop."""
        self.worker.parts.run_in_thread(job)

    def forget(self, work: CollectiveWork) -> None:
        """Forget work that has ended."""
        self._works.discard(work)


async def _do(work: CollectiveWork, doing: Doing) -> None:
    """Run the operation; end the work in the same iteration of the loop."""
    try:
        sender = await doing()
    except asyncio.CancelledError:
        work.end(destroyed(work.operation))
        raise
    except BaseException as error:  # noqa: BLE001  (the waiting thread raises it)
        work.end(error)
    else:
        work.end(None, -1 if sender is None else sender)


def check_reach(members: Iterable[Member], host_id: str = HOST_ID) -> None:
    """Refuse a group with members that this worker cannot reach."""
    far = [
        member.name
        for member in members
        if member.host_id not in ("", host_id)
        and not any(map(_is_for_others, member.addresses))
    ]
    if far:
        raise UsageError(
            f"{', '.join(far)} run on other hosts and accept connections from their "
            "own host only; start every rank with the same secret, in ASYNCRPC_SECRET "
            "or Options.secret"
        )


def _is_for_others(text: str) -> bool:
    address = Address.parse(text)
    return address.scheme != "uds" and not address.is_loopback

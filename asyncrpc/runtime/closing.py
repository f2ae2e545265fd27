"""The part of a `Worker` that ends it: bounded, whatever the others do.

What is in flight has the time that it is given.  Everything after that, together, has
`CLOSING_S`: a step that would take longer is cut short, and the next one is taken.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from asyncrpc.arguments import check_flag, check_timeout
from asyncrpc.runtime.calls.context import current_worker_var
from asyncrpc.runtime.calls.futures import CallFuture
from asyncrpc.runtime.calls.starting import CallStarter
from asyncrpc.runtime.extensions import Service
from asyncrpc.runtime.machine.termination import Phase
from asyncrpc.runtime.socket_directory import SocketDirectory
from asyncrpc.transport.abc import Listener

if TYPE_CHECKING:
    from asyncrpc.runtime.calls.credit import InboundCredit
    from asyncrpc.runtime.devices.staging import Devices
    from asyncrpc.runtime.links.sidecar import Sidecar
    from asyncrpc.runtime.membership.graceful_shutdown import (
        GracefulShutdown,
        ShutdownReport,
    )
    from asyncrpc.runtime.membership.members import Rendezvous
    from asyncrpc.runtime.payloads.landing import ReceivePool
    from asyncrpc.runtime.threads import ThreadPool

logger = logging.getLogger("asyncrpc")

CLOSING_S: Final = 1.0  # for all that comes after calls in flight
# Of that, what each step may take at most.
_LISTENERS_S: Final = 0.1
_SERVICES_S: Final = 0.1
_TASKS_S: Final = 0.15
_CONNECTIONS_S: Final = 0.3
_THREADS_S: Final = 0.2
# An end at once waits for nobody: so long may what ends by itself take.
_AT_ONCE_S: Final = 0.1
_HASTE_S: Final = 0.02  # for each step once the time is up


class Closing(CallStarter):
    """The part of a `Worker` that ends it."""

    active: int
    devices: Devices
    graceful_shutdown: GracefulShutdown
    pool: ThreadPool
    host_pool: ThreadPool
    sidecar: Sidecar
    receive_pool: ReceivePool
    inbound_credit: InboundCredit
    _draining: bool
    _idle: asyncio.Event
    _rendezvous: Rendezvous
    _services: dict[str, Service]
    _listeners: list[Listener]
    _token: contextvars.Token[Any] | None
    _socket_directory: SocketDirectory | None

    async def shutdown(
        self,
        *,
        graceful: bool = False,
        timeout: float | None = None,  # noqa: ASYNC109  (torch's name)
        drain_timeout_s: float | None = None,
    ) -> None:
        """End this worker, alone or together with the group.  Idempotent.

        Alone, it waits for no other: new calls are refused, those in flight here have
        `drain_timeout_s` seconds to end, then tasks are cancelled, connections closed
        and threads ended, all within one more second.  A thread that does not end is
        left behind, with a warning.

        Gracefully, it first waits until every worker of the group has asked for the
        same and no call is in flight anywhere, not even one that was started by one
        that was started by one that nobody awaits.  Until then it serves calls as
        before.  Workers that die meanwhile are left out.  A task that a function
        leaves running is not waited for, only its calls.  Without ranks there is no
        group, and it ends alone.

        Args:
            graceful: end together with the group.
            timeout: seconds to wait for the group, calls in flight included; None: no
                limit for the others to come.
            drain_timeout_s: seconds that calls in flight have: of this worker if it
                ends alone, of the group from when all have come.  None:
                `Options.drain_timeout_s`.

        Raises:
            UsageError: an argument is of another kind, or this is not the worker's
                event loop.
            TimeoutError: `timeout` passed; the message names those who had not come, or
                had calls in flight.  The worker has ended anyway.

        Cancellation:
            The worker is ended without waiting any longer, then it is passed on.
        """
        check_flag("graceful", graceful)
        check_timeout("timeout", timeout)
        check_timeout("drain_timeout_s", drain_timeout_s)
        if self._state != "running":
            return
        self.check_on_loop("Worker.shutdown")
        if drain_timeout_s is None:
            drain_timeout_s = self.options.drain_timeout_s
        report = None
        try:
            if graceful and self.graceful_shutdown.has_group:
                report = await self.graceful_shutdown.wait(timeout, drain_timeout_s)
                drain_timeout_s = min(drain_timeout_s, report.left_s)
        except BaseException:
            drain_timeout_s = 0.0
            raise
        finally:
            await self._shut_down(drain_timeout_s)
        if report is not None:
            self._report(report, timeout)

    async def _shut_down(self, drain_s: float) -> None:
        if self._state != "running":  # somebody else was quicker
            return
        self._state = "closing"
        if self._token is not None and current_worker_var.get() is self:
            current_worker_var.set(None)
        await self._stop(drain_s=drain_s)

    def _report(self, report: ShutdownReport, timeout_s: float | None) -> None:
        """Say what was not as it should be.

        Raises:
            TimeoutError: the time given for all of it has passed.
        """
        if report.lost:
            logger.warning(
                "worker %r: shutting down without the others that are gone: %s",
                self.name,
                _listed(report.lost),
            )
        if report.phase is Phase.EXCLUDED:
            logger.warning(
                "worker %r: the others believe it to be lost; it has shut down alone",
                self.name,
            )
        if not report.missing:
            return
        had = "calls in flight" if report.phase is Phase.DRAINING else "not come"
        problem = f"{_listed(report.missing)} had {had}"
        if report.is_late:
            raise TimeoutError(
                f"worker {self.name!r} has shut down without the others: after "
                f"{timeout_s:g} s {problem}"
            )
        logger.warning(
            "worker %r: %s when the time to drain had passed; they are cancelled",
            self.name,
            problem,
        )

    async def _stop(self, *, drain_s: float) -> None:
        """End what has been started, in `drain_s` and `CLOSING_S` seconds at most."""
        # The host of a meeting place waits for those still reading, meanwhile.
        leaving = self.loop.create_task(self._rendezvous.leave(drain_s + CLOSING_S))
        try:
            await self._drain(drain_s)
        finally:
            self._state = "closed"
            tearing_down = self._tear_down(leaving, at_once=not drain_s)
            await _finish(self.loop.create_task(tearing_down))

    async def _drain(self, timeout_s: float) -> None:
        """Let what is in flight end, in both directions."""
        self._draining = True
        for link in self.directory.links:
            link.say_goodbye()
        if timeout_s <= 0:
            return
        end_s = self.loop.time() + timeout_s
        waiting = [
            call
            for link in self.directory.links
            for call in link.pending
            if isinstance(call, CallFuture)
        ]
        if waiting:
            await asyncio.wait(waiting, timeout=timeout_s)
        self._idle.clear()
        if self.active:
            try:
                async with asyncio.timeout_at(end_s):
                    await self._idle.wait()
            except TimeoutError:
                logger.warning(
                    "worker %r: %d calls had not ended %g s after shutdown began; they "
                    "are cancelled",
                    self.name,
                    self.active,
                    timeout_s,
                )
        # The calls have ended; their large answers may still be on their way.
        await self.directory.close_lanes(end_s - self.loop.time())

    async def _tear_down(self, leaving: asyncio.Task[None], *, at_once: bool) -> None:
        """Take every step of the end, however long one would take.

        Cancellation:
            The steps that are left are taken in haste.
        """
        self.inbound_credit.close()  # what peers begin to send now is not read
        connections_s = _AT_ONCE_S if at_once else _CONNECTIONS_S
        threads_s = _AT_ONCE_S if at_once else _THREADS_S
        steps: list[tuple[str, Callable[[float], Awaitable[None]], float]] = [
            ("its listeners", self._close_listeners, _LISTENERS_S),
            *(
                (f"its service {one.name!r}", partial(_close_service, one), _SERVICES_S)
                for one in self._services.values()
            ),
            ("its tasks", self._cancel_tasks, _TASKS_S),
            ("its connections", self._close_connections, connections_s),
            ("its last tasks", self._cancel_tasks, _TASKS_S),
            ("its threads", self._close_threads, threads_s),
            ("the meeting place", partial(_leave, leaving), CLOSING_S),
        ]
        end_s, cancelled = self.loop.time() + CLOSING_S, None
        for what, step, most_s in steps:
            left_s = 0.0 if cancelled else end_s - self.loop.time()
            patience_s = max(min(most_s, left_s), _HASTE_S)
            # A step knows how long it may take; one that does not heed it is cut short.
            limit_s = max(min(1.5 * most_s, left_s), _HASTE_S)
            try:
                await self._take(what, step(patience_s), limit_s)
            except asyncio.CancelledError as error:
                cancelled = error
        self.sidecar.close()
        if self._socket_directory is not None:
            self._socket_directory.remove()
        if cancelled is not None:
            raise cancelled

    async def _take(self, what: str, step: Awaitable[None], limit_s: float) -> None:
        """Take one step of the end; if it fails, or lasts too long, say so."""
        try:
            async with asyncio.timeout(limit_s):
                await step
        except TimeoutError:
            logger.warning("worker %r: %s did not end in time", self.name, what)
        except Exception:  # whatever it is, the other steps must be taken
            logger.exception("worker %r: %s did not end in order", self.name, what)

    async def _close_listeners(self, _most_s: float) -> None:
        for listener in self._listeners:
            await listener.close()

    async def _cancel_tasks(self, most_s: float) -> None:
        """Cancel what runs; a function may ignore that, once or for ever."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=most_s)

    async def _close_connections(self, most_s: float) -> None:
        # In each half of the time: what is queued is written, then the end itself.
        await self.directory.close(most_s / 2)

    async def _close_threads(self, most_s: float) -> None:
        self.receive_pool.close()
        left = await self.pool.close(most_s)
        if self.host_pool is not self.pool:
            left += await self.host_pool.close(most_s)
        left += await self.devices.close(most_s)
        if left:
            logger.warning(
                "worker %r: these threads run on, their functions do not end: %s",
                self.name,
                ", ".join(left),
            )


async def _close_service(service: Service, _most_s: float) -> None:
    await service.close()


async def _leave(leaving: asyncio.Task[None], _most_s: float) -> None:
    await leaving  # it has a limit of its own; a step that is cut short cancels it


async def _finish(task: asyncio.Task[None]) -> None:
    """Wait for a task to end even if cancelled, which makes it hurry.

    Cancellation:
        It is passed on once the task has ended.
    """
    cancelled = None
    while not task.done():
        try:
            await asyncio.shield(task)  # each of its steps has a limit
        except asyncio.CancelledError as error:
            cancelled = error
            task.cancel()
    if cancelled is not None:
        raise cancelled
    task.result()


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(map(repr, names))

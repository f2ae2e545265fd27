"""Ending a worker: bounded, whatever the others do.

Calls in flight have the time that the caller gives them.  All steps after that have
`CLOSING_S` together: a step that would take longer is cut short, and the next one is
taken.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from asyncrpc.core.barriers.graceful_shutdown import ShutdownReport
from asyncrpc.core.barriers.machine.termination import Phase
from asyncrpc.core.calls.futures import CallFuture
from asyncrpc.core.lifecycle import Event
from asyncrpc.core.parts import Parts
from asyncrpc.core.services.extensions import Service

logger = logging.getLogger("asyncrpc")

CLOSING_S: Final = 1.0  # for all that comes after calls in flight
# Of that, what each step may take at most.
_LISTENERS_S: Final = 0.1
_SERVICES_S: Final = 0.1
_TASKS_S: Final = 0.15
_CONNECTIONS_S: Final = 0.3
_THREADS_S: Final = 0.2
# An end at once waits for no peer: steps that end by themselves may take so long.
_AT_ONCE_S: Final = 0.1
_HASTE_S: Final = 0.02  # for each step once the time is up
_HAD_NOT_ASKED: Final = "had not asked for the shutdown"


class Teardown:
    """Ends the parts of one worker, in order."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._ended = asyncio.Event()

    async def run(self, drain_s: float) -> None:
        """End what has been started, in `drain_s` and `CLOSING_S` seconds at most.

        A second caller waits until the first one has ended the worker.
        """
        parts = self._parts
        if parts.lifecycle.is_draining:
            await self._ended.wait()  # set by `_stop`, which is bounded
            return
        parts.lifecycle.advance(Event.SHUT_DOWN)
        try:
            await self._stop(drain_s)
        finally:
            self._ended.set()

    async def _stop(self, drain_s: float) -> None:
        # Meanwhile the host of a rendezvous waits for members that still read.
        parts = self._parts
        leaving = parts.loop.create_task(parts.rendezvous.leave(drain_s + CLOSING_S))
        try:
            await self._drain(drain_s)
        finally:
            parts.lifecycle.advance(Event.DRAINED)
            tearing_down = self._tear_down(leaving, at_once=not drain_s)
            await _finish(parts.loop.create_task(tearing_down))

    async def _drain(self, timeout_s: float) -> None:
        """Let what is in flight end, in both directions."""
        parts = self._parts
        for started in [*parts.calls.expected.values()]:
            started.cancel()
        for link in parts.directory.links:
            link.say_goodbye()
        if timeout_s <= 0:
            return
        end_s = parts.loop.time() + timeout_s
        waiting = [
            call
            for link in parts.directory.links
            for call in link.pending
            if isinstance(call, CallFuture)
        ]
        if waiting:
            await asyncio.wait(waiting, timeout=timeout_s)
        try:
            async with asyncio.timeout_at(end_s):
                await parts.admission.wait_idle()
        except TimeoutError:
            logger.warning(
                "worker %r: %d calls had not ended %g s after shutdown began; they "
                "are cancelled",
                parts.name,
                parts.admission.active,
                timeout_s,
            )
        # The calls have ended; their large answers may still be on their way.
        await parts.directory.close_lanes(end_s - parts.loop.time())

    async def _tear_down(self, leaving: asyncio.Task[None], *, at_once: bool) -> None:
        """Take every step of the end, however long one would take."""
        parts = self._parts
        parts.inbound_credit.close()  # what peers begin to send now is not read
        connections_s = _AT_ONCE_S if at_once else _CONNECTIONS_S
        threads_s = _AT_ONCE_S if at_once else _THREADS_S
        steps: list[tuple[str, Callable[[float], Awaitable[None]], float]] = [
            ("its listeners", self._close_listeners, _LISTENERS_S),
            *(
                (
                    f"its service {service.name!r}",
                    partial(_close_service, service),
                    _SERVICES_S,
                )
                for service in parts.services
            ),
            ("its tasks", parts.tasks.cancel, _TASKS_S),
            ("its connections", self._close_connections, connections_s),
            ("its last tasks", parts.tasks.cancel, _TASKS_S),
            ("its threads", self._close_threads, threads_s),
            ("its rendezvous", partial(_leave, leaving), CLOSING_S),
        ]
        end_s, cancelled = parts.loop.time() + CLOSING_S, None
        for subject, step, most_s in steps:
            left_s = 0.0 if cancelled else end_s - parts.loop.time()
            patience_s = max(min(most_s, left_s), _HASTE_S)
            # A step knows its limit; one that does not heed it is cut short.
            limit_s = max(min(1.5 * most_s, left_s), _HASTE_S)
            try:
                await self._take(subject, step(patience_s), limit_s)
            except asyncio.CancelledError as error:
                cancelled = error
        parts.deadlines.close()
        parts.sidecar.close()
        parts.recorder.close()
        if parts.socket_directory is not None:
            parts.socket_directory.remove()
        if cancelled is not None:
            raise cancelled

    async def _take(self, subject: str, step: Awaitable[None], limit_s: float) -> None:
        """Take one step of the end; log it if it fails, or lasts too long."""
        try:
            async with asyncio.timeout(limit_s):
                await step
        except TimeoutError:
            logger.warning(
                "worker %r: %s did not end in time", self._parts.name, subject
            )
        except Exception:  # whatever it is, the other steps must be taken
            logger.exception(
                "worker %r: %s failed while it ended", self._parts.name, subject
            )

    async def _close_listeners(self, _most_s: float) -> None:
        for listener in self._parts.listeners:
            await listener.close()
        self._parts.sidecar.release()  # it listens there, too

    async def _close_connections(self, most_s: float) -> None:
        # In each half of the time: what is queued is written, then the end itself.
        await self._parts.directory.close(most_s / 2)

    async def _close_threads(self, most_s: float) -> None:
        parts = self._parts
        parts.receive_pool.close()
        running = await parts.pool.close(most_s)
        if parts.host_pool is not parts.pool:
            running += await parts.host_pool.close(most_s)
        running += await parts.devices.close(most_s)
        if running:
            logger.warning(
                "worker %r: these threads still run, as their functions do not end: %s",
                self._parts.name,
                ", ".join(running),
            )


def report(name: str, outcome: ShutdownReport, timeout_s: float | None) -> None:
    """Report the workers that were lost or late when a group ended together."""
    if outcome.lost:
        logger.warning(
            "worker %r: shutting down without the others that are gone: %s",
            name,
            _listed(outcome.lost),
        )
    if outcome.phase is Phase.EXCLUDED:
        logger.warning(
            "worker %r: the others believe it to be lost; it has shut down alone",
            name,
        )
    if not outcome.missing:
        return
    is_draining = outcome.phase is Phase.DRAINING
    omission = "still had calls in flight" if is_draining else _HAD_NOT_ASKED
    problem = f"{_listed(outcome.missing)} {omission}"
    if outcome.is_late:
        raise TimeoutError(
            f"worker {name!r} has shut down without the others: after "
            f"{timeout_s:g} s {problem}"
        )
    logger.warning(
        "worker %r: %s when the time to drain had passed; they are cancelled",
        name,
        problem,
    )


async def _close_service(service: Service, _most_s: float) -> None:
    await service.close()


async def _leave(leaving: asyncio.Task[None], _most_s: float) -> None:
    await leaving  # it has a limit of its own; a step that is cut short cancels it


async def _finish(task: asyncio.Task[None]) -> None:
    """Wait for a task to end, even if cancelled: that makes the task hurry."""
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

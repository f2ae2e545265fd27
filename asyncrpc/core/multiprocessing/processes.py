"""A running group of processes, and the thread that watches it.

The thread feeds `supervisor` with the events of the pipes and sentinels of the
processes, and carries out its effects.  It runs from the start, so that the first
failure stops the rest even if no caller waits yet.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing import connection
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

from asyncrpc.core.arguments import check_duration, check_timeout
from asyncrpc.core.host.run_entry import RunEntry
from asyncrpc.core.loop.clock import Clock
from asyncrpc.core.loop.loops import loop_for
from asyncrpc.core.multiprocessing.child import Raised
from asyncrpc.core.multiprocessing.outcome import (
    Child,
    name_ranks,
    process_failed,
    receive,
    result_of,
)
from asyncrpc.core.multiprocessing.supervisor import (
    GRACE_S,
    Effect,
    Elapsed,
    Event,
    Exited,
    Failed,
    Kill,
    LaunchPhase,
    Reason,
    StopRequested,
    Supervisor,
)
from asyncrpc.errors import (
    DeadlineExceededError,
    Outcome,
    ProcessFailedError,
    UsageError,
)

T = TypeVar("T")

INTERRUPT_GRACE_S: Final = 1.0  # seconds: after Ctrl-C all processes end within two
# A grandchild made by fork keeps its parent's end of a sentinel open, so the sentinel
# does not show the end of the parent; asking the kernel this often bounds the delay.
_POLL_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Task:
    """The launched function, for messages."""

    name: str
    timeout_s: float | None


class Processes(Generic[T]):
    """The processes of one `launch`; `T` is the type of the function's result.

    Use it as a context manager, `with` or `async with`: an exception in the block stops
    the processes, and the end of the block waits for them.

    Thread safety:
        Every method may be called from any thread.

    Attributes:
        pids: process ids, by rank.
    """

    def __init__(
        self,
        children: Sequence[Child],
        supervisor: Supervisor,
        *,
        task: Task,
        store: object | None,
        entry: RunEntry | None,
        clock: Clock,
    ) -> None:
        self.pids = tuple(
            child.process.pid for child in children if child.process is not None
        )
        self._own_pid = os.getpid()
        self._children = children
        self._supervisor = supervisor
        self._task = task
        self._store = store  # served for as long as this object refers to it
        self._entry = entry  # by which commands find the processes
        self._clock = clock
        self._requests: queue.SimpleQueue[float] = queue.SimpleQueue()
        self._wake_reader, self._wake_writer = connection.Pipe(duplex=False)
        self._wake_lock = (
            threading.Lock()
        )  # the writer is closed by the watching thread
        self._results: Future[list[T]] = Future()
        self._results.set_running_or_notify_cancel()  # so it cannot be cancelled
        # Before multiprocessing's own hook, which waits for the processes.
        atexit.register(self._stop_at_exit)
        # A daemon, so that a program that forgets its processes can still exit.
        threading.Thread(target=self._watch, name="launch-watch", daemon=True).start()

    def wait(self) -> list[T]:
        """Wait until all processes have ended.

        Ctrl-C while waiting stops all of them within two seconds, and raises
        KeyboardInterrupt.

        Returns:
            The result of the function in each process, by rank.

        Raises:
            ProcessFailedError: a process failed, or `terminate` was called.  All
                processes have ended.
            DeadlineExceededError: the `timeout_s` of `launch` passed.  All processes
                have ended.
            UsageError: called on a running event loop; use `wait_async` there.  Or
                this process was forked from the one that launched them.
        """
        self._refuse_in_child("Processes.wait")
        refuse_on_loop("Processes.wait", "await Processes.wait_async()")
        try:
            return self._results.result()
        except KeyboardInterrupt:
            self._stop_for_interrupt()
            raise

    async def wait_async(self) -> list[T]:
        """Wait until all processes have ended, without blocking the event loop.

        Returns:
            The result of the function in each process, by rank.

        Raises:
            ProcessFailedError: a process failed, or `terminate` was called.  All
                processes have ended.
            DeadlineExceededError: the `timeout_s` of `launch` passed.  All processes
                have ended.
            UsageError: no event loop runs here, or this process was forked from the one
                that launched them.

        Cancellation:
            Only the waiting ends; the processes go on.
        """
        self._refuse_in_child("Processes.wait_async")
        await self._ended()
        return self._results.result()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until all processes have ended, for at most `timeout_s`.

        Args:
            timeout_s: seconds to wait at most; None is no limit.

        Returns:
            Whether all of them have ended; if not, they go on.

        Raises:
            ProcessFailedError: a process failed, or `terminate` was called.  All
                processes have ended.
            DeadlineExceededError: the `timeout_s` of `launch` passed.  All processes
                have ended.
            UsageError: called on a running event loop; use `wait_async` there.  Or
                `timeout_s` is not a number of seconds, or this process was forked from
                the one that launched them.

        Source: `join` of torch.multiprocessing.spawn's context, which must be called
            until it returns True.
        """
        self._refuse_in_child("Processes.join")
        refuse_on_loop("Processes.join", "await Processes.wait_async()")
        check_timeout("timeout_s", timeout_s)
        if timeout_s is not None:  # the time that a thread can wait has a limit
            timeout_s = min(timeout_s, threading.TIMEOUT_MAX)
        try:
            self._results.exception(timeout_s)
        except TimeoutError:
            return False
        except KeyboardInterrupt:
            self._stop_for_interrupt()
            raise
        self._results.result()
        return True

    def terminate(self, grace_s: float = GRACE_S) -> None:
        """Ask all processes to end, and kill those that do not.

        It returns at once; `wait` for the end.  It does nothing if they have ended.

        Args:
            grace_s: seconds from SIGTERM to SIGKILL.

        Raises:
            UsageError: `grace_s` is not a finite number of seconds, or this process was
                forked from the one that launched them.
        """
        check_duration("grace_s", grace_s)
        self._refuse_in_child("Processes.terminate")
        self._requests.put(grace_s)
        with self._wake_lock, contextlib.suppress(OSError):  # closed: all have ended
            self._wake_writer.send_bytes(b"wake")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            with self._quiet_if_requested():
                self.wait()
        else:
            self._stop_for_interrupt()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.terminate(INTERRUPT_GRACE_S)
            await self._ended()
            return
        try:
            await self._ended()
        except asyncio.CancelledError:
            self.terminate(INTERRUPT_GRACE_S)
            raise
        with self._quiet_if_requested():
            self._results.result()

    def _refuse_in_child(self, used: str) -> None:
        # The watching thread does not exist here, and its pipe is the parent's.
        if os.getpid() != self._own_pid:
            raise UsageError(
                f"{used} must be used in the process that launched the processes; this"
                " one was forked from it"
            )

    async def _ended(self) -> None:
        loop = loop_for("Processes.wait_async")
        ended = asyncio.Event()

        def tell(_: Future[list[T]]) -> None:
            with contextlib.suppress(
                RuntimeError
            ):  # that loop is closed: no task waits
                loop.call_soon_threadsafe(ended.set)

        self._results.add_done_callback(tell)
        await ended.wait()  # the watching thread always ends with an outcome

    def _stop_for_interrupt(self) -> None:
        self.terminate(INTERRUPT_GRACE_S)
        try:
            self._results.exception()
        except KeyboardInterrupt:  # a second one: kill them now
            self.terminate(0.0)
            self._results.exception()

    def _stop_at_exit(self) -> None:
        """Stop processes that nothing waits for, as a program ends.

        Those that are not daemons are waited for if the program has come to its end;
        not if an exception has ended it: they may serve for ever, and nobody reads what
        they return.
        """
        is_daemon = any(child.is_daemon for child in self._children)
        has_failed = getattr(sys, "last_value", None) is not None
        if os.getpid() == self._own_pid and (is_daemon or has_failed):
            self._stop_for_interrupt()

    @contextlib.contextmanager
    def _quiet_if_requested(self) -> Iterator[None]:
        try:
            yield
        except ProcessFailedError:
            is_requested = self._supervisor.reason is Reason.REQUEST
            if not is_requested or self._supervisor.first_failed is not None:
                raise

    # --- in the watching thread ------------------------------------------------------

    def _watch(self) -> None:
        try:
            while self._supervisor.phase is not LaunchPhase.DONE:
                self._step()
            results = self._collect()
        except BaseException as error:  # noqa: BLE001  goes to the waiting task
            self._finish()
            self._results.set_exception(error)
        else:
            self._finish()
            self._results.set_result(results)

    def _step(self) -> None:
        ready = connection.wait(self._sources(), self._patience_s())
        now_s = self._clock.now_s()
        if self._wake_reader in ready:
            self._wake_reader.recv_bytes()
        # All ready events are read before any effect is carried out: the supervisor
        # tells causes from consequences by the events of the same instant.
        events: list[Event] = [
            event
            for child in self._running()
            for event in self._hear(child, ready, now_s)
        ]
        with contextlib.suppress(queue.Empty):
            while True:
                events.append(StopRequested(now_s, self._requests.get_nowait()))
        events.append(Elapsed(now_s))
        effects = [e for event in events for e in self._supervisor.advance(event)]
        for effect in effects:
            self._carry_out(effect)

    def _running(self) -> list[Child]:
        return [child for child in self._children if child.exit_code is None]

    def _sources(self) -> list[Any]:
        sources: list[Any] = [self._wake_reader]
        for child in self._running():
            assert child.process is not None
            sources.append(child.process.sentinel)
            if child.reports is not None:
                sources.append(child.reports)
        return sources

    def _patience_s(self) -> float:
        wakes_at_s = self._supervisor.wakes_at_s
        if wakes_at_s is None:
            return _POLL_S
        return min(_POLL_S, max(0.0, wakes_at_s - self._clock.now_s()))

    def _hear(self, child: Child, ready: list[Any], now_s: float) -> list[Event]:
        events: list[Event] = []
        process = child.process
        assert process is not None  # it runs
        if process.sentinel in ready:
            process.join()
        exit_code = process.exitcode
        if exit_code is not None:
            process.join()  # at once: multiprocessing forgets it
        had_report = child.report is not None
        while child.reports is not None and child.reports.poll():
            receive(child)
        if isinstance(child.report, Raised) and not had_report:
            events.append(Failed(child.rank, child.report.raised_at_s, now_s))
        if exit_code is not None:
            child.exit_code = exit_code
            if exit_code == 0 and child.report is None:
                events.append(Failed(child.rank, now_s, now_s))
            events.append(Exited(child.rank, exit_code, now_s))
        return events

    def _carry_out(self, effect: Effect) -> None:
        signum = signal.SIGKILL if isinstance(effect, Kill) else signal.SIGTERM
        for rank in effect.ranks:
            child = self._children[rank]
            if child.exit_code is None:
                # It has not been reaped here, so its id is not reused yet.  The fork
                # server may have reaped it just now: ids are not reused that fast.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pids[rank] or 0, signum)

    def _collect(self) -> list[T]:
        first_failed = self._supervisor.first_failed
        if first_failed is not None:
            raise process_failed(self._children[first_failed], len(self._children))
        unfinished = self._supervisor.unfinished
        if self._supervisor.reason is Reason.TIMEOUT:
            raise DeadlineExceededError(
                function=self._task.name,
                to=name_ranks(unfinished),
                outcome=Outcome.UNKNOWN,
                timeout_s=self._task.timeout_s or 0.0,
            )
        if self._supervisor.reason is Reason.REQUEST and unfinished:
            child = self._children[unfinished[0]]
            raise ProcessFailedError(
                f"{name_ranks(unfinished)} stopped before the end, because this "
                "program called terminate() or was interrupted",
                rank=child.rank,
                exit_code=child.exit_code,
                remote_traceback="",
            )
        return [result_of(child) for child in self._children]

    def _finish(self) -> None:
        atexit.unregister(self._stop_at_exit)
        for child in self._running():  # only if watching itself failed
            if child.process is not None:
                child.process.kill()
                child.process.join()
                child.exit_code = child.process.exitcode
        for child in self._children:
            if child.reports is not None:
                child.reports.close()
            # Its end closes its descriptors.  It is not closed here: the program's
            # main thread may wait for it, as multiprocessing does at exit.
            child.process = None
        with self._wake_lock:
            self._wake_writer.close()
        self._wake_reader.close()
        self._store = None  # stops serving
        if self._entry is not None:
            self._entry.remove()


def refuse_on_loop(called: str, instead: str) -> None:
    """Refuse to block a running event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise UsageError(f"{called} would block the running event loop; use {instead}")

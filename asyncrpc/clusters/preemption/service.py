"""Watches for the announced end of the process, and acts on the machine's state.

Signal handlers are installed only for the block, and only for the signals that the
program names.  A separate task does the rest, so that the program's block is not
affected until it is cancelled.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import signal
import threading
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from asyncrpc import current_worker
from asyncrpc.clusters.preemption.machine.preempting import (
    Preempting,
    PreemptionEvent,
    PreemptionState,
)
from asyncrpc.core.arguments import check_above, check_flags, check_kind, listed, wrong
from asyncrpc.core.loop.loops import check_loop, loop_for
from asyncrpc.core.loop.threads import outcome_to
from asyncrpc.core.worker import Worker
from asyncrpc.errors import AsyncRpcError, CallError, NotStartedError, UsageError
from asyncrpc.extend import host_of
from asyncrpc.parallel.collectives.payload_exchange import rendezvous

logger = logging.getLogger("asyncrpc")

Callback = TypeVar("Callback", bound=Callable[[], Any])

# Slurm's KillWait and Kubernetes' terminationGracePeriodSeconds are 30 s by default.
GRACE_S: Final = 28.0
_TAG: Final = "asyncrpc: the last step"
_ENDS_ON: Final = (signal.SIGTERM,)
_DEFAULT_HANDLERS: Final = (
    signal.SIG_DFL,
    signal.SIG_IGN,
    signal.default_int_handler,
    None,  # not from Python
)


class Preemption:
    """Saves a program's state when its process is told to end, and leaves the group.

    Schedulers announce the end of a process by a signal and kill it some seconds later:
    Slurm at the time limit, for a job of higher priority or a requeue, Kubernetes when
    it moves a pod, a cloud when it takes a spot instance back.  Inside the block such a
    signal has these consequences:

    1.  Steps that are open (`step`) may end; no other step begins.  With `lockstep` all
        workers first agree on the last step, and make it.
    2.  The callbacks (`on_preempt`) run.  Calls work as before.
    3.  The block is cancelled, unless it is ending the group itself.
    4.  The worker drains and leaves the group.
    5.  The process exits with code 75 if every callback ended well (`EX_TEMPFAIL` of
        sysexits.h: start me again), else with 128 plus the signal's number.

    All of this takes `grace_s` seconds at most.  A block that ends before any signal
    has no effect.

    Example:
        >>> async with (
        ...     asyncrpc.Worker("trainer0") as worker,
        ...     asyncrpc.Preemption(worker, grace_s=60) as preemption,
        ... ):
        ...     preemption.on_preempt(save)
        ...     for batch in batches:
        ...         async with preemption.step():  # `save` waits for its end
        ...             await train(batch)

    Source: Slurm's `KillWait` and `--signal`; Kubernetes' termination of pods.
    """

    def __init__(
        self,
        worker: Worker | None = None,
        *,
        signals: Iterable[signal.Signals] = _ENDS_ON,
        grace_s: float = GRACE_S,
        graceful: bool = True,
        lockstep: bool = False,
        exits: bool = True,
    ) -> None:
        """Describe the preemption; `async with` begins to watch.

        Args:
            worker: the worker that leaves its group at the end; None: the current one.
            signals: the signals that announce the end, such as SIGTERM, or SIGUSR1 of
                `sbatch --signal`.
            grace_s: seconds from the signal to the process's end; a little less than
                the scheduler waits before it kills.
            graceful: whether the worker waits, within the grace, until all workers of
                the group end and no call is in flight.  Use this if a signal reaches
                all of them, as in Slurm.  False: it leaves alone, once the calls in
                flight here have ended.  Use this if one worker can be preempted alone.
            lockstep: whether the workers of the group make the same steps, as in
                data-parallel training; workers without steps do not count.  All of
                them must get the signal and have a Preemption; a worker that has found
                no agreement after 20 % of the grace continues alone.
            exits: whether the block ends with `SystemExit` after a signal.  False: the
                block ends normally, and the program continues after it.

        Raises:
            UsageError: an argument has the wrong type.
        """
        if worker is not None:
            check_kind("worker", worker, Worker, "a Worker or None")
        self._signals = _checked_signals(signals)
        check_above("grace_s", grace_s, 0)
        check_flags(graceful=graceful, lockstep=lockstep, exits=exits)
        self._worker = worker
        self._graceful, self._exits = graceful, exits
        self._machine = Preempting(grace_s, is_lockstep=lockstep)
        self._callbacks: list[Callable[[], Any]] = []
        self._signal = signal.SIGTERM
        self._requested, self._changed = asyncio.Event(), asyncio.Event()
        self._agreed, self._over = asyncio.Event(), asyncio.Event()
        self._ending: asyncio.Task[None] | None = None
        self._is_interrupted = False

    # --- what a program calls --------------------------------------------------------

    def on_preempt(self, callback: Callback) -> Callback:
        """Call a function when the end is announced.

        Coroutine functions run on the event loop, others in a thread of the worker.
        They run one after the other, in the order of their registration.  One that
        raises is logged with its traceback, and the next one runs.

        Args:
            callback: a function without arguments.

        Returns:
            The callback, so that this method can be used as a decorator.

        Raises:
            UsageError: callback is not callable.
        """
        if not callable(callback):
            raise wrong("callback", "a function without arguments", callback)
        self._callbacks.append(callback)
        return callback

    def step(self) -> PreemptionStep:
        """Return a context for one step of the program, which callbacks wait for.

        After a signal no step begins: entering the context waits for the end of the
        block.  Callbacks do not wait for a step beyond 40 % of the grace; the exit code
        is then not 75.

        Example:
            >>> async with preemption.step():
            ...     await optimizer.step(ctx)
        """
        if hasattr(self, "_task"):
            check_loop("Preemption.step", self._loop, "it")
        return PreemptionStep(self._machine, self._agreed, self._over, self._changed)

    def request(self, reason: str = "the program asked for it") -> None:
        """Announce the end, as a signal would.

        It is for notices that are not signals, such as those in a cloud's metadata.

        Args:
            reason: for the log.

        Raises:
            NotStartedError: the block has not been entered.
            UsageError: `reason` is not a string.
        """
        check_kind("reason", reason, str, "a string")
        self._check_entered()
        self._notice(reason)

    @property
    def is_requested(self) -> bool:
        """Whether the end has been announced."""
        return self._requested.is_set()

    @property
    def left_s(self) -> float:
        """Seconds that are left of the grace; all of it before the signal."""
        machine = self._machine
        if machine.noticed_at_s is None:
            return machine.grace_s
        end_s = machine.noticed_at_s + machine.grace_s
        return max(end_s - self._loop.time(), 0.0)

    async def wait_requested(self) -> None:
        """Wait until the end is announced.

        Raises:
            NotStartedError: the block has not been entered.
            UsageError: this is not the event loop that it was entered on.

        Cancellation:
            Nothing has changed.
        """
        self._check_entered()
        check_loop("Preemption.wait_requested", self._loop, "it")
        await self._requested.wait()

    def _check_entered(self) -> None:
        if not hasattr(self, "_task"):
            raise NotStartedError("use `async with asyncrpc.Preemption(...)` first")

    # --- the block -------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Install the signal handlers.

        Raises:
            NotStartedError: there is no current worker.
            UsageError: the block was entered before; this is not the main thread; or
                another handler of one of the signals is installed.
        """
        self._loop = loop_for("a Preemption")
        if hasattr(self, "_task"):
            raise UsageError("a Preemption is entered once; make a new one")
        self._worker = self._worker or current_worker()
        self._host = host_of(self._worker)
        self._host.check_on_loop("Preemption")
        if self._signals:
            _refuse_other_handlers(self._signals)
        for number in self._signals:
            self._loop.add_signal_handler(number, self._on_signal, number)
        task = asyncio.current_task()
        assert task is not None  # a coroutine runs
        self._task, self._cancelling = task, task.cancelling()
        self._context = contextvars.copy_context()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """Wait for the rest of what a signal has begun; remove the handlers.

        Raises:
            SystemExit: a signal came, and the block has not failed.  Errors of calls
                after the signal are logged, as the other workers may be ending as well.

        Cancellation:
            The callbacks are cancelled, and the worker ends at once.
        """
        machine = self._machine
        machine.advance(PreemptionEvent.BLOCK_ENDED)
        self._changed.set()
        try:
            if self._ending is not None:
                await self._wait_ended(self._ending)
        finally:
            for number in self._signals:
                self._loop.remove_signal_handler(number)
        was_ours = self._was_ours(error)
        if not self.is_requested:
            return False
        if error is not None and not was_ours:
            if not (self._exits and isinstance(error, CallError)):
                return False
            logger.warning("after the announced end a call failed", exc_info=error)
        if self._exits:
            raise SystemExit(machine.exit_code(self._signal)) from None
        return was_ours

    def _was_ours(self, error: BaseException | None) -> bool:
        """Return whether the block ended because it was cancelled from here."""
        if not self._is_interrupted:
            return False
        others = self._task.uncancel() > self._cancelling
        return isinstance(error, asyncio.CancelledError) and not others

    async def _wait_ended(self, ending: asyncio.Task[None]) -> None:
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            ending.cancel()
            await asyncio.wait([ending])  # it is almost finished
            raise

    # --- what the machine decides ----------------------------------------------------

    def _on_signal(self, number: signal.Signals) -> None:
        if not self.is_requested:
            self._signal = number
        self._notice(number.name)

    def _notice(self, reason: str) -> None:
        if self.is_requested or not self._machine.may_step:
            return
        self._machine.notice(self._loop.time())
        self._requested.set()
        assert self._worker is not None  # the block has been entered
        logger.info(
            "worker %r: its end was announced (%s); it ends within %g s",
            self._worker.name,
            reason,
            self._machine.grace_s,
        )
        if not self._machine.is_lockstep:
            self._agreed.set()
        name = f"asyncrpc preemption of {self._worker.name}"
        self._ending = self._loop.create_task(
            self._end(self._worker), name=name, context=self._context
        )

    async def _end(self, worker: Worker) -> None:
        """Act on the state until all is over."""
        machine = self._machine
        while machine.state is not PreemptionState.ENDED:
            match machine.state:
                case PreemptionState.AGREEING:
                    machine.agree(await self._agree(worker))
                    self._agreed.set()
                case PreemptionState.FINISHING:
                    await self._until_changed(PreemptionState.FINISHING)
                case PreemptionState.SAVING | PreemptionState.SAVING_LAST:
                    machine.on_saved(await self._save(worker))
                case PreemptionState.STOPPING:
                    self._interrupt(worker)
                    await self._until_changed(PreemptionState.STOPPING)
                case PreemptionState.LEAVING:
                    await self._leave(worker)
                    machine.advance(PreemptionEvent.LEFT)
        self._over.set()

    async def _agree(self, worker: Worker) -> int:
        """Return how many steps the group makes, or this worker if it is alone.

        A worker that has made no step need not catch up.
        """
        machine, wakes_at_s = self._machine, self._machine.wakes_at_s
        assert wakes_at_s is not None  # there was a notice
        own = str(machine.steps_begun).encode()
        timeout_s = max(wakes_at_s - self._loop.time(), 0.0)
        try:
            all_steps = await rendezvous(worker, _TAG, own, timeout_s=timeout_s)
        except (AsyncRpcError, TimeoutError) as error:
            logger.warning(
                "worker %r ends without an agreement on the last step: %s",
                worker.name,
                error,
            )
            return machine.steps_begun
        return max(map(int, all_steps)) if machine.steps_begun else 0

    async def _until_changed(self, state: PreemptionState) -> None:
        """Wait until the machine leaves a state, at the latest when its time is up."""
        machine = self._machine
        try:
            async with asyncio.timeout_at(machine.wakes_at_s):
                while machine.state is state:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            machine.advance(PreemptionEvent.TIME_UP)

    async def _save(self, worker: Worker) -> int:
        """Run the callbacks; return how many did not end well."""
        unsaved = len(self._callbacks)
        try:
            async with asyncio.timeout_at(self._machine.wakes_at_s):
                for callback in self._callbacks:
                    unsaved -= await self._save_by(callback, worker)
        except TimeoutError:
            logger.warning(
                "worker %r: the callbacks of its preemption did not end within %g s",
                worker.name,
                self._machine.grace_s,
            )
        return unsaved

    async def _save_by(self, callback: Callable[[], Any], worker: Worker) -> bool:
        """Run one callback; return whether it ended well."""
        try:
            if not inspect.iscoroutinefunction(callback):
                result = await self._in_thread(callback, worker)
            else:
                result = callback()
            if inspect.isawaitable(result):
                await result
        except Exception:  # the other callbacks must run in any case
            logger.exception(
                "worker %r: %r failed after the announced end", worker.name, callback
            )
            return False
        return True

    def _in_thread(self, callback: Callable[[], Any], worker: Worker) -> Awaitable[Any]:
        future = self._loop.create_future()
        context = contextvars.copy_context()
        if worker.is_closed:  # and so are its threads
            return asyncio.to_thread(context.run, callback)
        self._host.pool.submit(lambda: context.run(callback), outcome_to(future))
        return future

    def _interrupt(self, worker: Worker) -> None:
        """Cancel the block, unless it already ends together with the group."""
        if worker.is_closed or self._host.is_ending:
            return
        self._is_interrupted = True
        self._task.cancel(f"worker {worker.name!r} is preempted")

    async def _leave(self, worker: Worker) -> None:
        """End the worker in the remaining time."""
        end_s = self._machine.wakes_at_s
        assert end_s is not None  # there was a notice
        left_s = max(end_s - self._loop.time(), 0.0)
        drain_s = min(worker.options.drain_timeout_s, left_s)
        graceful = self._graceful and not self._host.is_ending
        try:
            await worker.shutdown(
                graceful=graceful, timeout_s=left_s, drain_timeout_s=drain_s
            )
        except TimeoutError as error:
            logger.warning("%s", error)


class PreemptionStep:
    """One step of a program, as a context: from `Preemption.step`."""

    __slots__ = ("_agreed", "_changed", "_machine", "_over")

    def __init__(
        self,
        machine: Preempting,
        agreed: asyncio.Event,
        over: asyncio.Event,
        changed: asyncio.Event,
    ) -> None:
        self._machine = machine
        self._agreed, self._over, self._changed = agreed, over, changed

    async def __aenter__(self) -> None:
        """Begin, unless the end has been announced.

        Raises:
            NotStartedError: the end was announced, and the worker has ended.

        Cancellation:
            The step has not begun.
        """
        machine = self._machine
        if not machine.may_step:
            await self._agreed.wait()  # within the grace; it may allow one more
        if not machine.may_step:
            await self._over.wait()  # within the grace; usually cancelled before
            raise NotStartedError("the worker has been preempted, and has ended")
        machine.begin_step()

    async def __aexit__(self, *_: object) -> None:
        """End the step.

        Raises:
            Nothing.

        Cancellation:
            It never waits.
        """
        self._machine.end_step()
        self._changed.set()


def _checked_signals(signals: Iterable[signal.Signals]) -> tuple[signal.Signals, ...]:
    wanted = "signals such as (signal.SIGTERM,)"
    numbers = listed("signals", signals, wanted)
    for number in numbers:
        check_kind("each of signals", number, int, wanted)
    try:
        return tuple(map(signal.Signals, numbers))
    except ValueError:
        raise wrong("signals", wanted, numbers) from None


def _refuse_other_handlers(signals: Iterable[signal.Signals]) -> None:
    """Refuse to replace handlers of other parts of the program."""
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "a Preemption handles signals, which only the main thread can: run the"
            " event loop there, or pass signals=() and call `request`"
        )
    for number in signals:
        if signal.getsignal(number) not in _DEFAULT_HANDLERS:
            raise UsageError(
                f"{number.name} already has a handler, which a Preemption would"
                " replace; remove it, or leave the signal out of `signals`"
            )

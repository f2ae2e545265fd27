"""The threads that run plain functions.

At most `limit` functions run at once, but a thread that waits for a nested call is not
running: it is counted as blocked and a spare is started.  So a chain of blocking calls
between workers, however deep, never waits for a thread that waits for it.  Functions
may also wait for what asyncrpc does not see (an event set by another call, say): when
none of the running ones ends for `STALL_S` while others queue, one more thread starts.

An *exclusive* pool runs one function at a time, whatever its thread: for devices that
only one thread may use.  A thread that waits for a call releases its lock.

Results go back to the event loop in batches: one wake-up for all that finished before
the loop looked.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from queue import Empty, SimpleQueue
from typing import Any, ClassVar, Final, Protocol, TypeVar

from asyncrpc.core.loop.waits import works_for
from asyncrpc.core.torch_modes import drop_modes
from asyncrpc.errors import ClosedError, Outcome, RejectedError

logger = logging.getLogger("asyncrpc")

T = TypeVar("T")
Job = Callable[[], Any]
Done = Callable[[Any, BaseException | None], None]
Submit = Callable[[Job, Done], None]  # runs a job, then tells its outcome on the loop


class Lock(Protocol):
    """A lock that one thread has at a time; those of devices are made above."""

    def acquire(self) -> Any:
        """Wait for it."""

    def release(self) -> None:
        """Give it up."""

    def __enter__(self) -> Any:
        """Wait for it."""

    def __exit__(self, *_: object) -> None:
        """Give it up."""


class YieldingLock(Protocol):
    """A lock that a thread gives up while it waits for a call; then it has it again.

    Autograd makes one, above this package.
    """

    @property
    def is_held_here(self) -> bool:
        """Return whether this thread has it."""

    def give_up(self) -> Any:
        """Release it; return what `take_back` needs."""

    def take_back(self, token: Any, /) -> None:
        """Wait for it again."""


STALL_S: Final = 0.1
OWN_THREAD: Final = "asyncrpc-look"  # it runs nothing but asyncrpc's own code
THREADS_MAX: Final = 4096  # blocked ones included: each takes some 50 KiB resident
_IDLE_S: Final = 10.0  # a spare that finds no work for so long ends
_ENTRY: Final = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)


def outcome_to(future: asyncio.Future[Any]) -> Done:
    """Return a function that sets a future's outcome, unless it is done already.

    No future takes a StopIteration: it comes as a RuntimeError from it, as it would out
    of a generator; so does a GeneratorExit.  And so does a CancelledError that a job
    has raised: who awaits the future has not been cancelled, and is not to look as if.
    """

    def finish(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(uncancelled(settable(error)))
            if issubclass(type(error), ClosedError):  # it may lie of its class
                future.exception()  # marks it as read
        else:
            future.set_result(result)

    return finish


def _work_of(done: Any) -> object:
    """Return whose job a thread runs: a call, or the future of `outcome_to`."""
    for cell in getattr(done, "__closure__", None) or ():
        if isinstance(cell.cell_contents, asyncio.Future):
            return cell.cell_contents
    return getattr(done, "__self__", None)


async def in_new_thread(loop: asyncio.AbstractEventLoop, job: Callable[[], T]) -> T:
    """Run a job in a thread of its own: all threads of the pools may be in use."""
    done: asyncio.Future[T] = loop.create_future()
    finish = outcome_to(done)

    def run() -> None:
        result, problem = None, None
        try:
            result = job()
        except Exception as error:  # noqa: BLE001  (raised in the awaiting task)
            problem = error
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(finish, result, problem)

    threading.Thread(target=run, name=OWN_THREAD, daemon=True).start()
    return await done


def settable(error: BaseException) -> BaseException:
    """Return what a future can be told of an error.

    A StopIteration it refuses; by a GeneratorExit the coroutines that await it would be
    closed, and could not wait for anything while they clean up.
    """
    for kind in (StopIteration, GeneratorExit):
        if issubclass(type(error), kind):
            text = f"a {kind.__name__} was raised where nothing iterates"
            return _instead(error, text)
    return error


def uncancelled(error: BaseException) -> BaseException:
    """Return an error of a job that was not cancelled, as its caller should see it."""
    if not issubclass(type(error), asyncio.CancelledError):
        return error
    return _instead(error, "a CancelledError was raised where nothing was cancelled")


def _instead(error: BaseException, text: str) -> RuntimeError:
    replacement = RuntimeError(text)
    replacement.__cause__ = error
    return replacement


class ThreadPool:
    """Runs functions in threads and reports to one event loop.

    Attributes:
        unfinished: jobs that have not ended, as the loop knows.
        runs_here: whether jobs run on the loop itself: so it is in a simulation.
        locks: what its threads give up while they wait for calls.
    """

    runs_here: ClassVar[bool] = False

    def __init__(
        self,
        name: str,
        limit: int,
        loop: asyncio.AbstractEventLoop,
        *,
        device_lock: Lock | None = None,
        begin: Callable[[], None] | None = None,
        settle: Callable[[], None] | None = None,
    ) -> None:
        """Describe a pool; threads start when there is work.

        Args:
            device_lock: the lock that a function needs to run; None: none.
        """
        self._name = name
        self._limit = limit if device_lock is None else 1
        self._device_lock = device_lock
        self._begin = begin
        self._settle = settle
        self._loop = loop
        self._lock = threading.Lock()
        self._all_ended = asyncio.Event()  # set once, after `close` has begun
        # Written in C: a thread is woken by one lock.  None ends a thread.
        self._jobs: SimpleQueue[tuple[Job, Done] | None] = SimpleQueue()
        self._threads: set[threading.Thread] = set()
        self.locks: list[YieldingLock] = []
        self.unfinished = 0
        self._blocked = 0
        self._closed = False
        self._started = 0
        self._finished: deque[tuple[Done, Any, BaseException | None]] = deque()
        self._waking = False  # the loop has been told and has not looked yet
        self._stall_timer: asyncio.TimerHandle | None = None
        self._ended = 0  # jobs; what the stall timer watches
        self._ended_before = 0

    @property
    def is_exclusive(self) -> bool:
        """Return whether only one job runs at a time, of all pools with its lock."""
        return self._device_lock is not None

    @property
    def threads(self) -> int:
        """How many threads there are."""
        return len(self._threads)

    def submit(self, job: Job, done: Done) -> None:
        """Run `job` in a thread, then `done(result, error)` on the loop.

        Called on the event loop.
        """
        if self._closed:
            raise RejectedError("the worker is closing")
        self._jobs.put((job, done))
        self.unfinished += 1
        if self.unfinished <= len(self._threads):
            return
        is_refused = False
        with self._lock:
            if len(self._threads) - self._blocked < self._limit:
                is_refused = not self._start_thread()
            if is_refused and not self._threads:
                self._take_back()
        # One that waits for what we cannot see keeps the lock.
        if is_refused or not self.is_exclusive:
            self._watch_for_stall()

    def run(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Run `job` in a thread; called on the event loop."""
        done: asyncio.Future[T] = self._loop.create_future()
        self.submit(job, outcome_to(done))
        return done

    def _take_back(self) -> None:
        """Give up the only job: no thread will ever run it."""
        self._jobs.get_nowait()
        self.unfinished -= 1
        raise RejectedError(
            "the worker has no free thread and the system cannot start one: memory or"
            " the process limit (ulimit -u) is exhausted; try again later",
            outcome=Outcome.NOT_EXECUTED,
        )

    def _watch_for_stall(self) -> None:
        """Look now and then whether what queues needs one more thread."""
        if self.unfinished > len(self._threads) and self._stall_timer is None:
            self._ended_before = self._ended
            self._stall_timer = self._loop.call_later(STALL_S, self._on_stall_timer)

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Mark the calling thread as waiting for a call, so that a spare may run.

        Does nothing in a thread that is not of this pool.
        """
        if threading.current_thread() not in self._threads:
            yield
            return
        with self._lock:
            self._blocked += 1
            is_refused = not self._jobs.empty() and not self._start_thread()
        if is_refused:
            self._loop.call_soon_threadsafe(self._watch_for_stall)
        held = [(lock, lock.give_up()) for lock in self.locks if lock.is_held_here]
        if self._device_lock is not None:
            self._device_lock.release()
        try:
            yield
        finally:
            if self._device_lock is not None:
                self._device_lock.acquire()
            for lock, token in reversed(held):
                lock.take_back(token)
            with self._lock:
                self._blocked -= 1

    async def close(self, timeout_s: float) -> list[str]:
        """Let the threads end; return the names of those that have not in time.

        Jobs that have not begun are dropped, with a `ClosedError`.  A thread cannot be
        interrupted: one that runs on is a daemon, and does not keep the process alive.
        """
        self._closed = True
        self._drop_jobs()
        for _ in range(len(self._threads)):
            self._jobs.put(None)
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        with self._lock:
            if not self._threads:
                self._all_ended.set()
        try:
            async with asyncio.timeout(timeout_s):
                await self._all_ended.wait()
        except TimeoutError:
            pass
        finally:
            self._drain_finished()
        return sorted(thread.name for thread in self._threads)

    def _drop_jobs(self) -> None:
        """Fail the jobs that have not begun."""
        with suppress(Empty):
            while (work := self._jobs.get_nowait()) is not None:
                self.unfinished -= 1
                try:
                    work[1](None, ClosedError("the worker was shut down before it ran"))
                except Exception:  # the callers of the other jobs must be told, too
                    logger.exception("the end of a worker could not be told")

    def _start_thread(self) -> bool:
        """Start one more thread; the lock is held."""
        if len(self._threads) >= THREADS_MAX:
            return True  # the job waits; every thread is blocked or busy
        self._started += 1
        name = f"asyncrpc-{self._name}-{self._started}"
        thread = _PoolThread(target=self._run, name=name, daemon=True)
        thread.pool = self
        self._threads.add(thread)
        try:
            start_thread(thread)
        except (RuntimeError, MemoryError):
            self._threads.discard(thread)
            return False
        return True

    @works_for(lambda at: _work_of(at.get("done")))
    def _run(self) -> None:
        try:
            while (work := self._next()) is not None:
                job, done = work
                try:
                    result = (
                        job() if self._device_lock is None else self._run_locked(job)
                    )
                    self._report(done, result, None)
                    del result
                except BaseException as error:  # noqa: BLE001  (the caller gets it)
                    self._report(done, None, error)
                del work, job, done  # hold nothing of the call while idle
                drop_modes()
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())
                is_last = self._closed and not self._threads
            if is_last:
                with suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._all_ended.set)

    def settle(self) -> None:
        """Do what precedes a release; called by who holds the lock."""
        if self._settle is not None:
            self._settle()

    def _run_locked(self, job: Job) -> Any:
        assert self._device_lock is not None  # the caller has looked
        with self._device_lock:
            try:
                if self._begin is not None:
                    self._begin()
                return job()
            finally:
                self.settle()

    def _next(self) -> tuple[Job, Done] | None:
        """Wait for a job; None tells the thread to end."""
        while True:
            if len(self._threads) - self._blocked > self._limit and self._may_end():
                return None
            try:
                return self._jobs.get(timeout=_IDLE_S)
            except Empty:
                if self._may_end():
                    return None

    def _may_end(self) -> bool:
        """Take this thread out, unless a job has come that counts on it.

        `submit` first adds the job and then counts the threads: it sees that this one
        is gone, or this one sees the job.
        """
        me = threading.current_thread()
        with self._lock:
            self._threads.discard(me)
            if self._jobs.empty():
                return True
            self._threads.add(me)
            return False

    def _report(self, done: Done, result: Any, error: BaseException | None) -> None:
        self._ended += 1
        self._finished.append((done, result, error))
        # Two threads may both find the flag down: one wake-up too many, never too few.
        if not self._waking:
            self._waking = True
            try:
                self._loop.call_soon_threadsafe(self._drain_finished)
            except RuntimeError:  # the loop is closed: no task is left to tell
                self._finished.clear()

    def _drain_finished(self) -> None:
        self._waking = False  # first: who appends from now on wakes the loop again
        finished = self._finished
        while finished:
            done, result, error = finished.popleft()
            self.unfinished -= 1
            try:
                done(result, error)
            except BaseException:  # goes to the loop's handler; the others go on
                self._waking = True
                self._loop.call_soon(self._drain_finished)
                raise

    def _on_stall_timer(self) -> None:
        self._stall_timer = None
        if self._closed or self._jobs.empty():
            return
        if self._ended == self._ended_before:
            with self._lock:
                self._start_thread()
        self._ended_before = self._ended
        self._stall_timer = self._loop.call_later(STALL_S, self._on_stall_timer)


class _PoolThread(threading.Thread):
    """A thread that knows its pool."""

    pool: ThreadPool


def thread_blocked() -> AbstractContextManager[None]:
    """Return a context in which this thread counts as waiting, not as running."""
    thread = threading.current_thread()
    return thread.pool.blocked() if isinstance(thread, _PoolThread) else nullcontext()


def start_thread(thread: threading.Thread) -> None:
    """Start a daemon thread, also while the `atexit` functions of the program run.

    From then on CPython 3.12 starts none ("can't create new thread at interpreter
    shutdown"); other versions do until these functions have ended.  Programs shut
    their workers down in them, and the others still call.  So there the system starts
    the thread, which enters the interpreter as one of a C library does.
    """
    try:
        thread.start()
    except RuntimeError as error:
        if sys.version_info[:2] != (3, 12) or "interpreter shutdown" not in str(error):
            raise
        _start_by_system(thread)


def _start_by_system(thread: Any) -> None:
    def enter(_: int | None) -> None:
        # So that `current_thread()` is this one; it stays, and so does the entry.
        threading._active[threading.get_ident()] = thread  # type: ignore[attr-defined]  # noqa: SLF001
        thread.run()

    thread.entry = _ENTRY(enter)
    library, identity = ctypes.CDLL(None), ctypes.c_void_p()
    number = library.pthread_create(ctypes.byref(identity), None, thread.entry, None)
    if number:
        raise RuntimeError(f"can't start new thread: error {number}")
    library.pthread_detach(identity)

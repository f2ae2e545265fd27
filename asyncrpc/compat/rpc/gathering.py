"""The ranges of callees, for threads that profile and ask for them.

Such a thread has a `Gatherer`.  The metadata of its calls have the wish, and what the
profiler records.  The callee runs the function under a profiler of its thread, and the
answer brings the ranges beside the result.  For `remote`, whose result stays, the
callee keeps the ranges until they are fetched.

The callee's profiler is torch's legacy one, whatever the caller's is: of torch's
profilers only that one sees a single thread, and can run in many at once.

Invariants: a call without a wish has no such metadata; a call that fails fails as
without a wish, and brings no ranges.

Source: torch.distributed.rpc's RemoteProfilerManager, for the names of the ranges.
"""

from __future__ import annotations

import concurrent.futures
import inspect
import itertools
import re
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context
from typing import Any, Final, NamedTuple, Self

import torch
from torch.autograd import profiler_legacy

from asyncrpc.core.calls.foreign_futures import as_awaitable
from asyncrpc.core.calls.modes import Mode, mode_of
from asyncrpc.core.loop.clock import wall_ns
from asyncrpc.core.torch_modes import steps
from asyncrpc.core.worker import Worker
from asyncrpc.errors import MalformedError, RemoteError

REMOTE_OP: Final = "#remote_op: "  # between the names of the call and the range
KEPT_MAX: Final = 1024  # values whose ranges were not fetched; callers may die

_autograd: Final[Any] = torch.autograd
_parse: Callable[[Any], Any] = profiler_legacy._parse_legacy_records  # noqa: SLF001
_tokens: Final = itertools.count()
_OWN_FRAMES: Final = re.compile(
    r'^  File "[^"\n]*asyncrpc/compat/rpc/gathering\.py".*\n(?:    .*\n)*',
    re.MULTILINE,
)
_threads: Final = threading.local()


def wall_us() -> float:
    """Read the clock that torch's profilers read: microseconds since the epoch."""
    return wall_ns() / 1000


class Range(NamedTuple):
    """An event of a profiler, as it is sent.

    Attributes:
        start_us: microseconds since the epoch, as `end_us`.
        thread: torch's number of the thread.
        rank: rank of the worker that recorded the event.
        memory_bytes: host memory that was allocated and not freed.
    """

    name: str
    start_us: float
    end_us: float
    thread: int
    rank: int
    is_async: bool = False
    fwd_thread: int | None = None
    shapes: Any = None
    stack: Any = ()
    scope: int = 0
    memory_bytes: int = 0
    sequence_nr: int = -1
    flops: int | None = None


class Settings(NamedTuple):
    """What a profiler records besides times, as in torch's `ProfilerConfig`."""

    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False

    @classmethod
    def of(cls, profile: Any) -> Settings:
        """Read the settings of one of torch's profilers."""
        return cls(*(bool(getattr(profile, name)) for name in cls._fields))

    def config(self) -> Any:
        """Return the settings for the legacy profiler."""
        nothing_more = torch._C._profiler._ExperimentalConfig()  # noqa: SLF001
        state = _autograd.ProfilerState.CPU
        return _autograd.ProfilerConfig(state, *self, nothing_more)


def start_of(records: Any) -> Any:
    """Return the record with which the legacy profiler began."""
    return next(
        record
        for record in itertools.chain(*records)
        if record.name() == "__start_profile"
    )


def _ranges_of(records: Any, rank: int) -> Iterator[Range]:
    origin_us = start_of(records).start_us()
    for event in _parse(records):
        yield Range(
            name=event.name,
            start_us=origin_us + event.time_range.start,
            end_us=origin_us + event.time_range.end,
            thread=event.thread,
            rank=rank,
            is_async=event.is_async,
            fwd_thread=event.fwd_thread,
            shapes=event.input_shapes,
            stack=tuple(event.stack),
            scope=event.scope,
            memory_bytes=event.cpu_memory_usage,
            sequence_nr=event.sequence_nr,
            flops=event.flops,
        )


# --- gathering -----------------------------------------------------------------------


class Gatherer:
    """Ranges of the calls of one thread, from `begin` to `end`.

    Attributes:
        settings: settings of the thread's profiler.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.ranges: list[Range] = []
        self._outer: Gatherer | None = None
        self._is_over = False

    def begin(self) -> None:
        """Gather for the calls of this thread."""
        self._outer, _threads.gatherer = gatherer_here(), self

    def end(self) -> None:
        """Stop gathering, also for calls in flight."""
        self._is_over = True
        self.leave()

    def leave(self) -> None:
        """Restore the thread's former gatherer."""
        _threads.gatherer, self._outer = self._outer, None

    def add(self, *ranges: Range) -> None:
        """Add ranges; from any thread."""
        if not self._is_over:
            self.ranges.extend(ranges)


def gatherer_here() -> Gatherer | None:
    """Return the gatherer for the calls of this thread."""
    gatherer: Gatherer | None = getattr(_threads, "gatherer", None)
    return gatherer


class Session(Gatherer):
    """The run of one function for a profiling caller: its ranges, and its callees'.

    A context, entered for each step of the function, in the thread of the step.
    """

    def __init__(self, settings: Settings, rank: int) -> None:
        super().__init__(settings)
        self._rank = rank
        self._thread = 0
        self._is_on = False

    def __enter__(self) -> Self:
        self.begin()
        try:
            _autograd._enable_profiler_legacy(self.settings.config())  # noqa: SLF001
            self._is_on = True
        except RuntimeError:  # another profiler runs in this thread
            self._is_on = False
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()
        if self._is_on:
            records = _autograd._disable_profiler_legacy()  # noqa: SLF001
            self._thread = start_of(records).thread_id()
            self.ranges += _ranges_of(records, self._rank)

    def show(
        self, name: str, start_us: float, end_us: float, *, is_async: bool
    ) -> None:
        """Add a call of the function; the profiler may be off when the call ends."""
        self.add(Range(name, start_us, end_us, -1, self._rank, is_async=is_async))

    def closed(self) -> list[Range]:
        """Return all ranges, when the function has ended."""
        self._is_over = True
        own = self._thread
        return [
            own_range._replace(thread=own) if own_range.thread < 0 else own_range
            for own_range in self.ranges
        ]


# --- at the caller -------------------------------------------------------------------


class ProfilingRequest:
    """The wish of one call."""

    def __init__(self, gatherer: Gatherer, name: str, worker: Worker) -> None:
        self._gatherer = gatherer
        self._name = name
        self._start_us = wall_us()
        self.token = f"{worker.name} {next(_tokens)}"

    def meta(self, *, keep: bool) -> dict[str, Any]:
        """Return the metadata that are sent with the call."""
        wish = [list(self._gatherer.settings), self.token if keep else ""]
        return {ProfiledThreads.key: wish}

    def take(self, ranges: list[Range], *, is_async: bool) -> None:
        """Give the gatherer the ranges of a call that has ended."""
        end_us = wall_us()
        moved_us = _moved_us(ranges, self._start_us, end_us)
        prefix = self._name + REMOTE_OP
        for remote_range in ranges:
            start, end = (
                remote_range.start_us + moved_us,
                remote_range.end_us + moved_us,
            )
            self._gatherer.add(
                remote_range._replace(
                    name=prefix + remote_range.name, start_us=start, end_us=end
                )
            )
        if isinstance(self._gatherer, Session):
            self._gatherer.show(self._name, self._start_us, end_us, is_async=is_async)


def _moved_us(ranges: list[Range], start_us: float, end_us: float) -> float:
    """Return by how much to move ranges so that they are within their call.

    This is 0 unless the clocks of the two hosts differ: then they move to its middle.
    """
    if not ranges:
        return 0.0
    first = min(remote_range.start_us for remote_range in ranges)
    last = max(remote_range.end_us for remote_range in ranges)
    if start_us <= first and last <= end_us:
        return 0.0
    spare_us = end_us - start_us - (last - first)
    return start_us + max(spare_us, 0.0) / 2 - first


class ProfiledResult(NamedTuple):
    """The result of a function, and the ranges recorded meanwhile."""

    result: Any
    ranges: list[Range]


class Opened:
    """Makes the future of a call with ranges look like that of a call without."""

    def __init__(self, call: Any, asked: ProfilingRequest, *, is_async: bool) -> None:
        self._call = call
        self._asked = asked
        self._is_async = is_async
        self._result: Any = None
        self.cancelled = call.cancelled
        self.exception = call.exception
        call.add_done_callback(self._take)

    def _take(self, call: Any) -> None:
        ranges: list[Range] = []
        error = None if call.cancelled() else call.exception()
        if isinstance(error, RemoteError):
            # As without a wish; this frame shows that C++ has raised it.
            error.remote_traceback = _OWN_FRAMES.sub("", error.remote_traceback)
        elif error is None and not call.cancelled():
            self._result = call.result()
            if isinstance(self._result, ProfiledResult):
                self._result, ranges = self._result
        self._asked.take(ranges, is_async=self._is_async)

    def add_done_callback(
        self, finish: Callable[[Any], object], *, context: Context | None = None
    ) -> None:
        """Call `finish` with this when the call has ended."""
        self._call.add_done_callback(lambda _: finish(self), context=context)

    def result(self) -> Any:
        """Return what the function returned, or raise what it raised."""
        self._call.result()
        return self._result


# --- at the callee -------------------------------------------------------------------


class ProfiledThreads:
    """A `runtime.extensions.ThreadState` for wishes, at both ends."""

    key = "p"

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._kept: dict[str, list[Range]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def wishing(self, asked: ProfilingRequest) -> Iterator[None]:
        """Give the call of `remote` that is started inside a wish."""
        _threads.wish = asked.meta(keep=True)[self.key]
        try:
            yield
        finally:
            del _threads.wish

    def here(self) -> Any:
        """Return the wish of the call that starts now."""
        return getattr(_threads, "wish", None)

    def surround(self, meta: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs `function` for a gathering caller."""
        settings, token = _lifted(meta)
        is_marked = mode_of(function) is Mode.ASYNC_EXECUTION

        def run(*args: Any, **kwargs: Any) -> Any:
            session = Session(settings, self._worker.rank)
            with session:
                result = function(*args, **kwargs)
            if isinstance(result, Coroutine):
                return self._await(steps(result, session), session, token)
            if not is_marked:
                return self._answer(result, session, token)
            if _is_future(result):
                return self._await(_of_future(result), session, token)
            return result  # refused later

        return run

    async def _await(self, running: Any, session: Session, token: str) -> Any:
        return self._answer(await running, session, token)

    def _answer(self, result: Any, session: Session, token: str) -> Any:
        ranges = session.closed()
        if not token:
            return ProfiledResult(result, ranges)
        with self._lock:
            if len(self._kept) >= KEPT_MAX:
                del self._kept[next(iter(self._kept))]
            self._kept[token] = ranges
        return result

    def take_kept(self, token: str) -> list[Range]:
        """Return the ranges that are kept under a token, and remove them."""
        with self._lock:
            return self._kept.pop(token, [])


def _lifted(meta: Any) -> tuple[Settings, str]:
    try:
        settings, token = meta
        return Settings(*map(bool, settings)), str(token)
    except (ValueError, TypeError) as error:
        raise MalformedError(
            f"a profiling request is malformed: {meta!r:.80}"
        ) from error


def _is_future(result: Any) -> bool:
    kinds = (torch._C.Future, concurrent.futures.Future)  # noqa: SLF001
    return isinstance(result, kinds) or inspect.isawaitable(result)


async def _of_future(future: Any) -> Any:
    return await as_awaitable(future)

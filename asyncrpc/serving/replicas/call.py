"""One call to replicas: its attempts, one after the other or two at a time.

Each attempt is a call of the worker, which ends with this one, whatever happens.

A stream from replicas moves too: until its first item it may move, from then on it
stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Generic, NoReturn, TypeVar

from asyncrpc import CallFuture, Peer
from asyncrpc.core.calls.streams import StreamReceiver
from asyncrpc.core.options import PLAIN, CallOptions
from asyncrpc.errors import AsyncRpcError, UsageError
from asyncrpc.extend import Deadline
from asyncrpc.serving.replicas.machine.attempts import (
    AttemptFailure,
    Health,
    NextStep,
    step_after,
)
from asyncrpc.serving.replicas.machine.routing import ReplicaRecord
from asyncrpc.serving.replicas.messages import AnswerNote, read_note
from asyncrpc.serving.replicas.router import ReplicaRouter, health_of

_NOTHING: Final = object()


class RoutedStream:
    """One attempt at a stream, at one replica."""

    __slots__ = ("_call", "_health", "_receivers", "items", "record")

    def __init__(
        self,
        call: ReplicaCall,
        record: ReplicaRecord,
        open_at: Callable[[Peer], AsyncGenerator[Any, None]],
        options: CallOptions,
    ) -> None:
        self._call = call
        self.record = record
        self._receivers: list[StreamReceiver] = []
        self._health = Health.UNKNOWN
        calls, loop = call.router.worker.parts.calls, call.router.worker.loop
        if call.deadline is not None:
            left_s = max(call.deadline.at_s - loop.time(), 0.0)
            options = replace(options, timeout_s=left_s)
        peer = Peer(calls, record.name, options, on_stream=self._receivers.append)
        self.items = open_at(peer)
        call.router.routing.begin(record)

    async def take(self) -> Any:
        """Return the next item, or `_NOTHING` at the end."""
        try:
            item = await anext(self.items, _NOTHING)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._take_note()
            failure = self._call.router.failure_of(self.record, error)
            self._health = health_of(failure)
            raise AttemptFailedError(failure, error) from error
        if self._health is Health.UNKNOWN:
            self._health = Health.GOOD
            self._take_note()  # of the first item
        return item

    async def close(self) -> None:
        """Count the attempt as ended, and close the generator at the replica."""
        try:
            await self.items.aclose()
        finally:
            self._call.router.end(self.record, self._health)
            self._take_note()

    def _take_note(self) -> None:
        for receiver in self._receivers:
            note = None if receiver.note is None else read_note(receiver.note)
            if note is not None:
                self._call.router.on_note(self.record, note)


async def stream_from(
    call: ReplicaCall,
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    options: CallOptions,
) -> AsyncGenerator[Any, None]:
    """Yield the items of a generator on a replica; see `Replicas.stream`."""

    def open_at(peer: Peer) -> AsyncGenerator[Any, None]:
        items: AsyncGenerator[Any, None] = peer.stream(function, *args, **kwargs)
        return items

    call.begin()
    last: AttemptFailedError | None = None
    while True:
        record = await call.next_record(last)
        call.note_attempt(record)
        attempt = RoutedStream(call, record, open_at, options)
        try:
            try:
                item = await attempt.take()
            except AttemptFailedError as failed:
                last = failed
                call.check_may_go_on(failed)
                continue
            while item is not _NOTHING:
                yield item
                try:
                    item = await attempt.take()
                except AttemptFailedError as failed:
                    raise_cause(failed)
            return
        finally:
            await attempt.close()


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReplicaAnswer(Generic[T]):
    """An answer, and where it comes from.

    Attributes:
        value: the result of the function.
        replica: name of the worker that it ran on.
        version: of the weights that made it; None: the function did not tell.
        attempts: how many times the call was made, hedged calls included.
    """

    value: T
    replica: str
    version: int | None
    attempts: int


@dataclass(slots=True)
class CallCounts:
    """The calls of one router, counted.

    Attributes:
        retries: attempts after another had failed.
        retries_refused: retries that the budget did not allow.
        hedges: attempts in parallel with a slow one.
        hedges_won: how many of these answered first.
    """

    calls: int = 0
    retries: int = 0
    retries_refused: int = 0
    hedges: int = 0
    hedges_won: int = 0


class AttemptFailedError(Exception):
    """One attempt has failed; the error of the program is its cause."""

    def __init__(self, failure: AttemptFailure, error: BaseException) -> None:
        super().__init__(failure.value)
        self.failure = failure
        self.error = error


@dataclass(slots=True, eq=False)
class ReplicaAttempt:
    """One call of the worker, at one replica."""

    record: ReplicaRecord
    future: CallFuture[Any]
    began_s: float


@dataclass(slots=True, eq=False)
class ReplicaCall:
    """One call of the program.

    Attributes:
        counts: counters of the router's calls.
        function: its name, for people.
        start: begins one attempt at a replica; it may raise.
        key: calls with the same one go to the same replica.
        is_idempotent: whether the function may run twice.
        deadline: of all attempts together.
    """

    router: ReplicaRouter
    counts: CallCounts
    function: str
    start: Callable[[ReplicaRecord, Deadline | None], CallFuture[Any]]
    key: bytes | None
    is_idempotent: bool
    deadline: Deadline | None
    tried: list[ReplicaRecord] = field(default_factory=list)
    attempts: int = 0
    retries: int = 0

    async def run(self) -> ReplicaAnswer[Any]:
        """Make attempts until one has a final result."""
        self.begin()
        last: AttemptFailedError | None = None
        while True:
            record = await self.next_record(last)
            try:
                return await self._try(record)
            except AttemptFailedError as failed:
                last = failed
                self.check_may_go_on(failed)

    def begin(self) -> None:
        """Pay into the budgets, and count the call."""
        routing = self.router.routing
        now_s = self.router.worker.loop.time()
        routing.retries.pay(now_s)
        routing.hedges.pay(now_s)
        self.counts.calls += 1

    async def next_record(self, last: AttemptFailedError | None) -> ReplicaRecord:
        """Return the next replica; raise the last error if none is left."""
        try:
            record = await self.router.choose(self.key, self.tried, self.deadline)
        except AsyncRpcError:
            if last is None:
                raise
            raise_cause(last)
        if record is None:
            assert last is not None  # some have been tried
            raise_cause(last)
        return record

    def check_may_go_on(self, failed: AttemptFailedError) -> None:
        """Raise the error of a failed attempt unless another attempt may follow."""
        if not self._may_go_on(failed.failure):
            raise_cause(failed)

    def note_attempt(self, record: ReplicaRecord) -> None:
        """Note that an attempt is made at a replica."""
        self.tried.append(record)
        self.attempts += 1

    def _may_go_on(self, failure: AttemptFailure) -> bool:
        options, counts = self.router.options, self.counts
        attempts_left = options.attempts_max - 1 - self.retries
        step = step_after(
            failure, is_idempotent=self.is_idempotent, attempts_left=attempts_left
        )
        if step is NextStep.RAISE:
            return False
        if step is NextStep.RETRY:
            if not self.router.routing.retries.take():
                counts.retries_refused += 1
                return False
            self.retries += 1
            counts.retries += 1
        return True

    # --- one or two attempts ---------------------------------------------------------

    async def _try(self, record: ReplicaRecord) -> ReplicaAnswer[Any]:
        first = self._begin(record)
        after_s = None
        if self.is_idempotent:
            after_s = self.router.routing.hedge_after_s(self.function)
        if after_s is not None:
            return await self._race(first, after_s)
        try:
            value = await first.future  # its deadline, or the end of its link, ends it
        except asyncio.CancelledError:
            self._give_up(first, is_first=False)
            raise
        except Exception as error:
            raise self._failed(first, error) from error
        return self._answered(first, value, is_first=True)

    async def _race(self, first: ReplicaAttempt, after_s: float) -> ReplicaAnswer[Any]:
        """Wait for an attempt; after `after_s`, start a second one beside it."""
        running = [first]
        failed: AttemptFailedError | None = None
        timeout_s: float | None = after_s
        try:
            while running:
                futures = [attempt.future for attempt in running]
                done, _ = await asyncio.wait(
                    futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
                )
                timeout_s = None
                if not done:
                    self._hedge(running)
                    continue
                for attempt in [
                    attempt for attempt in running if attempt.future in done
                ]:
                    running.remove(attempt)
                    try:
                        value = attempt.future.result()
                    except BaseException as error:  # noqa: BLE001  (likewise)
                        failed = self._failed(attempt, error)
                        continue
                    if attempt is not first:
                        self.counts.hedges_won += 1
                    return self._answered(attempt, value, is_first=attempt is first)
        finally:
            for attempt in running:
                self._give_up(attempt, is_first=attempt is first)
        assert failed is not None  # nothing runs, and nothing was returned
        raise failed from failed.error

    def _hedge(self, running: list[ReplicaAttempt]) -> None:
        """Make the call once more, at another replica, if the budget allows it."""
        routing = self.router.routing
        # The key's own replica is slow: the next one of the key may have its cache.
        record = self.router.choose_now(self.key, self.tried)
        if record is None or not routing.hedges.take():
            return
        try:
            running.append(self._begin(record))
        except AttemptFailedError:  # the first one runs on
            return
        self.counts.hedges += 1

    def _begin(self, record: ReplicaRecord) -> ReplicaAttempt:
        self.note_attempt(record)
        began_s = self.router.worker.loop.time()
        self.router.routing.begin(record)
        try:
            future = self.start(record, self.deadline)
        except Exception as error:
            failure = self.router.failure_of(record, error)
            self.router.end(record, health_of(failure))
            raise AttemptFailedError(failure, error) from error
        except BaseException:
            self.router.end(record, Health.UNKNOWN)
            raise
        return ReplicaAttempt(record, future, began_s)

    # --- how they end ----------------------------------------------------------------

    def _answered(
        self, attempt: ReplicaAttempt, value: Any, *, is_first: bool
    ) -> ReplicaAnswer[Any]:
        self.router.end(attempt.record, Health.GOOD)
        note = self._take_note(attempt)
        if is_first:
            self._record_latency(attempt)
        version = None if note is None else note.version
        return ReplicaAnswer(value, attempt.record.name, version, self.attempts)

    def _failed(
        self, attempt: ReplicaAttempt, error: BaseException
    ) -> AttemptFailedError:
        self._take_note(attempt)  # which may say that it drains
        failure = self.router.failure_of(attempt.record, error)
        self.router.end(attempt.record, health_of(failure))
        return AttemptFailedError(failure, error)

    def _give_up(self, attempt: ReplicaAttempt, *, is_first: bool) -> None:
        """Cancel an attempt that is no longer wanted."""
        if not attempt.future.cancel():
            # It has ended in the same loop iteration: mark any error as read.
            attempt.future.cancelled() or attempt.future.exception()
        self.router.end(attempt.record, Health.UNKNOWN)
        if is_first:
            self._record_latency(attempt)

    def _record_latency(self, attempt: ReplicaAttempt) -> None:
        if self.is_idempotent:
            taken_s = self.router.worker.loop.time() - attempt.began_s
            self.router.routing.record_latency(self.function, taken_s)

    def _take_note(self, attempt: ReplicaAttempt) -> AnswerNote | None:
        encoded = attempt.future.note
        note = None if encoded is None else read_note(encoded)
        if note is not None:
            self.router.on_note(attempt.record, note)
        return note


def raise_cause(failed: AttemptFailedError) -> NoReturn:
    """Raise the program's error, without the `AttemptFailedError` around it."""
    raise failed.error from failed.error.__cause__


def starter(
    router: ReplicaRouter,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: CallOptions,
) -> tuple[str, Callable[[ReplicaRecord, Deadline | None], CallFuture[Any]]]:
    """Return a function's name, and a function that begins one attempt."""
    calls = router.worker.parts.calls
    target, values = calls.describe(function, args, kwargs)
    name = target or str(getattr(function, "__qualname__", function))
    name = name.rpartition(":")[2]

    def start(record: ReplicaRecord, deadline: Deadline | None) -> CallFuture[Any]:
        left_s = None
        if deadline is not None:
            left_s = max(deadline.at_s - router.worker.loop.time(), 0.0)
        call = calls.new_call(name, record.name)
        if options is not PLAIN:
            call.options = options
        fresh = list(values[0]), dict(values[1])
        calls.begin(call, target, fresh, timeout_s=left_s)
        return call

    return name, start


_KEY_WANTED: Final = "a string, bytes, an integer, or None"


def key_bytes(key: Any) -> bytes | None:
    """Return the bytes of a key that are hashed."""
    if key is None or type(key) is bytes:
        return key
    if type(key) is str:
        return b"s" + key.encode(errors="surrogatepass")
    if type(key) is int:
        return b"i" + str(key).encode()
    raise UsageError(f"key must be {_KEY_WANTED}, not of type {type(key).__name__}")

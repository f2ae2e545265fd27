"""The values of this worker, made or still to be made: futures, by reference."""

from __future__ import annotations

import asyncio
from typing import Any

from asyncrpc.core.ids import Incarnation, RRefId
from asyncrpc.core.loop.threads import settable
from asyncrpc.core.rref.shared import copy_of
from asyncrpc.core.trace.recorder import FlightRecorder
from asyncrpc.core.trace.ring import plain
from asyncrpc.errors import ClosedError, Outcome, RRefDeletedError


class Value(asyncio.Future[Any]):
    """A value that is made or still to be made.

    Attributes:
        made_s: since when, on the loop's clock.
        outcome: whether its function ran, if the value has failed.
    """

    __slots__ = ("made_s", "outcome")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self.made_s = loop.time()
        self.outcome = Outcome.EXECUTED


class Values:
    """The values of one worker.

    Attributes:
        is_closed: whether the worker has let go of all of them.

    Thread safety: `add` may be called from any thread; the rest on the worker's loop.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, recorder: FlightRecorder
    ) -> None:
        self._loop = loop
        self._references, self._now_s = recorder.references, recorder.now_s
        self._known: dict[RRefId, Value] = {}
        self.get = self._known.get
        self.is_closed = False

    def __len__(self) -> int:
        return len(self._known)

    def has(self, future: object) -> bool:
        """Return whether a future is that of a value here."""
        return any(known is future for known in self._known.values())

    def add(self, rref_id: RRefId, value: Any) -> None:
        """Keep a value that is made."""
        future = Value(self._loop)
        future.set_result(value)
        self._known[rref_id] = future
        self._note(rref_id, "made")

    def expect(self, rref_id: RRefId) -> Value:
        """Return the future of a value, made or still to be made."""
        future = self._known.get(rref_id)
        if future is None:
            future = self._known[rref_id] = Value(self._loop)
        return future

    def fulfil(self, rref_id: tuple[int, int], value: Any) -> None:
        """Set a value that its function has returned."""
        key = id_of(rref_id)
        future = self._known.get(key)
        if future is not None and not future.done():
            future.set_result(value)
            self._note(key, "made")

    def fail(
        self,
        rref_id: tuple[int, int],
        error: BaseException,
        outcome: Outcome = Outcome.EXECUTED,
    ) -> None:
        """Fail a value whose function has raised, or was refused."""
        key = id_of(rref_id)
        future = self._known.get(key)
        if future is not None and not future.done():
            future.outcome = outcome
            self._fail(key, future, error)

    def free(self, rref_id: RRefId, why: str) -> None:
        """Let go of a value; one that has not been made fails, and says why."""
        future = self._known.pop(rref_id, None)
        if future is None:
            return
        if not future.done():
            self._fail(rref_id, future, RRefDeletedError(why))
        self._note(rref_id, "freed")

    def _fail(self, rref_id: RRefId, future: Value, error: BaseException) -> None:
        future.set_exception(settable(error))
        future.exception()  # marks it as read: it may never be awaited
        self._note(rref_id, "failed")

    def _note(self, rref_id: RRefId, change: str) -> None:
        self._references.record((self._now_s(), plain(rref_id), change))

    def close(self) -> None:
        """Drop all values; fail the tasks that wait for one."""
        self.is_closed = True
        for rref_id in self._known:
            gone = ClosedError("the owner was shut down before the value was made")
            self.fail(rref_id, gone)
        self._known.clear()


def result_of(done: asyncio.Future[Any]) -> Any:
    """Return a value, or raise a copy of the error that it became.

    Raising the kept error itself would attach frames to it, and a frame may hold the
    very reference whose entry keeps the error.
    """
    error = done.exception()
    if error is not None:
        raise copy_of(error)
    return done.result()


def id_of(pair: tuple[int, int]) -> RRefId:
    """Return the id that two numbers of a message form."""
    return RRefId(Incarnation(pair[0]), pair[1])

"""The watchdog of waits: after a test nothing of asyncrpc is pending without a cause.

`all_end` checks every future and task that was made inside of it on its loop.  They are
found by the garbage collector, which knows all objects: older objects are hidden from
it meanwhile (`gc.freeze`, 1 us), so that a search takes 0.1 ms.  Otherwise it takes 32
ms with torch loaded (208,000 objects), and registering each future when it is made
would cost 0.3 us, in programs as well.  Measured on CPython 3.11.

`asyncrpc.testing.causes` decides what may still be pending.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, TypeAlias

from asyncrpc import CallFuture
from asyncrpc.core.arguments import wrong
from asyncrpc.core.loop.loops import loop_for
from asyncrpc.core.rref.values import Value
from asyncrpc.testing.causes import problem_of, worker_of, worker_of_link
from asyncrpc.testing.frames import SuspendedLine, place_of_callback, places_of

AnyFuture: TypeAlias = "asyncio.Future[Any]"

_PAUSE_FIRST_S: Final = 0.001
_PAUSE_MAX_S: Final = 0.05
_PLACES_MAX: Final = 8  # of each task, in a text


class StillPendingError(AssertionError):
    """A wait in asyncrpc will never end.

    Attributes:
        waits: a description of each such wait: its kind, its worker, where it was made
            or waits, and why nothing will end it.
    """

    def __init__(self, waits: list[str], within_s: float) -> None:
        self.waits = waits
        lines = "".join(f"\n- {wait}" for wait in waits)
        super().__init__(
            f"{len(waits)} still pending {within_s:g} s after the end, and nothing "
            f"will end them:{lines}"
        )


@asynccontextmanager
async def all_end(within_s: float) -> AsyncIterator[None]:
    """Fail unless all that asyncrpc began in the block ends, or has a cause to end.

    It checks the calls, streams, values of references and tasks that were made in the
    block, on this loop.  Each must be done `within_s` seconds after the block, or have
    a live cause.  Nothing of a closed worker has a cause.  While a worker is open, its
    own tasks have one; a call has one if it has a deadline, or if its callee, when in
    this process, is serving it; and a wait such as at a barrier has one until the
    worker is closed.  `asyncrpc.testing.causes` has the whole list.

    If the block raises, nothing is waited for: the waits that were pending at that
    moment are added to the error as a note.

    Blocks may be nested, or follow one another.  Meanwhile older garbage is not
    collected.

    Args:
        within_s: seconds that all may take to end.  The block ends as soon as they
            have; only a hang takes the whole time.

    Raises:
        StillPendingError: some waits will not end; the error names each.
        UsageError: `within_s` is not a number of seconds, or no event loop runs here.

    Cancellation:
        Nothing more is checked.

    Example:
        >>> async with all_end(within_s=30.0), Cluster(2) as (a, b):
        ...     assert await a.peer("b").call(max, 1, 2) == 2
    """
    _check(within_s)
    sight = _Sight()
    try:
        yield
        await sight.clear(within_s)
    except (asyncio.CancelledError, StillPendingError):
        raise
    except BaseException as error:
        for wait in sight.stuck():
            error.add_note(f"pending at that moment: {wait}")
        raise
    finally:
        sight.end()


def _check(within_s: object) -> None:
    is_number = isinstance(within_s, int | float) and not isinstance(within_s, bool)
    if not is_number or not within_s >= 0:  # type: ignore[operator]  # it is a number
        raise wrong("within_s", "a number of seconds, 0 or more", within_s)


class _Sight:
    """The futures made on the running loop since this object was made."""

    def __init__(self) -> None:
        self._loop = loop_for("all_end")
        self._is_first = not gc.get_freeze_count()  # no other code has frozen objects
        self._before: weakref.WeakSet[AnyFuture] = weakref.WeakSet()
        if self._is_first:
            gc.freeze()
        else:
            self._before.update(self._pending())

    def end(self) -> None:
        """Let the collector see the older objects again."""
        if self._is_first:
            # Collect the block's garbage first, which takes 0.2 ms without the older
            # objects.  Otherwise the next block would freeze it, and it would stay.
            gc.collect()
            gc.unfreeze()

    async def clear(self, within_s: float) -> None:
        """Wait until nothing is stuck."""
        end_s, pause_s = self._loop.time() + within_s, 0.0
        while waits := self.stuck():
            is_over = self._loop.time() >= end_s
            if is_over or pause_s >= _PAUSE_MAX_S:
                gc.collect()  # futures without references do not count
                waits = self.stuck()
            if is_over and waits:
                raise StillPendingError(waits, within_s)
            if not waits:
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s + _PAUSE_FIRST_S, _PAUSE_MAX_S)

    def stuck(self) -> list[str]:
        """Return descriptions of the waits that are pending without a cause."""
        me = asyncio.current_task()
        futures = (future for future in self._pending() if future is not me)
        return sorted(filter(None, map(_wait_of, futures)))

    def _pending(self) -> list[AnyFuture]:
        return [
            candidate
            for candidate in gc.get_objects()
            # Not `isinstance`, which would ask a proxy object for its class.
            if issubclass(type(candidate), asyncio.Future)
            and not candidate.done()
            and candidate.get_loop() is self._loop
            and candidate not in self._before
        ]


def _wait_of(future: AnyFuture) -> str:
    """Describe a future that nothing will end; empty: not ours, or it will end."""
    places = (
        places_of(future)
        if isinstance(future, asyncio.Task)
        else _callback_places(future)
    )
    is_ours = isinstance(future, CallFuture | Value)
    if not is_ours and not any(place.is_ours for place in places):
        return ""
    problem = problem_of(future, places)
    return f"{_described(future, places)}: {problem}" if problem else ""


def _callback_places(future: AnyFuture) -> list[SuspendedLine]:
    """Return the functions that are called once a future is done."""
    callbacks = (callback for callback, _ in getattr(future, "_callbacks", None) or ())
    return list(filter(None, map(place_of_callback, callbacks)))


def _described(future: AnyFuture, places: list[SuspendedLine]) -> str:
    worker = worker_of(places)
    of = "" if worker is None else f", for worker {worker.name!r}"
    where = " < ".join(map(str, places[:_PLACES_MAX]))
    if isinstance(future, asyncio.Task):
        return f"task {future.get_name()!r} in {where}{_awaited_by(future)}{of}"
    if isinstance(future, CallFuture):
        maker = worker_of_link(future.link)
        return (
            repr(future) if maker is None else f"{future!r}, of worker {maker.name!r}"
        )
    callback = f", of which {where} is told" if where else ""
    return f"a {type(future).__name__}{callback}{of}"


def _awaited_by(task: asyncio.Task[Any]) -> str:
    awaited = getattr(task, "_fut_waiter", None)
    is_plain = awaited is None or type(awaited) is asyncio.Future
    return "" if is_plain else f", which awaits {awaited!r:.200}"

"""The watchdog of waits: after a test nothing of asyncrpc is pending without a cause.

`all_end` looks at every future and task that was made inside of it on its loop.  They
are found by the garbage collector, which knows all objects: what was there before is
put out of its sight for the time (`gc.freeze`, 1 us), so that a look takes 0.1 ms.
Without that it takes 32 ms with torch loaded (208,000 objects), and a register that
futures enter when they are made would cost each 0.3 us, in programs, too.  Measured on
CPython 3.11.

What may still be pending, `asyncrpc.testing.causes` says.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, TypeAlias

from asyncrpc.arguments import wrong
from asyncrpc.rref.values import Value
from asyncrpc.runtime.calls.futures import CallFuture
from asyncrpc.runtime.loops import loop_for
from asyncrpc.testing.causes import problem_of, worker_of, worker_of_link
from asyncrpc.testing.frames import SuspendedLine, place_of_callback, places_of

AnyFuture: TypeAlias = "asyncio.Future[Any]"

_PAUSE_FIRST_S: Final = 0.001
_PAUSE_MAX_S: Final = 0.05
_PLACES_MAX: Final = 8  # of each task, in a text


class StillPendingError(AssertionError):
    """A wait in asyncrpc will never end.

    Attributes:
        waits: each such wait, in words: what it is, its worker, where it was made or
            stands, and why nothing will end it.
    """

    def __init__(self, waits: list[str], within_s: float) -> None:
        self.waits = waits
        lines = "".join(f"\n- {one}" for one in waits)
        super().__init__(
            f"{len(waits)} still pending {within_s:g} s after the end, and nothing "
            f"will end them:{lines}"
        )


@asynccontextmanager
async def all_end(within_s: float) -> AsyncIterator[None]:
    """Fail unless all that asyncrpc began in the block ends, or has a cause to.

    It looks at the calls, streams, values of references and tasks that were made in the
    block, on this loop.  Each must be done `within_s` seconds after the block, or have
    a live cause.  Nothing of a closed worker has one.  While a worker is open, its own
    tasks have one; a call has one if it has a deadline, or if its callee, where that is
    in this process, has it in hand; and a wait at a barrier, say, has one until the
    worker is closed.  `asyncrpc.testing.causes` has the whole list.

    A block that raises is not waited for: what was pending at that moment is added to
    its error as a note.

    Blocks may be nested, or follow one another.  Meanwhile garbage that was there
    before is not collected.

    Args:
        within_s: seconds that all may take to end.  The block ends as soon as they
            have; a hang alone takes all of it.

    Raises:
        StillPendingError: some have not ended; it names each.
        UsageError: `within_s` is no number of seconds, or no event loop runs here.

    Cancellation:
        Nothing more is looked at.

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
    """What has been made on the running loop since."""

    def __init__(self) -> None:
        self._loop = loop_for("all_end")
        self._is_first = not gc.get_freeze_count()  # no other code has frozen objects
        self._before: weakref.WeakSet[AnyFuture] = weakref.WeakSet()
        if self._is_first:
            gc.freeze()
        else:
            self._before.update(self._pending())

    def end(self) -> None:
        """Let the collector see what was there before."""
        if self._is_first:
            # Garbage of the block first: that looks at nothing else, so takes 0.2 ms.
            # Else it would be frozen by the next block, and never go.
            gc.collect()
            gc.unfreeze()

    async def clear(self, within_s: float) -> None:
        """Wait until nothing is stuck.

        Raises:
            StillPendingError: something is.
        """
        end_s, pause_s = self._loop.time() + within_s, 0.0
        while waits := self.stuck():
            is_over = self._loop.time() >= end_s
            if is_over or pause_s >= _PAUSE_MAX_S:
                gc.collect()  # what no task can wait for any more does not count
                waits = self.stuck()
            if is_over and waits:
                raise StillPendingError(waits, within_s)
            if not waits:
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s + _PAUSE_FIRST_S, _PAUSE_MAX_S)

    def stuck(self) -> list[str]:
        """Return what is pending without a cause, in words."""
        me = asyncio.current_task()
        found = (one for one in self._pending() if one is not me)
        return sorted(filter(None, map(_wait_of, found)))

    def _pending(self) -> list[AnyFuture]:
        return [
            one
            for one in gc.get_objects()
            # Not `isinstance`, which asks an object that stands for another.
            if issubclass(type(one), asyncio.Future)
            and not one.done()
            and one.get_loop() is self._loop
            and one not in self._before
        ]


def _wait_of(one: AnyFuture) -> str:
    """Describe a future that nothing will end; empty: it is not ours, or will end."""
    places = places_of(one) if isinstance(one, asyncio.Task) else _told(one)
    is_ours = isinstance(one, CallFuture | Value)
    if not is_ours and not any(place.is_ours for place in places):
        return ""
    problem = problem_of(one, places)
    return f"{_described(one, places)}: {problem}" if problem else ""


def _told(one: AnyFuture) -> list[SuspendedLine]:
    """Return the functions that are called once a future is done."""
    callbacks = (callback for callback, _ in getattr(one, "_callbacks", None) or ())
    return list(filter(None, map(place_of_callback, callbacks)))


def _described(one: AnyFuture, places: list[SuspendedLine]) -> str:
    worker = worker_of(places)
    of = "" if worker is None else f", for worker {worker.name!r}"
    where = " < ".join(map(str, places[:_PLACES_MAX]))
    if isinstance(one, asyncio.Task):
        return f"task {one.get_name()!r} in {where}{_awaited_by(one)}{of}"
    if isinstance(one, CallFuture):
        maker = worker_of_link(one.link)
        return repr(one) if maker is None else f"{one!r}, of worker {maker.name!r}"
    told = f", of which {where} is told" if where else ""
    return f"a {type(one).__name__}{told}{of}"


def _awaited_by(task: asyncio.Task[Any]) -> str:
    awaited = getattr(task, "_fut_waiter", None)
    is_plain = awaited is None or type(awaited) is asyncio.Future
    return "" if is_plain else f", which awaits {awaited!r:.200}"

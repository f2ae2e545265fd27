"""A plain algorithm in a thread, whose questions a coroutine answers.

An optimizer with a closure calls it from the middle of its step, and waits.  Ours is a
coroutine function of the user's: it runs in the task that waits for the step, with its
deadline and its contexts.
"""

from __future__ import annotations

import asyncio
import contextvars
import enum
import threading
from collections.abc import Awaitable, Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from asyncrpc.core.calls.futures import refuse_on_loop
from asyncrpc.core.parts import Parts

R = TypeVar("R")


class _ThreadEvent(enum.Enum):
    """An event of the thread."""

    ASKED = "asked"
    ENDED = "ended"


async def run_with_callbacks(
    worker: Parts,
    algorithm: Callable[[Callable[[], Any]], R],
    evaluate: Callable[[], Awaitable[Any]],
) -> R:
    """Run `algorithm(ask)` in a thread, where `ask()` returns the result of `evaluate`.

    An error of `evaluate` is raised by `ask`.
    """
    # Bounded by the thread, which asks one question at a time.
    events: asyncio.Queue[_ThreadEvent] = asyncio.Queue()
    answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
    is_abandoned = threading.Event()

    def ask() -> Any:
        refuse_on_loop("a closure", "in a simulation, step without one")
        if is_abandoned.is_set():  # the algorithm has caught the error, and goes on
            raise _AbandonedError
        worker.loop.call_soon_threadsafe(events.put_nowait, _ThreadEvent.ASKED)
        with worker.pool.blocked():
            value, error = answers.get()
        if error is not None:
            raise error
        return value

    context = contextvars.copy_context()
    work = worker.run_in_thread(lambda: context.run(algorithm, ask))
    work.add_done_callback(lambda _: events.put_nowait(_ThreadEvent.ENDED))
    try:
        # The thread asks or ends; a job that its pool has dropped also ends.
        while await events.get() is _ThreadEvent.ASKED:
            try:
                answers.put((await evaluate(), None))
            except Exception as error:  # noqa: BLE001  (the thread raises it)
                answers.put((None, error))
    except BaseException:
        is_abandoned.set()
        answers.put((None, _AbandonedError()))
        await asyncio.wait([work])
        work.exception()  # that error, or another that the algorithm made of it
        raise
    return work.result()


class _AbandonedError(Exception):
    """The task that answers has ended."""

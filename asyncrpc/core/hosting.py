"""An event loop in a thread of its own, for threads that block.

The thread is a daemon: a process that ends without `shutdown` ends all the same.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from asyncrpc.core.calls.futures import loop_closed, wait_on_loop
from asyncrpc.core.devices.streams import StreamMarks, marks_here, take_marks
from asyncrpc.core.loop.loops import loop_factory
from asyncrpc.core.loop.threads import thread_blocked

T = TypeVar("T")

_JOIN_S = 5.0  # a thread is to end at once; a function of the user's may hold it up


class LoopThread:
    """A loop that runs until `stop`."""

    def __init__(self, name: str, *, stops_at_exit: bool = True) -> None:
        """Begin.

        Args:
            stops_at_exit: whether `stop` is registered at `atexit`; else its owner
                calls it there: an interpreter that ends while a thread is inside of
                uvloop crashes.
        """
        self.loop = loop_factory()()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()
        if stops_at_exit:
            atexit.register(self.stop)

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    @property
    def is_here(self) -> bool:
        """Return whether this is the loop's own thread."""
        return threading.get_ident() == self._thread.ident

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop; block this thread until it ends.

        It runs in this thread's context.
        """
        return self.do(lambda: self.loop.create_task(work))

    def do(self, start: Callable[[], asyncio.Future[T]]) -> T:
        """Start something on the loop, and block this thread until it ends."""
        if self.is_here:
            raise RuntimeError("a function that runs on the event loop must not block")
        # A lock: the cheapest thing that one thread can wait for and another release.
        ended = threading.Lock()
        ended.acquire()
        results: list[T] = []
        errors: list[BaseException] = []
        marks = marks_here()

        def finish(done: asyncio.Future[T]) -> None:
            try:
                results.append(done.result())
            except BaseException as error:  # noqa: BLE001  (the waiting thread raises it)
                errors.append(error)
            ended.release()

        def begin() -> None:
            take_marks(marks)
            try:
                future = start()
            except BaseException as error:  # noqa: BLE001  (likewise)
                errors.append(error)
                ended.release()
            else:
                future.add_done_callback(finish)

        try:
            self.loop.call_soon_threadsafe(begin)
        except RuntimeError:  # it is closed
            raise loop_closed() from None
        with thread_blocked():
            # What it stops in the middle of, or was given too late, it never ends.
            wait_on_loop(self.loop, lambda limit_s: ended.acquire(timeout=limit_s))
        if errors:
            try:
                raise errors.pop()
            finally:
                del finish, begin  # no cycle of frames and errors: it would hold RRefs
        return results.pop()

    def do_at_once(self, action: Callable[[], T]) -> T:
        """Do something on the loop that does not wait; return what came of it."""
        if self.is_here:
            return action()

        def start() -> asyncio.Future[T]:
            done: asyncio.Future[T] = self.loop.create_future()
            done.set_result(action())
            return done

        return self.do(start)

    def soon(self, action: Callable[[], object]) -> None:
        """Do something on the loop soon, in this thread's context."""
        marks = marks_here()
        with suppress(RuntimeError):  # the loop is closed, and all that it held
            if marks is None:
                self.loop.call_soon_threadsafe(action)
            else:
                self.loop.call_soon_threadsafe(_marked, marks, action)

    def stop(self) -> None:
        """Let the loop end, and its thread."""
        atexit.unregister(self.stop)
        self.soon(self.loop.stop)
        if not self.is_here:
            self._thread.join(_JOIN_S)


def _marked(marks: StreamMarks, action: Callable[[], object]) -> None:
    take_marks(marks)
    action()

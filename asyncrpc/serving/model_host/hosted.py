"""The model in its process: made once, and lent to the web workers that attach.

A web worker attaches by a stream.  Its items tell the state of the model; it lasts
until the web worker leaves or is lost, or the process ends.  So the end of the stream
tells that its web worker is gone.

Whether the code of a process is still the code on disk.

A model process outlives a reload of its web workers for some seconds.  If a file that
it has imported was changed meanwhile, it would answer with the old code.  So it stores
the state of its files, and compares it when a web worker comes.  It checks all imported
files, including installed packages: 4,000 files take 15 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import inspect
import logging
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from types import TracebackType
from typing import Any, Final, Self, TypeAlias

from asyncrpc import RRef, current_worker, expose
from asyncrpc.core.loop.threads import outcome_to
from asyncrpc.extend import Route, WorkerId, service_of
from asyncrpc.serving.model_host.machine.occupancy import (
    Occupancy,
    OccupancyEvent,
    OccupancyState,
)
from asyncrpc.serving.model_host.order import HostOrder, resolve
from asyncrpc.serving.model_host.slot import ModelSlot, SlotNote

FileStamp: TypeAlias = tuple[int, int]  # size, and time of the last write


class SourceSnapshot:
    """The files of all modules that were imported when it was taken."""

    def __init__(self, paths: Iterable[str]) -> None:
        """Store the present state of files; blocks this thread.

        Args:
            paths: of the files; missing ones, such as in an archive, do not count.
        """
        stamps = ((path, _stamp(path)) for path in paths)
        self._stamps = {path: stamp for path, stamp in stamps if stamp is not None}

    @classmethod
    def of_this_process(cls) -> Self:
        """Store the state of the files of all imported modules; blocks this thread."""
        files = (
            getattr(module, "__file__", None) for module in list(sys.modules.values())
        )
        return cls({file for file in files if isinstance(file, str)})

    def changed(self) -> str:
        """Return a file that has changed or is gone since; empty if there is none.

        Blocks this thread.
        """
        stamps = self._stamps.items()
        return next((path for path, stamp in stamps if _stamp(path) != stamp), "")


def _stamp(path: str) -> FileStamp | None:
    try:
        status = os.stat(path)  # noqa: PTH116  (no path object for each of thousands)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


logger = logging.getLogger("asyncrpc")

SERVICE: Final = "model_host"

# News for a web worker: the kind, and its value.
HostNews: TypeAlias = tuple[str, Any]
LOADING: Final = "loading"  # the generation of the process
READY: Final = "ready"  # a reference to the model
ENDING: Final = "ending"  # why


class HostedModel:
    """The model of one process, and its users; a `Service` of the process's worker.

    Attributes:
        occupancy: decides how long the process lives.
        changed: set when the occupancy must be checked again.
    """

    name = SERVICE

    def __init__(self, order: HostOrder, lock: int) -> None:
        """Prepare; `make` begins.

        Args:
            lock: the locked file of its slot; -1 once another process has the slot.
        """
        self._order = order
        self._lock = lock
        self._slot = ModelSlot(order.path)
        self._sources: SourceSnapshot | None = None
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[RRef[Any]] = self._loop.create_future()
        self._failed_at: TracebackType | None = None
        self._ended = asyncio.Event()
        self._why = ""
        self._is_loading_in_thread = False
        self.changed = asyncio.Event()
        self.occupancy = Occupancy(order.linger_s, self._loop.time())

    @property
    def routes(self) -> Iterable[Route]:
        """No routes: web workers call a function instead."""
        return ()

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        """Do nothing: the streams of the peer end by themselves."""

    async def close(self) -> None:
        """Do nothing: `hold` releases the model."""

    @property
    def is_stuck(self) -> bool:
        """Whether a thread is still making the model, which nothing can end."""
        return self._is_loading_in_thread

    @property
    def is_made(self) -> bool:
        """Whether there is a model to release."""
        return self._loaded.done() and self._loaded.exception() is None

    # --- the model -------------------------------------------------------------------

    async def hold(self, release: asyncio.Event) -> None:
        """Make the model, and release it when `release` is set."""
        try:
            async with contextlib.AsyncExitStack() as stack:
                model = await self._make(stack)
                # The objects made so far stay: the collector need not search them for
                # cycles, for 0.1 s, while requests wait.
                gc.collect()
                gc.freeze()
                self._loaded.set_result(RRef(model))
                self._sources = await self._in_thread(SourceSnapshot.of_this_process)
                await release.wait()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            if self._loaded.done():
                raise  # of its end: the program's own
            self._fail(error)

    async def _make(self, stack: contextlib.AsyncExitStack) -> Any:
        """Return the result of the function, awaited or entered if possible."""
        function = await self._in_thread(lambda: resolve(self._order))
        if inspect.iscoroutinefunction(function):
            model = await function()
        else:
            self._is_loading_in_thread = True
            model = await self._in_thread(function)
            self._is_loading_in_thread = False
        if inspect.isawaitable(model):
            model = await model
        if hasattr(type(model), "__aenter__") and hasattr(type(model), "__aexit__"):
            model = await stack.enter_async_context(model)
        return model

    def _fail(self, error: BaseException) -> None:
        """Note that the model could not be made; for a while, tell all web workers."""
        self._is_loading_in_thread = False
        logger.error(
            "model %r: %s() raised",
            self._order.name,
            self._order.function,
            exc_info=error,
        )
        if not isinstance(error, Exception):  # such as SystemExit, which ends the loop
            text = f"{self._order.function}() raised {type(error).__name__}: {error}"
            error, cause = RuntimeError(text), error
            error.__cause__ = cause
        self._failed_at = error.__traceback__
        self._loaded.set_exception(error)
        self._loaded.exception()  # marks it as read: perhaps no web worker waits
        self.occupancy.fail(self._loop.time())
        self.changed.set()

    async def _in_thread(self, job: Callable[[], Any]) -> Any:
        """Run a job in a new thread that does not keep the process alive."""
        done: asyncio.Future[Any] = self._loop.create_future()
        finish = outcome_to(done)
        context = contextvars.copy_context()  # has the current worker

        def run() -> None:
            result, problem = None, None
            try:
                result = context.run(job)
            except BaseException as error:  # noqa: BLE001  (raised in the awaiter)
                problem = error
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(finish, result, problem)

        threading.Thread(target=run, name="asyncrpc-model", daemon=True).start()
        return await done

    # --- its users -------------------------------------------------------------------

    async def attach(self, version: str) -> AsyncIterator[HostNews]:
        """Lend the model to a web worker, as long as it consumes this."""
        why = await self._outdated_by(version)
        if why:
            self._retire(why)
        if not self.occupancy.takes_others:
            yield ENDING, why or self._why
            return
        self.occupancy.come()
        self.changed.set()
        try:
            yield LOADING, self._order.generation
            yield READY, await self._model()
            await self._ended.wait()
            yield ENDING, self._why
        finally:
            self.occupancy.leave(self._loop.time())
            self.changed.set()

    async def _model(self) -> RRef[Any]:
        """Return the model, or raise the error of the function that makes it."""
        await asyncio.wait([self._loaded])
        error = self._loaded.exception()
        if error is not None:  # without the frames of those it was raised to before
            raise error.with_traceback(self._failed_at)
        return self._loaded.result()

    async def _outdated_by(self, version: str) -> str:
        """Return why a web worker needs another process; empty if it does not."""
        ours = self._order.version
        if version != ours:
            return f"it has version {ours!r}, but version {version!r} is wanted"
        if self._sources is None:
            return ""
        changed = await self._in_thread(self._sources.changed)
        return f"{changed} has changed since it was started" if changed else ""

    def _retire(self, why: str) -> None:
        """Give the slot to a process with newer code."""
        self._why = why
        self.occupancy.advance(OccupancyEvent.OUTDATED)
        if self.occupancy.state is OccupancyState.RETIRED and self._lock >= 0:
            self._slot.remove_note()
            os.close(self._lock)
            self._lock = -1
        self.changed.set()

    def end(self, why: str) -> None:
        """End the process, after a signal."""
        self._why = why
        self.occupancy.advance(OccupancyEvent.TOLD_TO_END)
        self.changed.set()

    def dismiss(self) -> None:
        """Tell the web workers that the process ends."""
        self._why = self._why or "no web worker has used it for a while"
        self._ended.set()

    # --- its slot --------------------------------------------------------------------

    def tell(self, note: SlotNote) -> None:
        """Write the note, unless another process has the slot; blocks this thread."""
        if self._lock >= 0:
            with contextlib.suppress(OSError):
                self._slot.write_note(note)

    def untell(self) -> None:
        """Remove the note; the kernel frees the slot together with the memory."""
        if self._lock >= 0:
            self._slot.remove_note()

    def keep_fresh(self) -> None:
        """Protect the slot from cleaners of temporary files; blocks this thread."""
        if self._lock >= 0:
            with contextlib.suppress(OSError):
                self._slot.keep_fresh()


@expose
async def attach(version: str) -> AsyncIterator[HostNews]:
    """Attach the web worker that calls this to the model process; see `HostedModel`."""
    hosted: Any = service_of(current_worker(), HostedModel)
    async with contextlib.aclosing(hosted.attach(version)) as news:
        async for message in news:
            yield message

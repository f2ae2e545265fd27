"""The threads of this process: where each is, and what it waits for.

Of a thread that waits inside of C only its line is seen.  Waits through asyncrpc are
recognized: for the answer of a call, by `wait`; for the device lock; for the lock over
gradients; for the end of a backward pass, whose gradients the loop reduces.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread
import linecache
import sys
import threading
from collections.abc import Iterator, Mapping
from types import CodeType, FrameType
from typing import Any, Final

from asyncrpc.autograd.gradient_lock import GradientLock
from asyncrpc.ddp.passes import Backward
from asyncrpc.inspection.names import local, locals_of
from asyncrpc.inspection.records import StackFrame
from asyncrpc.runtime.calls import futures
from asyncrpc.runtime.calls.futures import CallFuture
from asyncrpc.runtime.calls.inbound import InboundCall
from asyncrpc.runtime.devices import device_lock
from asyncrpc.runtime.threads import ThreadPool

FRAMES_MAX: Final = 100  # of one stack; the innermost ones
_IN_THREAD: Final[CodeType] = InboundCall._in_thread.__code__  # noqa: SLF001
_RUN_JOB: Final[CodeType] = concurrent.futures.thread._WorkItem.run.__code__  # noqa: SLF001
_POOL: Final[CodeType] = ThreadPool._run.__code__  # noqa: SLF001
_WAITING: Final[Mapping[CodeType, str]] = {
    CallFuture.wait.__code__: "self",
    futures.is_done_within.__code__: "future",
}


class ThreadStack:
    """One thread at one moment.

    Attributes:
        frames: of its stack, the innermost first.
    """

    def __init__(self, ident: int, name: str, innermost: FrameType) -> None:
        """Take down a stack."""
        self.ident = ident
        self.name = name
        self.frames = tuple(_outwards(innermost))

    def waits_for(self) -> CallFuture[Any] | None:
        """Return the call whose answer the thread waits for; None if it does not."""
        for frame in self.frames:
            if (name := _WAITING.get(frame.f_code)) is not None:
                call = local(frame, name)
                if isinstance(call, CallFuture):
                    return call
        return None

    def serves(self) -> InboundCall | None:
        """Return the call whose function the thread runs; None if it runs none."""
        for frame in self.frames:
            if frame.f_code is _IN_THREAD:
                call = local(frame, "self")
            elif frame.f_code is _POOL:  # it may still wait for a device
                call = getattr(local(frame, "done"), "__self__", None)
            else:
                continue
            if isinstance(call, InboundCall):
                return call
        return None

    def waits_for_pass(self) -> Backward | None:
        """Return the backward pass whose reduction the thread waits for."""
        for frame in self.frames:
            if frame.f_code is Backward.wait_ended.__code__:
                backward = local(frame, "self")
                if isinstance(backward, Backward):
                    return backward
        return None

    def runs_pass(self, backward: Backward) -> bool:
        """Return whether the thread fills the buckets of a backward pass."""
        return any(
            frame.f_code.co_qualname == "Reducer.backward.<locals>.run"
            and locals_of(frame).get("current") is backward
            for frame in self.frames
        )

    def ahead_at_device(self) -> list[int]:
        """Return the idents of the threads ahead of this one at the device lock."""
        if any(frame.f_code is device_lock.WAITS for frame in self.frames):
            return device_lock.ahead_of(self.ident)
        return []

    def owner_of_gradients(self) -> int | None:
        """Return the ident of the thread that holds the lock over gradients.

        A thread that waits for it is in a method of the lock, which calls no other.
        """
        lock = local(self.frames[0], "self") if self.frames else None
        owner = lock.owner if type(lock) is GradientLock else 0
        return owner if owner not in (0, self.ident) else None

    def runs_job(self) -> concurrent.futures.Future[Any] | asyncio.Future[Any] | None:
        """Return the future of the job that the thread runs for an executor or pool."""
        for frame in self.frames:
            if frame.f_code is _POOL:
                return _future_of(local(frame, "done"))
            if frame.f_code is _RUN_JOB:
                future = getattr(local(frame, "self"), "future", None)
                if isinstance(future, concurrent.futures.Future):
                    return future
        return None


def _future_of(done: Any) -> asyncio.Future[Any] | None:
    """Return the future that a pool completes when a job ends; see `outcome_to`."""
    for cell in getattr(done, "__closure__", None) or ():
        if isinstance(cell.cell_contents, asyncio.Future):
            return cell.cell_contents
    return None


def stacks() -> list[ThreadStack]:
    """Return the stacks of all threads but this one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    return [
        ThreadStack(ident, names.get(ident, f"thread {ident}"), frame)
        for ident, frame in sys._current_frames().items()  # noqa: SLF001
        if ident != own
    ]


def source_of(frame: FrameType) -> str:
    """Return the source line of a frame, without a comment; empty if it has none."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0)
    return line.partition("  # ")[0].strip()


def frame_of(frame: FrameType) -> StackFrame:
    """Return the record of a frame."""
    code = frame.f_code
    return StackFrame(code.co_qualname, code.co_filename, frame.f_lineno or 0)


def _outwards(innermost: FrameType) -> Iterator[FrameType]:
    frame: FrameType | None = innermost
    for _ in range(FRAMES_MAX):
        if frame is None:
            return
        yield frame
        frame = frame.f_back

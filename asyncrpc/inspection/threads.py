"""The threads of this process: where each is, and what it waits for.

What a thread waits for inside of C is not seen, only the line that it is at.  What it
waits for through asyncrpc is: the answer of a call, by `wait`.
"""

from __future__ import annotations

import concurrent.futures.thread
import linecache
import sys
import threading
from collections.abc import Iterator, Mapping
from types import CodeType, FrameType
from typing import Any, Final

from asyncrpc.inspection.names import local
from asyncrpc.inspection.records import StackFrame
from asyncrpc.runtime.calls import futures
from asyncrpc.runtime.calls.futures import CallFuture
from asyncrpc.runtime.calls.inbound import InboundCall

FRAMES_MAX: Final = 100  # of one stack; the innermost ones
_IN_THREAD: Final[CodeType] = InboundCall._in_thread.__code__  # noqa: SLF001
_RUN_JOB: Final[CodeType] = concurrent.futures.thread._WorkItem.run.__code__  # noqa: SLF001
_WAITING: Final[Mapping[CodeType, str]] = {
    CallFuture.wait.__code__: "self",
    futures.is_done_within.__code__: "future",
}


class ThreadStack:
    """One thread at one moment.

    Attributes:
        ident: of the thread.
        name: of the thread.
        frames: of its stack, the innermost first.
    """

    def __init__(self, ident: int, name: str, innermost: FrameType) -> None:
        """Take down a stack.

        Args:
            ident: of the thread.
            name: of the thread.
            innermost: frame that it runs.
        """
        self.ident = ident
        self.name = name
        self.frames = tuple(_outwards(innermost))

    def waits_for(self) -> CallFuture[Any] | None:
        """Return the call whose answer the thread waits for; None if it does not."""
        for frame in self.frames:
            if (name := _WAITING.get(frame.f_code)) is not None:
                found = local(frame, name)
                if isinstance(found, CallFuture):
                    return found
        return None

    def serves(self) -> InboundCall | None:
        """Return the call whose function the thread runs; None if it runs none."""
        for frame in self.frames:
            if frame.f_code is _IN_THREAD:
                found = local(frame, "self")
                if isinstance(found, InboundCall):
                    return found
        return None

    def runs_job(self) -> concurrent.futures.Future[Any] | None:
        """Return the future of the job of an executor that the thread runs."""
        for frame in self.frames:
            if frame.f_code is _RUN_JOB:
                found = getattr(local(frame, "self"), "future", None)
                if isinstance(found, concurrent.futures.Future):
                    return found
        return None


def stacks() -> list[ThreadStack]:
    """Return the stacks of all threads but this one."""
    names = {one.ident: one.name for one in threading.enumerate()}
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
    """Return a frame as it is told."""
    code = frame.f_code
    return StackFrame(code.co_qualname, code.co_filename, frame.f_lineno or 0)


def _outwards(innermost: FrameType) -> Iterator[FrameType]:
    frame: FrameType | None = innermost
    for _ in range(FRAMES_MAX):
        if frame is None:
            return
        yield frame
        frame = frame.f_back

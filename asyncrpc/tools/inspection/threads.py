"""The threads of this process: where each is, and what it waits for.

Of a thread that waits inside of C only its line is seen.  Functions of asyncrpc that
wait in a thread declare it, see `core.loop.waits`.
"""

from __future__ import annotations

import concurrent.futures.thread
import linecache
import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any, Final

from asyncrpc.core.loop.waits import Declaration, declaration_of
from asyncrpc.extend import WaitDescription
from asyncrpc.tools.inspection.names import local, locals_of
from asyncrpc.tools.inspection.records import StackFrame

FRAMES_MAX: Final = 100  # of one stack; the innermost ones
_RUN_JOB: Final[CodeType] = concurrent.futures.thread._WorkItem.run.__code__  # noqa: SLF001


class ThreadStack:
    """One thread at one moment.

    Attributes:
        frames: of its stack, the innermost first.
    """

    def __init__(self, ident: int, name: str, innermost: FrameType) -> None:
        self.ident = ident
        self.name = name
        self.frames = tuple(_outwards(innermost))

    def wait(self) -> WaitDescription | None:
        """Return what the thread waits for through asyncrpc, as declared."""
        for frame, declaration in self._declared():
            if declaration.waits is not None:
                wait = declaration.waits(locals_of(frame))
                if wait is not None and wait.threads != (self.ident,):
                    return wait
        return None

    def works_for(self) -> Iterator[object]:
        """Yield the objects that the thread works for, such as a served call."""
        for frame, declaration in self._declared():
            if declaration.work is not None:
                yield declaration.work(locals_of(frame))
        if (job := self.runs_job()) is not None:
            yield job

    def _declared(self) -> Iterator[tuple[FrameType, Declaration]]:
        for frame in self.frames:
            if (declaration := declaration_of(frame.f_code)) is not None:
                yield frame, declaration

    def runs_job(self) -> concurrent.futures.Future[Any] | None:
        """Return the future of the job that the thread runs for an executor."""
        for frame in self.frames:
            if frame.f_code is _RUN_JOB:
                future = getattr(local(frame, "self"), "future", None)
                if isinstance(future, concurrent.futures.Future):
                    return future
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

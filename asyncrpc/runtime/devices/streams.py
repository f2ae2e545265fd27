"""The order of a device's streams, where threads and tasks hand work over.

torch knows a current stream for each thread.  What a program computes on another stream
than the default one is ready when that stream has done it, which only the thread that
uses it can say: a call that is made in a thread, or before its peer is connected, is
encoded later, elsewhere.  Only CUDA has streams.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, TypeAlias

import torch

StreamMarks: TypeAlias = dict[torch.device, Any]  # events

_cuda: Any = torch.cuda  # torch says nothing of its types
_carried: ContextVar[StreamMarks | None] = ContextVar("stream_marks", default=None)


def marks_here() -> StreamMarks | None:
    """Return when what this thread has begun is ready, on devices where that matters.

    None: only default streams are current in this thread, or CUDA is not in use.
    """
    if not _cuda.is_initialized():
        return None
    marks: StreamMarks = {}
    for index in range(_cuda.device_count()):
        current = _cuda.current_stream(index)
        if current != _cuda.default_stream(index):
            marks[torch.device("cuda", index)] = current.record_event()
    return marks or None


def take_marks(marks: StreamMarks | None) -> None:
    """Let what is encoded in this context leave no sooner than the marks say.

    Args:
        marks: of `marks_here` in the thread, or at the time, of a call.
    """
    if marks is not None:
        _carried.set(marks)


def carried_mark(device: torch.device) -> Any:
    """Return the mark for a device that this context has taken; None: there is none."""
    marks = _carried.get()
    return None if marks is None else marks.get(device)


def order_default_streams() -> None:
    """Make default streams do what comes after what this thread's streams were given.

    Nothing waits but the streams themselves.
    """
    if not _cuda.is_initialized():
        return
    for index in range(_cuda.device_count()):
        current = _cuda.current_stream(index)
        default = _cuda.default_stream(index)
        if current != default:
            default.wait_stream(current)

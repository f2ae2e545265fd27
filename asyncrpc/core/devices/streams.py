"""The order of a device's streams, where threads and tasks hand work over.

torch knows a current stream for each thread.  Results that a program computes on
another stream than the default one are ready when that stream has computed them, which
only the thread that uses it can tell: a call that is made in a thread, or before its
peer is connected, is encoded later, elsewhere.  Only CUDA has streams.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, TypeAlias

import torch

StreamMarks: TypeAlias = dict[torch.device, Any]  # events

_cuda: Any = torch.cuda  # torch does not annotate it
_carried: ContextVar[StreamMarks | None] = ContextVar("stream_marks", default=None)


def marks_here() -> StreamMarks | None:
    """Return events behind the work of this thread, for devices where that matters.

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
    """Send tensors that are encoded in this context only once the marks are reached."""
    if marks is not None:
        _carried.set(marks)


def carried_mark(device: torch.device) -> Any:
    """Return the mark for a device that this context has taken; None: it has none."""
    marks = _carried.get()
    return None if marks is None else marks.get(device)


def order_default_streams() -> None:
    """Make default streams wait for the work that this thread's streams were given.

    Only the streams wait.
    """
    if not _cuda.is_initialized():
        return
    for index in range(_cuda.device_count()):
        current = _cuda.current_stream(index)
        default = _cuda.default_stream(index)
        if current != default:
            default.wait_stream(current)

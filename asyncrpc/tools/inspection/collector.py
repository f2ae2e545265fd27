"""Holds the garbage collector while frames of other threads and tasks are read.

Before Python 3.12 the collector may run inside of any allocation, even that of the
frame object for `sys._current_frames`, `f_back` or `cr_frame`.  Finalizers may then let
other threads run; the frame ends meanwhile, and its object refers to memory that is in
use for something else.  A process that was looked at every second crashed in this way
after some minutes, with a segmentation fault in `PyFrame_GetBack`.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

RUNS_ANYWHERE: Final = sys.version_info < (3, 12)
_lock: Final = threading.Lock()
_looking: Final[list[bool]] = []  # one for each look: whether it was on before


@contextmanager
def held_back() -> Iterator[None]:
    """Disable the collector until the block ends, and then restore it.

    Thread safety: from any thread; blocks of several threads may overlap.
    """
    if not RUNS_ANYWHERE:
        yield
        return
    with _lock:
        _looking.append(gc.isenabled() if not _looking else _looking[0])
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            if _looking.pop() and not _looking:
                gc.enable()

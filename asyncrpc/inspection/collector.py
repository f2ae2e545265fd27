"""The garbage collector waits while frames of other threads and tasks are looked at.

Before Python 3.12 it may run inside of any allocation, also of that of the object for a
frame that is asked for: by `sys._current_frames`, `f_back` or `cr_frame`.  What it runs
may let other threads run; the frame ends meanwhile, and its object refers to memory
that is in use for something else.  A process that was looked at every second ended so
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
_looking: Final[list[bool]] = []  # of those who look: whether it was on before


@contextmanager
def held_back() -> Iterator[None]:
    """Let it not run until the block ends, and then as before.

    Thread safety: from any thread; several may look at a time.
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

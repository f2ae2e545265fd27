"""Threads that a program may need while it ends.

CPython 3.12 starts none from the moment on at which its `atexit` functions run ("can't
create new thread at interpreter shutdown"); other versions do, until these have ended.
Programs shut their workers down in such functions, and then others still call them.
There, the system starts the thread, and it enters the interpreter as a thread of a C
library does.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import Any, Final

_ENTRY: Final = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)


def start_thread(thread: threading.Thread) -> None:
    """Start a daemon thread, also while the program's `atexit` functions run.

    Raises:
        RuntimeError: the system refuses: no memory, or too many threads.
    """
    try:
        thread.start()
    except RuntimeError as error:
        if sys.version_info[:2] != (3, 12) or "interpreter shutdown" not in str(error):
            raise
        _start_by_system(thread)


def _start_by_system(thread: Any) -> None:
    def enter(_: int | None) -> None:
        # So that `current_thread()` is this one; it stays, and so does the entry.
        threading._active[threading.get_ident()] = thread  # type: ignore[attr-defined]  # noqa: SLF001
        thread.run()

    thread.entry = _ENTRY(enter)
    library, identity = ctypes.CDLL(None), ctypes.c_void_p()
    number = library.pthread_create(ctypes.byref(identity), None, thread.entry, None)
    if number:
        raise RuntimeError(f"can't start new thread: error {number}")
    library.pthread_detach(identity)

"""What Python itself reports: imports, code made, files and processes opened.

An audit hook sees all of it, whatever way it is done, and cannot be removed: this one
sleeps unless it is asked to watch, one thread or all of them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

# Events that nothing which only rebuilds values has any business to raise.
FORBIDDEN: Final = frozenset(
    {
        *("import", "exec", "compile", "open", "pickle.find_class"),
        *("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn"),
        *("os.spawn", "os.startfile", "subprocess.Popen", "os.remove", "os.rename"),
        *("os.mkdir", "os.rmdir", "os.listdir", "os.chmod", "os.putenv", "os.kill"),
        *("shutil.rmtree", "socket.connect", "socket.bind", "socket.__new__"),
        *("ctypes.dlopen", "ctypes.dlsym", "marshal.loads", "marshal.load"),
        *("function.__new__", "code.__new__", "sys.settrace", "sys.setprofile"),
    }
)


class _Watch(threading.local):
    seen: tuple[list[str], ...] = ()  # who watches this thread


_watch: Final = _Watch()
_installed: Final[list[bool]] = []
_everywhere: Final[list[list[str]]] = []  # who watches all threads


def _is_in_traceback() -> bool:
    """Tell whether a traceback is being formatted: that opens and parses its files."""
    frame = sys._getframe()  # noqa: SLF001
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__") in ("traceback", "linecache"):
            return True
    return False


def _hook(event: str, args: tuple[object, ...]) -> None:
    if event in FORBIDDEN and not _is_in_traceback():
        for seen in (*_everywhere, *_watch.seen):
            seen.append(f"{event}{args!r:.200}")


@contextmanager
def watched(*, everywhere: bool = False) -> Iterator[list[str]]:
    """Note every event of `FORBIDDEN` within, of this thread or of all."""
    if not _installed:
        _installed.append(True)
        sys.addaudithook(_hook)
    seen: list[str] = []
    if everywhere:
        _everywhere.append(seen)
    else:
        _watch.seen = (seen,)
    try:
        yield seen
    finally:
        _watch.seen = ()
        _everywhere.clear()

"""What Python itself reports: imports, code made, files and processes opened.

An audit hook sees all of it, whatever way it is done, and cannot be removed: this one
sleeps unless it is asked to watch, and then only watches its own thread.
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
    seen: list[str] | None = None


_watch: Final = _Watch()
_installed: Final[list[bool]] = []


def _hook(event: str, args: tuple[object, ...]) -> None:
    if _watch.seen is not None and event in FORBIDDEN:
        _watch.seen.append(f"{event}{args!r:.200}")


@contextmanager
def watched() -> Iterator[list[str]]:
    """Note every event of `FORBIDDEN` that this thread raises within."""
    if not _installed:
        _installed.append(True)
        sys.addaudithook(_hook)
    seen: list[str] = []
    _watch.seen = seen
    try:
        yield seen
    finally:
        _watch.seen = None

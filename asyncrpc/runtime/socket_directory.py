"""The private directory of a worker's Unix sockets, and the sweep of dead ones.

A killed worker cannot remove its directory.  So each holds a lock on a file in its own
as long as it lives, and the kernel releases it at its death; and each removes, when it
starts, the directories of this user whose lock is free.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Final

_PREFIX: Final = "asyncrpc-"
_LOCK: Final = "alive"
SWEPT_MAX: Final = 1000  # directories looked at: what is beyond waits for the next


class SocketDirectory:
    """A directory that only this user may enter; removed with the worker.

    Attributes:
        path: where it is.
    """

    def __init__(self) -> None:
        """Make it, and remove those of workers that died."""
        _sweep(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        # Under its name only when it is locked: before, it would look left behind.
        unnamed = self.path / f"{_LOCK}.new"
        self._lock = os.open(unnamed, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(self.path / _LOCK)
        self._remove = weakref.finalize(self, _remove, self.path, self._lock)

    def remove(self) -> None:
        """Remove it, with all that is in it."""
        self._remove()

    def disown(self) -> None:
        """Leave it to the process that this one was forked from.

        That process holds the lock on: it is of both until both have closed it.
        """
        if self._remove.detach() is not None:
            os.close(self._lock)


def _remove(path: Path, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


def _sweep(parent: Path) -> None:
    """Remove the directories of this user's workers that have died."""
    looked_at = 0
    with suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if not entry.name.startswith(_PREFIX):
                continue
            looked_at += 1
            if looked_at > SWEPT_MAX:
                return
            with suppress(OSError):  # another worker may be at it too
                if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                    _remove_if_dead(Path(entry.path))


def _remove_if_dead(path: Path) -> None:
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    lock = os.open(path / _LOCK, flags)  # fails if there is none: it is not ours
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if its owner lives
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)

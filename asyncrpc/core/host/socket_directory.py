"""The private directory of a worker's Unix sockets, and the sweep of dead ones.

A killed worker cannot remove its directory.  So each worker holds a lock on a file
in its own directory as long as it lives; the kernel releases the lock at its death.  At
its start, each worker removes the directories of this user whose locks are free.
"""

from __future__ import annotations

import errno
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
SWEPT_MAX: Final = 1000  # directories looked at; the next sweep looks at the others


class SocketDirectory:
    """A directory that only this user may enter; removed with the worker."""

    def __init__(self) -> None:
        _sweep(Path(_temporary()))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        try:
            self._lock = _locked(self.path)
        except OSError:
            shutil.rmtree(self.path, ignore_errors=True)  # no sweep would find it
            raise
        self._remove = weakref.finalize(self, _remove, self.path, self._lock)

    def remove(self) -> None:
        """Remove it, with all that is in it."""
        self._remove()

    def disown(self) -> None:
        """Leave it to the process that this one was forked from.

        That process keeps the lock, which both share until both have closed it.
        """
        if self._remove.detach() is not None:
            os.close(self._lock)


def _temporary() -> str:
    """Return the directory for temporary files: the first that can be written."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError as error:
        # Its text has all that were tried.
        raise OSError(errno.ENOSPC, str(error), "/tmp") from error  # noqa: S108


def _locked(path: Path) -> int:
    """Return the descriptor of the lock of a directory, which is held."""
    # Under its name only when it is locked: before, it would look left behind.
    unnamed = path / f"{_LOCK}.new"
    lock = os.open(unnamed, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(path / _LOCK)
    except OSError:
        os.close(lock)
        raise
    return lock


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
            with suppress(OSError):  # another worker may be at it too
                if entry.stat(follow_symlinks=False).st_uid != os.geteuid():
                    continue  # other users' do not keep ours
                looked_at += 1
                if looked_at > SWEPT_MAX:
                    return
                _remove_if_dead(Path(entry.path))


def _remove_if_dead(path: Path) -> None:
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    lock = os.open(path / _LOCK, flags)  # fails without a lock file: not ours
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if its owner lives
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)

"""Whether the code of a process is still the code on disk.

A model process outlives a reload of its web workers for some seconds.  If a file that
it has imported was changed meanwhile, it would answer with the old code.  So it stores
the state of its files, and compares it when a web worker comes.  It checks all imported
files, including installed packages: 4,000 files take 15 ms.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Self, TypeAlias

FileStamp: TypeAlias = tuple[int, int]  # size, and time of the last write


class SourceSnapshot:
    """The files of all modules that were imported when it was taken."""

    def __init__(self, paths: Iterable[str]) -> None:
        """Store the present state of files; blocks this thread.

        Args:
            paths: of the files; missing ones, such as in an archive, do not count.
        """
        stamps = ((path, _stamp(path)) for path in paths)
        self._stamps = {path: stamp for path, stamp in stamps if stamp is not None}

    @classmethod
    def of_this_process(cls) -> Self:
        """Store the state of the files of all imported modules; blocks this thread."""
        files = (
            getattr(module, "__file__", None) for module in list(sys.modules.values())
        )
        return cls({file for file in files if isinstance(file, str)})

    def changed(self) -> str:
        """Return a file that has changed or is gone since; empty if there is none.

        Blocks this thread.
        """
        stamps = self._stamps.items()
        return next((path for path, stamp in stamps if _stamp(path) != stamp), "")


def _stamp(path: str) -> FileStamp | None:
    try:
        status = os.stat(path)  # noqa: PTH116  (no path object for each of thousands)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns

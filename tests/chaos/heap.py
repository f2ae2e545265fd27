"""How much memory of a process is in use.

Not how much it has: that grows for a long time under a mixed load, since each thread
has an arena of its own whose free parts are not given back (mallopt(3)).  A leak shows
in what is in use.
"""

from __future__ import annotations

import ctypes
import sys

_FIELDS = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _MallInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


class Heap:
    """What malloc has given out, by mallinfo2(3); 0 where there is no such function."""

    def __init__(self) -> None:
        self._ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
        if self._ask is not None:
            self._ask.restype = _MallInfo

    @property
    def bytes_in_use(self) -> int:
        """Bytes given out and not freed, in every thread's arena and apart."""
        if self._ask is None:
            return 0
        info = self._ask()
        return int(info.uordblks + info.hblkhd)


def allocated_blocks() -> int:
    """Return how many small blocks Python has given out and not freed."""
    return sys.getallocatedblocks()

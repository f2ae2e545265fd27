"""Shortage: which resource has run out, and what to do about it."""

from __future__ import annotations

import errno
import os
import re
import resource
from typing import Final

MORE_MEMORY: Final = (
    "raise its limit, `ulimit -v` or that of its container, or send less at a time"
)
_NO_SPACE: Final = {
    errno.ENOSPC: "no space is left",
    errno.EDQUOT: "nothing is left of the user's quota",
}
_TORCH_HAS_NO_MEMORY: Final = ("can't allocate memory", "std::bad_alloc")
_TORCH_NUMBER: Final = re.compile(r": [^:]+ \((\d+)\)$")  # of its shared memory
# torch's stores tell the kernel's error in its words alone.
_WORDS: Final = {
    os.strerror(number): number
    for number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EFBIG, *_NO_SPACE)
}
# Of these, a listening socket stays readable although it cannot accept.
EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def descriptors_max() -> int:
    """Return how many descriptors this process may have now; it may change."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 30


def shortage_of(error: BaseException | None) -> str:
    """Return what has run out, and the cure; empty: it is another error."""
    while error is not None:
        number = _number_of(error)
        if number == errno.EMFILE:
            return (
                f"this process has no file descriptor left of {descriptors_max()}: "
                "raise its limit, `ulimit -n`"
            )
        if number == errno.ENFILE:
            return (
                "this host has no file descriptor left: raise its limit, "
                "`sysctl fs.file-max`"
            )
        if number == errno.ENOMEM:
            return f"this process has no memory left: {MORE_MEMORY}"
        if number in _NO_SPACE:
            where = getattr(error, "filename", None)
            return (
                f"{_NO_SPACE[number]} where {str(where)!r} is"
                if where
                else _NO_SPACE[number]
            ) + ": free some, or choose another directory"
        if number == errno.EFBIG:
            return "a file would be too large: raise the limit of files, `ulimit -f`"
        error = error.__cause__
    return ""


def _number_of(error: BaseException) -> int | None:
    """Return the number of the kernel's error, also if torch tells it in words."""
    if isinstance(error, OSError):
        return error.errno
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    if isinstance(error, RuntimeError):
        text = str(error)
        if any(words in text for words in _TORCH_HAS_NO_MEMORY):
            return errno.ENOMEM
        number = _TORCH_NUMBER.search(text)
        if number is not None:
            return int(number[1])
        return _WORDS.get(text.partition("\n")[0])
    return None

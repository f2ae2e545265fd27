"""What has run out is named with its cure, whoever tells of it."""

from __future__ import annotations

import errno

import pytest

from asyncrpc.core.host.shortage import shortage_of

CASES = [
    (OSError(errno.EMFILE, ""), "`ulimit -n`"),
    (OSError(errno.ENFILE, ""), "`sysctl fs.file-max`"),
    (OSError(errno.ENOMEM, ""), "no memory left: raise its limit, `ulimit -v`"),
    (MemoryError(), "no memory left: raise its limit, `ulimit -v`"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you"), "no memory left"),
    (RuntimeError("std::bad_alloc"), "no memory left"),
    (RuntimeError("unable to open file </proc/9>: Too many open files (24)"), "-n`"),
    (RuntimeError("unable to mmap 9 bytes: Cannot allocate memory (12)"), "-v`"),
    (RuntimeError("Too many open files\nin a stack"), "`ulimit -n`"),
    (RuntimeError("No space left on device"), "no space is left: free some"),
    (OSError(errno.ENOSPC, "", "/run/x"), "no space is left where '/run/x' is: free"),
    (OSError(errno.EDQUOT, ""), "nothing is left of the user's quota: free some"),
    (OSError(errno.EFBIG, ""), "`ulimit -f`"),
]


@pytest.mark.parametrize(("error", "words"), CASES)
def test_shortage_is_named_with_its_remedy(error: Exception, words: str) -> None:
    assert words in shortage_of(error)
    outer = ValueError("of the program")
    outer.__cause__ = error
    assert words in shortage_of(outer)


@pytest.mark.parametrize(
    "error",
    [None, OSError(errno.EACCES, ""), RuntimeError("line (24) is wrong"), ValueError()],
)
def test_other_errors_are_not_a_shortage(error: Exception | None) -> None:
    assert not shortage_of(error)

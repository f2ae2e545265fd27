"""A lock in shared memory that the kernel frees when its holder dies.

A POSIX mutex, *robust*: a process that takes it after its holder was killed learns of
that, and can repair what the dead process left.  It also checks errors, so that a
thread may release it without knowing whether it holds it.  That makes an exception from
a signal handler, which may strike between any two steps, harmless.

Taken without contention it costs no system call: 0.2 us.

Source: pthread_mutexattr_setrobust(3), pthread_mutex_consistent(3).
"""

from __future__ import annotations

import ctypes
import errno
import os
from functools import partial
from typing import Any, Final

_ATTRIBUTES_BYTES: Final = 64  # 4 on x86-64, 8 on AArch64
_TRIES: Final = 64  # some 20 us, with the GIL: to give it up costs more than a try
_PROCESS_SHARED: Final = 1  # pthread.h of glibc and of musl
_ROBUST: Final = 1
_ERRORCHECK: Final = 2


class RobustMutex:
    """The mutex at an address."""

    __slots__ = ("_address", "release")

    def __init__(self, address: int) -> None:
        self._address = ctypes.c_void_p(address)
        # Releases it; does nothing if this thread does not have it.  No function of
        # Python's: at the start of one, an exception from a signal could strike.
        self.release = partial(_UNLOCK, self._address)

    def create(self) -> None:
        """Make the mutex; only for the creator of the memory, before others map it."""
        attributes = ctypes.create_string_buffer(_ATTRIBUTES_BYTES)
        _check(_LIBC.pthread_mutexattr_init(attributes))
        _check(_LIBC.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED))
        _check(_LIBC.pthread_mutexattr_setrobust(attributes, _ROBUST))
        _check(_LIBC.pthread_mutexattr_settype(attributes, _ERRORCHECK))
        _check(_LIBC.pthread_mutex_init(self._address, attributes))

    def acquire(self) -> None:
        """Take the lock, also after its holder died; wait while the holder lives."""
        # It is held for some microseconds; to sleep and be woken takes ten times that.
        for _ in range(_TRIES):
            number = _TRY_LOCK(self._address)
            if number != errno.EBUSY:
                break
        else:
            number = _LOCK(self._address)
        if number == errno.EOWNERDEAD:
            number = _LIBC.pthread_mutex_consistent(self._address)
        _check(number)


def _check(number: int) -> None:
    if number:
        raise OSError(number, f"a lock in shared memory: {os.strerror(number)}")


# The names of functions, and nothing else.  They return their error; errno is not set.
_LIBC: Final = ctypes.CDLL(None)
_QUICK: Final = ctypes.PyDLL(None)
_LOCK: Final[Any] = _LIBC.pthread_mutex_lock
_TRY_LOCK: Final[Any] = _QUICK.pthread_mutex_trylock
_UNLOCK: Final[Any] = _QUICK.pthread_mutex_unlock

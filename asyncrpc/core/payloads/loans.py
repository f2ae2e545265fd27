"""Memory of devices that other processes use: it is kept until they are done.

Host memory belongs to all processes that have mapped it.  Memory of a device belongs to
the process that has allocated it, and when that process frees it, all processes lose
it.  So a process that opens such memory gets the end of a pipe, and closes this end
when its last tensor over the memory has died; the kernel closes it for a killed
process.  The lender reads the end of the pipe, and lets go.

    lender                                 borrower
      has the pipe's other end
      writing end, token            -->      keeps it with the memory
      open [key, handle, token ...] -->      opens it
      ...                                    its last tensor dies, or it is killed
      reads the end of the pipe     <--      (the kernel)
      lets go
"""

from __future__ import annotations

import asyncio
import os
import select
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from asyncrpc.errors import Outcome, RejectedError

if TYPE_CHECKING:
    import torch

# Each loan has a descriptor, and many processes are limited to 1,024 descriptors.
LOANS_MAX: Final = 4096
_HOLD: Final = "_asyncrpc_hold"
_DRAINED_BYTES: Final = 4096


class MemoryLoan(NamedTuple):
    """Memory that another process has opened.

    Attributes:
        storage: the memory, which must not be freed.
        end: called in a thread when the process has let go.
    """

    key: bytes
    storage: torch.UntypedStorage
    end: Callable[[], None]


class Loans:
    """The loans of one worker."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        run: Callable[[Callable[[], None]], object],
    ) -> None:
        self._loop = loop
        self._run = run
        self._loans: dict[int, MemoryLoan] = {}

    def __len__(self) -> int:
        """Return the number of loans."""
        return len(self._loans)

    def find(self, key: bytes) -> torch.UntypedStorage | None:
        """Return lent memory by its key; None if it is not lent."""
        storages = (loan.storage for loan in self._loans.values() if loan.key == key)
        return next(storages, None)

    def begin(self, loan: MemoryLoan) -> int:
        """Keep memory; return the descriptor that the borrower closes at the end.

        The descriptor belongs to the caller, which passes it on.
        """
        if len(self._loans) >= LOANS_MAX:
            raise RejectedError(
                f"at most {LOANS_MAX} pieces of device memory can be lent",
                outcome=Outcome.NOT_EXECUTED,
            )
        ours, theirs = os.pipe()
        self._loans[ours] = loan
        self._loop.add_reader(ours, self._on_readable, ours)
        return theirs

    def _on_readable(self, ours: int) -> None:
        if os.read(ours, _DRAINED_BYTES):
            return  # a correct borrower never writes
        self._loop.remove_reader(ours)
        os.close(ours)
        self._run(self._loans.pop(ours).end)

    def close(self) -> None:
        """End with the loop; a thread keeps the memory until it is unused."""
        remaining, self._loans = self._loans, {}
        for ours in remaining:
            self._loop.remove_reader(ours)
        if remaining:
            keeper = threading.Thread(
                target=_keep, args=(remaining,), name="asyncrpc-loans", daemon=True
            )
            keeper.start()


def _keep(loans: dict[int, MemoryLoan]) -> None:
    poll = select.poll()
    for ours in loans:
        poll.register(ours, select.POLLIN)
    while loans:
        for ours, _ in poll.poll():
            if not os.read(ours, _DRAINED_BYTES):
                poll.unregister(ours)
                os.close(ours)
                loans.pop(ours).end()


class _LoanHold:
    """Dies together with its storage."""

    __slots__ = ("__weakref__",)


def keep_until_dead(
    storage: torch.UntypedStorage, descriptor: int, loop: asyncio.AbstractEventLoop
) -> None:
    """Close a descriptor when a storage has died."""
    held = _LoanHold()
    setattr(storage, _HOLD, held)
    weakref.finalize(held, _close, descriptor, loop).atexit = False


def _close(descriptor: int, loop: asyncio.AbstractEventLoop) -> None:
    try:
        # Deferred, because the memory itself is closed right after this call.
        loop.call_soon_threadsafe(os.close, descriptor)
    except RuntimeError:  # the loop is closed
        os.close(descriptor)


def is_borrowed(storage: torch.UntypedStorage) -> bool:
    """Return whether a storage belongs to another process."""
    return hasattr(storage, _HOLD)

"""Memory of devices that other processes use: it lives until they are done.

Host memory belongs to all that have mapped it.  That of a device belongs to the process
that has made it, and is gone for all when it is freed.  So a process that opens it gets
the end of a pipe, and closes that when its last tensor over the memory has died; the
kernel closes it for a killed process.  The lender sees the pipe's end, and lets go.

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

# Each has a descriptor, of which a process often may have 1,024.
LOANS_MAX: Final = 4096
_HOLD: Final = "_asyncrpc_hold"
_DRAINED_BYTES: Final = 4096


class MemoryLoan(NamedTuple):
    """Memory that another process has opened.

    Attributes:
        key: of the region.
        storage: what must not be freed.
        end: takes note, in a thread, that the process has let go.
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
        """Lend nothing yet.

        Args:
            loop: the worker's.
            run: runs a function in a thread.
        """
        self._loop = loop
        self._run = run
        self._loans: dict[int, MemoryLoan] = {}

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._loans)

    def find(self, key: bytes) -> torch.UntypedStorage | None:
        """Return memory that is lent."""
        found = (loan.storage for loan in self._loans.values() if loan.key == key)
        return next(found, None)

    def begin(self, loan: MemoryLoan) -> int:
        """Keep memory; return the descriptor to close when it is not used any more.

        It is the caller's, who passes it on.

        Raises:
            RejectedError: there are too many.
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
            return  # only an attacker writes there, to make us busy
        self._loop.remove_reader(ours)
        os.close(ours)
        self._run(self._loans.pop(ours).end)

    def close(self) -> None:
        """End with the loop; a thread keeps the memory until it is unused."""
        left, self._loans = self._loans, {}
        for ours in left:
            self._loop.remove_reader(ours)
        if left:
            keeper = threading.Thread(
                target=_keep, args=(left,), name="asyncrpc-loans", daemon=True
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
    """Dies with the storage that has it."""

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
        # Not before the memory itself has been closed, which happens right after this.
        loop.call_soon_threadsafe(os.close, descriptor)
    except RuntimeError:  # the loop is closed
        os.close(descriptor)


def is_borrowed(storage: torch.UntypedStorage) -> bool:
    """Return whether a storage belongs to another process."""
    return hasattr(storage, _HOLD)

"""The lock over `.grad` of every parameter of a worker, and what is done under it.

Hooks run under the lock, and may wait for a call whose function needs it: for a pass of
another context over the same parameters, say.  So a thread that waits for a call gives
it up.  What it had in `.grad` is taken out meanwhile, and comes back before it goes on.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch

from asyncrpc.core.loop.waits import WaitDescription, WaitKind, waits

_OWNER: Final = re.compile(r"owner=(\d+)")


class Suspendable(Protocol):
    """A change that is there only while its thread has the lock."""

    def suspend(self) -> None:
        """Take the change back for a while."""

    def resume(self) -> None:
        """Make the change again."""


class GradientLock:
    """A reentrant lock that a thread gives up while it waits for a call.

    Attributes:
        changes: what is there under the lock, in the order in which it began.
    """

    __slots__ = ("_lock", "changes")

    def __init__(self) -> None:
        self._lock: Any = threading.RLock()
        self.changes: list[Suspendable] = []

    @waits(lambda at: at["self"].wait_now())
    def acquire(self, blocking: bool = True) -> bool:  # noqa: FBT001, FBT002  (as RLock)
        """Wait for the lock, or do not; return whether this thread has it."""
        acquired: bool = self._lock.acquire(blocking)
        return acquired

    def release(self) -> None:
        """Let go of the lock once."""
        self._lock.release()

    @waits(lambda at: at["self"].wait_now())
    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @property
    def is_held_here(self) -> bool:
        """Return whether this thread has the lock."""
        held: bool = self._lock._is_owned()  # noqa: SLF001  (as threading.Condition does)
        return held

    @property
    def owner(self) -> int:
        """Return the ident of the thread that has the lock; 0: none has."""
        match = _OWNER.search(repr(self._lock))  # a lock tells its owner nowhere else
        return int(match[1]) if match else 0

    def wait_now(self) -> WaitDescription | None:
        """Describe the wait for the thread that has the lock, if one has."""
        if not (owner := self.owner):
            return None
        return WaitDescription(
            WaitKind.LOCK, "the lock over gradients", threads=(owner,)
        )

    def give_up(self) -> Any:
        """Take back what is there under the lock and release it, however often held."""
        changes, self.changes = self.changes, []
        for change in reversed(changes):
            change.suspend()
        return changes, self._lock._release_save()  # noqa: SLF001

    @waits(lambda at: at["self"].wait_now())
    def take_back(self, token: Any) -> None:
        """Wait for the lock again, and make the changes again."""
        changes, saved = token
        self._lock._acquire_restore(saved)  # noqa: SLF001
        for change in changes:
            change.resume()
        self.changes = changes


class GradientsSetAside:
    """Puts gradients into `.grad` for a block under the lock, and restores `.grad`.

    `contextlib.contextmanager` would take 1 us more.
    """

    __slots__ = ("_before", "_lock", "_meanwhile", "_parameters")

    def __init__(
        self,
        lock: GradientLock,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
    ) -> None:
        self._lock = lock
        self._parameters = parameters
        self._meanwhile = gradients
        self._before: Sequence[torch.Tensor | None] = ()

    def __enter__(self) -> None:
        self._before = [parameter.grad for parameter in self._parameters]
        try:
            self._set_gradients(self._meanwhile)
        except BaseException:
            self._set_gradients(self._before)
            raise
        self._lock.changes.append(self)

    def __exit__(self, *_: object) -> None:
        self._lock.changes.pop()
        self._set_gradients(self._before)

    def suspend(self) -> None:
        """Restore `.grad` while this thread waits."""
        self._meanwhile = [parameter.grad for parameter in self._parameters]
        self._set_gradients(self._before)

    def resume(self) -> None:
        """Put the gradients back; others may have changed `.grad` meanwhile."""
        self._before = [parameter.grad for parameter in self._parameters]
        self._set_gradients(self._meanwhile)

    def _set_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient

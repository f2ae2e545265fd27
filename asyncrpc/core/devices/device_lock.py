"""The lock of devices that only one thread may use at a time.

torch_xla keeps the graph of what is still to be computed per device, for all threads:
two threads that use one device at once crash the process; two with a device each do not
(torch_xla 2.9, PJRT on the CPU, 4 of 4 runs; with one device for both 0 of 4).  The
devices are the process's, and so is their lock: there is one queue for every worker in
it, and for the program's own threads.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from typing import Final

from asyncrpc.core.devices.names import DeviceName
from asyncrpc.core.loop.waits import WaitDescription, WaitKind, waits
from asyncrpc.errors import UsageError


class DeviceLock:
    """The right to use some devices: a lock that excludes all that overlap with it.

    First come, first served.
    """

    def __init__(self, devices: Sequence[DeviceName] = ()) -> None:
        """Name the devices.

        Args:
            devices: one without an index stands for all of its type; none at all: every
                device.
        """
        self._devices = tuple(devices)

    def overlaps(self, other: DeviceLock) -> bool:
        """Return whether the two exclude each other."""
        if not self._devices or not other._devices:
            return True
        return any(
            own.type == its.type and (None in (own.index, its.index) or own == its)
            for own in self._devices
            for its in other._devices
        )

    def acquire(self) -> None:
        """Wait until no earlier lock has any of the devices."""
        _QUEUE.enter(self)

    def release(self) -> None:
        """Release the devices."""
        _QUEUE.leave(self)

    def __enter__(self) -> None:
        """See `acquire`."""
        self.acquire()

    def __exit__(self, *_: object) -> None:
        """See `release`."""
        self.release()


class _LockQueue:
    """The locks that are held, and those that wait."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # A ticket, its lock, and the thread that holds it or waits.
        self._entries: list[tuple[object, DeviceLock, int]] = []

    @waits(lambda at: at["self"].wait_now(at.get("ticket"), at["lock"]))
    def enter(self, lock: DeviceLock) -> None:
        ticket = object()
        with self._changed:
            self._entries.append((ticket, lock, threading.get_ident()))
            # A holder always releases, however its `with` ends.
            self._changed.wait_for(lambda: self._may_go(ticket, lock))

    def _may_go(self, ticket: object, lock: DeviceLock) -> bool:
        before = takewhile(lambda entry: entry[0] is not ticket, self._entries)
        return not any(lock.overlaps(other) for _, other, _ in before)

    def wait_now(self, ticket: object, lock: DeviceLock) -> WaitDescription | None:
        """Describe what the holder of a ticket waits for, if it waits."""
        # Without `_changed`: another thread may hold it for long.
        entries = tuple(self._entries)
        before = takewhile(lambda entry: entry[0] is not ticket, entries)
        ahead = tuple(ident for _, other, ident in before if lock.overlaps(other))
        if not ahead:
            return None
        return WaitDescription(WaitKind.DEVICE, "the device lock", threads=ahead)

    def leave(self, lock: DeviceLock) -> None:
        with self._changed:
            # A lock overlaps with itself: of its entries the first has it.
            at = next(
                at for at, (_, held, _) in enumerate(self._entries) if held is lock
            )
            del self._entries[at]
            self._changed.notify_all()


_QUEUE: Final = _LockQueue()


@contextmanager
def lock(device: str | None = None) -> Iterator[None]:
    """Hold an exclusive device in a thread of the program's own.

    Functions that run for calls hold it already, as does what `asyncrpc.devices.run`
    runs.  Meanwhile nothing else uses the device, not even copies for
    calls: be brief, and do not wait for calls.

    Args:
        device: such as `"xla:0"`; None: all exclusive ones.

    Raises:
        UsageError: called on an event loop, which it could block: use
            `asyncrpc.devices.run`; or `device` is not a device.

    Example:
        >>> with asyncrpc.devices.lock():
        ...     loss = model(batch).sum()
    """
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        raise UsageError(
            "waiting for a device would block the event loop; use "
            "`await asyncrpc.devices.run(function)`"
        )
    with DeviceLock(() if device is None else (DeviceName.parse(device),)):
        yield

"""The heartbeat record of a worker, and where peers of its host find it.

Its event loop writes into it twice a second, for as long as it runs.  See
`asyncrpc.core.sidecar.pulse` for what is in it; `Hello.sidecar` says where it is:

    pulse://PID/STARTED/NAMESPACE/DESCRIPTOR
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from asyncrpc.core.host.this_host import HOST_ID
from asyncrpc.core.ids import Incarnation
from asyncrpc.core.loop.clock import NS_PER_S, Clock
from asyncrpc.core.sidecar import pulse
from asyncrpc.core.wire.frames import Hello

_SCHEME: Final = "pulse://"
_CLOCK: Final = Clock()  # real time, whatever the loop's: the kernel's is compared

is_supported: Final = hasattr(os, "memfd_create")


def now_ns() -> int:
    """Return the time that heartbeats are compared with, in nanoseconds."""
    return int(_CLOCK.now_s() * NS_PER_S)


@dataclass(frozen=True, slots=True)
class PulseAddress:
    """Where on its host the heartbeat record of a worker lies.

    Attributes:
        pid: of the worker's process.
        started: when that was started; see `Pulse`.
        namespace: inode of the pid namespace in which `pid` counts.
        descriptor: of the record, in that process.
    """

    pid: int
    started: int
    namespace: int
    descriptor: int

    def __str__(self) -> str:
        numbers = (self.pid, self.started, self.namespace, self.descriptor)
        return _SCHEME + "/".join(map(str, numbers))

    @classmethod
    def find(cls, addresses: Iterable[str]) -> PulseAddress | None:
        """Return the one among the addresses of a HELLO, if there is one."""
        for text in addresses:
            parts = text.removeprefix(_SCHEME).split("/")
            if text.startswith(_SCHEME) and len(parts) == len(cls.__slots__):
                with contextlib.suppress(ValueError):
                    pid, *numbers = (int(part) for part in parts)
                    if pid > 0:  # others mean groups of processes
                        return cls(pid, *numbers)
        return None

    @property
    def is_here(self) -> bool:
        """Return whether `pid` means the same process here."""
        try:
            return self.namespace == pulse.pid_namespace()
        except OSError:
            return False


def find_here(hello: Hello) -> PulseAddress | None:
    """Return where a peer's record is if its process can be seen from here."""
    # The host's id begins with that of the kernel's boot; what follows, namespaces of
    # network and files, does not matter here.
    if hello.host_id.partition("/")[0] != HOST_ID.partition("/")[0]:
        return None
    address = PulseAddress.find(hello.sidecar)
    return address if address is not None and address.is_here else None


class HeartbeatRecord:
    """The record that the event loop of this worker writes for as long as it runs."""

    def __init__(
        self, incarnation: Incarnation, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._loop = loop
        pid = os.getpid()
        record = pulse.Pulse(
            pid,
            pulse.started_at(pid),
            incarnation,
            pulse.pid_namespace(),
            now_ns(),
        )
        self.descriptor = os.memfd_create(pulse.NAME, os.MFD_CLOEXEC)
        try:
            os.write(self.descriptor, record.pack())
            self._memory = mmap.mmap(self.descriptor, pulse.PULSE_BYTES)
        except BaseException:
            os.close(self.descriptor)
            raise
        # An array of numbers: each is written as a whole, so a reader never sees half.
        self._numbers = memoryview(self._memory).cast("Q")
        self.address = PulseAddress(
            pid, record.started, record.namespace, self.descriptor
        )
        self._timer = self._loop.call_later(pulse.TICK_S, self._tick)

    @property
    def ticked_ns(self) -> int:
        """When the loop last wrote, in nanoseconds; see `now_ns`."""
        return self._numbers[pulse.TICKED]

    def _tick(self) -> None:
        self._numbers[pulse.TICKED] = now_ns()
        self._timer = self._loop.call_later(pulse.TICK_S, self._tick)

    def close(self) -> None:
        """Stop, and remove the record."""
        self._timer.cancel()
        self._numbers.release()
        self._memory.close()
        os.close(self.descriptor)

"""Letting peers see that this worker runs, and seeing whether they do.

Peers of this host see it from the kernel and from our *pulse*, which the event loop
writes twice a second; those of other hosts ask the *watch* beside us, a process that
lives on when this one stands still, or has died (`asyncrpc.watch`).  `Hello.watch` says
where both are:

    pulse://PID/STARTED/NAMESPACE/DESCRIPTOR    see `asyncrpc.watch.pulse`
    tcp://HOST:PORT                             see `asyncrpc.watch.query`

What is concluded from the evidence, `machine.detector` decides.

Only Linux tells all this.  Elsewhere, and in a simulation, there is no evidence.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from asyncrpc.clock import NS_PER_S, Clock
from asyncrpc.errors import UsageError
from asyncrpc.runtime.links.host import HOST_ID
from asyncrpc.runtime.links.watcher import Watcher
from asyncrpc.runtime.links.watcher import is_supported as watcher_is_supported
from asyncrpc.runtime.machine.detector import Evidence
from asyncrpc.transport.address import Address
from asyncrpc.watch import pulse, query

if TYPE_CHECKING:
    from asyncrpc.runtime.worker import Worker
    from asyncrpc.wire.messages import Hello

logger = logging.getLogger("asyncrpc")

__all__ = ["Evidence", "Watch", "evidence_of"]

WATCHES_MAX: Final = 8  # addresses of one watch that are asked
_SCHEME: Final = "pulse://"
_CLOCK: Final = Clock()  # real time, whatever the loop's: the kernel's is compared

_EVIDENCE: Final = {
    pulse.GONE: Evidence.GONE,
    pulse.STOPPED: Evidence.STOPPED,
    pulse.BUSY: Evidence.BUSY,
    pulse.TICKING: Evidence.TICKING,
}


is_supported: Final = hasattr(os, "memfd_create")


def _now_ns() -> int:
    return int(_CLOCK.now_s() * NS_PER_S)


@dataclass(frozen=True, slots=True)
class PulseAddress:
    """Where on its host the pulse of a worker is to be found.

    Attributes:
        pid: of the worker's process.
        started: when that was started; see `Pulse`.
        namespace: inode of the pid namespace in which `pid` counts.
        descriptor: of the pulse, in that process.
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
                    pid, *others = (int(one) for one in parts)
                    if pid > 0:  # others mean groups of processes
                        return cls(pid, *others)
        return None

    @property
    def is_here(self) -> bool:
        """Whether `pid` means the same process here."""
        try:
            return self.namespace == pulse.pid_namespace()
        except OSError:
            return False


class OwnPulse:
    """The pulse of this worker, written by its event loop for as long as that runs."""

    def __init__(self, worker: Worker) -> None:
        """Begin.

        Raises:
            OSError: this kernel has nothing of the kind.
        """
        self._loop = worker.loop
        pid = os.getpid()
        record = pulse.Pulse(
            pid,
            pulse.started_at(pid),
            worker.incarnation,
            pulse.pid_namespace(),
            _now_ns(),
        )
        self.descriptor = os.memfd_create(pulse.NAME, os.MFD_CLOEXEC)
        try:
            os.write(self.descriptor, record.pack())
            self._memory = mmap.mmap(self.descriptor, pulse.PULSE_BYTES)
        except BaseException:
            os.close(self.descriptor)
            raise
        # An array of numbers: each is written as a whole, whoever reads meanwhile.
        self._numbers = memoryview(self._memory).cast("Q")
        self.address = PulseAddress(
            pid, record.started, record.namespace, self.descriptor
        )
        self._timer = self._loop.call_later(pulse.TICK_S, self._tick)

    def _tick(self) -> None:
        self._numbers[pulse.TICKED] = _now_ns()
        self._timer = self._loop.call_later(pulse.TICK_S, self._tick)

    def close(self) -> None:
        """Stop, and take it away."""
        self._timer.cancel()
        self._numbers.release()
        self._memory.close()
        os.close(self.descriptor)


class Watch:
    """What lets peers see that one worker runs: its pulse, and its watch.

    Attributes:
        addresses: for `Hello.watch`.
        watcher: the process, where there may be one.
    """

    def __init__(self, worker: Worker) -> None:
        """Prepare it; nothing is to be seen yet."""
        self._worker = worker
        self._pulse: OwnPulse | None = None
        self.watcher: Watcher | None = None
        self.addresses: tuple[str, ...] = ()

    async def start(self, listening: Iterable[Address]) -> None:
        """Let a worker that runs in real time be seen.

        Where that is impossible there is nothing to see, and no error.

        Args:
            listening: where it listens; the watch does beside its addresses of TCP.

        Raises:
            TransportError: the watch cannot listen.
            UsageError: the interface of the options has no address.

        Cancellation:
            `close` undoes what has been done.
        """
        worker = self._worker
        if not is_supported:
            return
        try:
            self._pulse = OwnPulse(worker)
        except OSError as error:
            logger.debug("worker %r: no pulse: %s", worker.name, error)
            return
        self.addresses = (str(self._pulse.address),)
        beside = [one for one in listening if one.scheme == "tcp"]
        if worker.options.watch == "off" or not beside or not watcher_is_supported:
            return
        self.watcher = Watcher(worker, self._pulse.descriptor)
        await self.watcher.listen(beside, worker.options.interface)
        self.addresses += tuple(map(str, self.watcher.addresses))
        if worker.options.watch == "on":
            self.watcher.start()

    def on_peer(self, hello: Hello) -> None:
        """Have the watch answer if this peer cannot see for itself."""
        if self.watcher is not None and _address_here(hello) is None:
            self.watcher.start()

    def close(self) -> None:
        """End what there is; it takes 1 ms where there is a process to end."""
        if self.watcher is not None:
            self.watcher.close()
        if self._pulse is not None:
            self._pulse.close()
            self._pulse = None


# --- what became of a peer ----------------------------------------------------------


async def evidence_of(
    hello: Hello,
    *,
    credentials_pid: int | None,
    secret: bytes | None,
    timeout_s: float,
) -> Evidence:
    """Find out what became of the process of a peer.  Never raises.

    Args:
        hello: how the peer introduced itself.
        credentials_pid: its process as the kernel tells it, over a Unix socket.
        secret: the cluster's; its watch answers only those who know it.
        timeout_s: seconds to wait for the watch, if this host does not tell.

    Returns:
        UNKNOWN where nobody could tell, UNREACHABLE where the watch does not answer.

    Cancellation:
        Nothing is left of it.
    """
    found = _seen(hello, credentials_pid)
    if found is not Evidence.UNKNOWN:
        return found
    watches = [one for one in map(_tcp_address, hello.watch) if one is not None]
    if not watches:
        return found
    return await _told(hello, watches[:WATCHES_MAX], secret, timeout_s)


def _address_here(hello: Hello) -> PulseAddress | None:
    """Return the address of a peer's pulse if its process can be seen from here."""
    # The host's id begins with that of the kernel's boot; what follows, namespaces of
    # network and files, does not matter here.
    if hello.host_id.partition("/")[0] != HOST_ID.partition("/")[0]:
        return None
    address = PulseAddress.find(hello.watch)
    return address if address is not None and address.is_here else None


def _seen(hello: Hello, credentials_pid: int | None) -> Evidence:
    """Look at a process of this host."""
    address = _address_here(hello)
    if address is not None:
        state = pulse.state_of(address.pid, address.started)
        found = pulse.read_of(address.pid, address.descriptor)
        if found is not None and found.incarnation != hello.incarnation:
            found = None
        return _EVIDENCE.get(pulse.judge(found, state, _now_ns()), Evidence.UNKNOWN)
    if credentials_pid and credentials_pid == hello.pid and pulse.is_gone(hello.pid):
        return Evidence.GONE
    return Evidence.UNKNOWN


async def _told(
    hello: Hello, watches: list[Address], secret: bytes | None, timeout_s: float
) -> Evidence:
    """Ask a watch at all of its addresses at once; the first answer counts."""
    key = query.key_from(secret, hello.incarnation)
    answers: list[int] = []
    tasks: list[asyncio.Task[None]] = []

    async def ask(address: Address) -> None:
        answer = await _answer(address, key, hello.incarnation)
        if answer is not None and not answers:
            answers.append(answer)
            for task in tasks:
                task.cancel()

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
            tasks += [group.create_task(ask(one)) for one in watches]
    if not answers:
        return Evidence.UNREACHABLE
    return _EVIDENCE.get(answers[0], Evidence.UNKNOWN)


async def _answer(address: Address, key: bytes, incarnation: int) -> int | None:
    """Return what a watch answers at one address; None if it does not."""
    nonce = os.urandom(query.NONCE_BYTES)
    try:
        reader, writer = await asyncio.open_connection(address.host, address.port)
    except OSError:
        return None
    try:
        writer.write(query.pack_query(key, incarnation, nonce))
        record = await reader.readexactly(query.ANSWER_BYTES)
    except (OSError, asyncio.IncompleteReadError):
        return None
    finally:
        writer.transport.abort()
    return query.read_answer(key, incarnation, nonce, record)


def _tcp_address(text: str) -> Address | None:
    """Return an address of a watch; None if it is none that needs no name service."""
    if not text.startswith("tcp://"):
        return None
    try:
        address = Address.parse(text)
        ipaddress.ip_address(address.host)
    except (UsageError, ValueError):
        return None
    return address

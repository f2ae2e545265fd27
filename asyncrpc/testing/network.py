"""A simulated network: seeded delays, and faults on request.

Connections between named hosts, on a loop of virtual time.  They behave as TCP lets
them: bytes stay in order and complete, so a lost packet appears as a delay, and too
many of them as a broken connection.  Rules are set per pair of hosts, and read like
sentences:

    network = Network(seed=1)
    network.between("a", "ps").delay(0.01)
    network.between("a", "ps").partition()
    network.crash("ps", silent=True)

The same seed and the same program give the same `trace`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from asyncrpc.core.transport.abc import (
    Buffer,
    Connector,
    Listener,
    StreamHandler,
    Transport,
)
from asyncrpc.core.transport.address import Address
from asyncrpc.core.transport.flow import WaterMarks
from asyncrpc.core.transport.memory import MemoryListener, MemoryTransport
from asyncrpc.errors import (
    ConnectError,
    ConnectionLostError,
    RefusedError,
    TransportError,
    UsageError,
)

DELAY_S: Final = 0.001  # mean of one way, if no rule says otherwise
RETRANSMIT_S: Final = 0.2  # Linux waits this long at least, and doubles it each time
RETRANSMITS_MAX: Final = 8  # then TCP gives up; after 51 s
BROKEN_AFTER_S: Final = 60.0  # a longer cut breaks the connections across it
CONNECT_TIMEOUT_S: Final = 127.0  # what Linux gives the first packet, by default
DETECT_S: Final = 0.05  # until a peer learns that a process has died
_ROUNDING_S: Final = 1e-9  # asyncio runs a timer that is this much in the future
TRACE_MAX: Final = 100_000  # events kept; a run with more is an endless loop


class HostLink:
    """The rules between two hosts, in both directions alike."""

    def __init__(self, network: Network, ends: tuple[str, str]) -> None:
        self.ends = ends
        self.connections: dict[SimTransport, None] = {}  # a set, but ordered
        self.blocked_until_s = 0.0  # infinite in a partition
        self._network = network
        self._mean_s = DELAY_S
        self._loss = 0.0
        self._cut_timer: asyncio.TimerHandle | None = None

    def delay(self, mean_s: float) -> None:
        """Draw delays from an exponential distribution of this mean, in seconds."""
        self._mean_s = mean_s

    def lose(self, probability: float) -> None:
        """Lose packets: each loss delays by a retransmission, too many break."""
        if not 0 <= probability <= 1:
            raise UsageError(
                f"a probability must be between 0 and 1, not {probability}"
            )
        self._loss = probability

    def partition(self) -> None:
        """Let nothing through, until `heal`; `BROKEN_AFTER_S` breaks connections."""
        self._note("partition")
        self.blocked_until_s = math.inf
        self._stop_timer()
        loop = self._network.loop
        self._cut_timer = loop.call_later(BROKEN_AFTER_S, self.drop_connections)

    def heal(self) -> None:
        """Let everything through again; the held bytes go first."""
        self._note("heal")
        self._stop_timer()
        self._block_until(self._network.loop.time())

    def clog(self, duration_s: float) -> None:
        """Hold everything back for a while."""
        self._note(f"clog {duration_s:g} s")
        self._block_until(self._network.loop.time() + duration_s)

    def drop_connections(self) -> None:
        """Break every connection, at both ends."""
        self._note("drop connections")
        for connection in tuple(self.connections):
            connection.fail(ConnectionLostError(f"{connection}: connection reset"))

    @property
    def is_blocked(self) -> bool:
        """Return whether the link lets nothing through now."""
        return self.blocked_until_s > self._network.loop.time()

    def draw_delay_s(self) -> float:
        """Return how long the next packet takes; infinite if it never arrives."""
        rng = self._network.rng
        delay_s = rng.expovariate(1 / self._mean_s) if self._mean_s else 0.0
        retransmits = 0
        while self._loss and rng.random() < self._loss:
            delay_s += RETRANSMIT_S * 2**retransmits
            retransmits += 1
            if retransmits > RETRANSMITS_MAX:
                return math.inf
        return delay_s

    def _block_until(self, time_s: float) -> None:
        self.blocked_until_s = time_s
        for connection in tuple(self.connections):
            connection.reschedule()
        self._network.wake()

    def _stop_timer(self) -> None:
        if self._cut_timer is not None:
            self._cut_timer.cancel()
            self._cut_timer = None

    def _note(self, text: str) -> None:
        self._network.note(f"{'-'.join(self.ends)}: {text}")


class SimTransport(MemoryTransport):
    """One end of a simulated connection: bytes have a time of arrival."""

    def __init__(
        self,
        handler: StreamHandler,
        *,
        here: str,
        remote: str,
        network: Network,
        link: HostLink,
    ) -> None:
        super().__init__(handler, remote=remote, marks=network.marks)
        self.host = here
        self.has_vanished = False
        self._network = network
        self._link = link
        self._posted = 0  # places of the stream: sent so far,
        self._landed = 0  # arrived at the other host,
        self._delivered = 0  # and taken by its handler
        self._flights: deque[tuple[float, int]] = deque()  # when, up to which place
        self._last_arrival_s = 0.0
        self._other: SimTransport = self  # until `join`
        link.connections[self] = None

    def meet(self, other: SimTransport) -> None:
        """Make this and `other` the two ends of one connection."""
        self._other, other._other = other, self
        self.join(other)

    @property
    def is_blocked(self) -> bool:
        """Return whether this end takes nothing now: paused, or silently gone."""
        return self.has_vanished or super().is_blocked

    def reschedule(self) -> None:
        """Plan the delivery again: the link's rules have changed."""
        if self._delivery is not None:
            self._delivery.cancel()
            self._delivery = None
        self._schedule()

    def vanish(self, *, silent: bool) -> None:
        """End without a call to the handler: the process that had it is dead."""
        self.has_vanished = silent
        self._handler = _Nobody()
        self.fail(ConnectionLostError(f"host {self.host!r} has crashed"))
        if silent:
            self._other.start_retransmitting()
        else:
            self._loop.call_later(DETECT_S, self._other.fail, _died(self))

    def start_retransmitting(self) -> None:
        """Break this end some time after it has sent to a host that is gone."""
        if self._posted > self._delivered:
            error = ConnectionLostError(f"{self}: no acknowledgement; timed out")
            self._loop.call_later(BROKEN_AFTER_S, self.fail, error)

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Queue buffers, in order; see `Transport.send`."""
        for buffer in buffers:
            self._network.note_bytes(buffer)
        super().send(buffers)

    def _post(self, nbytes: int) -> None:
        self._posted += nbytes
        delay_s = self._link.draw_delay_s()
        if delay_s == math.inf:
            self._loop.call_soon(self._break_both)
            return
        # A stream is ordered: nothing overtakes what was sent before it.
        arrival_s = max(self._loop.time() + delay_s, self._last_arrival_s)
        self._last_arrival_s = arrival_s
        self._flights.append((arrival_s, self._posted))
        self._schedule()
        if self._other.has_vanished:
            self.start_retransmitting()

    def _arrived(self) -> int:
        now_s = self._loop.time() + _ROUNDING_S
        if now_s < self._link.blocked_until_s:
            return 0
        while self._flights and self._flights[0][0] <= now_s:
            self._landed = self._flights.popleft()[1]
        return self._landed - self._delivered

    def _schedule(self) -> None:
        if self._delivery is None and self._has_work():
            when_s = max(self._next_arrival_s(), self._link.blocked_until_s)
            if when_s < math.inf:
                self._delivery = self._loop.call_at(when_s, self._deliver)

    def _next_arrival_s(self) -> float:
        if self._landed > self._delivered:
            return self._loop.time()
        return self._flights[0][0] if self._flights else math.inf

    def _consumed(self, nbytes: int) -> None:
        self._delivered += nbytes
        self._network.note(f"{self.host}->{self._other.host}: {nbytes} bytes")
        if self._eof_sent:
            self._link.connections.pop(self, None)

    def _reset_peer(self, error: TransportError) -> None:
        delay_s = self._link.draw_delay_s()
        if max(delay_s, self._link.blocked_until_s) < math.inf:  # else it is lost
            self._loop.call_later(delay_s, self._peer.fail, error)

    def _break_both(self) -> None:
        for end in (self, self._peer):
            end.fail(ConnectionLostError(f"{end}: no acknowledgement; timed out"))

    def _end(self, error: TransportError | None) -> None:
        super()._end(error)
        if self._eof_sent:  # else the end of the stream is still on its way
            self._link.connections.pop(self, None)


class Network:
    """Hosts, the links between them, and what listens where.

    Attributes:
        rng: the only source of randomness.
        trace: the last events: `(virtual seconds, words)`.
        sent: how many buffers have been sent, by all hosts.
        sent_bytes: how many bytes were in them.
    """

    def __init__(
        self,
        seed: int,
        loop: asyncio.AbstractEventLoop | None = None,
        *,
        marks: WaterMarks | None = None,
    ) -> None:
        self.rng = random.Random(seed)  # noqa: S311  (to be repeated, not secret)
        self.marks = marks or WaterMarks()
        self.trace: deque[tuple[float, str]] = deque(maxlen=TRACE_MAX)
        self._given_loop = loop
        self._links: dict[tuple[str, str], HostLink] = {}
        self._names: dict[str, MemoryListener] = {}
        self._homes: dict[str, str] = {}  # which host has, or had, a name
        self._crashed: dict[str, bool] = {}  # host: silently?
        self._changed = asyncio.Event()
        self.sent = self.sent_bytes = 0
        self._digest = hashlib.blake2b(digest_size=16)

    @property
    def digest(self) -> str:
        """Return a digest of all events and all bytes so far."""
        return self._digest.hexdigest()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop given, or the running one."""
        return self._given_loop or asyncio.get_running_loop()

    def connector(self, host: str) -> SimConnector:
        """Make a connector that acts as `host`."""
        return SimConnector(self, host)

    def between(self, first: str, second: str) -> HostLink:
        """Return the rules between two hosts, in whichever order they are named."""
        ends = (min(first, second), max(first, second))
        if ends not in self._links:
            self._links[ends] = HostLink(self, ends)
        return self._links[ends]

    def heal_all(self) -> None:
        """End every partition, clog, delay and loss."""
        for link in self._links.values():
            link.delay(DELAY_S)
            link.lose(0.0)
            if link.is_blocked:
                link.heal()

    def crash(self, host: str, *, silent: bool = False) -> None:
        """Kill everything on `host`; its handlers are not called any more.

        The tasks that ran there are the test's to cancel.
        """
        self.note(f"{host}: crash" + (", silently" if silent else ""))
        self._crashed[host] = silent
        for name in [name for name, home in self._homes.items() if home == host]:
            self._names.pop(name, None)
        for link in self._links.values():
            for connection in tuple(link.connections):
                if connection.host == host:
                    connection.vanish(silent=silent)

    def restart(self, host: str) -> None:
        """Let `host` listen and connect again, without its former state."""
        self.note(f"{host}: restart")
        self._crashed.pop(host, None)
        self.wake()

    def note(self, event: str) -> None:
        """Add an event to the trace and the digest."""
        now_s = self.loop.time()
        self.trace.append((now_s, event))
        self._digest.update(f"{now_s!r} {event}\n".encode())

    def note_bytes(self, sent: Buffer) -> None:
        """Add sent bytes to the digest."""
        self.sent += 1
        self.sent_bytes += len(sent)
        self._digest.update(sent)

    def wake(self) -> None:
        """Make connects in progress check the rules again."""
        self._changed.set()
        self._changed = asyncio.Event()

    # --- for SimConnector ---

    def listen(
        self, host: str, address: Address, accept: Callable[[], StreamHandler]
    ) -> MemoryListener:
        """Give a name to `accept`; see `Connector.listen`."""
        if host in self._crashed:
            raise TransportError(f"cannot listen at {address}: {host!r} has crashed")
        if address.host in self._names:
            raise TransportError(f"cannot listen at {address}: the name is taken")
        listener = MemoryListener(address, accept, self._names)
        self._names[address.host] = listener
        self._homes[address.host] = host
        return listener

    async def reach(self, host: str, address: Address) -> None:
        """Wait for the round trip of a connect, forever if nothing answers."""
        home = self._homes.get(address.host, address.host)
        link = self.between(host, home)
        for _ in range(2):
            await asyncio.sleep(min(link.draw_delay_s(), CONNECT_TIMEOUT_S))
            while not self._lets_through(link):
                await self._rules_change(link)

    def join(self, host: str, address: Address, handler: StreamHandler) -> SimTransport:
        """Connect `handler` to the listener; see `Connector.connect`."""
        listener = self._names.get(address.host)
        if listener is None or host in self._crashed:
            known = ", ".join(sorted(self._names)) or "none"
            raise RefusedError(
                f"cannot connect to {address} from host {host!r}: no such listener; "
                f"there are: {known}"
            )
        home = self._homes[address.host]
        link = self.between(host, home)
        self.note(f"{host}->{home}: connect")
        near = SimTransport(
            handler, here=host, remote=address.host, network=self, link=link
        )
        far = SimTransport(
            listener.accept(), here=home, remote=host, network=self, link=link
        )
        near.meet(far)
        self.loop.call_soon(far.start)
        near.start()
        return near

    def _lets_through(self, link: HostLink) -> bool:
        silent = any(self._crashed.get(end, False) for end in link.ends)
        return not silent and link.blocked_until_s <= self.loop.time() + _ROUNDING_S

    async def _rules_change(self, link: HostLink) -> None:
        changed = self._changed
        wait_s = link.blocked_until_s - self.loop.time()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s if 0 < wait_s < math.inf else None):
                await changed.wait()


class SimConnector(Connector):
    """Connects and listens as one host of a simulated network."""

    scheme = "mem"

    def __init__(self, network: Network, host: str) -> None:
        self.host = host
        self._network = network

    async def listen(
        self, address: Address, accept: Callable[[], StreamHandler]
    ) -> Listener:
        """Listen at a name on this host; see `Connector.listen`."""
        return self._network.listen(self.host, address, accept)

    async def connect(self, address: Address, handler: StreamHandler) -> Transport:
        """Connect to a name; see `Connector.connect`."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self._network.reach(self.host, address)
        except TimeoutError as error:
            raise ConnectError(
                f"cannot connect to {address} from host {self.host!r}: no answer in "
                f"{CONNECT_TIMEOUT_S:g} s"
            ) from error
        return self._network.join(self.host, address, handler)


class _Nobody:
    """The handler of a dead process."""

    def connection_made(self, transport: Transport) -> None:
        """Do nothing."""

    def get_buffer(self, sizehint: int, /) -> bytearray:
        """Return no memory; never called, since its end has vanished."""
        return bytearray(1)

    def buffer_updated(self, nbytes: int, /) -> None:
        """Do nothing."""

    def connection_lost(self, error: TransportError | None, /) -> None:
        """Do nothing."""

    def pause_writing(self) -> None:
        """Do nothing."""

    def resume_writing(self) -> None:
        """Do nothing."""


def _died(end: SimTransport) -> ConnectionLostError:
    return ConnectionLostError(f"connection reset: host {end.host!r} has crashed")

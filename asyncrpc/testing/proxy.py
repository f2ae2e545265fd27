"""A proxy in front of one address, which cuts, holds, delays and refuses on request.

It is for real sockets what `testing.network` is for simulated ones.  It reads the
headers of passing frames, so that a cut can be placed between two frames or inside one:

    async with Proxy("tcp://127.0.0.1:7000") as proxy:
        cut = proxy.cut_after(Way.TO_TARGET, frames=3, nbytes=20)
        ...                       # a worker dials proxy.address, and works
        await cut.happened.wait()

Give the worker behind it `NetworkOptions(advertise=(proxy.address,))`: otherwise the
worker tells its peers its own listening address.

A proxy runs on the loop on which it is entered.  To see a worker stop or die, it must
run in another process than that worker.  It cannot see frames under TLS: cut those only
by `nbytes`.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from asyncrpc.core.arguments import (
    check_count,
    check_duration,
    check_flag,
    check_kind,
    check_text,
    is_seconds,
    wrong,
)
from asyncrpc.core.loop.loops import loop_for
from asyncrpc.core.transport.address import Address
from asyncrpc.errors import UsageError
from asyncrpc.testing.passage import ProxiedConnection
from asyncrpc.testing.proxied_socket import ProxiedSocket
from asyncrpc.testing.scanner import Conversation, End, Way

__all__ = ["Cut", "Proxy", "Way"]

PIECES_PER_S: Final = 100  # of a stream that is throttled


@dataclass(eq=False, slots=True)
class Cut:
    """A planned cut; see `Proxy.cut_after`.

    Attributes:
        frames: how many more must end.
        nbytes: how many bytes pass after that.
        reset: whether both ends see a reset; else they see the stream end.
        happened: set once the connection has been cut.
    """

    way: Way
    frames: int
    nbytes: int
    reset: bool
    happened: asyncio.Event = field(default_factory=asyncio.Event)
    passage: ProxiedConnection | None = (
        None  # on which it will happen, once that is known
    )

    def place(
        self, passage: ProxiedConnection, ends: Sequence[int], size: int
    ) -> int | None:
        """Return where in a chunk the cut lies; None: it lies after the chunk."""
        if self.passage not in (None, passage):
            return None
        begin = 0
        if self.frames > len(ends):
            self.frames -= len(ends)
            return None
        if self.frames:
            begin, self.frames = ends[self.frames - 1], 0
        self.passage = passage
        if begin + self.nbytes > size:
            self.nbytes -= size - begin
            return None
        return begin + self.nbytes


class Proxy:
    """A proxy in front of `target`; `async with` makes it listen.

    Attributes:
        target: where it connects to.
        connections: how many have been made to it in total.
        frames: how many frames have passed, by direction.
        kinds: the same by direction and the number of their kind.
        sessions: connections by the numbers by which others resume them.

    Example:
        >>> async with Proxy("tcp://127.0.0.1:7000") as proxy:
        ...     where = {"ps": proxy.address}
    """

    def __init__(self, target: str, *, listen: str = "tcp://127.0.0.1:0") -> None:
        """Describe a proxy.

        Args:
            target: a `tcp://` or `uds://` address; no process need listen there yet.
            listen: the proxy's own address.  Port 0 is replaced by a free one.

        Raises:
            UsageError: `target` or `listen` is not such an address.
        """
        self.target = _address("target", target)
        self.connections = 0
        self.frames: Counter[Way] = Counter()
        self.kinds: dict[Way, Counter[int]] = {way: Counter() for way in Way}
        self._where = _address("listen", listen)
        self._server: asyncio.AbstractServer | None = None
        self._passages: dict[ProxiedConnection, None] = {}
        self._cuts: dict[Way, Cut] = {}
        self.sessions: dict[int, Conversation] = {}
        self._delay_s = 0.0
        self._bytes_per_s: float | None = None
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._tasks = asyncio.TaskGroup()

    # --- life ---

    async def __aenter__(self) -> Self:
        """Listen.

        Raises:
            OSError: the proxy cannot listen at the address.

        Cancellation:
            Nothing is left.
        """
        await self.accept()
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Cut every connection, and stop listening."""
        await self.refuse()
        self.cut()
        self.heal()
        await self._tasks.__aexit__(None, None, None)
        await asyncio.sleep(0)  # aborted transports are closed in this iteration

    @property
    def address(self) -> str:
        """Return the address of the proxy, to be used in place of the target's."""
        return str(self._where)

    @property
    def open_connections(self) -> int:
        """How many connections go through it now."""
        return len(self._passages)

    # --- faults ---

    def cut(self, *, reset: bool = True) -> int:
        """Break every connection now, and return how many there were.

        Args:
            reset: both ends see a reset (on TCP), else the stream ends.  In both cases
                bytes that the proxy has not passed on are lost.

        Raises:
            UsageError: `reset` is not True or False.
        """
        check_flag("reset", reset)
        passages = tuple(self._passages)
        for passage in passages:
            passage.end(reset=reset)
        return len(passages)

    def cut_after(
        self, way: Way, *, frames: int = 0, nbytes: int = 0, reset: bool = True
    ) -> Cut:
        """Break a connection at a given place of the stream from now on.

        The other end receives exactly the bytes before this place.  The place is
        counted over all connections, including later ones; the connection on which it
        lies is cut.

        Args:
            way: which direction is counted.
            frames: how many frames pass completely.  A handshake does not count.
            nbytes: how many more bytes pass: 0 cuts between two frames.
            reset: see `cut`.

        Raises:
            UsageError: another cut is planned in this direction; or an argument has the
                wrong type.
        """
        check_kind("way", way, Way, "a Way")
        check_count("frames", frames)
        check_count("nbytes", nbytes)
        check_flag("reset", reset)
        if way in self._cuts:
            raise UsageError(f"a cut {way.value} is already planned; spare it first")
        cut = self._cuts[way] = Cut(way, frames, nbytes, reset)
        return cut

    def spare(self, cut: Cut) -> None:
        """Cancel a planned cut.

        Raises:
            UsageError: `cut` is not a planned cut.
        """
        check_kind("cut", cut, Cut, "what `cut_after` returned")
        if self._cuts.get(cut.way) is cut:
            del self._cuts[cut.way]

    async def refuse(self) -> None:
        """Stop listening: new connections are refused, existing ones stay.

        Raises:
            Nothing.

        Cancellation:
            The proxy no longer listens.
        """
        if self._server is not None:
            self._server.close()
            self._server = None
            await asyncio.sleep(0)  # uvloop closes the socket in its next iteration
            if self._where.scheme == "uds":
                _remove(self._where.host)

    async def accept(self) -> None:
        """Listen again at the same address.

        Raises:
            UsageError: no event loop runs here.
            OSError: another process has taken the address.

        Cancellation:
            The proxy does not listen.
        """
        loop = loop_for("Proxy.accept")
        if self._server is not None:
            return

        def accept() -> ProxiedSocket:
            return ProxiedSocket(self._on_connection)

        if self._where.scheme == "uds":
            self._server = await loop.create_unix_server(accept, self._where.host)
            return
        self._server = await loop.create_server(
            accept, self._where.host, self._where.port, reuse_address=True
        )
        port: int = self._server.sockets[0].getsockname()[1]
        self._where = Address("tcp", self._where.host, port)

    def partition(self) -> None:
        """Let nothing through, silently, until `heal`.

        Bytes sent meanwhile are held back, as in a network whose senders retransmit.
        """
        self._is_open.clear()

    def heal(self) -> None:
        """End a partition; the held bytes go first."""
        self._is_open.set()

    def delay(self, delay_s: float) -> None:
        """Deliver everything `delay_s` seconds later than it came; 0 ends this.

        Raises:
            UsageError: `delay_s` is not a finite number of seconds.
        """
        check_duration("delay_s", delay_s)
        self._delay_s = delay_s

    def throttle(self, bytes_per_s: float | None) -> None:
        """Limit the bytes per second of each connection; None: no limit.

        Raises:
            UsageError: `bytes_per_s` is not a positive, finite number.
        """
        if bytes_per_s is not None and not _is_rate(bytes_per_s):
            raise wrong(
                "bytes_per_s", "a positive, finite number, or None", bytes_per_s
            )
        self._bytes_per_s = bytes_per_s

    # --- for the connections ---

    def _on_connection(self, near: ProxiedSocket) -> None:
        passage = ProxiedConnection(self, near)
        self._passages[passage] = None
        self.connections += 1
        self._tasks.create_task(passage.run())

    def forget(self, passage: ProxiedConnection) -> None:
        """Internal: record that a connection has ended."""
        self._passages.pop(passage, None)

    def pass_on(
        self,
        passage: ProxiedConnection,
        way: Way,
        chunk: memoryview,
        ends: Sequence[End],
    ) -> tuple[int, Cut | None]:
        """Internal: return how many bytes of a chunk may pass, and the cut after."""
        cut = self._cuts.get(way)
        place = None
        if cut is not None:
            place = cut.place(passage, [at for at, _ in ends], len(chunk))
            if place is not None:
                del self._cuts[way]
        allowed = len(chunk) if place is None else place
        passed = [kind for at, kind in ends if at <= allowed]
        self.frames[way] += len(passed)
        self.kinds[way].update(passed)
        return allowed, cut if place is not None else None

    async def until_due(self, due_s: float) -> None:
        """Internal: wait until a chunk is due, and no partition holds it back.

        Args:
            due_s: time of the event loop, in seconds.

        Raises:
            RuntimeError: no event loop runs.

        Cancellation:
            The chunk is not delivered.
        """
        wait_s = due_s - asyncio.get_running_loop().time()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        await self._is_open.wait()

    @property
    def delay_s(self) -> float:
        """Internal: the delay of every delivery, in seconds."""
        return self._delay_s

    def pieces(self, chunk: memoryview) -> Iterator[tuple[memoryview, float]]:
        """Internal: divide a chunk for the throttle: pieces, the pause after each."""
        if self._bytes_per_s is None:
            yield chunk, 0.0
            return
        piece = max(1, int(self._bytes_per_s / PIECES_PER_S))
        for begin in range(0, len(chunk), piece):
            part = chunk[begin : begin + piece]
            yield part, len(part) / self._bytes_per_s


def _address(name: str, text: object) -> Address:
    """Read an address for a proxy."""
    check_text(name, text)
    try:
        address = Address.parse(str(text))
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from error
    if address.scheme not in ("tcp", "uds"):
        raise UsageError(f"{name}: a proxy speaks tcp:// and uds://, not {address}")
    return address


def _is_rate(number: object) -> bool:
    return is_seconds(number) and 0 < number < math.inf


def _remove(path: str) -> None:
    Path(path).unlink(missing_ok=True)

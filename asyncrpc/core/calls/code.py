"""Code that travels by value, between the workers at the ends of a link.

Each piece is sent once, and answered; a message that needs it waits until then.  The
sender decides what the receiver keeps: it says with a new piece which old ones to drop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from asyncrpc.core.counters import Counters
from asyncrpc.core.ids import Incarnation
from asyncrpc.core.serde.by_value import CodeName, CodeTable
from asyncrpc.core.services.ports import PeerLink, ask
from asyncrpc.core.services.router import Route, answers
from asyncrpc.core.services.schema import Request, message
from asyncrpc.errors import (
    AsyncRpcError,
    CallError,
    EncodeError,
    MalformedError,
    Outcome,
    RejectedError,
)

if TYPE_CHECKING:
    from asyncrpc.core.calls.deferred import PendingBuffers
    from asyncrpc.core.calls.ports import CallHost
    from asyncrpc.core.serde import Encoded

PIECES_MAX: Final = 1024  # that one peer keeps here: programs send tens
BYTES_MAX: Final = 256 << 20


@message("code", "put", about="a function or class of the sender")
class PutCode(Request[None]):
    """Here is a function or class that I am about to name.

    Attributes:
        piece: its name.
        content: a pickle of it.
        main: the program whose main module has it; empty: none has.
        dropped: names that I shall not use any more.
    """

    piece: str
    content: bytes
    main: str
    dropped: list[str]


class CodeExchange:
    """Sends the code of this worker to its peers, and takes theirs."""

    name = "code"

    def __init__(self, host: CallHost, counters: Counters) -> None:
        self._host = host
        self._counters = counters
        self.routes: list[Route] = [answers(PutCode, self._on_put)]
        # Per link: what the peer has, or is being sent.
        self._sent: dict[PeerLink, _SentCode] = {}
        self._held: dict[Incarnation, dict[str, int]] = {}  # bytes, by name

    @property
    def pieces(self) -> int:
        """How many pieces of code of peers this worker holds; from any thread."""
        return sum(map(len, list(self._held.values())))

    def send(
        self,
        link: PeerLink,
        code: Sequence[CodeName],
        encoded: Encoded,
        defer: Callable[[Encoded], PendingBuffers],
    ) -> None:
        """Let a message wait until the peer has the code that it names."""
        sent = self._sent.get(link)
        if sent is None:
            for lost in [link for link in self._sent if link.is_lost]:
                del self._sent[lost]
            sent = self._sent[link] = _SentCode()
        for name in code:
            if sent.has(name):
                continue
            putting = sent.on_their_way.get(name)
            if putting is None:
                put = self._put(link, name, sent.make_room(name))
                putting = self._host.start_task(put)
                sent.begin(name, putting)
            _release_after(putting, defer(encoded))

    async def _put(self, link: PeerLink, name: CodeName, dropped: list[str]) -> None:
        self._counters.code_sent += 1
        await ask(link, PutCode(str(name), name.content, name.main, dropped))

    async def _on_put(self, link: PeerLink, request: PutCode) -> None:
        table = self._table()
        name = CodeName.received(request.piece, request.content, request.main)
        held = self._held.setdefault(link.peer.incarnation, {})
        for dropped in request.dropped:
            if held.pop(dropped, None) is not None:
                table.let_go(dropped)
        if name in held:
            return
        size_bytes = len(name.content)
        _check_room(link, held, size_bytes)
        function = await self._host.run_on_host(lambda: table.load(name))
        _check_room(link, held, size_bytes)  # others may have come meanwhile
        if name not in held and not link.is_lost:
            self._counters.code_received += 1
            held[str(name)] = size_bytes
            table.hold(name, function)

    def _table(self) -> CodeTable:
        table = self._host.functions.code
        if table is None:
            raise RejectedError(
                "a function arrived by value, and this worker's policy is strict: it"
                " takes functions by name alone; let both import it",
                outcome=Outcome.NOT_EXECUTED,
            )
        return table

    def held_for(self, peer: Incarnation) -> int:
        """Return how many bytes of code of a peer are held here."""
        return sum(self._held.get(peer, {}).values())

    def on_peer_lost(self, peer: Any, _reason: str) -> None:
        """Let go of the code of a peer, and of what is known of it."""
        for name in self._held.pop(peer.incarnation, ()):
            self._table().let_go(name)
        for link in [link for link in self._sent if link.peer == peer]:
            del self._sent[link]

    async def close(self) -> None:
        """Let go of all code."""
        self._sent.clear()
        self._held.clear()


def _check_room(link: PeerLink, held: dict[str, int], size_bytes: int) -> None:
    """Refuse a further piece of a peer that keeps too many here."""
    if len(held) >= PIECES_MAX or sum(held.values()) + size_bytes > BYTES_MAX:
        raise MalformedError(
            f"a peer keeps at most {PIECES_MAX} functions and {BYTES_MAX} bytes of code"
            " here"
        )
    link.check_room(size_bytes)


class _SentCode:
    """What one peer has been sent.

    Attributes:
        on_their_way: pieces that it has not got yet.
    """

    def __init__(self) -> None:
        self._sizes: OrderedDict[str, int] = OrderedDict()  # the last used is the last
        self._bytes = 0
        self.on_their_way: dict[str, asyncio.Future[None]] = {}

    def has(self, name: CodeName) -> bool:
        """Return whether the peer has a piece, which is used now."""
        if name not in self._sizes:
            return False
        self._sizes.move_to_end(name)
        return not self.on_their_way or name not in self.on_their_way

    def make_room(self, name: CodeName) -> list[str]:
        """Forget the pieces that a further one displaces; return their names."""
        dropped = []
        size_bytes = len(name.content)
        while self._sizes and (
            len(self._sizes) >= PIECES_MAX or self._bytes + size_bytes > BYTES_MAX
        ):
            dropped.append(next(iter(self._sizes)))
            self._forget(dropped[-1])
        return dropped

    def begin(self, name: CodeName, putting: asyncio.Future[None]) -> None:
        """Note that a piece is being sent."""
        key = str(name)
        self._sizes[key] = len(name.content)
        self._bytes += len(name.content)
        self.on_their_way[key] = putting
        putting.add_done_callback(lambda done: self._on_put(key, done))

    def _on_put(self, name: str, putting: asyncio.Future[None]) -> None:
        if self.on_their_way.get(name) is putting:
            del self.on_their_way[name]
            if putting.cancelled() or putting.exception() is not None:
                self._forget(name)

    def _forget(self, name: str) -> None:
        self._bytes -= self._sizes.pop(name, 0)


def _release_after(put: asyncio.Future[None], message: PendingBuffers) -> None:
    """Let a message go once its code is there; fail it if that cannot come."""

    def on_put(done: asyncio.Future[None]) -> None:
        error = None if done.cancelled() else done.exception()
        if done.cancelled():
            error = RejectedError("the worker is shutting down")
        if error is None:
            message.release()
            return
        if not isinstance(error, AsyncRpcError):
            error = EncodeError(f"its code could not be sent: {error}")
        if isinstance(error, CallError):
            error.outcome = Outcome.NOT_EXECUTED  # of what waits for it
        message.fail(error)

    put.add_done_callback(on_put)

"""The contract of a transport: an ordered stream of bytes, and nothing about messages.

Every transport owes the same behaviour and the same errors; the tests
hold them to it.

*   Bytes arrive in the order in which they were sent, whole or not at all.
*   `send` never blocks, never copies and never raises for what the network does: the
    buffers are the transport's until they are written, and must not change until then.
*   The handler says where received bytes go (`get_buffer`), so a payload can land in
    its final place.
*   `connection_lost` is called exactly once, whichever side ended it and however.

The handler is asyncio's `BufferedProtocol` in all but name: on a socket the event loop
calls its `get_buffer` and `buffer_updated` directly, with nothing in between.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from asyncrpc.core.transport.address import Address
from asyncrpc.errors import TransportError

if TYPE_CHECKING:
    from asyncrpc.core.transport.flow import WaterMarks

Buffer: TypeAlias = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class PeerCredentials:
    """The process at the other end of a Unix socket, as the kernel states it."""

    pid: int
    uid: int
    gid: int


class StreamHandler(Protocol):
    """Receives the bytes of one connection.  All methods run on the event loop."""

    def connection_made(self, transport: Transport) -> None:
        """Called once, before anything else."""

    def get_buffer(self, sizehint: int, /) -> memoryview | bytearray:
        """Return where the next bytes must land; at least one byte long."""

    def buffer_updated(self, nbytes: int, /) -> None:
        """`nbytes` bytes have landed in what `get_buffer` returned."""

    def connection_lost(self, error: TransportError | None, /) -> None:
        """Called once, at the end.  None: this side or the peer closed in order."""

    def pause_writing(self) -> None:
        """More than the high-water mark is queued: hold back what can wait."""

    def resume_writing(self) -> None:
        """The queue has fallen below the low-water mark."""


class Transport(ABC):
    """One connection."""

    @property
    @abstractmethod
    def remote(self) -> str:
        """Where the other end is, for people to read."""

    @property
    @abstractmethod
    def scheme(self) -> str:
        """`tcp`, `uds` or `mem`."""

    @property
    def credentials(self) -> PeerCredentials | None:
        """Return the process at the other end if the kernel names it, else None."""
        return None

    @property
    def channel_binding(self) -> bytes:
        """Return a name that only the two ends of this channel share; empty if none."""
        return b""

    @property
    def has_begun(self) -> bool:
        """Return whether the peer has begun a handshake of the channel's own."""
        return False

    @abstractmethod
    def send(self, buffers: Sequence[Buffer]) -> None:
        """Queue buffers, in order.  After `close` or `abort` they are dropped.

        The buffers are not copied: they must not change until they are written.
        """

    @property
    @abstractmethod
    def queued_bytes(self) -> int:
        """Bytes accepted by `send` and not yet taken by the kernel (or the peer)."""

    @abstractmethod
    def pause_reading(self) -> None:
        """Stop calling `get_buffer`; idempotent."""

    @abstractmethod
    def resume_reading(self) -> None:
        """Undo `pause_reading`; idempotent."""

    @abstractmethod
    def use_marks(self, marks: WaterMarks) -> None:
        """Use other water marks than the connector's."""

    @abstractmethod
    def set_handler(self, handler: StreamHandler) -> None:
        """Give everything that happens from now on to another handler.

        The new handler does not get `connection_made`.  If writing is paused, it gets
        `resume_writing` when there is room again.
        """

    @abstractmethod
    def close(self) -> None:
        """Write what is queued, then end: `connection_lost(None)`.  Idempotent."""

    @abstractmethod
    def abort(self) -> None:
        """End now and drop what is queued; `connection_lost` follows.  Idempotent."""


class Listener(ABC):
    """A place where connections arrive."""

    @property
    @abstractmethod
    def addresses(self) -> tuple[Address, ...]:
        """Return every address at which this listener can be reached, best first.

        Ports are the real ones: a listener bound to port 0 reports the one that it got.
        """

    @abstractmethod
    async def close(self) -> None:
        """Stop accepting and free the address.  Connections live on.  Idempotent."""


class Connector(ABC):
    """One way of making connections: a scheme."""

    scheme: str

    @abstractmethod
    async def listen(
        self, address: Address, accept: Callable[[], StreamHandler]
    ) -> Listener:
        """Listen at `address`; each connection gets the handler that `accept` makes."""

    @abstractmethod
    async def connect(self, address: Address, handler: StreamHandler) -> Transport:
        """Connect to `address`; `handler.connection_made` has run when this returns."""

"""Places of a store that workers meet at: given by the program, or at a TCP address."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from torch.distributed import (  # type: ignore[attr-defined]
    FileStore,
    PrefixStore,
    TCPStore,
)

from asyncrpc.core.loop.clock import Clock
from asyncrpc.core.transport.endpoints import Endpoint, reason_of
from asyncrpc.core.transport.meeting import MeetingAddress, ResolvedName
from asyncrpc.errors import RendezvousTimeoutError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

KNOCK_S: Final = 0.1  # between attempts to find the host of a store
# Rank 0 may come so much later than another process at the address, and host the store.
GRACE_S: Final = 2.0
OPEN_S: Final = 5.0  # for torch to connect: its thread cannot be cancelled

_now_s: Final = Clock().now_s


class Hosting(enum.Enum):
    """Whether a process hosts the store of its group."""

    NEVER = "another process is known to: the launcher, or rank 0 beside this one"
    AT_ONCE = "if the address is one of this host's; this is rank 0"
    LATE = "if the address is one of this host's, and no process listens for a while"


class StorePlace(Protocol):
    """Where a store is.

    Attributes:
        is_host: whether this worker keeps the store alive until all have read it.
        may_come_back: whether a store that is lost can be found again.
    """

    is_host: bool
    may_come_back: bool

    async def find(self, end_s: float, timeout_s: float) -> Callable[[float], Store]:
        """Wait for the store; return what opens it within so many seconds."""

    async def visit(self, limit_s: float) -> Callable[[float], Store]:
        """Return what opens the store that is there now; raise OSError without one."""

    def apart(self, store: Store) -> Store:
        """Return the part of it in which the group of this attempt meets."""

    def lost(self, timeout_s: float, why: str) -> RendezvousTimeoutError:
        """Return the error for a store that was lost before all had met."""

    def close(self) -> None:
        """Let go of the store."""


class GivenStore:
    """A store that can be opened at once: in a file, or one that the program has."""

    may_come_back = False

    def __init__(self, open_store: Callable[[], Store], *, is_host: bool) -> None:
        self.is_host = is_host
        self._open_store = open_store

    @classmethod
    def in_file(cls, path: str, *, is_host: bool) -> GivenStore:
        """Return the store in a file."""
        return cls(lambda: FileStore(path), is_host=is_host)

    async def find(self, end_s: float, timeout_s: float) -> Callable[[float], Store]:
        """Return what opens it."""
        return lambda _timeout_s: self._open_store()

    async def visit(self, limit_s: float) -> Callable[[float], Store]:
        """Return what opens it."""
        return lambda _timeout_s: self._open_store()

    def apart(self, store: Store) -> Store:
        """Return all of it."""
        return store

    def lost(self, timeout_s: float, why: str) -> RendezvousTimeoutError:
        """Return the error for its loss."""
        return RendezvousTimeoutError(
            f"the store for the rendezvous was lost ({why}); the process that serves "
            "it has ended",
            missing=(),
        )

    def close(self) -> None:
        """Do nothing: it is not this worker's."""


class TcpPlace:
    """A store at a TCP address; the process there that gets the port hosts it.

    Rank 0 need not be at the address: srun and mpirun may have put it elsewhere.  But
    if it is there, it is the host: torch's own process group expects that.
    """

    may_come_back = True

    def __init__(
        self, address: MeetingAddress, hosting: Hosting, *, attempt: str = "0"
    ) -> None:
        """Describe the place.

        Args:
            attempt: which of several groups that meet there, one after the other, this
                is; the first one is "0".
        """
        self.address = address
        self.is_host = False
        self._hosting = hosting
        self._attempt = attempt
        self._offered: Store | None = None

    async def find(self, end_s: float, timeout_s: float) -> Callable[[float], Store]:
        """Wait until a process listens; return what opens the store.

        torch waits for that as well, but in a thread that cannot be cancelled.
        """
        begun_s, problem = _now_s(), ""
        while (left_s := end_s - _now_s()) > 0:
            try:
                resolved = await self.address.look(left_s)
                if self._may_host(resolved, _now_s() - begun_s) and self._host(
                    resolved
                ):
                    return self._open_own
                listening = await self.address.knock(resolved.endpoints, left_s)
            except OSError as error:  # TimeoutError is one
                # What the end of the time cuts short says less than what was before.
                is_cut = _now_s() >= end_s
                problem = problem if problem and is_cut else reason_of(error)
                await asyncio.sleep(max(0.0, min(KNOCK_S, end_s - _now_s())))
            else:
                return partial(self._open, listening.host)
        raise self.lost(timeout_s, problem)

    async def visit(self, limit_s: float) -> Callable[[float], Store]:
        """Return what opens a store that is there now; never host one."""
        if self._offered is not None:
            return self._open_own
        async with asyncio.timeout(limit_s):
            resolved = await self.address.look(limit_s)
            listening = await self.address.knock(resolved.endpoints, limit_s)
        return partial(self._open, listening.host)

    def lost(self, timeout_s: float, why: str) -> RendezvousTimeoutError:
        """Return the error for a store that cannot be found, or found again."""
        return RendezvousTimeoutError(
            f"the meeting place {self.address} cannot be reached in {timeout_s:g} s: "
            f"{why or 'no time was left'}; missing: a worker at this address, such as "
            "rank 0, or the launcher that serves the store there",
            missing=(str(self.address),),
        )

    def _may_host(self, resolved: ResolvedName, waited_s: float) -> bool:
        if self._hosting is Hosting.NEVER or self._offered is not None:
            return False
        if self._hosting is Hosting.AT_ONCE:
            # A name that leads here through another address, such as that of a
            # Kubernetes service, looks like one where no process listens; so the port
            # is offered here, too.
            return bool(resolved.local) or waited_s >= GRACE_S
        return resolved.is_here and waited_s >= GRACE_S

    def _host(self, resolved: ResolvedName) -> bool:
        """Try to host the store; return whether the address leads to it."""
        descriptor = self.address.bind()
        if descriptor is None:  # another process of this host does
            return False
        host = resolved.local[0].host if resolved.local else "127.0.0.1"
        self._offered = TCPStore(
            host,
            self.address.port,
            is_master=True,
            timeout=timedelta(seconds=OPEN_S),
            wait_for_workers=False,
            multi_tenant=True,  # torch's process group of this process may share it
            master_listen_fd=descriptor,  # from here on the store's to close
        )
        self.is_host = True
        return bool(resolved.local)

    def _open_own(self, _timeout_s: float) -> Store:
        assert self._offered is not None
        return self._offered

    def _open(self, host: str, timeout_s: float) -> Store:
        return TCPStore(
            host,
            self.address.port,
            is_master=False,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )

    def apart(self, store: Store) -> Store:
        """Return the part of a store in which the group of this attempt meets."""
        if self._attempt == "0":
            return store
        return PrefixStore(f"attempt{self._attempt}", store)

    def close(self) -> None:
        """Let go of the store that is hosted here."""
        self._offered = None

    async def is_second(self) -> bool:
        """Return whether another store at the same name comes before this process's.

        A name of several hosts may show one of them first, and another later; each may
        have hosted a store when it saw itself alone.  Of those that listen, the one at
        the lowest address is the meeting point.  A name that leads here by the address
        of something in between, such as a Service, says nothing of that.
        """
        try:
            resolved = await self.address.look(OPEN_S)
            own = min(map(_order, resolved.local), default=None)
            before = [
                endpoint
                for endpoint in resolved.endpoints
                if endpoint not in resolved.local
                and own is not None
                and _order(endpoint) < own
            ]
            if not before or self._offered is None:
                return False
            await self.address.knock(sorted(before, key=_order), OPEN_S)
        except OSError:
            return False
        return True

    def give_way(self) -> None:
        """Close the hosted store, and host no other unless the name is this host's."""
        self.close()
        self.is_host = False
        self._hosting = Hosting.LATE


def _order(endpoint: Endpoint) -> tuple[int, bytes]:
    return endpoint.address.version, endpoint.address.packed

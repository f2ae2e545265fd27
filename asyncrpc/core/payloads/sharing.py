"""Shared memory between this worker and its peers on the same host: a `Service`.

A worker has one set of slabs, for all its peers.  The set grows in the background when
a payload finds no room, within `LimitOptions.shared_memory_bytes`, and shrinks when
slabs have not been used for a while.  A peer that needs a slab receives its descriptor
once (`transport.descriptors`), and then its id over the connection.

    a sends, for the first time     b
      payload by the socket  --->
      makes a slab
      descriptor, token      --->   keeps it
      attach [id, size, token] -->  claims and maps it
                             <---   attached [id, ""]
      message with locations --->   makes tensors over the slab
                             <---   FREE location, when they are dead

Of the memory that peers lend to this worker, each place that a message refers to
becomes a view backed by a `Lease`, which dies with the last tensor over that view, in
any thread; then the place goes back to its sender.  All places of one turn of the loop
go back together, or just before an answer that is written in that turn.

No memory outlives its processes: a slab has no name, and all places that a peer held
are free when its connection ends.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, Self

import numpy as np
import torch

from asyncrpc.core.calls.ports import CallHost
from asyncrpc.core.host.shortage import shortage_of
from asyncrpc.core.ids import WorkerId
from asyncrpc.core.loop.tasks import Tasks
from asyncrpc.core.loop.threads import thread_blocked
from asyncrpc.core.payloads.messages import (
    MEMORY,
    AttachSlab,
    DetachSlabs,
    SlabAttached,
)
from asyncrpc.core.payloads.mover import (
    PLACED_BYTES_MIN,
    REST_S,
    REST_S_MAX,
    CopyQueue,
    OwnSlabs,
    SlabMover,
    in_pages,
)
from asyncrpc.core.payloads.ports import PayloadLink
from asyncrpc.core.payloads.regions import Regions
from asyncrpc.core.services.ports import PeerLink
from asyncrpc.core.services.router import takes
from asyncrpc.core.shm.machine.pool import OFFSET_BITS, OFFSET_MASK, Block
from asyncrpc.core.shm.slab import Slab, is_supported
from asyncrpc.core.transport.address import Address
from asyncrpc.core.transport.descriptors import (
    TOKEN_BYTES,
    DescriptorInbox,
    send_descriptor,
)
from asyncrpc.core.wire.frames import FrameKind, Hello, prefix
from asyncrpc.errors import (
    AsyncRpcError,
    MalformedError,
    Outcome,
    RejectedError,
    TransportError,
)

logger = logging.getLogger("asyncrpc")

_OWN: Final = "slab"
_PEERS: Final = "peer's slab"
_TAKEN: Final = "taken"
_RETURNED: Final = "returned"

# A slab that was not used for this time, or twice, is given back to the system.
SWEEP_S: Final = 10.0
ATTACH_TIMEOUT_S: Final = 30.0  # touching the pages of a large slab takes a second

_FREE: Final = int(FrameKind.FREE)


class Lender(Protocol):
    """Gets places back: `Sharing` its own, and `Borrowed` those of a peer."""

    def take_back(self, locations: list[int]) -> None:
        """Take back places that are no longer used."""


class Borrowed:
    """The slabs of one peer that this worker has mapped.

    Attributes:
        slabs: the mapped slabs by id; the peer chooses the ids.
    """

    __slots__ = ("_leases", "link", "slabs")

    def __init__(self, leases: Leases, link: PayloadLink) -> None:
        self._leases = leases
        self.link = link
        self.slabs: dict[int, Slab] = {}

    @property
    def size_bytes(self) -> int:
        """The total size of all slabs."""
        return sum(slab.size_bytes for slab in list(self.slabs.values()))

    def place(self, location: int, nbytes: int) -> memoryview:
        """Return the memory that a message of the peer refers to."""
        slab = self.slabs.get(location >> OFFSET_BITS)
        start = location & OFFSET_MASK
        if slab is None or not nbytes or start + nbytes > slab.size_bytes:
            raise MalformedError(
                f"{nbytes} bytes at {location:#x} do not lie in a slab of the peer"
            )
        return self._leases.lend(self, slab, location, nbytes)

    def take_back(self, locations: list[int]) -> None:
        """Tell the peer that these places are free again."""
        if not self.link.is_lost:
            join = self.link.connection.join
            for location in locations:
                join(prefix(_FREE, location))


class Leases:
    """The leases of places in the slabs of peers, and in the worker's own slabs.

    Attributes:
        dead: dead leases whose places have not gone back yet.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread_id = threading.get_ident()
        self._watches: set[_LeaseWatch] = set()
        self._noted = False
        self.dead: deque[_LeaseWatch] = deque()

    def __len__(self) -> int:
        """Return the number of places in use."""
        return len(self._watches) - len(self.dead)

    def lend(
        self, lender: Lender, slab: Slab, location: int, nbytes: int
    ) -> memoryview:
        """Return a view of a place; the place goes back when the view is dead."""
        lease = Lease(slab)
        self._watches.add(_LeaseWatch(lease, self._on_death, lender, location))
        return slab.view(lease, location & OFFSET_MASK, nbytes)

    def _on_death(self, watch: _LeaseWatch) -> None:
        """Queue a place for the loop: this may run in any thread, at any time."""
        self.dead.append(watch)
        if self._noted:
            return
        self._noted = True
        is_here = threading.get_ident() == self._thread_id
        loop = self._loop
        try:
            (loop.call_soon if is_here else loop.call_soon_threadsafe)(self._on_noted)
        except RuntimeError:  # the loop is closed, and with it every link
            self.dead.clear()

    def _on_noted(self) -> None:
        self._noted = False
        self.give_back()

    def give_back(self) -> None:
        """Give dead places back to their lenders.  Cheap if no lease has died."""
        by_lender: dict[Lender, list[int]] = {}
        while self.dead:
            watch = self.dead.popleft()
            self._watches.discard(watch)
            by_lender.setdefault(watch.lender, []).append(watch.location)
        for lender, locations in by_lender.items():
            lender.take_back(locations)


class Sharing:
    """The slabs of one worker, and the mapped slabs of its peers.

    Attributes:
        own: the worker's own slabs.
        pool: the blocks in the own slabs, and their holders.
        slabs: the own slabs by id.
        leases: the leases of places in slabs.
        inbox: takes the descriptors of memory that peers share.
        regions: memory that travels by reference.
        is_on: whether this worker uses shared memory at all.
    """

    name = MEMORY

    def __init__(self, host: CallHost) -> None:
        self._host = host
        self.routes = [
            takes(AttachSlab, self._on_attach),
            takes(SlabAttached, self._on_attached),
            takes(DetachSlabs, self._on_detach),
        ]
        limit_bytes = host.limits.shared_memory_bytes
        self._limit_bytes = limit_bytes
        self.is_on = bool(limit_bytes) and is_supported
        self.own = OwnSlabs(limit_bytes)
        self.pool = self.own.pool
        self.slabs = self.own.by_id
        self.leases = Leases(host.loop)
        self.inbox = DescriptorInbox(host.loop)
        self.regions = Regions(host, self)
        self._borrowed: dict[PeerLink, Borrowed] = {}
        self._movers: dict[PeerLink, SlabMover] = {}
        self._copies = CopyQueue(host.loop)
        # Slabs on their way to a peer; done when the peer has mapped or refused them.
        self._passing: dict[tuple[PeerLink, int], asyncio.Future[str]] = {}
        self._is_growing = False
        self._is_closed = False
        self._sweeping: asyncio.TimerHandle | None = None

    async def listen(self, path: str) -> None:
        """Take descriptors at a socket next to `path`; without it share no memory."""
        if self.is_on:
            try:
                await self.inbox.listen(path)
            except TransportError as error:
                logger.debug("worker %r: no shared memory: %s", self._host.name, error)

    def on_link(self, link: PayloadLink) -> None:
        """Let payloads of a new link go through shared memory, if on this host."""
        connection = link.connection
        credentials = connection.credentials
        if not self.is_on or connection.scheme != "uds" or credentials is None:
            return
        if credentials.uid != os.geteuid():
            return
        borrowed = self._borrowed[link] = Borrowed(self.leases, link)
        mover = SlabMover(
            self.own,
            self._copies,
            link,
            _socket_path(connection.peer),
            extend=self.extend,
            on_end=self.on_link_lost,
        )
        self._movers[link] = mover
        connection.share_memory(mover, borrowed.place)

    def on_link_lost(self, mover: SlabMover) -> None:
        """Take back the places that the peer held, and unmap its slabs."""
        for (link, _), attached in self._passing.items():
            if link is mover.link and not attached.done():
                attached.set_result("the connection has ended")
        self._movers.pop(mover.link, None)
        borrowed = self._borrowed.pop(mover.link, None)
        if borrowed is not None:
            if borrowed.slabs:
                self._note(_PEERS, _RETURNED, borrowed.size_bytes)
            borrowed.slabs.clear()
        self.regions.on_link_lost(mover.link)
        self.pool.release_all(mover)
        self._let_go_if_closed()

    def mover_of(self, link: PeerLink) -> SlabMover | None:
        """Return the mover of payloads to a peer, if memory is shared with it."""
        return self._movers.get(link)

    @property
    def own_bytes(self) -> int:
        """Total size of the own slabs.

        Thread safety: from any thread.
        """
        return sum(slab.size_bytes for slab in list(self.slabs.values()))

    @property
    def borrowed_bytes(self) -> int:
        """Total size of the slabs of peers that are mapped here.

        Thread safety: from any thread.
        """
        return sum(slabs.size_bytes for slabs in list(self._borrowed.values()))

    def _note(self, memory: str, change: str, nbytes: int) -> None:
        recorder = self._host.recorder
        recorder.memory.record((recorder.now_s(), memory, change, nbytes))

    # --- growing and shrinking -------------------------------------------------------

    def extend(self, mover: SlabMover, needed_bytes: int) -> None:
        """Get a peer more room, in the background, as far as the limit allows."""
        if mover.is_busy or self._host.is_draining or self._is_closed:
            return
        if self._host.loop.time() < mover.rests_until_s:
            return
        slab, mover.unattached = mover.unattached, -1
        if slab < 0 or slab not in self.slabs:
            spare_slab = self.pool.find_room(needed_bytes, without=mover.attached)
            slab = -1 if spare_slab is None else spare_slab
        size_bytes = 0
        if slab < 0:
            size_bytes = 0 if self._is_growing else self.pool.reserve(needed_bytes)
            if not size_bytes:
                return
        mover.is_busy = True
        self._host.start_task(self._extend(mover, slab, size_bytes))

    async def _extend(self, mover: SlabMover, slab: int, size_bytes: int) -> None:
        try:
            if slab < 0:
                slab = await self._grow(size_bytes)
            if slab in self.slabs:  # else it was given back before this task began
                await self._pass(mover, slab)
            mover.rest_s = REST_S
        except (AsyncRpcError, OSError, TimeoutError) as error:
            mover.rests_until_s = self._host.loop.time() + mover.rest_s
            mover.rest_s = min(2 * mover.rest_s, REST_S_MAX)
            logger.log(
                logging.WARNING if shortage_of(error) else logging.DEBUG,
                "worker %r: no more shared memory with %r for now, so payloads go by "
                "the socket: %s",
                self._host.name,
                mover.link.peer.name,
                shortage_of(error) or error,
            )
        finally:
            mover.is_busy = False

    async def _grow(self, size_bytes: int) -> int:
        """Make a slab that has been reserved; return its id."""
        self._is_growing = True
        slab: Slab | None = None
        try:
            slab = await self._host.run_on_host(
                lambda: Slab.create(size_bytes).prefault()
            )
        finally:
            self._is_growing = False
            if slab is None:
                self.pool.cancel(size_bytes)
        return self._add(slab)

    def _add(self, new_slab: Slab) -> int:
        slab = self.own.add(new_slab)
        self._note(_OWN, _TAKEN, new_slab.size_bytes)
        if self._sweeping is None:
            self._sweeping = self._host.loop.call_later(SWEEP_S, self._sweep)
        return slab

    async def _pass(self, mover: SlabMover, slab: int) -> None:
        """Make a peer map one of our slabs.

        Uses notices: a request would count as a call, and shutdown waits for calls.
        """
        memory, token = self.slabs[slab], os.urandom(TOKEN_BYTES)
        link, key = mover.link, (mover.link, slab)
        attached = self._passing[key] = self._host.loop.create_future()
        try:
            await self._host.run_on_host(
                lambda: send_descriptor(mover.path, token, memory.descriptor)
            )
            link.tell(AttachSlab(slab, memory.size_bytes, token))
            async with asyncio.timeout(ATTACH_TIMEOUT_S):
                refusal = await attached
        finally:
            del self._passing[key]
        if refusal:
            raise _rejected(refusal)
        mover.attached.append(slab)

    def _sweep(self) -> None:
        self._sweeping = None
        idle = self.pool.sweep({slab for _, slab in self._passing})
        for slab in idle:
            self._note(_OWN, _RETURNED, self.slabs.pop(slab).size_bytes)
        for mover in self._movers.values():
            gone = [slab for slab in idle if slab in mover.attached]
            if gone:
                mover.attached = [
                    attached for attached in mover.attached if attached not in gone
                ]
                mover.link.tell(DetachSlabs(gone))
        if self.slabs:
            self._sweeping = self._host.loop.call_later(SWEEP_S, self._sweep)

    # --- own tensors -----------------------------------------------------------------

    def empty(self, nbytes: int) -> memoryview | None:
        """Return memory in an own slab, held until the last view of it is dead.

        Its content is arbitrary.  None if there is no room.
        """
        if not self.is_on or self._is_closed or nbytes < PLACED_BYTES_MIN:
            return None
        block = self.pool.allocate(nbytes, self.slabs)
        if block is None:
            block = self._allocate_in_new(nbytes)
        if block is None:
            return None
        slab = self.slabs[block.slab]
        self.pool.hold(self, block, block.location)
        self.own.note_tensor(block, nbytes)
        return self.leases.lend(self, slab, block.location, nbytes)

    def _allocate_in_new(self, nbytes: int) -> Block | None:
        """Take a block from a new slab, whose pages are touched afterwards."""
        size_bytes = self.pool.reserve(in_pages(nbytes))
        if not size_bytes:
            return None
        try:
            new_slab = Slab.create(size_bytes)
        except OSError as error:
            self.pool.cancel(size_bytes)
            logger.debug("worker %r: no slab: %s", self._host.name, error)
            return None
        slab = self._add(new_slab)
        self._host.run_on_host(new_slab.prefault)
        return self.pool.allocate(nbytes, (slab,))

    def take_back(self, locations: list[int]) -> None:
        """Release places whose own tensors are dead; peers may still hold them."""
        self.own.forget_tensors(locations)
        for location in locations:
            self.pool.release(self, location)

    # --- notices of peers ------------------------------------------------------------

    def _on_attach(self, link: PeerLink, request: AttachSlab) -> None:
        self._host.start_task(self._attach(link, request))

    async def _attach(self, link: PeerLink, request: AttachSlab) -> None:
        """Map a slab of a peer, and answer."""
        try:
            await self._map(link, request)
            refusal = ""
        except (AsyncRpcError, OSError, TimeoutError) as error:
            refusal = str(error) or "its descriptor has not arrived"
        if not link.is_lost:
            link.tell(SlabAttached(request.slab, refusal))

    async def _map(self, link: PeerLink, request: AttachSlab) -> None:
        borrowed, slab = self._borrowed.get(link), request.slab
        if borrowed is None:
            raise _rejected("this worker shares no memory with you")
        limit_bytes = self._limit_bytes
        if borrowed.size_bytes + request.size_bytes > limit_bytes:
            raise _rejected(
                f"at most {limit_bytes} bytes of a peer's memory are mapped"
            )
        if slab in borrowed.slabs:
            raise MalformedError(f"slab {slab} was passed twice")
        descriptor = await self.inbox.claim(request.token)
        if self._borrowed.get(link) is not borrowed:  # nothing would unmap it
            os.close(descriptor)
            raise _rejected("the connection has ended")
        mapped = Slab.attach(descriptor, request.size_bytes)
        borrowed.slabs[slab] = mapped
        self._note(_PEERS, _TAKEN, mapped.size_bytes)
        await self._host.run_on_host(mapped.prefault)

    def _on_attached(self, link: PeerLink, answer: SlabAttached) -> None:
        attached = self._passing.get((link, answer.slab))
        if attached is not None and not attached.done():
            attached.set_result(answer.refusal)

    def _on_detach(self, link: PeerLink, message: DetachSlabs) -> None:
        """Unmap slabs; a slab that was never passed does not affect the others."""
        borrowed = self._borrowed.get(link)
        known = {} if borrowed is None else borrowed.slabs
        wrong = [slab for slab in message.slabs if not self._unmap(known, slab)]
        if wrong:
            raise MalformedError(f"slab {wrong[0]} was never passed")

    def _unmap(self, known: dict[int, Slab], slab: int) -> bool:
        """Let go of a peer's slab; return whether it was mapped.

        It stays mapped for as long as anything refers to it, a frame included.
        """
        mapped = known.pop(slab, None)
        if mapped is None:
            return False
        self._note(_PEERS, _RETURNED, mapped.size_bytes)
        return True

    def take_back_from(self, link: PeerLink, location: int) -> None:
        """Take back a place that a peer does not use any more."""
        self.pool.release(self._movers.get(link), location)

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        """Do nothing: the end of the connection has released the peer's memory."""

    async def close(self) -> None:
        """Stop listening; mapped memory stays until its tensors are dead."""
        self.inbox.close()
        self._is_closed = True
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        for slab in self.slabs.values():
            slab.close_descriptor()
        self._let_go_if_closed()

    def _let_go_if_closed(self) -> None:
        """Unmap our slabs once no message can be sent through them any more."""
        if self._is_closed and not self._movers:
            self.slabs.clear()


def empty_tensor(
    memory: Sharing, tasks: Tasks, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Return a tensor in shared memory, or a plain one; from any thread."""
    sizes = [int(size) for size in shape]
    nbytes = math.prod(sizes) * dtype.itemsize
    if threading.get_ident() == tasks.thread_id:
        view = memory.empty(nbytes)
    else:
        allocated: concurrent.futures.Future[memoryview | None] = (
            concurrent.futures.Future()
        )
        tasks.loop.call_soon_threadsafe(
            lambda: allocated.set_result(memory.empty(nbytes))
        )
        with thread_blocked():
            view = allocated.result()
    if view is None:
        return torch.empty(sizes, dtype=dtype, device="cpu")
    flat = torch.from_numpy(np.ndarray(nbytes, np.uint8, view))
    return flat.view(dtype).view(sizes)


def _rejected(why: str) -> RejectedError:
    return RejectedError(why, outcome=Outcome.NOT_EXECUTED)


def _socket_path(hello: Hello | None) -> str:
    """Return the path of a peer's Unix socket; empty if it has no such address."""
    addresses = Address.parse_all(() if hello is None else hello.addresses)
    return next((address.host for address in addresses if address.scheme == "uds"), "")


class Lease:
    """Lives as long as a place is in use; keeps the slab mapped."""

    __slots__ = ("__weakref__", "_slab")

    def __init__(self, slab: Slab) -> None:
        self._slab = slab


class _LeaseWatch(weakref.ref[Lease]):
    """Reports the death of a lease, at half the cost of `finalize`."""

    __slots__ = ("lender", "location")

    lender: Lender
    location: int

    def __new__(cls, lease: Lease, on_death: Callable[[Any], None], *_: object) -> Self:
        return super().__new__(cls, lease, on_death)

    def __init__(
        self,
        lease: Lease,
        on_death: Callable[[Any], None],
        lender: Lender,
        location: int,
    ) -> None:
        self.lender = lender
        self.location = location

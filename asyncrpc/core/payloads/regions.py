"""Memory that tensors share across processes: `asyncrpc.share`; a `Service`.

A *region* is a storage that travels by reference, identified by a random key.  A
message that refers to a region carries the key; both ends must have the region before
the message is read.  So the first message to a peer that refers to the region is held
back until the peer has confirmed it; other messages overtake it.

    a                                  b
      has [[key, bytes], ...]     -->    looks
                                 <--     [whether it has it, ...]
      descriptor, token           -->    keeps it
      attach [key, bytes, token]  -->    claims and maps it
                                 <--     nil
      the message                 -->

Memory of a device is not passed by a descriptor, but by a handle of the device, and
`loans` keeps it alive while another process uses it.  A message with such memory also
waits for computations that are still running on the device.

From then on either end may refer to the region.  A worker keeps a region until no
tensor has used it for `IDLE_S`; then it tells the peers that they cannot count on the
region any more (`gone`), and lets go of it once they know.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch

from asyncrpc.core.calls.deferred import PendingBuffers
from asyncrpc.core.calls.ports import CallHost
from asyncrpc.core.host.shortage import shortage_of
from asyncrpc.core.ids import WorkerId
from asyncrpc.core.loop.clock import Deadline
from asyncrpc.core.payloads.loans import (
    Loans,
    MemoryLoan,
    is_borrowed,
    keep_until_dead,
)
from asyncrpc.core.payloads.machine.regions import KeptRegions, RegionQuestion
from asyncrpc.core.payloads.messages import (
    REGIONS,
    AttachPart,
    AttachRegion,
    HasRegions,
    KeyedRegion,
    OpenRegion,
    RegionsGone,
)
from asyncrpc.core.payloads.ports import PayloadLink
from asyncrpc.core.serde import Encoded, Policy
from asyncrpc.core.serde.encoded import mark
from asyncrpc.core.serde.shared import MappedFiles, is_sealed, users_of
from asyncrpc.core.services.ports import PeerLink, ask
from asyncrpc.core.services.router import Route, answers
from asyncrpc.core.services.schema import Request
from asyncrpc.core.transport.descriptors import (
    TOKEN_BYTES,
    send_descriptor,
)
from asyncrpc.errors import (
    AsyncRpcError,
    DecodeError,
    EncodeError,
    MalformedError,
    Outcome,
    RejectedError,
    TransportError,
)

if TYPE_CHECKING:
    from asyncrpc.core.payloads.sharing import Sharing

T = TypeVar("T")
R = TypeVar("R", bound=Request[Any])
Mark = tuple[torch.device, Any]

logger = logging.getLogger("asyncrpc")

# A training loop comes back within this time.  A region is kept for this time or twice
# as long.
IDLE_S: Final = 5.0
PASSING_MAX: Final = 16  # at once, of one message
CONFIRM_TIMEOUT_S: Final = 10.0
# How often a peer is asked if it lets go meanwhile; a correct peer is asked twice.
QUESTIONS_MAX: Final = 3
_STRICT: Final = Policy.STRICT


class Regions:
    """The regions that one worker knows; `find` is a `serde.FindStorage`."""

    name = REGIONS

    def __init__(self, host: CallHost, memory: Sharing) -> None:
        self.routes = [
            self._route(HasRegions, self._on_has),
            self._route(AttachRegion, self._on_attach),
            self._route(AttachPart, self._on_attach),
            self._route(OpenRegion, self._on_open),
            self._route(RegionsGone, self._on_gone),
        ]
        self._host = host
        self._memory = memory
        self._kept: KeptRegions[PeerLink, torch.UntypedStorage] = KeptRegions(
            has_users=lambda storage: users_of(storage) > 1
        )
        self._files = MappedFiles()
        self.loans = Loans(host.loop, self._end_loan)
        self._sweeping: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Return the number of kept regions."""
        return len(self._kept)

    # --- sending and receiving -------------------------------------------------------

    def refer(self, link: PayloadLink, encoded: Encoded) -> None:
        """Hold a message back until the peer has the regions that it refers to."""
        shared = encoded.shared or {}
        mover = self._memory.mover_of(link)
        if mover is None or mover.is_refused:
            raise EncodeError(
                "a tensor marked by asyncrpc.share cannot be sent to "
                f"{link.peer.name!r}: the two workers share no memory (connection: "
                f"{link.connection.scheme or 'none'}); send tensor.clone()",
                outcome=Outcome.NOT_EXECUTED,
            )
        try:
            for key, storage in shared.items():
                self._keep(key, storage)
        except RejectedError as error:
            raise EncodeError(
                f"a tensor marked by asyncrpc.share cannot be sent: {error.problem}",
                outcome=Outcome.NOT_EXECUTED,
            ) from error
        missing = self._kept.missing(link, shared)
        devices = [
            storage.device
            for storage in shared.values()
            if storage.device.type != "cpu"
        ]
        marks = self._host.devices.marks(devices) if devices else []
        if missing or marks:
            held = link.defer(encoded)
            question = self._kept.begin(link, missing)
            self._host.start_task(self._confirm(link, question, marks, held))

    def find(self, key: bytes) -> torch.UntypedStorage:
        """Return a region that a peer refers to; see `FindStorage`."""
        storage = self._kept.find(key)
        if storage is None:
            raise DecodeError("a shared tensor arrived, but its memory is not here")
        return storage

    def on_link_lost(self, link: PeerLink) -> None:
        """Forget the regions of a lost peer."""
        self._kept.on_lost(link)

    def _keep(self, key: bytes, storage: torch.UntypedStorage) -> None:
        self._kept.keep(key, storage)
        if self._sweeping is None:
            self._sweeping = self._host.loop.call_later(IDLE_S, self._sweep)

    # --- passing regions to a peer ---------------------------------------------------

    async def _confirm(
        self,
        link: PeerLink,
        question: RegionQuestion[PeerLink],
        marks: list[Mark],
        held: PendingBuffers,
    ) -> None:
        """Make the peer map regions, then send the message that waits for them."""
        try:
            await self._pass_all(link, question)
            await self._host.devices.reach(marks)
        except Exception as error:  # noqa: BLE001  (the call must end, whatever it is)
            problem = EncodeError(
                f"shared memory could not be passed to {link.peer.name!r}: {error}",
                outcome=Outcome.NOT_EXECUTED,
            )
            held.fail(problem)
            return
        finally:
            self._kept.end(question)
        held.release()

    async def _pass_all(
        self, link: PeerLink, question: RegionQuestion[PeerLink]
    ) -> None:
        """Ask until the peer has all regions; again if it lets go meanwhile."""
        for _ in range(QUESTIONS_MAX):
            if not question.unconfirmed:
                return
            await self._pass_left(link, question)
        if question.unconfirmed:
            raise _refused("the peer releases the memory each time that it gets it")

    async def _pass_left(
        self, link: PeerLink, question: RegionQuestion[PeerLink]
    ) -> None:
        keys, regions = question.ask(), self._kept.regions
        keyed_regions = [KeyedRegion(key, regions[key].nbytes()) for key in keys]
        answer = await self._ask(link, HasRegions(keyed_regions))
        if len(answer) != len(keys):
            raise MalformedError(
                f"the answer to `has` must have {len(keys)} entries, not {answer!r:.60}"
            )
        missing = []
        for key, has in zip(keys, answer, strict=True):
            if has:
                self._kept.confirm(question, key)
            else:
                missing.append(key)
        limit = asyncio.Semaphore(PASSING_MAX)

        async def pass_region(key: bytes) -> None:
            async with limit:
                await self._pass(link, key)
            self._kept.confirm(question, key)

        await asyncio.gather(*map(pass_region, missing))

    async def _pass(self, link: PeerLink, key: bytes) -> None:
        mover = self._memory.mover_of(link)
        if mover is None:
            raise _refused("the connection has ended")
        path, token = mover.path, os.urandom(TOKEN_BYTES)
        storage = self._kept.regions[key]
        if storage.device.type != "cpu":
            await self._lend(link, path, key, storage, token)
            return
        descriptor, start = self._files.add(storage)
        await self._host.run_on_host(lambda: send_descriptor(path, token, descriptor))
        nbytes = storage.nbytes()
        await self._ask(
            link,
            AttachPart(key, nbytes, token, start)
            if start
            else AttachRegion(key, nbytes, token),
        )

    async def _lend(
        self,
        link: PeerLink,
        path: str,
        key: bytes,
        storage: torch.UntypedStorage,
        token: bytes,
    ) -> None:
        """Make a peer open memory of a device, and keep the memory for it."""
        device = storage.device
        if is_borrowed(storage):
            raise _refused(
                f"only the worker that shares memory on {device} can send it on;"
                " send tensor.clone()"
            )
        devices = self._host.devices
        handle = await devices.export(storage)
        theirs = self.loans.begin(
            MemoryLoan(key, storage, partial(devices.end, device, handle))
        )

        def pass_on() -> None:
            try:
                send_descriptor(path, token, theirs)
            finally:
                os.close(theirs)

        await self._host.run_on_host(pass_on)
        await self._ask(
            link, OpenRegion(key, storage.nbytes(), token, str(device), handle)
        )

    def _end_loan(self, end: Callable[[], None]) -> None:
        """Record, in a thread, that a peer has let go of memory of a device."""

        def done(_: object, error: BaseException | None) -> None:
            if error is not None:
                logger.warning("worker %r: %s", self._host.name, error)

        with contextlib.suppress(RejectedError):  # closing: the process's end ends it
            self._host.pool.submit(end, done)

    async def _ask(self, link: PeerLink, request: Request[T]) -> T:
        deadline = Deadline.after(CONFIRM_TIMEOUT_S, self._host.loop.time())
        return await ask(link, request, deadline=deadline)

    # --- letting go ------------------------------------------------------------------

    def _sweep(self) -> None:
        """Let go of idle regions; sweep again later while regions are kept."""
        self._sweeping = None
        if not self._host.is_draining:
            idle = self._kept.sweep()
            if idle:
                self._host.start_task(self._let_go(idle))
        if len(self._kept):
            self._sweeping = self._host.loop.call_later(IDLE_S, self._sweep)

    async def _let_go(self, keys: list[bytes]) -> None:
        try:
            await asyncio.gather(*(self._tell(link, keys) for link in self._kept))
        finally:
            self._kept.let_go(keys)

    async def _tell(self, link: PeerLink, keys: list[bytes]) -> None:
        """Tell a peer of idle regions; it is told again later if it does not answer."""
        gone = self._kept.tell(link, keys)
        if not gone:
            return
        try:
            await self._ask(link, RegionsGone(gone))
        except AsyncRpcError as error:
            logger.debug("worker %r: %s", self._host.name, error)
        else:
            self._kept.on_told(link, gone)

    # --- requests of peers -----------------------------------------------------------

    def _route(
        self, kind: type[R], handler: Callable[[PeerLink, R], Awaitable[Any]]
    ) -> Route:
        """Return the route of a request from a peer that shares memory."""

        def reply(link: PeerLink, request: R) -> Awaitable[Any]:
            self._check_shares(link)
            return handler(link, request)

        return answers(kind, reply)

    def _check_shares(self, link: PeerLink) -> None:
        """Refuse a peer that does not share memory with this worker (any more)."""
        if self._memory.mover_of(link) is None:
            raise _refused("this worker shares no memory with you")

    async def _on_has(self, link: PeerLink, request: HasRegions) -> list[bool]:
        has_region = [
            self._has(region.key, region.size_bytes) for region in request.regions
        ]
        for region, has in zip(request.regions, has_region, strict=True):
            if has:
                self._kept.on_asked(link, region.key)
        return has_region

    async def _on_attach(
        self, link: PeerLink, request: AttachRegion | AttachPart
    ) -> None:
        self._kept.check_part(link)
        await self._attach(request)
        self._check_shares(link)  # it may have been lost meanwhile
        self._kept.on_asked(link, request.key)

    async def _on_open(self, link: PeerLink, request: OpenRegion) -> None:
        self._kept.check_part(link)
        await self._open(request)
        self._check_shares(link)
        self._kept.on_asked(link, request.key)

    async def _on_gone(self, link: PeerLink, message: RegionsGone) -> None:
        self._kept.on_gone(link, message.keys)

    def _has(self, key: bytes, nbytes: int) -> bool:
        storage = self._kept.find(key)
        if storage is None:
            storage = self.loans.find(key)  # ours, but used only by other processes
            if storage is None:
                return False
            self._keep(key, storage)
        if storage.nbytes() != nbytes:
            raise MalformedError(
                f"a region has {storage.nbytes()} bytes, not {nbytes} as the peer says"
            )
        return True

    async def _attach(self, request: AttachRegion | AttachPart) -> None:
        key, nbytes = request.key, request.size_bytes
        start = request.start if isinstance(request, AttachPart) else 0
        descriptor = await self._claim(request.token)
        try:
            if not is_sealed(descriptor) and self._host.functions.policy is _STRICT:
                raise _refused(
                    "memory was passed whose size can change, and this worker's policy"
                    " is strict: let asyncrpc.share move it, not torch; share"
                    " tensor.clone()"
                )
            if os.fstat(descriptor).st_size < start + nbytes:
                raise MalformedError(
                    f"shared memory is shorter than {start + nbytes} bytes"
                )
            if not self._has(key, nbytes):
                storage = self._files.storage_at(descriptor, start, nbytes)
                mark(storage, key)
                self._keep(key, storage)
        except (OSError, RuntimeError) as error:
            raise _refused(shortage_of(error) or str(error)) from error
        finally:
            os.close(descriptor)

    async def _claim(self, token: bytes) -> int:
        try:
            return await self._memory.inbox.claim(token)
        except TransportError as error:
            raise _refused(str(error)) from error

    async def _open(self, request: OpenRegion) -> None:
        descriptor = await self._claim(request.token)
        try:
            storage = await self._host.devices.open(
                request.device, request.handle, request.size_bytes
            )
            mark(storage, request.key)
            self._keep(request.key, storage)
        except BaseException:
            os.close(descriptor)
            raise
        keep_until_dead(storage, descriptor, self._host.loop)

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        """Do nothing: the end of the connection has released the peer's regions."""

    async def close(self) -> None:
        """Let go of every region; tensors over them live on."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        self._kept.clear()
        self.loans.close()


def _refused(why: str) -> RejectedError:
    return RejectedError(why, outcome=Outcome.NOT_EXECUTED)

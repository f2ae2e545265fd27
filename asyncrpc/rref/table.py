"""The handles and values of one worker: feeds the machines, carries out their effects.

All state is touched on the event loop; only `adopt` and the finalizers of handles come
from other threads, and they queue.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, cast

from asyncrpc.errors import (
    CallError,
    MalformedError,
    OwnerLostError,
    RRefDeletedError,
    TransportError,
    UsageError,
)
from asyncrpc.ids import Incarnation, RRefId, WorkerId, WorkerInfo
from asyncrpc.rref import machine as m
from asyncrpc.rref.handle import RRef
from asyncrpc.rref.pins import Shared
from asyncrpc.runtime.link import Link
from asyncrpc.runtime.worker import Worker

if TYPE_CHECKING:
    from asyncrpc.rref.service import RRefService

SERVICE: Final = "rref"


class RRefTable:
    """References that this worker owns and holds, and the protocol's own messages."""

    name = SERVICE

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.whole = cast("RRefService", self)  # of which this is the base
        self._me = worker.incarnation
        self._owner = m.OwnerTable(self._me)
        self._user = m.UserTable()
        self._serial = 0
        self._serial_lock = threading.Lock()
        self._values: dict[RRefId, asyncio.Future[Any]] = {}
        self._shared: weakref.WeakValueDictionary[RRefId, Shared] = (
            weakref.WeakValueDictionary()
        )
        self._names: dict[Incarnation, str] = {self._me: worker.name}
        self._notes: deque[Callable[[], Iterable[m.Effect]]] = deque()
        self._noted = False
        self._waiting: dict[Incarnation, list[tuple[str, list[Any]]]] = {}

    # --- handles ---

    def new_id(self) -> RRefId:
        """Return an id that no other reference has; from any thread."""
        with self._serial_lock:
            self._serial += 1
            return RRefId(self._me, self._serial)

    def adopt(self, handle: RRef[Any], value: Any) -> None:
        """Make `handle` refer to a value of this worker; from any thread."""
        rref_id = self.new_id()
        shared = Shared(rref_id, self.worker.id, is_here=True)
        future: asyncio.Future[Any] = asyncio.Future(loop=self.worker.loop)
        future.set_result(value)
        self._values[rref_id] = future
        self._shared[rref_id] = shared
        self._note(lambda: self._owner.create(rref_id))
        self.attach(handle, shared)

    def attach(self, handle: RRef[Any], shared: Shared) -> None:
        """Tie a counted handle to what it refers to, until it is collected."""
        handle._service, handle._shared = self.whole, shared  # noqa: SLF001
        handle.rref_id = shared.rref_id
        drop = self._drop_owned if shared.is_here else self._drop_held
        final = weakref.finalize(handle, drop, shared.rref_id)
        final.atexit = False

    def _drop_owned(self, rref_id: RRefId) -> None:
        self._note(lambda: self._owner.local_release(rref_id))

    def _drop_held(self, rref_id: RRefId) -> None:
        self._note(lambda: self._user.drop_handle(rref_id))

    def _note(self, change: Callable[[], Iterable[m.Effect]]) -> None:
        """Queue a change for the loop; from any thread, also from a finalizer."""
        self._notes.append(change)
        if not self._noted:
            self._noted = True
            try:
                self.worker.loop.call_soon_threadsafe(self.settle_notes)
            except RuntimeError:  # the loop is closed, and all of this with it
                self._notes.clear()

    def settle_notes(self) -> None:
        """Apply what was queued.  Cheap if nothing was."""
        self._noted = False
        effects: list[m.Effect] = []
        while self._notes:
            effects += self._notes.popleft()()
        if effects:
            self._carry_out(effects)

    def _shared_of(self, rref_id: RRefId, owner: WorkerId) -> Shared:
        shared = self._shared.get(rref_id)
        if shared is None:
            is_here = owner.incarnation == self._me
            shared = Shared(rref_id, owner, is_here=is_here)
            self._shared[rref_id] = shared
        return shared

    def info(self, owner: WorkerId) -> WorkerInfo:
        """Return a worker as programs see it."""
        for member in self.worker.directory.members:
            if member.name == owner.name:
                return WorkerInfo(owner.name, member.rank)
        return WorkerInfo(owner.name, -1)

    def is_confirmed(self, shared: Shared) -> bool:
        """Say whether the owner counts this worker."""
        if shared.is_here:
            return True
        holding = self._user.get(shared.rref_id)
        return holding is not None and holding.state is m.HoldingState.CONFIRMED

    # --- the protocol's own messages ---

    def on_notice(self, link: Link, method: str, value: Any) -> None:
        """Feed a message to the machines."""
        from_ = link.peer.incarnation
        self._names[from_] = link.peer.name
        if method == "returned":
            self.whole.take_back(from_, value)
            return
        if method == "release":
            for creator, serial, forks in value:
                rref_id = RRefId(creator, serial)
                self._carry_out(self._owner.release(rref_id, from_, forks))
            return
        rref_id = RRefId(*value)
        handler = {
            "register": lambda: self._owner.register(rref_id, from_),
            "registered": lambda: self._user.registered(rref_id),
            "gone": lambda: self._user.gone(rref_id),
            "probe": lambda: self._user.probe(rref_id, from_),
            "settled": lambda: self._owner.settled(rref_id, from_),
        }.get(method)
        if handler is None:
            raise MalformedError(f"there is no message {method!r} about references")
        self._carry_out(handler())

    async def on_request(self, link: Link, method: str, value: Any) -> Any:
        """Nothing here is asked for."""
        raise MalformedError(f"references do not answer {method!r}")

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        """Drop what a dead worker held; fail what it owned."""
        self._waiting.pop(peer.incarnation, None)
        for shared in list(self._shared.values()):
            if shared.owner == peer and shared.error is None:
                shared.error = OwnerLostError(
                    worker=peer.name, incarnation=peer.incarnation, reason=reason
                )
        effects = self._owner.worker_lost(peer.incarnation)
        self._carry_out(effects + self._user.worker_lost(peer.incarnation))
        self._names.pop(peer.incarnation, None)

    async def close(self) -> None:
        """Let go of every value."""
        self.settle_notes()
        self._values.clear()

    def counts(self) -> dict[str, int]:
        """Return how many values are owned and held here, for leak checks."""
        self.settle_notes()
        return {
            "owned": len(self._owner),
            "held": len(self._user),
            "values": len(self._values),
        }

    def holders(self, rref_id: RRefId) -> dict[str, int]:
        """Return who holds a value of this worker, by name, and how many forks."""
        held = self._owner.holders(rref_id)
        return {self._names.get(who, f"{who:016x}"): n for who, n in held.items()}

    def _carry_out(self, effects: Iterable[m.Effect]) -> None:
        for effect in effects:
            match effect:
                case m.SendRelease(to, rref_id, forks):
                    self._send(to, "release", [[*rref_id, forks]])
                case m.SendLoanReturned(to, token):
                    self._send(to, "returned", [token])
                case m.Freed(rref_id):
                    self._values.pop(rref_id, None)
                case m.ValueGone(rref_id):
                    self.whole.fail(
                        rref_id, RRefDeletedError("the value will never be made")
                    )
                    self._values.pop(rref_id, None)
                case m.HandlesLost(rref_id, cause):
                    self._lose_handles(rref_id, cause)
                case _:
                    self._send(effect.to, _METHODS[type(effect)], [*effect.rref_id])

    def _lose_handles(self, rref_id: RRefId, cause: m.LossCause) -> None:
        shared = self._shared.get(rref_id)
        if shared is None or shared.error is not None:
            return
        if cause is m.LossCause.OWNER_LOST:
            shared.error = OwnerLostError(
                worker=shared.owner.name,
                incarnation=shared.owner.incarnation,
                reason=cause.value,
            )
        else:
            shared.error = RRefDeletedError(f"{rref_id}: {cause.value}")

    def _send(self, to: Incarnation, method: str, value: list[Any]) -> None:
        """Send a message, over a connection that may have to be made first."""
        link = self.worker.directory.link_of(to)
        if link is not None and to not in self._waiting:
            link.notify(SERVICE, method, value)
            return
        queue = self._waiting.setdefault(to, [])
        queue.append((method, value))
        if len(queue) == 1 and not self.worker.is_closed:
            self.worker.start_task(self._connect_and_send(to))

    def _listed_name(self, to: Incarnation) -> str:
        """Return the name of a worker that has not spoken to us: a creator we probe."""
        members = self.worker.directory.members
        return next((one.name for one in members if one.incarnation == to), "")

    async def _connect_and_send(self, to: Incarnation) -> None:
        name = self._names.get(to) or self._listed_name(to)
        try:
            link = await self.worker.link_to(name)
        except (CallError, TransportError, UsageError) as error:
            if to in self._waiting:
                self.on_peer_lost(WorkerId(name, to), str(error))
            return
        queue = self._waiting.pop(to, [])
        if link.peer.incarnation != to:
            self.on_peer_lost(WorkerId(name, to), "it has been restarted")
            return
        for method, value in queue:
            link.notify(SERVICE, method, value)


_METHODS: Final[dict[type, str]] = {
    m.SendRegister: "register",
    m.SendRegistered: "registered",
    m.SendGone: "gone",
    m.SendProbe: "probe",
    m.SendSettled: "settled",
}

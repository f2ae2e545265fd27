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
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from asyncrpc.errors import (
    ClosedError,
    OwnerLostError,
    RemoteProtocolError,
    RRefDeletedError,
)
from asyncrpc.ids import Incarnation, RRefId, WorkerId, WorkerInfo
from asyncrpc.rref import machine as m
from asyncrpc.rref.handle import RRef
from asyncrpc.rref.notices import SERVICE, Notices
from asyncrpc.rref.pins import Shared
from asyncrpc.rref.records import RRefRecord
from asyncrpc.runtime.forms import (
    ID,
    POSITIVE,
    Form,
    Methods,
    ServiceMethods,
    array,
    each,
)
from asyncrpc.runtime.ports import PeerLink
from asyncrpc.runtime.worker import Worker

if TYPE_CHECKING:
    from asyncrpc.rref.service import RRefService

_Change: TypeAlias = Callable[[Shared], Iterable[m.Effect]]


class Value(asyncio.Future[Any]):
    """A value that is here or is to be, and since when, on the loop's clock."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self.made_s = loop.time()


_REFERENCE: Final[Form] = array(creator=ID, serial=ID)
_RELEASED: Final[Form] = each(array(creator=ID, serial=ID, forks=POSITIVE))


class RRefTable(ServiceMethods):
    """References that this worker owns and holds, and the protocol's own messages."""

    name = SERVICE

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.requests = Methods(SERVICE, {})
        self.notices = Methods(
            SERVICE,
            {
                "register": (_REFERENCE, self._take_register),
                "registered": (_REFERENCE, self._take_registered),
                "gone": (_REFERENCE, self._take_gone),
                "probe": (_REFERENCE, self._take_probe),
                "settled": (_REFERENCE, self._take_settled),
                "release": (_RELEASED, self._take_release),
                "returned": (each(ID), self._take_returned),
            },
        )
        self.whole = cast("RRefService", self)  # of which this is the base
        self._me = worker.incarnation
        self._owner = m.OwnerTable(self._me, worker.options.references_max)
        self._user = m.UserTable()
        self._serial = 0
        self._serial_lock = threading.Lock()
        self._values: dict[RRefId, Value] = {}
        self._shared: weakref.WeakValueDictionary[RRefId, Shared] = (
            weakref.WeakValueDictionary()
        )
        self._names: dict[Incarnation, str] = {self._me: worker.name}
        # Changes for the loop to make; at most two for each handle.
        self._notes: deque[tuple[_Change, Shared]] = deque()
        self._noted = False
        self._thread_id = threading.get_ident()
        self.is_closed = False
        self.handle_class: type[RRef[Any]] = RRef  # a facade may have its own
        self._notices = Notices(
            worker, name_of=self._name_of, on_unreachable=self.on_peer_lost
        )

    # --- handles ---

    def new_id(self) -> RRefId:
        """Return an id that no other reference has; from any thread."""
        with self._serial_lock:
            self._serial += 1
            return RRefId(self._me, self._serial)

    def adopt(self, handle: RRef[Any], value: Any) -> None:
        """Make `handle` refer to a value of this worker; from any thread."""
        rref_id = self.new_id()
        future = Value(self.worker.loop)
        future.set_result(value)
        self._values[rref_id] = future
        shared = self._shared_of(rref_id, self.worker.id)
        self._note(self._created, shared)
        self.attach(handle, shared)

    def attach(self, handle: RRef[Any], shared: Shared) -> None:
        """Tie a counted handle to what it refers to, until it is collected."""
        handle._service, handle._shared = self.whole, shared  # noqa: SLF001
        handle.rref_id = shared.rref_id
        final = weakref.finalize(handle, self._note, self._dropped, shared)
        final.atexit = False
        handle._final = final  # noqa: SLF001

    def release(self, handle: RRef[Any]) -> None:
        """Give a handle back now; see `RRef.release`."""
        shared = handle._shared  # noqa: SLF001
        if handle._final() is None and shared.error is not None:  # noqa: SLF001
            return  # it has been given back, or was lost, before
        released = Shared(
            shared.rref_id, shared.owner, is_here=shared.is_here, made_s=shared.made_s
        )
        released.is_apart = True
        released.error = RRefDeletedError(
            f"{handle!r} was given back by RRef.release(); use another handle of the "
            "value, or make it again"
        )
        handle._shared = released  # noqa: SLF001

    def _created(self, shared: Shared) -> Iterable[m.Effect]:
        return self._owner.create(shared.rref_id)

    def _dropped(self, shared: Shared) -> Iterable[m.Effect]:
        if shared.is_here:
            return self._owner.local_release(shared.rref_id)
        return () if shared.is_apart else self._user.drop_handle(shared.rref_id)

    def _note(self, change: _Change, shared: Shared) -> None:
        """Queue a change for the loop; from any thread, also from a finalizer."""
        self._notes.append((change, shared))
        if self._noted:
            return
        self._noted = True
        loop = self.worker.loop
        # To wake the loop takes a system call; on its own thread it is awake.
        is_here = threading.get_ident() == self._thread_id
        try:
            (loop.call_soon if is_here else loop.call_soon_threadsafe)(self._on_noted)
        except RuntimeError:  # the loop is closed, and all of this with it
            self._notes.clear()

    def _on_noted(self) -> None:
        self._noted = False
        self.settle_notes()
        self._notices.flush()

    def settle_notes(self) -> None:
        """Apply what was queued.  Cheap if nothing was."""
        notes = self._notes
        while notes:
            change, shared = notes.popleft()
            effects = change(shared)
            if effects:
                self._carry_out(effects)

    def _shared_of(self, rref_id: RRefId, owner: WorkerId) -> Shared:
        shared = self._shared.get(rref_id)
        if shared is None:
            is_here = owner.incarnation == self._me
            made_s = self.worker.loop.time()
            shared = Shared(rref_id, owner, is_here=is_here, made_s=made_s)
            self._shared[rref_id] = shared
        return shared

    def info(self, owner: WorkerId) -> WorkerInfo:
        """Return a worker as programs see it."""
        for member in self.worker.directory.members:
            if member.name == owner.name:
                return WorkerInfo(owner.name, member.rank)
        return WorkerInfo(owner.name, -1)

    def is_pending(self, shared: Shared) -> bool:
        """Say whether the call that makes the value has not reached its owner yet."""
        holding = None if shared.is_here else self._user.get(shared.rref_id)
        return holding is not None and holding.state is m.HoldingState.PENDING

    def is_confirmed(self, shared: Shared) -> bool:
        """Say whether the owner counts this worker."""
        if shared.is_here:
            return True
        holding = None if shared.is_apart else self._user.get(shared.rref_id)
        return holding is not None and holding.state is m.HoldingState.CONFIRMED

    # --- the protocol's own messages ---

    def on_notice(self, link: PeerLink, method: str, value: Any) -> None:
        """Feed a message to the machines."""
        take = self.notices.find(link.peer.name, method, value)
        if link.is_lost:
            return  # of a time that both ends have declared over
        self.meet(link)
        self._names[link.peer.incarnation] = link.peer.name
        take(link.peer.incarnation, value)

    def _take_returned(self, from_: Incarnation, tokens: list[int]) -> None:
        self.whole.take_back(from_, tokens)

    def _take_release(self, from_: Incarnation, released: list[list[int]]) -> None:
        """Take back forks; an entry that is wrong spoils no other."""
        problem: RemoteProtocolError | None = None
        for creator, serial, forks, *_ in released:
            rref_id = RRefId(Incarnation(creator), serial)
            try:
                self._carry_out(self._owner.release(rref_id, from_, forks))
            except RemoteProtocolError as error:
                problem = problem or error
        if problem is not None:
            raise problem

    def _take_register(self, from_: Incarnation, value: list[Any]) -> None:
        self._carry_out(self._owner.register(_read_id(value), from_))

    def _take_registered(self, from_: Incarnation, value: list[Any]) -> None:
        self._check_owner(rref_id := _read_id(value), from_)
        self._carry_out(self._user.registered(rref_id))

    def _take_gone(self, from_: Incarnation, value: list[Any]) -> None:
        self._check_owner(rref_id := _read_id(value), from_)
        self._carry_out(self._user.gone(rref_id))

    def _check_owner(self, rref_id: RRefId, from_: Incarnation) -> None:
        """Refuse the word of another worker about an owner's value.

        Raises:
            RemoteProtocolError: it is not the owner.
        """
        holding = self._user.get(rref_id)
        if holding is not None and holding.owner != from_:
            raise RemoteProtocolError(
                f"worker {self._name_or_number(from_)!r} speaks of {rref_id}, which "
                f"worker {self._name_or_number(holding.owner)!r} owns"
            )

    def _take_probe(self, from_: Incarnation, value: list[Any]) -> None:
        self._carry_out(self._user.probe(_read_id(value), from_))

    def _take_settled(self, from_: Incarnation, value: list[Any]) -> None:
        self._carry_out(self._owner.settled(_read_id(value), from_))

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        """Drop what a lost worker held; fail what it owned."""
        self.settle_notes()
        self._notices.forget(peer.incarnation)
        for shared in list(self._shared.values()):
            owner = shared.owner.incarnation
            if owner == peer.incarnation and shared.error is None:
                shared.error = OwnerLostError(
                    worker=peer.name, incarnation=peer.incarnation, reason=reason
                )
        effects = self._owner.worker_lost(peer.incarnation)
        self._carry_out(effects + self._user.worker_lost(peer.incarnation))
        self._notices.forget(peer.incarnation)
        self._names.pop(peer.incarnation, None)

    def on_peer_back(self, peer: WorkerId) -> None:
        """Begin anew with a worker that was declared lost, and lives.

        What was lost stays lost: its handles here fail, and it holds nothing here.
        """
        self.settle_notes()
        self._owner.forgive(peer.incarnation)
        self._carry_out(self._user.forgive(peer.incarnation))

    def meet(self, link: PeerLink) -> None:
        """Take note that a link to a worker is open, which may have been lost before.

        A worker may have been declared lost here alone, since it could not be reached.
        """
        peer = link.peer
        if self._user.is_lost(peer.incarnation) and not link.is_lost:
            self.on_peer_back(peer)

    async def close(self) -> None:
        """Let go of every value; who waits here for one is told that it never comes."""
        self.settle_notes()
        self._notices.close()
        self.is_closed = True
        for rref_id in self._values:
            self.whole.fail(rref_id, ClosedError("its owner was shut down before"))
        self._values.clear()

    def counts(self) -> dict[str, int]:
        """Return how many values are owned and held here, for leak checks."""
        self.settle_notes()
        return {
            "owned": len(self._owner),
            "held": len(self._user),
            "values": len(self._values),
        }

    def records(self) -> list[RRefRecord]:
        """Describe every reference that this worker owns or holds, oldest first."""
        self.settle_notes()
        found = [self._owned_record(rref_id) for rref_id in self._owner]
        found += [self._held_record(rref_id) for rref_id in self._user]
        return sorted(found, key=lambda record: (-record.age_s, record.rref_id))

    def _owned_record(self, rref_id: RRefId) -> RRefRecord:
        future = self._values.get(rref_id)
        return RRefRecord(
            rref_id=rref_id,
            owner=self.worker.name,
            creator=self._name_or_number(rref_id.creator),
            is_owner=True,
            state=self._owner.state(rref_id).value,
            type_name=_type_name(future),
            holders=self.holders(rref_id),
            handles=self._owner.local(rref_id),
            lent=0,
            age_s=self.worker.loop.time() - getattr(future, "made_s", 0.0),
        )

    def _held_record(self, rref_id: RRefId) -> RRefRecord:
        holding = self._user.get(rref_id)
        assert holding is not None  # the loop has not turned since it was listed
        shared = self._shared.get(rref_id)
        now_s = self.worker.loop.time()
        return RRefRecord(
            rref_id=rref_id,
            owner=self._name_or_number(holding.owner),
            creator=self._name_or_number(rref_id.creator),
            is_owner=False,
            state=holding.state.value,
            type_name="",
            holders={},
            handles=holding.handles,
            lent=holding.pins,
            age_s=now_s - shared.made_s if shared is not None else 0.0,
        )

    def _name_or_number(self, who: Incarnation) -> str:
        return self._name_of(who) or f"{who:016x}"

    def holders(self, rref_id: RRefId) -> dict[str, int]:
        """Return who holds a value of this worker, by name, and how many forks."""
        held = self._owner.holders(rref_id)
        return {self._name_or_number(who): forks for who, forks in held.items()}

    def _carry_out(self, effects: Iterable[m.Effect]) -> None:
        for effect in effects:
            _CARRY_OUT[type(effect)](self, effect)

    def _send_release(self, effect: m.SendRelease) -> None:
        self._notices.release(effect.to, effect.rref_id, effect.forks)

    def _return_loan(self, effect: m.SendLoanReturned) -> None:
        self._notices.return_loan(effect.to, effect.token)

    def _send(self, effect: Any) -> None:
        method = _METHODS[type(effect)]
        self._notices.send(effect.to, method, [*effect.rref_id])

    def _free(self, effect: m.Freed | m.NotWanted) -> None:
        freed = RRefDeletedError("the value was freed before it was made")
        self.whole.fail(effect.rref_id, freed)  # which a value that is here ignores
        self._values.pop(effect.rref_id, None)

    def _fail_value(self, effect: m.ValueGone) -> None:
        gone = RRefDeletedError(
            "the value will never be made: this worker refused to, or its creator was "
            "lost before the call that was to make it"
        )
        self.whole.fail(effect.rref_id, gone)
        self._values.pop(effect.rref_id, None)

    def _set_apart(self, effect: m.HandlesApart) -> None:
        shared = self._shared.pop(effect.rref_id, None)
        if shared is not None:
            shared.is_apart = True

    def _find(self, effect: m.FindOwner) -> None:
        self._notices.connect(effect.owner)

    def _lose_handles(self, effect: m.HandlesLost) -> None:
        rref_id, cause = effect.rref_id, effect.cause
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

    def _name_of(self, to: Incarnation) -> str:
        """Return the name of a worker; one that has not spoken to us may be listed."""
        members = self.worker.directory.members
        listed = (one.name for one in members if one.incarnation == to)
        return next(listed, "") or self._names.get(to, "")


def _read_id(value: list[Any]) -> RRefId:
    creator, serial, *_ = value
    return RRefId(Incarnation(creator), serial)


def _type_name(value: Value | None) -> str:
    if value is None or not value.done():
        return ""
    return type(value.exception() or value.result()).__qualname__


_METHODS: Final[dict[type, str]] = {
    m.SendRegister: "register",
    m.SendRegistered: "registered",
    m.SendGone: "gone",
    m.SendProbe: "probe",
    m.SendSettled: "settled",
}

_CARRY_OUT: Final[dict[type, Callable[[RRefTable, Any], None]]] = {
    m.SendRelease: RRefTable._send_release,  # noqa: SLF001
    m.SendLoanReturned: RRefTable._return_loan,  # noqa: SLF001
    m.Freed: RRefTable._free,  # noqa: SLF001
    m.NotWanted: RRefTable._free,  # noqa: SLF001
    m.ValueGone: RRefTable._fail_value,  # noqa: SLF001
    m.HandlesLost: RRefTable._lose_handles,  # noqa: SLF001
    m.HandlesApart: RRefTable._set_apart,  # noqa: SLF001
    m.FindOwner: RRefTable._find,  # noqa: SLF001
    **dict.fromkeys(_METHODS, RRefTable._send),  # noqa: SLF001
}

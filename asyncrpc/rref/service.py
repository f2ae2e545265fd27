"""Remote references of one worker: feeds the lifetime machines, carries out effects.

It implements `runtime.extensions.References` (how references travel in messages) and
`Service` (the protocol's own messages).  All state is touched on the event loop; only
`drop` and `adopt` come from other threads, and they queue.

Source: docs/reference/rref-protocol.md.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

from asyncrpc.errors import (
    CallError,
    DecodeError,
    EncodeError,
    MalformedError,
    Outcome,
    OwnerLostError,
    RejectedError,
    RRefDeletedError,
    RRefError,
    TransportError,
    UsageError,
)
from asyncrpc.ids import Incarnation, RRefId, WorkerId, WorkerInfo
from asyncrpc.rref import machine as m
from asyncrpc.rref.handle import RRef
from asyncrpc.runtime.futures import CallFuture
from asyncrpc.runtime.inbound import MODE_ATTRIBUTE, Mode
from asyncrpc.runtime.link import Link
from asyncrpc.runtime.worker import UNSET, Worker

SERVICE: Final = "rref"
# How a reference travels: [creator, serial, owner, owner's name, form, token].
FORK, LOAN, HOME = 0, 1, 2


class Shared:
    """What all handles of this worker to one value share."""

    __slots__ = ("__weakref__", "error", "is_here", "owner", "rref_id")

    def __init__(self, rref_id: RRefId, owner: WorkerId, *, is_here: bool) -> None:
        self.rref_id = rref_id
        self.owner = owner
        self.is_here = is_here
        self.error: Exception | None = None  # why the value can no longer be had


class MessagePins:
    """What one message that was sent relies on; a `runtime.extensions.Pins`."""

    __slots__ = ("_at_home", "_by_order", "_forks", "_loans", "_service", "_to")

    def __init__(self, service: RRefService, to: Incarnation) -> None:
        self._service = service
        self._to = to
        self._forks: list[RRefId] = []  # counted at the owner, who is this worker
        self._loans: list[int] = []  # to be returned by the receiver
        self._by_order: list[int] = []  # over as soon as the message is written
        self._at_home: list[Shared] = []  # sent to this worker itself

    def add_fork(self, rref_id: RRefId) -> None:
        """A fork of a value of ours travels."""
        self._forks.append(rref_id)

    def add_loan(self, loan: m.Loan) -> int:
        """A loan travels; return the token to send."""
        (self._loans if loan.needs_return else self._by_order).append(loan.token)
        return loan.token if loan.needs_return else 0

    def add_at_home(self, shared: Shared) -> None:
        """A reference goes to this worker itself: its count travels with it."""
        self._at_home.append(shared)

    def on_sent(self) -> None:
        """The last byte has been handed over: the link's order protects the rest."""
        self._service.end_loans(self._by_order)
        self._by_order = []

    def release(self, returned: list[int]) -> None:
        """The answer is here, with the loans that the receiver has returned."""
        self._service.take_back(self._to, returned)

    def undo(self) -> None:
        """The message was never sent, or not to its end: nobody has read it."""
        self._service.undo(self._to, self._forks, [*self._loans, *self._by_order])
        self._service.drop_all(self._at_home)
        self._forks, self._loans, self._by_order, self._at_home = [], [], [], []


class _Returned:
    """A function that gives a value which is here."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __call__(self) -> Any:
        return self._value


setattr(_Returned, MODE_ATTRIBUTE, Mode.ON_LOOP)


class RRefService:
    """Remote references of one worker."""

    name = SERVICE
    handled: tuple[type, ...] = (RRef,)

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.backward_from: Callable[..., Any] | None = None  # set by autograd
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
        self._link: Link | None = None  # of the message at hand
        self._pins: MessagePins | None = None
        self._loans: list[tuple[RRefId, Incarnation, int]] = []
        self._waiting: dict[Incarnation, list[tuple[str, list[Any]]]] = {}

    # --- handles ---------------------------------------------------------------------

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
        handle._service, handle._shared = self, shared  # noqa: SLF001
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

    # --- using a value ---------------------------------------------------------------

    def local_value(self, handle: RRef[Any]) -> Any:
        """Return a value that is here; see `RRef.local_value`."""
        shared = handle._shared  # noqa: SLF001
        if not shared.is_here:
            raise UsageError(
                f"the value of {handle!r} is on worker {shared.owner.name!r}, not on "
                f"{self.worker.name!r}; fetch a copy with `await rref.to_here()`"
            )
        future = self._values.get(handle.rref_id)
        if future is None or not future.done():
            raise UsageError(
                f"the value of {handle!r} is still being made; `await rref.to_here()`"
            )
        return future.result()

    async def fetch(self, handle: RRef[Any], timeout_s: Any) -> Any:
        """Return the value or a copy of it; see `RRef.to_here`."""
        shared = handle._shared  # noqa: SLF001
        if not shared.is_here:
            return await self.start_method(handle, "", (), {}, timeout_s)
        future = self._value(handle.rref_id)
        if timeout_s is UNSET:
            timeout_s = self.worker.options.rpc_timeout_s
        async with asyncio.timeout(timeout_s):
            return await asyncio.shield(future)

    def start_method(
        self, handle: RRef[Any], name: str, args: Any, kwargs: Any, timeout_s: Any
    ) -> CallFuture[Any]:
        """Start a method of a referenced object, on its owner.

        Raises:
            OwnerLostError: the owner is gone.
            EncodeError: an argument cannot travel.
        """
        shared = handle._shared  # noqa: SLF001
        if shared.error is not None:
            raise shared.error
        called = name or "to_here"
        call = self.worker.new_call(called, shared.owner.name, with_site=True)
        target = ["=", *handle.rref_id, name]
        call.add_done_callback(_Keep(handle))
        values = (list(args), dict(kwargs))
        self.worker.begin(call, target, values, timeout_s=timeout_s)
        return call

    def remote_method(
        self, handle: RRef[Any], name: str, args: Any, kwargs: Any, timeout_s: Any
    ) -> RRef[Any]:
        """Start a method whose result stays on the owner."""
        shared = handle._shared  # noqa: SLF001
        if shared.error is not None:
            raise shared.error
        target = ["=", *handle.rref_id, name]
        values = (list(args), dict(kwargs))
        return self.start_remote(
            shared.owner.name, target, values, timeout_s, keep=handle
        )

    async def backward(
        self, handle: RRef[Any], context: Any, *, retain_graph: bool
    ) -> None:
        """Run a backward pass from the value; see `RRef.backward`."""
        if self.backward_from is None:
            raise UsageError("this worker was made without autograd")
        await self.backward_from(handle, context, retain_graph=retain_graph)

    # --- remote(): values made elsewhere ---------------------------------------------

    def start_remote(
        self,
        to: str,
        target: str | list[Any] | None,
        values: tuple[list[Any], dict[str, Any]],
        timeout_s: Any = UNSET,
        *,
        keep: Any = None,
    ) -> RRef[Any]:
        """Start a call whose result stays on the callee; return the handle at once."""
        rref_id = self.new_id()
        member = self.worker.directory.find(to).member
        owner = WorkerId(member.name, member.incarnation)
        shared = Shared(rref_id, owner, is_here=owner == self.worker.id)
        self._shared[rref_id] = shared
        name = target if isinstance(target, str) else "a method"
        call = self.worker.new_call(name.rpartition(":")[2], to)
        call.add_done_callback(_Keep(keep))
        handle = RRef._make(self, shared)
        self.worker.on_loop_thread(
            lambda: self._begin_remote(shared, call, target, values, timeout_s)
        )
        return handle

    def _begin_remote(
        self,
        shared: Shared,
        call: CallFuture[Any],
        target: Any,
        values: Any,
        timeout_s: Any,
    ) -> None:
        rref_id = shared.rref_id
        self._names[shared.owner.incarnation] = shared.owner.name
        if shared.is_here:
            self._carry_out(self._owner.create(rref_id))
            self._value(rref_id)
        else:
            self._carry_out(self._user.create(rref_id, shared.owner.incarnation))
        call.add_done_callback(lambda done: self._on_remote_answered(shared, done))
        try:
            self.worker.begin(
                call, target, values, timeout_s=timeout_s, meta={"r": list(rref_id)}
            )
        except (CallError, RRefError) as error:
            call.fail(error)
            call.exception()
            if isinstance(error, EncodeError):
                raise

    def _on_remote_answered(self, shared: Shared, call: asyncio.Future[Any]) -> None:
        """The owner has run the function, or the call failed before it could."""
        error = None if call.cancelled() else call.exception()
        if shared.is_here:
            if error is not None:
                self.fail(shared.rref_id, error)
            return
        if error is None:
            self._carry_out(self._user.confirmed(shared.rref_id))
            return
        if shared.error is None:
            shared.error = error if isinstance(error, Exception) else None
        self._carry_out(self._user.refused(shared.rref_id))

    def expect(self, link: Link, rref_id: tuple[int, int]) -> None:
        """A function is about to make a value for the other end of `link`."""
        key = RRefId(*rref_id)
        if link.peer.incarnation == self._me:
            return  # our own remote(): the entry is there
        if key.creator != link.peer.incarnation:
            raise MalformedError("a reference in the name of another worker")
        self._value(key)
        self._carry_out(self._owner.create(key, link.peer.incarnation))

    def fulfil(self, rref_id: tuple[int, int], value: Any) -> None:
        """The function that makes a value has returned it."""
        future = self._values.get(RRefId(*rref_id))
        if future is not None and not future.done():
            future.set_result(value)

    def fail(self, rref_id: tuple[int, int], error: BaseException) -> None:
        """The function that makes a value has raised."""
        future = self._values.get(RRefId(*rref_id))
        if future is not None and not future.done():
            future.set_exception(error)
            future.exception()  # whoever asks is told; nobody may ever ask

    def resolve(
        self, link: Link, target: list[Any], ready: Callable[[Callable[..., Any]], None]
    ) -> None:
        """Call `ready` with a method of a value that is here, once it is made."""
        if len(target) != 4 or target[0] != "=" or type(target[3]) is not str:  # noqa: PLR2004
            raise MalformedError(f"{target!r} is no method of a reference")
        rref_id = RRefId(int(target[1]), int(target[2]))
        self._carry_out(self._owner.pin(rref_id))
        if self._owner.state(rref_id) is m.EntryState.GONE:
            self._carry_out(self._owner.unpin(rref_id))
            raise RRefDeletedError("the value of this RRef has been freed")
        future = self._value(rref_id)

        def on_value(done: asyncio.Future[Any]) -> None:
            try:
                ready(self._method(done, target[3]))
            finally:
                self._carry_out(self._owner.unpin(rref_id))

        if future.done():
            on_value(future)
        else:
            future.add_done_callback(on_value)

    def _method(self, done: asyncio.Future[Any], name: str) -> Callable[..., Any]:
        """Return what to call; what is wrong with it is raised by calling it."""
        error = done.exception()
        if error is not None:
            return _raiser(error)
        value = done.result()
        if not name:
            return _Returned(value)
        try:
            method: Callable[..., Any] = getattr(value, name)
        except AttributeError as missing:
            return _raiser(missing)
        declared = getattr(type(value), name, method)
        if not self.worker.functions.is_allowed(declared):
            kind = type(value).__qualname__
            return _raiser(
                RejectedError(
                    f"{kind}.{name} is not exposed here; mark {kind} with "
                    "@asyncrpc.expose, or list it in Options.allow",
                    outcome=Outcome.NOT_EXECUTED,
                )
            )
        return method

    def _value(self, rref_id: RRefId) -> asyncio.Future[Any]:
        """Return the future of a value that is here, or is to be."""
        future = self._values.get(rref_id)
        if future is None:
            future = self._values[rref_id] = self.worker.loop.create_future()
        return future

    # --- references in messages ------------------------------------------------------

    def begin_encode(self, link: Link) -> None:
        """A message to the other end of `link` is about to be encoded."""
        self._link = link

    def end_encode(self, *, sent: bool) -> MessagePins | None:
        """It has been, or could not be."""
        pins, self._pins, self._link = self._pins, None, None
        if pins is not None and not sent:
            pins.undo()
            return None
        return pins

    def lower(self, value: RRef[Any]) -> object:
        """Return what travels in place of a reference, and count it."""
        link, shared = self._link, value._shared  # noqa: SLF001
        if link is None:
            raise EncodeError("an RRef can only travel in a call or its result")
        if self._notes:
            self.settle_notes()  # a handle made in a thread may not be counted yet
        if value._service is not self:  # noqa: SLF001
            raise EncodeError(f"{value!r} belongs to another worker of this process")
        to = link.peer.incarnation
        if self._pins is None:
            self._pins = MessagePins(self, to)
        owner = shared.owner
        form, token = HOME, 0
        if to == self._me:
            self._count_handle(shared)
            self._pins.add_at_home(shared)
        elif shared.is_here:
            form = FORK
            self._owner.hand_out(value.rref_id, to)
            self._pins.add_fork(value.rref_id)
        else:
            form = LOAN
            token = self._pins.add_loan(self._user.lend(value.rref_id, to))
        return [*value.rref_id, owner.incarnation, owner.name, form, token]

    def begin_decode(self, link: Link) -> None:
        """A message from the other end of `link` is about to be decoded."""
        self._link = link
        self._loans = []

    def end_decode(self) -> Any:
        """It has been; return the loans that it brought."""
        self._link = None
        loans, self._loans = self._loans, []
        return loans or None

    def lift(self, tree: Any) -> RRef[Any]:
        """Make a handle of a reference that has arrived, and count it."""
        link = self._link
        rref_id, owner, form, token = _read_reference(tree)
        if link is None:
            raise DecodeError("an RRef outside of a call")
        sender = link.peer.incarnation
        self._names[owner.incarnation] = owner.name
        if form == HOME and sender != self._me:
            raise DecodeError("an RRef that claims to have stayed at home")
        if form == HOME:  # its count came with it
            return RRef._make(self, self._shared_of(rref_id, owner))
        if owner.incarnation == self._me:
            return self._lift_own(rref_id, sender, token)
        if form == FORK:
            if owner.incarnation != sender:
                raise DecodeError("an RRef that its owner did not send")
            effects = self._user.receive_fork(rref_id, sender)
        else:
            effects = self._user.borrow(rref_id, owner.incarnation, sender, token)
            self._loans.append((rref_id, sender, token))
        handle = RRef._make(self, self._shared_of(rref_id, owner))
        self._carry_out(effects)
        return handle

    def _lift_own(self, rref_id: RRefId, sender: Incarnation, token: int) -> RRef[Any]:
        """A reference to a value of this worker has come back to it."""
        effects = self._owner.came_home(rref_id, sender, token)
        self._value(rref_id)
        self._owner.local_acquire(rref_id)
        effects += self._owner.unpin(rref_id)
        shared = self._shared_of(rref_id, self.worker.id)
        handle = RRef._make(self, shared)
        self._carry_out(effects)
        return handle

    def _count_handle(self, shared: Shared) -> None:
        if shared.is_here:
            self._owner.local_acquire(shared.rref_id)
        else:
            self._user.add_handle(shared.rref_id)

    def drop_all(self, at_home: Iterable[Shared]) -> None:
        """Drop the counts of references that were to go to this worker itself."""
        for shared in at_home:
            drop = self._drop_owned if shared.is_here else self._drop_held
            drop(shared.rref_id)

    def _shared_of(self, rref_id: RRefId, owner: WorkerId) -> Shared:
        shared = self._shared.get(rref_id)
        if shared is None:
            is_here = owner.incarnation == self._me
            shared = Shared(rref_id, owner, is_here=is_here)
            self._shared[rref_id] = shared
        return shared

    def settle_loans(self, link: Link, loans: Any, *, answered: bool) -> list[int]:
        """The call is over: return the loans that go back with its answer."""
        self.settle_notes()
        effects: list[m.Effect] = []
        for rref_id, lender, token in loans:
            effects += self._user.settle(rref_id, lender, token)
        to = link.peer.incarnation if answered else None
        here = [
            effect
            for effect in effects
            if isinstance(effect, m.SendLoanReturned) and effect.to == to
        ]
        self._carry_out(effect for effect in effects if effect not in here)
        return [effect.token for effect in here]

    def end_loans(self, tokens: Iterable[int]) -> None:
        """End loans that need no return."""
        effects: list[m.Effect] = []
        for token in tokens:
            effects += self._user.loan_over(token)
        self._carry_out(effects)

    def take_back(self, from_: Incarnation, tokens: Iterable[int]) -> None:
        """Take back loans that came with an answer."""
        effects: list[m.Effect] = []
        for token in tokens:
            effects += self._user.loan_returned(int(token), from_)
        self._carry_out(effects)

    def undo(self, to: Incarnation, forks: list[RRefId], loans: list[int]) -> None:
        """Take back what a message counted that nobody has read."""
        effects: list[m.Effect] = []
        for rref_id in forks:
            effects += self._owner.undo_hand_out(rref_id, to)
        for token in loans:
            effects += self._user.loan_over(token)
        self._carry_out(effects)

    # --- the protocol's own messages -------------------------------------------------

    def on_notice(self, link: Link, method: str, value: Any) -> None:
        """Feed a message to the machines."""
        from_ = link.peer.incarnation
        self._names[from_] = link.peer.name
        if method == "returned":
            self.take_back(from_, value)
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

    # --- effects ---------------------------------------------------------------------

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
                    self.fail(rref_id, RRefDeletedError("the value will never be made"))
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

    async def _connect_and_send(self, to: Incarnation) -> None:
        name = self._names.get(to, "")
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


class _Keep:
    """A callback that keeps an object alive until the future is done."""

    __slots__ = ("_kept",)

    def __init__(self, kept: Any) -> None:
        self._kept = kept

    def __call__(self, _future: object) -> None:
        self._kept = None


_METHODS: Final[dict[type, str]] = {
    m.SendRegister: "register",
    m.SendRegistered: "registered",
    m.SendGone: "gone",
    m.SendProbe: "probe",
    m.SendSettled: "settled",
}


def _raiser(error: BaseException) -> Callable[..., Any]:
    def fail(*_args: Any, **_kwargs: Any) -> Any:
        raise error

    setattr(fail, MODE_ATTRIBUTE, Mode.ON_LOOP)
    return fail


def _read_reference(tree: Any) -> tuple[RRefId, WorkerId, int, int]:
    types = (int, int, int, str, int, int)
    if type(tree) is not list or len(tree) != len(types):
        raise DecodeError("an RRef that is no array of six")
    if any(type(value) is not kind for value, kind in zip(tree, types, strict=True)):
        raise DecodeError("an RRef with fields of the wrong types")
    creator, serial, incarnation, name, form, token = tree
    owner = WorkerId(name, Incarnation(incarnation))
    return RRefId(Incarnation(creator), serial), owner, form, token

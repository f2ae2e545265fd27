"""Remote references of one worker, whole: what `Worker.references` is.

It joins its parts, and decides nothing itself:

    handles     what programs hold: made, and let go of, in any thread
    tables      who holds which value: the two machines, and their effects
    values      the values that are here
    codec       references in messages
    messages    of the protocol itself;  notices: out;  incoming: in
    owned       calls that others make on the values here
    remote      calls of this worker on values, wherever they are
    records     what `Worker.rrefs` says

Source: docs/reference/rref-protocol.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypedDict

from asyncrpc.core.ids import Incarnation, RRefId, WorkerId
from asyncrpc.core.links.directory import Directory
from asyncrpc.core.options import Options
from asyncrpc.core.rref import machine as m
from asyncrpc.core.rref.codec import ReferenceCodec
from asyncrpc.core.rref.handle import RRef
from asyncrpc.core.rref.handles import Handles
from asyncrpc.core.rref.incoming import IncomingNotices
from asyncrpc.core.rref.messages import SERVICE
from asyncrpc.core.rref.names import PeerNames
from asyncrpc.core.rref.notices import Notices
from asyncrpc.core.rref.owned import OwnedValues
from asyncrpc.core.rref.ports import Calls, Functions, Links
from asyncrpc.core.rref.records import Records, RRefRecord
from asyncrpc.core.rref.remote import RemoteValues
from asyncrpc.core.rref.shared import Shared, SharedById
from asyncrpc.core.rref.tables import REFERENCE_BYTES, Tables
from asyncrpc.core.rref.values import Values
from asyncrpc.core.services.ports import Scheduler
from asyncrpc.core.trace.recorder import FlightRecorder
from asyncrpc.errors import UsageError


class ReferenceWorker(Scheduler, Calls, Links, Protocol):
    """A worker, as far as its references need it.

    Attributes:
        recorder: keeps what becomes of values.
        random_bytes: returns so many unpredictable bytes.
    """

    options: Options
    recorder: FlightRecorder
    random_bytes: Callable[[int], bytes]

    @property
    def id(self) -> WorkerId:
        """This life of the worker."""

    @property
    def directory(self) -> Directory:
        """The workers that are known."""

    @property
    def functions(self) -> Functions:
        """Return the functions that peers may call."""


class _CountingParts(TypedDict):
    """The parts that count, which codec and calls have in common."""

    tables: Tables
    handles: Handles
    shared: SharedById
    values: Values
    names: PeerNames


class RRefService:
    """A `runtime.extensions.References` and `Service`.

    Attributes:
        backward_from: runs a backward pass from a referenced tensor; set by autograd.
        shared: the state that the handles of each value share.
        user: the machine for references to others' values.
        names: of the workers that references come from.
        routes: what other workers may send.
    """

    name = SERVICE
    handled: tuple[type, ...] = (RRef,)

    def __init__(self, worker: ReferenceWorker) -> None:
        me, loop, options = worker.id, worker.loop, worker.options
        directory = worker.directory
        self.worker = worker
        self.backward_from: Callable[..., Any] | None = None
        owner = m.OwnerTable(me.incarnation, options.limits.references_max)
        self.user = m.UserTable()
        self.values = values = Values(loop, worker.recorder)
        self.shared = shared = SharedById(me.incarnation, loop.time)
        self.names = names = PeerNames(directory, me)
        self._notices = notices = Notices(
            worker,
            directory,
            worker,
            name_of=names.of,
            on_unreachable=self._on_unreachable,
        )
        self._owner = owner
        tables = Tables(owner, self.user, values, shared, notices)
        self.handles = handles = Handles(
            self,
            me=me,
            loop=loop,
            tables=tables,
            shared=shared,
            on_applied=notices.flush,
            # A simulation replaces it later.
            random_bytes=lambda count: worker.random_bytes(count),  # noqa: PLW0108
        )
        self._incoming = incoming = IncomingNotices(
            tables, names, notices, shared, handles.settle, call_soon=loop.call_soon
        )
        counted: _CountingParts = {
            "tables": tables,
            "handles": handles,
            "shared": shared,
            "values": values,
            "names": names,
        }
        self.routes = incoming.routes
        self._codec = codec = ReferenceCodec(me, meet=incoming.meet, **counted)
        owned = OwnedValues(
            me,
            tables,
            values,
            worker.functions,
            values_max=options.limits.references_max,
        )
        remote = RemoteValues(
            me,
            worker,
            directory,
            owned,
            timeout_s=options.rpc_timeout_s,
            **counted,
        )
        self._records = Records(me.name, tables, values, shared, names, now_s=loop.time)
        self._offer(values, codec, incoming, owned, remote)

    def _offer(
        self,
        values: Values,
        codec: ReferenceCodec,
        incoming: IncomingNotices,
        owned: OwnedValues,
        remote: RemoteValues,
    ) -> None:
        """Make the methods of the parts this object's own: no call lies in between.

        The runtime calls them for each message, and a handle for each call.
        """
        self.begin_encode, self.end_encode = codec.begin_encode, codec.end_encode
        self.begin_decode, self.end_decode = codec.begin_decode, codec.end_decode
        self.lower, self.lift = codec.lower, codec.lift
        self.settle_loans, self.take_back = codec.settle_loans, incoming.take_back
        self.fulfil, self.fail = values.fulfil, values.fail
        self.expect, self.resolve = owned.expect, owned.resolve
        self.local_value = owned.local_value
        self.fetch, self.start_remote = remote.fetch, remote.start_remote
        self.start_method = remote.start_method
        self.remote_method = remote.remote_method
        self.info = self.names.info

    @property
    def values_held(self) -> int:
        """How many values this worker keeps for references; from any thread."""
        return len(self.values)

    @property
    def lifted(self) -> int:
        """How many references of the message being decoded have been rebuilt."""
        return self._codec.lifted

    def held_for(self, peer: Incarnation) -> int:
        """Return how many bytes the references take that a peer holds (HoldsForPeers).

        Their values are not counted: exposed functions made them.
        """
        return REFERENCE_BYTES * self._owner.kept_for(peer)

    # --- handles ---------------------------------------------------------------------

    def adopt(self, handle: RRef[Any], value: Any) -> None:
        """Make `handle` refer to a value of this worker; from any thread."""
        rref_id = self.handles.new_id()
        self.values.add(rref_id, value)
        self.handles.adopt(handle, rref_id)

    def is_pending(self, shared: Shared) -> bool:
        """Return whether the call that makes the value has not reached its owner."""
        holding = None if shared.is_here else self.user.get(shared.rref_id)
        return holding is not None and holding.state is m.HoldingState.PENDING

    def is_confirmed(self, shared: Shared) -> bool:
        """Return whether the owner counts this worker."""
        if shared.is_here:
            return True
        holding = None if shared.is_apart else self.user.get(shared.rref_id)
        return holding is not None and holding.state is m.HoldingState.CONFIRMED

    async def backward(
        self, handle: RRef[Any], context: Any, *, retain_graph: bool
    ) -> None:
        """Run a backward pass from the value; see `RRef.backward`."""
        if self.backward_from is None:
            raise UsageError("this worker was made without autograd")
        await self.backward_from(handle, context, retain_graph=retain_graph)

    # --- messages (Service) ----------------------------------------------------------

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        """Drop what a lost worker held; fail what it owned."""
        self._incoming.on_peer_lost(peer, reason)

    def on_peer_back(self, peer: WorkerId) -> None:
        """Begin anew with a worker that was declared lost, and lives."""
        self._incoming.on_peer_back(peer)

    def _on_unreachable(self, peer: WorkerId, reason: str) -> None:
        self._incoming.on_peer_lost(peer, reason)

    async def close(self) -> None:
        """Free every value; fail the tasks that wait for one."""
        self.handles.settle()
        self._notices.close()
        self.values.close()

    # --- parts -------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """Return how many values are owned and held here, for leak checks."""
        self.handles.settle()
        return self._records.counts()

    def records(self, oldest_max: int | None = None) -> list[RRefRecord]:
        """Describe every reference that this worker owns or holds, oldest first."""
        self.handles.settle()
        return self._records.oldest(oldest_max)

    def holders(self, rref_id: RRefId) -> dict[str, int]:
        """Return the holders of a value of this worker, by name, with their forks."""
        return self._records.holders(rref_id)

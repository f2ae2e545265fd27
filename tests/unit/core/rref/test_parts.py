"""The parts of a worker's references, each alone: no worker, no network."""

from __future__ import annotations

import asyncio
import gc
import os
from typing import Any

import pytest

from asyncrpc.core.ids import Incarnation, RRefId, WorkerId
from asyncrpc.core.members import Member
from asyncrpc.core.rref import machine as m
from asyncrpc.core.rref.codec import FORK, HOME, LOAN, ReferenceCodec
from asyncrpc.core.rref.handle import RRef, shared_of
from asyncrpc.core.rref.handles import Handles
from asyncrpc.core.rref.incoming import LOST_IN_A_TURN, IncomingNotices
from asyncrpc.core.rref.messages import (
    Gone,
    Probe,
    Register,
    Release,
    Released,
    Returned,
)
from asyncrpc.core.rref.names import HEARSAY_MAX, PeerNames
from asyncrpc.core.rref.notices import BATCH_MAX, Notices
from asyncrpc.core.rref.owned import OwnedValues
from asyncrpc.core.rref.records import Records
from asyncrpc.core.rref.shared import SharedById
from asyncrpc.core.rref.tables import REFERENCE_BYTES, Tables
from asyncrpc.core.rref.values import Values
from asyncrpc.core.services.extensions import RefusedFunction
from asyncrpc.errors import (
    ClosedError,
    DecodeError,
    EncodeError,
    Outcome,
    OverloadedError,
    OwnerLostError,
    RejectedError,
    RRefDeletedError,
)
from asyncrpc.trace import FlightRecorder
from tests.unit.recording import (
    LoopScheduler,
    RecordingLink,
    RecordingLinks,
    deliver,
    let_run,
    recording_parts,
    worker,
)

FAR = Incarnation(99)
ME, PEER, THIRD = worker("me"), worker("peer"), worker("third")


class Everything:
    """All parts, joined as the service joins them, around links that only record."""

    def __init__(self, me: WorkerId = ME, values_max: int = 100) -> None:
        self.me = me
        self.scheduler = LoopScheduler()
        loop = self.scheduler.loop
        self.peer, self.third = RecordingLink(PEER), RecordingLink(THIRD)
        links: Any = RecordingLinks(self.peer, self.third)
        self.links = links
        self.lost: list[tuple[WorkerId, str]] = []
        self.values = Values(loop, FlightRecorder())
        self.shared = SharedById(me.incarnation, loop.time)
        host = recording_parts(me, links, self.scheduler)
        self.names = PeerNames(host)
        self.notices = Notices(
            host,
            name_of=self.names.of,
            on_unreachable=lambda peer, reason: self.lost.append((peer, reason)),
        )
        self.owner = m.OwnerTable(me.incarnation)
        self.user = m.UserTable()
        tables = Tables(self.owner, self.user, self.values, self.shared, self.notices)
        self.tables = tables
        service: Any = self
        self.handles = Handles(
            service,
            me=me,
            loop=loop,
            tables=tables,
            shared=self.shared,
            on_applied=self.notices.flush,
            random_bytes=os.urandom,
        )
        self.incoming = IncomingNotices(
            tables,
            self.names,
            self.notices,
            self.shared,
            self.handles.settle,
            call_soon=loop.call_soon,
        )
        self.codec = ReferenceCodec(
            me,
            tables=tables,
            handles=self.handles,
            shared=self.shared,
            values=self.values,
            names=self.names,
            meet=self.incoming.meet,
        )
        functions: Any = _AllowsUpper()
        self.owned = OwnedValues(
            me, tables, self.values, functions, values_max=values_max
        )
        self.records = Records(
            me.name, tables, self.values, self.shared, self.names, now_s=loop.time
        )

    def adopt(self, value: object) -> RRef[Any]:
        """Return a handle of a value of this worker."""
        handle: RRef[Any] = RRef.__new__(RRef)
        rref_id = self.handles.new_id()
        self.values.add(rref_id, value)
        self.handles.adopt(handle, rref_id)
        return handle

    def lift(self, tree: list[Any], link: RecordingLink) -> RRef[Any]:
        """Take a reference that has come over a link."""
        self.codec.begin_decode(link)
        try:
            return self.codec.lift(tree)
        finally:
            self.codec.end_decode()


class _AllowsUpper:
    def check_method(self, kind: type, name: str) -> None:
        if name != "upper":
            raise RejectedError(
                f"{kind.__qualname__}.{name} is not exposed",
                outcome=Outcome.NOT_EXECUTED,
            )


def fork(serial: int, *, owner: WorkerId = PEER, form: int = FORK) -> list[Any]:
    """Return a reference as `owner` sends it."""
    return [int(owner.incarnation), serial, int(owner.incarnation), owner.name, form, 0]


# --- handles and values --------------------------------------------------------------


async def test_value_is_freed_with_its_last_handle() -> None:
    parts = Everything()
    first = parts.adopt("value")
    shared = shared_of(first)
    parts.handles.settle()
    parts.handles.count(shared)
    second = parts.handles.make(shared)
    del first
    gc.collect()
    parts.handles.settle()
    assert (len(parts.values), len(parts.owner)) == (1, 1)
    del second
    gc.collect()
    parts.handles.settle()
    assert (len(parts.values), len(parts.owner)) == (0, 0)


async def test_handle_notes_are_applied_in_the_next_turn_of_the_loop() -> None:
    parts = Everything()
    handle = parts.adopt("value")
    assert len(parts.owner) == 0  # nothing yet: it may be another thread's
    await let_run()
    assert len(parts.owner) == 1
    del handle
    gc.collect()
    await let_run()
    assert len(parts.owner) == 0


async def test_released_handle_says_so() -> None:
    parts = Everything()
    handle = parts.adopt("value")
    handle.release()
    handle.release()  # idempotent
    with pytest.raises(RRefDeletedError, match="given back"):
        shared_of(handle).check()
    parts.handles.settle()
    assert len(parts.owner) == 0


async def test_value_is_awaited_before_it_is_made() -> None:
    values = Values(asyncio.get_running_loop(), FlightRecorder())
    key = RRefId(PEER.incarnation, 1)
    future = values.expect(key)
    assert values.expect(key) is future
    assert values.has(future)
    values.fulfil(key, "made")
    values.fail(key, ValueError("too late"))  # which changes nothing
    assert await future == "made"
    values.free(key, "not wanted")
    assert not values.has(future)
    assert await future == "made"


async def test_value_freed_before_it_is_made_reports_the_reason() -> None:
    recorder = FlightRecorder()
    values = Values(asyncio.get_running_loop(), recorder)
    key = RRefId(PEER.incarnation, 1)
    future = values.expect(key)
    values.free(key, "nobody wants it")
    values.free(key, "once more")  # which changes nothing
    with pytest.raises(RRefDeletedError, match="nobody wants it"):
        await future
    assert [change.change for change in recorder.references.recent] == [
        "failed",
        "freed",
    ]


async def test_waiters_of_values_fail_at_shutdown() -> None:
    values = Values(asyncio.get_running_loop(), FlightRecorder())
    future = values.expect(RRefId(PEER.incarnation, 1))
    values.close()
    assert values.is_closed
    with pytest.raises(ClosedError):
        await future


# --- references in messages ----------------------------------------------------------


async def test_owner_sends_a_reference_as_a_fork() -> None:
    parts = Everything()
    handle = parts.adopt("value")
    parts.codec.begin_encode(parts.peer)
    tree = parts.codec.lower(handle)
    pins = parts.codec.end_encode(sent=True)
    me = int(ME.incarnation)
    assert tree == [*handle.rref_id, me, "me", FORK, 0]
    assert parts.owner.holders(handle.rref_id) == {PEER.incarnation: 1}
    assert pins is not None
    pins.undo()
    assert parts.owner.holders(handle.rref_id) == {}


async def test_unsent_message_counts_no_reference() -> None:
    parts = Everything()
    handle = parts.adopt("value")
    parts.codec.begin_encode(parts.peer)
    parts.codec.lower(handle)
    assert parts.codec.end_encode(sent=False) is None
    assert parts.owner.holders(handle.rref_id) == {}


async def test_user_sends_a_reference_as_a_loan_until_its_return() -> None:
    parts = Everything()
    handle = parts.lift(fork(7), parts.peer)
    parts.codec.begin_encode(parts.third)
    *_, form, token = list(parts.codec.lower(handle))  # type: ignore[call-overload]
    parts.codec.end_encode(sent=True)
    assert form == LOAN
    holding = parts.user.get(handle.rref_id)
    assert holding is not None
    assert holding.pins == 1
    deliver(parts.incoming.routes, parts.third, Returned([token]))
    assert holding.pins == 0


async def test_reference_sent_to_its_owner_keeps_its_count_on_the_way() -> None:
    parts = Everything()
    mine = RecordingLink(ME)
    handle = parts.adopt("value")
    parts.codec.begin_encode(mine)
    tree: Any = parts.codec.lower(handle)
    parts.codec.end_encode(sent=True)
    assert tree[4] == HOME
    del handle
    gc.collect()
    parts.handles.settle()
    assert len(parts.values) == 1  # the message holds it
    assert parts.owner.local(parts.lift(tree, mine).rref_id) == 1


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        ([1, 2, 3], "must be an array of six"),
        ([1, 2, 3, 4, 5, 6], "wrong types"),
        (fork(1, owner=THIRD), "marked as sent by its owner"),
        (fork(1, form=HOME), "marked as sent to itself"),
    ],
)
async def test_inconsistent_reference_is_refused(tree: list[Any], problem: str) -> None:
    parts = Everything()
    with pytest.raises(DecodeError, match=problem):
        parts.lift(tree, parts.peer)
    assert len(parts.user) == 0


async def test_reference_outside_a_message_is_refused() -> None:
    parts = Everything()
    handle = parts.adopt("value")
    with pytest.raises(EncodeError, match="in a call or its result"):
        parts.codec.lower(handle)
    with pytest.raises(DecodeError, match="outside of a call"):
        parts.codec.lift(fork(1))


async def test_reference_of_another_worker_of_the_process_is_refused() -> None:
    here, there = Everything(), Everything(THIRD)
    handle = there.adopt("value")
    here.codec.begin_encode(here.peer)
    with pytest.raises(EncodeError, match="another worker of this process"):
        here.codec.lower(handle)
    here.codec.end_encode(sent=False)


# --- what is told to others ----------------------------------------------------------


async def test_releases_of_one_turn_share_a_message() -> None:
    parts = Everything()
    handles = [parts.lift(fork(serial), parts.peer) for serial in (1, 2)]
    await let_run()
    handles.clear()
    gc.collect()
    await let_run()
    (notice,) = parts.peer.notices
    assert isinstance(notice, Release)
    expected = [Released(RRefId(PEER.incarnation, serial), 1) for serial in (1, 2)]
    assert sorted(notice.released) == expected


async def test_full_batch_of_releases_does_not_wait_for_the_turn() -> None:
    parts = Everything()
    for token in range(BATCH_MAX + 1):
        parts.notices.return_loan(PEER.incarnation, token)
    assert parts.peer.notices == [Returned(list(range(BATCH_MAX)))]


async def test_messages_wait_for_a_connection_in_order() -> None:
    parts = Everything()
    far = RecordingLink(worker("far"))
    parts.links.reachable["far"] = far
    parts.names.note(far.peer)
    register, probe = Register(RRefId(FAR, 2)), Probe(RRefId(FAR, 4))
    parts.notices.send(far.peer.incarnation, register)
    parts.notices.send(far.peer.incarnation, probe)
    await parts.scheduler.settle()
    assert far.notices == [register, probe]


async def test_restarted_owner_counts_as_lost() -> None:
    parts = Everything()
    parts.links.reachable["far"] = RecordingLink(WorkerId("far", Incarnation(2)))
    parts.names.note(WorkerId("far", Incarnation(1)))
    parts.notices.send(Incarnation(1), Probe(RRefId(FAR, 4)))
    await parts.scheduler.settle()
    assert parts.lost == [(WorkerId("far", Incarnation(1)), "it has been restarted")]


@pytest.mark.parametrize("has_dialed", [True, False])
async def test_undialable_owner_may_have_dialed_itself(*, has_dialed: bool) -> None:
    parts = Everything()
    far = RecordingLink(worker("far"))
    parts.names.note(far.peer)
    parts.notices.send(far.peer.incarnation, Probe(RRefId(FAR, 4)))
    if has_dialed:  # while nothing answers at its address
        parts.links.open[far.peer.incarnation] = far
    await parts.scheduler.settle()
    assert far.notices == ([Probe(RRefId(FAR, 4))] if has_dialed else [])
    assert [peer for peer, _ in parts.lost] == ([] if has_dialed else [far.peer])


async def test_owner_alone_may_write_about_a_value() -> None:
    parts = Everything()
    parts.lift(fork(7), parts.peer)
    with pytest.raises(Exception, match=r"'third' wrote about .* worker 'peer' owns"):
        deliver(parts.incoming.routes, parts.third, Gone(RRefId(PEER.incarnation, 7)))


async def test_handles_of_a_lost_owner_fail_and_stay_lost() -> None:
    parts = Everything()
    handle = parts.lift(fork(7), parts.peer)
    parts.incoming.on_peer_lost(PEER, "it was killed")
    with pytest.raises(OwnerLostError, match="it was killed"):
        shared_of(handle).check()
    parts.incoming.meet(parts.peer)  # it lives: it begins anew
    with pytest.raises(OwnerLostError):
        shared_of(handle).check()
    assert parts.lift(fork(8), parts.peer).rref_id.serial == 8


@pytest.mark.parametrize("is_back", [False, True])
async def test_references_of_a_lost_worker_are_dropped_in_several_turns(
    *, is_back: bool
) -> None:
    parts = Everything(values_max=3 * LOST_IN_A_TURN)
    count = 2 * LOST_IN_A_TURN + 1
    for serial in range(1, count + 1):
        parts.owned.expect(parts.peer, (PEER.incarnation, serial))
    parts.incoming.on_peer_lost(PEER, "it was killed")
    assert len(parts.owner) == count - LOST_IN_A_TURN
    if is_back:  # it begins anew, and keeps what it gets now
        parts.incoming.meet(parts.peer)
        parts.owned.expect(parts.peer, (PEER.incarnation, count + 1))
    await let_run()
    await let_run()
    assert len(parts.owner) == is_back


async def test_peer_without_room_gets_no_more_references() -> None:
    parts = Everything()
    parts.owned.expect(parts.peer, (PEER.incarnation, 1))
    parts.peer.room_bytes = REFERENCE_BYTES - 1
    with pytest.raises(OverloadedError):
        parts.owned.expect(parts.peer, (PEER.incarnation, 2))
    unborn = RRefId(THIRD.incarnation, 1)
    with pytest.raises(OverloadedError):
        deliver(parts.incoming.routes, parts.peer, Register(unborn))
    await let_run()
    assert parts.peer.notices == [Gone(unborn)]  # it waits for no answer in vain
    assert len(parts.owner) == 1


def test_names_from_hearsay_are_limited() -> None:
    names = PeerNames(recording_parts(ME, RecordingLinks()))
    names.note(PEER)
    for number in range(HEARSAY_MAX + 1):
        names.note_hearsay(WorkerId(f"w{number}", Incarnation(number + 1)))
    assert names.of(Incarnation(1)) == ""
    assert names.of(Incarnation(2)) == "w1"
    assert names.of(PEER.incarnation) == "peer"


def test_hearsay_names_unknown_workers_and_renames_none() -> None:
    links = RecordingLinks()
    names = PeerNames(recording_parts(ME, links))
    names.note(PEER)
    names.note_hearsay(WorkerId("liar", PEER.incarnation))
    names.note_hearsay(THIRD)
    assert [names.of(worker_id.incarnation) for worker_id in (ME, PEER, THIRD)] == [
        "me",
        "peer",
        "third",
    ]
    links.members = [Member("fourth", 3, Incarnation(4), ())]
    assert names.of(Incarnation(4)) == "fourth"  # listed, and never heard of
    names.forget(PEER.incarnation)
    assert names.shown(PEER.incarnation) == f"{PEER.incarnation:016x}"


# --- calls on the values here --------------------------------------------------------


async def test_method_is_called_once_its_value_is_made() -> None:
    parts = Everything()
    key = RRefId(PEER.incarnation, 1)
    parts.owned.expect(parts.peer, key)
    ready: list[Any] = []
    parts.owned.resolve(parts.peer, ["=", *key, "upper"], ready.append)
    assert ready == []
    parts.values.fulfil(key, "text")
    await let_run()
    assert ready[0]() == "TEXT"


async def test_unexposed_method_is_refused_before_its_lookup() -> None:
    parts = Everything()
    handle = parts.adopt("text")
    parts.handles.settle()
    ready: list[Any] = []
    parts.owned.resolve(parts.peer, ["=", *handle.rref_id, "lower"], ready.append)
    assert isinstance(ready[0], RefusedFunction)
    assert "str.lower is not exposed" in str(ready[0].error)


async def test_number_of_values_is_limited() -> None:
    parts = Everything(values_max=1)
    parts.owned.expect(parts.peer, (int(PEER.incarnation), 1))
    with pytest.raises(RejectedError, match="has 1 referenced values"):
        parts.owned.expect(parts.peer, (int(PEER.incarnation), 2))


async def test_value_is_not_made_in_the_name_of_another_worker() -> None:
    parts = Everything()
    with pytest.raises(Exception, match="names another worker"):
        parts.owned.expect(parts.peer, (int(THIRD.incarnation), 1))


async def test_records_name_owner_and_holders() -> None:
    parts = Everything()
    mine = parts.adopt("text")
    parts.codec.begin_encode(parts.peer)
    parts.codec.lower(mine)
    parts.codec.end_encode(sent=True)
    parts.names.note(PEER)
    theirs = parts.lift(fork(7), parts.peer)
    by_id = {record.rref_id: record for record in parts.records.oldest()}
    assert by_id[mine.rref_id].holders == {"peer": 1}
    assert by_id[mine.rref_id].type_name == "str"
    assert by_id[theirs.rref_id].owner == "peer"
    assert parts.records.counts() == {"owned": 1, "held": 1, "values": 1}

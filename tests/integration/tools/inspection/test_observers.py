"""Observers look, prove who they are, and can do nothing else."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgpack
import pytest

from asyncrpc import LocalRendezvous, NetworkOptions, Options, RejectedError, Worker
from asyncrpc.core.links.observers import OBSERVERS_MAX, QUESTION_BYTES_MAX
from asyncrpc.core.membership.messages import AskMembers, FindMember
from asyncrpc.core.serde import Policy
from asyncrpc.core.wire.frames import FrameKind
from asyncrpc.errors import AuthenticationError, ConnectError, ConnectionLostError
from asyncrpc.tools.inspection.beside import Look, look_beside
from asyncrpc.tools.inspection.local_socket import names_of
from asyncrpc.tools.inspection.messages import LookBeside, TakeSnapshot
from asyncrpc.tools.inspection.observer import Observed, Observer
from asyncrpc.tools.inspection.records import NoAnswer, Trouble

TCP = NetworkOptions(listen=("tcp://127.0.0.1:0",))
OPTIONS = Options(secret="a secret of the group", network=TCP)
GENEROUS_S = 30.0


@contextlib.asynccontextmanager
async def observed_worker(options: Options = OPTIONS) -> Any:
    """Yield a worker, and a connection of an observer to it."""
    alone = LocalRendezvous(1)
    async with (
        Worker("ps", rank=0, world_size=1, rendezvous=alone, options=options) as w,
        Observer(OPTIONS) as observer,
    ):
        yield w, await observer.connect(w.addresses[0])


@pytest.mark.parametrize("policy", Policy)
async def test_observer_sees_a_worker(policy: Policy) -> None:
    options = Options(secret="a secret of the group", network=TCP, policy=policy)
    async with observed_worker(options) as (worker, observed):
        snapshot = await observed.ask(
            TakeSnapshot(is_thorough=True), timeout_s=GENEROUS_S
        )
        assert snapshot.name == worker.name
        assert snapshot.incarnation == worker.incarnation
        assert not snapshot.blocked_for_s


async def test_observer_is_not_a_member() -> None:
    async with observed_worker() as (worker, observed):
        records = await observed.ask(AskMembers(), timeout_s=GENEROUS_S)
        assert [record.name for record in records] == ["ps"]
        assert [record.name for record in worker.known_members] == ["ps"]
        assert worker.parts.directory.links == []


async def test_observer_may_not_send_other_requests() -> None:
    async with observed_worker() as (_, observed):
        with pytest.raises(RejectedError, match=r"may not send a 'membership\.find'"):
            await observed.ask(FindMember("ps"), timeout_s=GENEROUS_S)
        assert await observed.ask(AskMembers(), timeout_s=GENEROUS_S)


async def test_observer_needs_the_secret() -> None:
    alone = LocalRendezvous(1)
    async with (
        Worker("ps", rank=0, world_size=1, rendezvous=alone, options=OPTIONS) as w,
        Observer(Options(secret="another secret of it")) as observer,
    ):
        with pytest.raises(AuthenticationError):
            await observer.connect(w.addresses[0])


@pytest.mark.parametrize(
    ("kind", "control"),
    [
        (FrameKind.REQUEST, msgpack.packb([[], {}])),
        (FrameKind.NOTICE, msgpack.packb([])),
        (FrameKind.RESPONSE, msgpack.packb(1)),
        (FrameKind.SERVICE, b"\xc1"),
        (FrameKind.SERVICE, msgpack.packb([[]] * QUESTION_BYTES_MAX)),
    ],
    ids=["a call", "a notice", "an answer", "no plain data", "a long question"],
)
async def test_forbidden_frame_ends_the_connection_alone(
    kind: FrameKind, control: bytes
) -> None:
    async with observed_worker() as (worker, observed):
        head = msgpack.packb(["inspection", "snapshot"])
        connection = observed.connection
        connection.send(kind, 1, head=head, control=control)
        async with asyncio.timeout(GENEROUS_S):
            await connection.ended
        async with Observer(OPTIONS) as other:
            again = await other.connect(worker.addresses[0])
            assert await again.ask(AskMembers(), timeout_s=GENEROUS_S)


async def test_observers_beyond_the_limit_are_refused() -> None:
    async with observed_worker() as (worker, _), contextlib.AsyncExitStack() as stack:
        for _ in range(OBSERVERS_MAX - 1):
            observer = await stack.enter_async_context(Observer(OPTIONS))
            await observer.connect(worker.addresses[0])
        observer = await stack.enter_async_context(Observer(OPTIONS))
        with pytest.raises(ConnectError, match="observers"):
            await observer.connect(worker.addresses[0])


async def test_a_question_ends_with_the_connection() -> None:
    async with Observer(OPTIONS) as observer:
        alone = LocalRendezvous(1)
        worker = Worker("ps", rank=0, world_size=1, rendezvous=alone, options=OPTIONS)
        async with worker:
            observed: Observed = await observer.connect(worker.addresses[0])
        with pytest.raises(ConnectionLostError):
            await observed.ask(TakeSnapshot(is_thorough=True), timeout_s=GENEROUS_S)


class TestDoors:
    async def test_worker_answers_at_its_local_door(self) -> None:
        async with observed_worker() as (worker, observed):
            for name in names_of(worker.incarnation, worker.addresses):
                look = await asyncio.to_thread(look_beside, [name])
                assert isinstance(look, Look)
                assert look.snapshot.name == "ps"
                assert [member.name for member in look.members] == ["ps"]
            asked = LookBeside(worker.incarnation, [])
            beside = await observed.ask(asked, timeout_s=GENEROUS_S)
            assert beside.snapshot is not None
            assert beside.snapshot.name == "ps"

    async def test_door_is_closed_with_its_worker(self) -> None:
        async with observed_worker() as (worker, _):
            names = names_of(worker.incarnation, worker.addresses)
        answer = await asyncio.to_thread(look_beside, names)
        assert isinstance(answer, NoAnswer)
        assert answer.trouble is Trouble.GONE

    async def test_unknown_door_is_reported_as_gone(self) -> None:
        async with observed_worker() as (_, observed):
            answer = await observed.ask(LookBeside(1, ["none"]), timeout_s=GENEROUS_S)
            assert answer.snapshot is None
            assert answer.no_answer is not None
            assert answer.no_answer.trouble is Trouble.GONE

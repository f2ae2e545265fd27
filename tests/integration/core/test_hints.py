"""What a worker says of others that is not so, and what the others make of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, TypeAlias

import pytest

import asyncrpc
from asyncrpc import LivenessOptions, LocalRendezvous, NetworkOptions, Options, Worker
from asyncrpc.core.links.machine.reconnect import NO_SUCH
from asyncrpc.core.links.tokens import Token
from asyncrpc.core.wire.frames import FrameKind, Hello, prefix
from asyncrpc.core.wire.handshake import NONCE_BYTES, Handshake, Role
from asyncrpc.errors import WorkerLostError
from tests.integration.core.groups import LIMIT_S, alone, started, until
from tests.integration.core.raw_connections import dialed
from tests.raw_messages import request, tell

Trio: TypeAlias = tuple[Worker, Worker, Worker]
NOWHERE = ["tcp://127.0.0.1:9"]
SECRET = "a secret of those inside"
FAR = (1 << 63) - 1
ALIVE, LOST, LEFT = range(3)


@asyncrpc.expose
async def add(left: int, right: int) -> int:
    return left + right


@asyncrpc.expose
async def own_rank() -> int:
    return asyncrpc.current_worker().rank


@asyncrpc.expose
async def wait_for_ever() -> None:
    await asyncio.Event().wait()


def options(policy: asyncrpc.Policy = asyncrpc.Policy.STRICT) -> Options:
    return Options(
        secret=SECRET,
        policy=policy,
        drain_timeout_s=1.0,
        network=NetworkOptions(listen=("tcp://127.0.0.1:0",)),
        liveness=LivenessOptions(heartbeat_s=0.5, lost_after_s=10.0),
    )


def group(
    *names: str, policy: asyncrpc.Policy = asyncrpc.Policy.STRICT
) -> list[Worker]:
    meeting, chosen = LocalRendezvous(len(names)), options(policy)
    return [
        Worker(name, rank=rank, rendezvous=meeting, options=chosen)
        for rank, name in enumerate(names)
    ]


@pytest.fixture(params=list(asyncrpc.Policy), ids=str)
async def trio(request: pytest.FixtureRequest) -> AsyncIterator[Trio]:
    """Two honest members and one that is to lie, all connected."""
    ps, member, liar = group("ps", "m", "liar", policy=request.param)
    async with started(ps, member, liar):
        for worker in (ps, member, liar):
            for other in ("ps", "m"):
                assert await worker.peer(other).call(add, 1, 1) == 2
        yield ps, member, liar


def record(of: Worker, **other: Any) -> list[Any]:
    """Return what is said of a worker, by default what is so."""
    identity = of.parts.identity
    fields = {
        "name": of.name,
        "rank": identity.rank,
        "incarnation": identity.incarnation,
        "addresses": list(of.addresses),
        "host_id": identity.host_id,
        "generation": 1,
        "version": 0,
        "status": ALIVE,
    }
    return list((fields | other).values())


async def say(liar: Worker, to: Worker, *records: list[Any]) -> None:
    link: Any = await liar.parts.directory.open_link(to.name)
    tell(link, "membership", "news", [[[-1, entry] for entry in records]])
    await request(link, "membership", "ping", [])  # by then the news has been taken


def status_of(worker: Worker, name: str) -> int:
    value = worker.parts.membership.table.get(name)
    return LEFT if value is None else int(value.status)


HEIR = {"generation": 2, "incarnation": 12345}
LIES: dict[str, dict[str, Any]] = {
    "lost": {"version": 5, "status": LOST},
    "left": {"version": 5, "status": LEFT},
    "left for good": {"version": FAR, "status": LEFT},
    "succeeded": {**HEIR, "addresses": NOWHERE},
    "succeeded for good": {**HEIR, "generation": FAR, "addresses": NOWHERE},
    "succeeded by one that has left": {**HEIR, "status": LEFT},
    "elsewhere": {"version": 5, "addresses": NOWHERE, "rank": 0},
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("to", ["ps", "m"])
async def test_false_record_of_a_linked_worker_ends_no_link(
    trio: Trio, lie: str, to: str
) -> None:
    ps, member, liar = trio
    running = asyncio.create_task(ps.peer("m").call(wait_for_ever))
    (target,) = (worker for worker in (ps, member) if worker.name == to)
    await say(liar, target, record(member, **LIES[lie]))
    for _ in range(20):
        assert await ps.peer("m").call(add, 1, 1) == 2
        assert await ps.peer(1).call(add, 1, 1) == 2
        assert await member.peer("ps").call(add, 1, 1) == 2
    await until(lambda: status_of(ps, "m") == ALIVE)
    await until(
        lambda: [worker.name for worker in ps.known_members] == ["ps", "m", "liar"]
    )
    assert not running.done()
    running.cancel()


@pytest.mark.parametrize("lie", LIES)
async def test_false_record_of_an_unlinked_worker_is_corrected(lie: str) -> None:
    ps, member, liar = group("ps", "m", "liar")
    async with started(ps, member, liar):
        await say(liar, ps, record(member, **LIES[lie]))
        assert await ps.peer("m").call(add, 1, 1) == 2
        await until(lambda: status_of(ps, "m") == ALIVE)
        assert await ps.peer(1).call(add, 1, 1) == 2


@pytest.mark.parametrize("lie", LIES)
async def test_guest_records_of_others_are_ignored(trio: Trio, lie: str) -> None:
    ps, member, _ = trio
    door = ps.addresses[0].replace("tcp://", "join://")
    token = ps.tokens.issue(valid_s=600.0, name="laptop")
    known = ps.parts.membership.table.get("m")
    guest = Worker("laptop", rendezvous=door, options=Options(token=token))
    async with guest:
        for target in (ps, member):
            await say(guest, target, record(member, **LIES[lie]))
        assert ps.parts.membership.table.get("m") == known
        await say(guest, ps, record(member, name="ghost", incarnation=99, rank=-1))
        assert ps.parts.membership.table.get("ghost") is None
        assert await ps.peer("m").call(add, 1, 1) == 2
        assert await guest.peer("m").call(add, 1, 1) == 2


def ghosts(like: Worker, numbers: range, **other: Any) -> list[list[Any]]:
    other["rank"] = -1
    return [record(like, name=f"ghost{n}", incarnation=n + 9, **other) for n in numbers]


async def test_invented_members_keep_no_worker_out(trio: Trio) -> None:
    ps, member, liar = trio
    for start in range(0, 8000, 200):
        await say(liar, ps, *ghosts(member, range(start, start + 200)))
    assert len(ps.known_members) <= 4096 + 3
    door = ps.addresses[0].replace("tcp://", "join://")
    async with Worker("honest", rendezvous=door, options=options()) as honest:
        assert await honest.peer("ps").call(add, 1, 1) == 2
        assert await ps.peer("honest").call(add, 1, 1) == 2


async def test_names_known_from_a_lost_member_are_forgotten(trio: Trio) -> None:
    ps, member, liar = trio
    await say(liar, ps, *ghosts(member, range(50), addresses=NOWHERE))
    assert len(ps.known_members) == 53
    await liar.shutdown()
    await until(lambda: [known.name for known in ps.known_members] == ["ps", "m"])


# --- names and ranks -----------------------------------------------------------------


async def answer_to(at: Worker, hello: Hello, *, guest: bool = False) -> Hello:
    """Dial with the secret or as guest `laptop`, say a HELLO; return the answer."""
    key, ticket = SECRET.encode(), b""
    if guest:
        token = Token.parse(at.tokens.issue(valid_s=600.0, name="laptop"))
        key, ticket = token.key, token.ticket
    opening = prefix(FrameKind.HELLO, control=hello.encode())
    handshake = Handshake(Role.DIALER, key, bytes(range(NONCE_BYTES)), ticket=ticket)
    async with dialed(at) as (reader, writer), asyncio.timeout(LIMIT_S):
        writer.write(handshake.start())
        while handshake.wanted:
            answer = handshake.receive(await reader.readexactly(handshake.wanted))
            if answer:
                writer.write(answer + opening)
        length = int.from_bytes((await reader.readexactly(40))[8:12], "little")
        return Hello.decode(await reader.readexactly(length))


def claim(name: str, incarnation: int, rank: int = -1, expects: str = "ps") -> Hello:
    return Hello(name=name, incarnation=incarnation, rank=rank, pid=1, expects=expects)


@pytest.mark.parametrize(
    ("name", "rank"), [("m", 1), ("m", -1), ("stranger", 1), ("stranger", 0), ("ps", 0)]
)
async def test_name_and_rank_in_use_are_refused(
    trio: Trio, name: str, rank: int
) -> None:
    ps, _, _ = trio
    assert "taken by" in (await answer_to(ps, claim(name, 4242, rank))).verdict
    assert await ps.peer(1).call(add, 1, 1) == 2
    assert await ps.peer("m").call(add, 1, 1) == 2


@pytest.mark.parametrize("expects", ["ps", "m", ""])
@pytest.mark.parametrize("of", ["ps", "m", "liar"])
@pytest.mark.parametrize("name", ["laptop", "stranger"])
async def test_incarnation_in_use_refused(
    trio: Trio, name: str, of: str, expects: str
) -> None:
    """Services know a worker by it; for a guest of `ps`, and one with the secret."""
    ps, member, liar = trio
    (whose,) = (worker for worker in trio if worker.name == of)
    asked = member if name == "stranger" and expects == "m" else ps
    hello = claim(name, whose.incarnation, expects=expects)
    answer = await answer_to(asked, hello, guest=name == "laptop")
    assert f"its incarnation is that of worker {of!r}" in answer.verdict
    for teller in (ps, member):
        link = teller.parts.directory.link_of(whose.incarnation)
        assert link is None or link.peer.name == of
    for worker in (ps, member, liar):
        assert await worker.peer("m").call(add, 1, 1) == 2
    assert [worker.name for worker in ps.known_members] == ["ps", "m", "liar"]


@pytest.mark.parametrize("name", ["m", "ps"])
async def test_foreign_incarnation_in_news_ends_no_link(trio: Trio, name: str) -> None:
    """A regression: the owner of the name ended the link of the other worker."""
    ps, member, liar = trio
    token = ps.tokens.issue(valid_s=600.0, name="laptop")
    guest = Worker(
        "laptop",
        rendezvous=ps.addresses[0].replace("tcp://", "join://"),
        options=Options(token=token, drain_timeout_s=1.0),
    )
    async with started(guest):
        for worker in (ps, member):
            await worker.find("laptop", timeout_s=LIMIT_S)
            assert await guest.peer(worker.name).call(add, 1, 1) == 2
        running = asyncio.create_task(guest.peer("m").call(wait_for_ever))
        (of,) = (worker for worker in (ps, member) if worker.name == name)
        lie = {"incarnation": guest.incarnation, "generation": 2}
        for target in (ps, member):
            await say(liar, target, record(of, **lie))
        await until(lambda: status_of(ps, "m") == status_of(member, "ps") == ALIVE)
        for caller in (ps, member, guest):
            for to in ("ps", "m"):
                assert await caller.peer(to).call(add, 1, 1) == 2
        assert not running.done()
        running.cancel()


async def test_duplicate_rank_is_explained_to_the_later_program(trio: Trio) -> None:
    ps, *_ = trio
    where = {"other": "tcp://127.0.0.1:0", "twin": "tcp://127.0.0.1:0"}
    where["ps"] = ps.addresses[0]
    twin = Worker("twin", rank=1, rendezvous=where, options=options())
    async with started(twin):
        with pytest.raises(WorkerLostError, match=r"rank 1, of 'm', is taken.*another"):
            await twin.peer("ps").call(add, 1, 1)
        assert await ps.peer(1).call(add, 1, 1) == 2


@pytest.mark.parametrize("name", ["ps", "m", "notebook"])
@pytest.mark.parametrize("expects", ["ps", "m", ""])
async def test_token_is_for_its_name_only(trio: Trio, name: str, expects: str) -> None:
    ps, member, _ = trio
    incarnations = {"ps": ps.incarnation, "m": member.incarnation, "notebook": 77}
    hello = claim(name, incarnations[name], expects=expects)
    answer = await answer_to(ps, hello, guest=True)
    assert "its token is that of worker 'laptop'" in answer.verdict


async def test_guest_is_refused_a_rank_in_use(trio: Trio) -> None:
    ps, *_ = trio
    answer = await answer_to(ps, claim("laptop", 4242, rank=1), guest=True)
    assert "rank 1, of 'm', is taken by a running worker" in answer.verdict
    assert await ps.peer(1).call(add, 1, 1) == 2


@pytest.mark.parametrize("whose", ["ps", "m"])
@pytest.mark.parametrize("expects", ["ps", "m", ""])
@pytest.mark.parametrize("sender", ["member", "guest"])
async def test_incarnation_of_another_worker_cannot_be_claimed(
    trio: Trio, sender: str, expects: str, whose: str
) -> None:
    """Everybody knows it, and what a worker holds is counted by it."""
    ps, member, _ = trio
    rref = member.peer("ps").remote(add, 1, 1)
    assert await rref.to_here() == 2
    incarnation = {"ps": ps.incarnation, "m": member.incarnation}[whose]
    dials = member if sender == "member" and expects == "m" else ps
    hello = claim("laptop", incarnation, expects=expects)
    answer = await answer_to(dials, hello, guest=sender == "guest")
    assert f"its incarnation is that of worker '{whose}'" in answer.verdict
    references: Any = ps.parts.references
    assert references.holders(rref.rref_id) == {"m": 1}
    assert await rref.to_here() == 2
    assert await ps.peer("m").call(add, 1, 1) == 2


@pytest.mark.parametrize("way", ["lane", "resume"])
@pytest.mark.parametrize("sender", ["member", "guest"])
async def test_connection_is_continued_by_its_dialer_only(
    trio: Trio, sender: str, way: str
) -> None:
    """An eavesdropper knows the connection id, and each peer the incarnation."""
    ps, member, _ = trio
    link: Any = ps.parts.directory.link_to("m")
    dialed_by, at = (
        (member, ps) if link.connection.role is Role.ACCEPTOR else (ps, member)
    )
    said = claim("laptop", dialed_by.incarnation, expects=at.name)
    hello = replace(said, lane=link.connection.token)
    if way == "resume":
        hello = replace(said, resume=link.connection.token, attempt=99)
    answer = await answer_to(at, hello, guest=sender == "guest")
    assert answer.verdict in {"no such connection", NO_SUCH}
    assert not link.is_lost
    assert not link.connection.is_broken
    assert await ps.peer("m").call(add, 1, 1) == 2


async def test_peer_with_a_foreign_incarnation_gets_no_call(
    trio: Trio, monkeypatch: pytest.MonkeyPatch
) -> None:
    ps, member, liar = trio
    link: Any = ps.parts.directory.link_to("liar") or await ps.parts.link_to("liar")
    monkeypatch.setattr(liar.parts.identity, "incarnation", member.incarnation)
    link.connection.end(WorkerLostError("by this test", to="liar", function=""))
    with pytest.raises(WorkerLostError, match="its incarnation is that of worker 'm'"):
        await ps.peer("liar").call(add, 1, 1)
    monkeypatch.undo()
    assert ps.parts.directory.link_of(member.incarnation) is not None
    assert await ps.peer("m").call(add, 1, 1) == 2


@pytest.mark.parametrize("status", [ALIVE, LOST, LEFT])
async def test_news_with_foreign_incarnation_dropped(trio: Trio, status: int) -> None:
    ps, member, liar = trio
    former = record(member, name="ghost", rank=-1, status=status)
    later = record(member, name="ghost", rank=-1, incarnation=99, generation=2)
    await say(liar, ps, former)
    assert ps.parts.membership.table.get("ghost") is None
    await say(liar, ps, later, former)
    assert ps.parts.membership.table.refusal("m", member.incarnation) == ""
    assert await ps.peer("m").call(add, 1, 1) == 2


@pytest.mark.parametrize("generation", [2, 9])
async def test_member_keeps_its_name_against_a_twin(
    trio: Trio, generation: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody with the secret listens as `m`, and says so to everybody."""
    ps, member, liar = trio
    displacement = member.parts.membership._displacement  # noqa: SLF001
    await until(lambda: displacement.is_known)
    twin = alone("m", member.parts.options)
    async with started(twin):
        claimed = record(twin, generation=generation)
        for target in (ps, member):
            await say(liar, target, claimed)
        await until(lambda: "another worker answers to its name" in caplog.text)
        assert await ps.peer("m").call(own_rank) == 1
        assert await ps.peer(1).call(own_rank) == 1
        assert await member.peer("ps").call(add, 1, 1) == 2
        assert not displacement.has_happened


@pytest.mark.parametrize("is_linked", [False, True])
async def test_member_denies_a_false_incarnation(*, is_linked: bool) -> None:
    """A worker that believed the record refuses the other one until the denial."""
    ps, member, other, liar = group("ps", "m", "other", "liar")
    async with started(ps, member, other, liar):
        if is_linked:
            assert await ps.peer("m").call(add, 1, 1) == 2
        life = other.parts.identity.incarnation
        await say(liar, ps, record(member, incarnation=life, generation=2))
        mine: Any = ps.parts.membership.table
        await until(lambda: mine.get("m").generation > 2)
        assert mine.get("m").incarnation == member.parts.identity.incarnation
        for worker in (member, other):
            assert await ps.peer(worker.name).call(add, 1, 1) == 2

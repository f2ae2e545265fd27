"""A peer sends only what its kind may: every message, from every kind that may not.

The kinds of peer are real: a member, a guest of a gateway, seen by the gateway and by
another member, and an observer.  Who may send what is in the messages themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from asyncrpc import AsyncRpcError, LocalRendezvous, Options, Policy, Worker, serving
from asyncrpc.core.links.link import Link
from asyncrpc.core.services.schema import Message, Request, Sender, names_of
from asyncrpc.core.wire.frames import FRAMES_OF_OBSERVERS, FrameKind, pack_head
from asyncrpc.serving.weights.service import serve_weights
from asyncrpc.tools.inspection.observer import Observed, Observer
from tests import raw_messages
from tests.docs import test_wire_tables
from tests.integration.core.groups import started, until
from tests.integration.core.test_guests import INSIDE, guests
from tests.integration.core.test_wrong_content import sizes, until_same
from tests.integration.core.wrong_content import examples

# Only the workers of a `Cluster` take those of its service.
MESSAGES = {
    name: kind
    for name, kind in test_wire_tables.MESSAGES.items()
    if not kind.service.startswith("cluster")
}

LIMIT_S = 60.0  # for what would otherwise hang
POLICIES = pytest.mark.parametrize("policy", Policy)


class Senders(NamedTuple):
    """A worker, and peers of each kind that are connected to it.

    Attributes:
        victim: the worker.
        laptop: the guest.
        member: a link of a member to it.
        guest: a link of a guest to it.
        observer: a connection of an observer to it.
    """

    victim: Worker
    laptop: Worker
    member: Link
    guest: Link
    observer: Observed


@asynccontextmanager
async def senders(policy: Policy, at: str = "other") -> AsyncIterator[Senders]:
    meeting = LocalRendezvous(2)
    options = replace(INSIDE, policy=policy)
    gateway, other = (
        Worker(name, rank=rank, rendezvous=meeting, options=options)
        for rank, name in enumerate(("gateway", "other"))
    )
    victim, member = (gateway, other) if at == "gateway" else (other, gateway)
    looking = Options(secret=INSIDE.secret)
    async with started(gateway, other), guests(gateway, "laptop") as (laptop,):
        members: Any = victim.parts.membership.table
        await until(lambda: members.get("laptop") is not None)
        serve_weights(victim.parts, serving.ServedModel(torch.nn.Linear(1, 1)))
        async with serving.Replica(victim), Observer(looking) as observer:
            yield Senders(
                victim,
                laptop,
                await member.parts.link_to(victim.name),
                await laptop.parts.link_to(victim.name),
                await observer.connect(victim.addresses[0]),
            )


def content_of(kind: type[Message], senders: Senders) -> Any:
    """Return a right content of a message, which concerns nothing real."""
    return examples(senders.laptop, senders.victim).get((kind.service, kind.method), [])


def refused(kind: type[Message], sender: Sender) -> str:
    return f"({names_of(sender)}) may not send a {kind.name!r} message"


async def answer_of(link: Link, kind: type[Message], content: Any) -> str:
    """Ask for something; return the text of the error, empty if it was answered."""
    try:
        async with asyncio.timeout(LIMIT_S):
            await raw_messages.request(link, kind.service, kind.method, content)
    except AsyncRpcError as error:
        return str(error)
    return ""


@POLICIES
@pytest.mark.parametrize("at", ["gateway", "other"])
async def test_guest_may_not_send_messages_of_members(
    policy: Policy, at: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with senders(policy, at) as peers:
        assert isinstance(peers.guest, Link)
        before = sizes(peers.victim)
        for kind in MESSAGES.values():
            if Sender.GUEST in kind.by:
                continue
            content = content_of(kind, peers)
            if issubclass(kind, Request):
                said = await answer_of(peers.guest, kind, content)
            else:
                caplog.clear()
                raw_messages.tell(peers.guest, kind.service, kind.method, content)
                await raw_messages.request(peers.guest, "membership", "ping", [])
                said = caplog.text
            assert refused(kind, Sender.GUEST) in said
            assert "'laptop'" in said
        await until_same(peers.victim, before)
        assert not peers.guest.is_lost


@POLICIES
async def test_observer_may_not_send_messages_of_members(policy: Policy) -> None:
    async with senders(policy) as peers:
        before = sizes(peers.victim)
        for kind in MESSAGES.values():
            if Sender.OBSERVER in kind.by or not issubclass(kind, Request):
                continue
            ask: Any = raw_messages.RawMessage(kind.service, kind.method, [1, 2])
            with pytest.raises(AsyncRpcError) as refusal:
                await peers.observer.ask(ask, timeout_s=LIMIT_S)
            assert refused(kind, Sender.OBSERVER) in str(refusal.value)
        await until_same(peers.victim, before)


async def test_observer_may_not_send_other_frames() -> None:
    async with senders(Policy.STRICT) as peers:
        before = sizes(peers.victim)
        for kind in sorted(set(FrameKind) - FRAMES_OF_OBSERVERS):
            async with Observer(Options(secret=INSIDE.secret)) as observer:
                observed = await observer.connect(peers.victim.addresses[0])
                connection = observed.connection
                connection.send(kind, 1, head=pack_head(["membership", "news"]))
                await asyncio.wait_for(asyncio.wait([connection.ended]), LIMIT_S)
        await until_same(peers.victim, before)


@POLICIES
async def test_permitted_sender_is_not_refused_for_its_kind(policy: Policy) -> None:
    """The subjects of the messages do not exist."""
    async with senders(policy) as peers:
        for kind in MESSAGES.values():
            content = content_of(kind, peers)
            for link, sender in (
                (peers.member, Sender.MEMBER),
                (peers.guest, Sender.GUEST),
            ):
                if sender in kind.by and issubclass(kind, Request):
                    assert "may not send" not in await answer_of(link, kind, content)


def test_messages_declare_senders_and_subjects() -> None:
    assert len(MESSAGES) > 70
    for kind in MESSAGES.values():
        assert kind.about, kind.name
        assert Sender.MEMBER in kind.by, kind.name

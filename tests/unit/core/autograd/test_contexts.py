"""Contexts of one worker, their crossings and their ends: no worker, no network."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from asyncrpc.core.autograd.contexts import (
    ENDED_IN_A_TURN,
    ENDED_MAX,
    JOINS_MAX,
    RECORD_BYTES,
    Context,
    ContextLifetime,
    Contexts,
    Crossings,
    current_context_var,
)
from asyncrpc.core.autograd.engine import Keeping
from asyncrpc.core.autograd.functions import CrossingId
from asyncrpc.core.autograd.messages import JoinContext, PassId, ReleaseContext
from asyncrpc.core.ids import ContextId, MessageId, WorkerId
from asyncrpc.core.serde import Encoded
from asyncrpc.errors import (
    AutogradError,
    InvalidContextError,
    MalformedError,
    OverloadedError,
)
from tests.unit.recording import (
    LoopScheduler,
    RecordingLink,
    RecordingLinks,
    let_run,
    worker,
)

ME, PEER, THIRD = worker("me"), worker("peer"), worker("third")
MINE, THEIRS = ContextId(ME.incarnation, 1), ContextId(PEER.incarnation, 1)


class Everything:
    """A worker's contexts, around links that only record."""

    def __init__(self) -> None:
        self.scheduler = LoopScheduler()
        self.peer, self.third = RecordingLink(PEER), RecordingLink(THIRD)
        self.links = RecordingLinks(self.peer, self.third)
        self.contexts = Contexts(ME, self.links.link_of)
        self.crossings = Crossings(ME.incarnation, self.contexts, self.scheduler.loop)
        self.lifetime = ContextLifetime(
            ME.incarnation, self.contexts, self.links.link_to, self.scheduler
        )

    def send(
        self, context_id: ContextId, to: RecordingLink, *tensors: torch.Tensor
    ) -> Any:
        """Return what travels with a message that is sent in a context."""
        service: Any = None
        token = current_context_var.set(Context(service, context_id))
        try:
            return self.crossings.outgoing(to, Encoded(b"", [], list(tensors), 0))
        finally:
            current_context_var.reset(token)


async def test_released_context_tells_each_peer_once() -> None:
    parts = Everything()
    parts.contexts.enter(MINE, ME)
    parts.send(MINE, parts.peer)
    parts.send(MINE, parts.peer)
    released: list[ContextId] = []
    parts.contexts.on_released = released.append
    parts.contexts.release(MINE)
    parts.contexts.release(MINE)
    assert parts.peer.notices == [ReleaseContext(MINE)]
    assert parts.third.notices == []
    assert released == [MINE]


async def test_late_message_does_not_revive_a_context() -> None:
    parts = Everything()
    assert parts.crossings.incoming(parts.peer, [*THEIRS, 1]) is not None
    parts.contexts.release(THEIRS)
    assert parts.crossings.incoming(parts.peer, [*THEIRS, 2]) is None
    assert THEIRS not in parts.contexts.open
    with pytest.raises(InvalidContextError, match="has ended"):
        parts.contexts.enter(THEIRS, PEER)


async def test_ended_contexts_are_remembered_up_to_a_limit() -> None:
    contexts = Contexts(ME, RecordingLinks().link_of)
    every = [ContextId(ME.incarnation, serial) for serial in range(ENDED_MAX + 1)]
    for context in every:
        contexts.enter(context, ME)
        contexts.release(context)
    assert [contexts.has_ended(context) for context in (every[0], every[1])] == [
        False,
        True,
    ]


async def test_creator_name_is_filled_in_by_a_later_message() -> None:
    contexts = Contexts(ME, RecordingLinks().link_of)
    state = contexts.enter(THEIRS, WorkerId("", PEER.incarnation))
    assert contexts.enter(THEIRS, PEER) is state
    assert state.creator == PEER


async def test_message_outside_a_context_has_no_crossing() -> None:
    parts = Everything()
    assert (
        parts.crossings.outgoing(parts.peer, Encoded(b"", [], [torch.ones(1)], 0))
        is None
    )


async def test_sent_tensor_enters_the_graph_at_its_own_node() -> None:
    parts = Everything()
    state = parts.contexts.enter(MINE, ME)
    tensor = torch.ones(2, requires_grad=True) * 2
    *_, serial = parts.send(MINE, parts.peer, tensor)
    (sent,) = state.sent.values()
    assert (sent.to, sent.edges[0].node) == (PEER, tensor.grad_fn)
    crossing = CrossingId(MessageId(ME.incarnation, serial), 0)
    state.check_sent(PEER, [crossing])
    with pytest.raises(MalformedError, match="was sent to 'peer'"):
        state.check_sent(THIRD, [crossing])
    with pytest.raises(AutogradError, match="nothing was sent as"):
        state.check_sent(PEER, [CrossingId(crossing.message, 1)])


async def test_received_tensors_are_differentiable() -> None:
    parts = Everything()
    receive = parts.crossings.incoming(parts.peer, [*THEIRS, 5])
    assert receive is not None
    first, second = receive(torch.ones(1)), receive(torch.ones(1))
    assert first.requires_grad
    keys = [tensor.grad_fn.received.crossing for tensor in (first, second)]  # type: ignore[union-attr]
    message = MessageId(PEER.incarnation, 5)
    assert keys == [CrossingId(message, 0), CrossingId(message, 1)]


async def test_context_is_ended_by_its_creator_only() -> None:
    parts = Everything()
    parts.contexts.enter(MINE, ME)
    with pytest.raises(MalformedError, match="no part in"):
        parts.lifetime.on_release(parts.peer, ReleaseContext(MINE))
    parts.send(MINE, parts.peer)
    with pytest.raises(MalformedError, match="only the worker that opened it"):
        parts.lifetime.on_release(parts.peer, ReleaseContext(MINE))
    parts.crossings.incoming(parts.peer, [*THEIRS, 0])
    parts.lifetime.on_release(parts.peer, ReleaseContext(THEIRS))
    assert list(parts.contexts.open) == [MINE]


async def test_lost_worker_ends_its_contexts() -> None:
    parts = Everything()
    parts.crossings.incoming(parts.peer, [*THEIRS, 0])
    parts.send(THEIRS, parts.third)
    parts.lifetime.on_peer_lost(PEER)
    assert THEIRS not in parts.contexts.open
    assert parts.third.notices == [ReleaseContext(THEIRS)]


async def test_lost_worker_ends_many_contexts_in_several_turns() -> None:
    parts = Everything()
    for serial in range(2 * ENDED_IN_A_TURN + 1):
        parts.crossings.incoming(parts.peer, [PEER.incarnation, serial, 0])
    parts.lifetime.on_peer_lost(PEER)
    assert len(parts.contexts.open) == ENDED_IN_A_TURN + 1
    await let_run()
    await let_run()
    assert not parts.contexts.open


async def test_creators_of_many_contexts_are_asked_in_several_turns() -> None:
    parts = Everything()
    for serial in range(2 * JOINS_MAX):
        parts.crossings.incoming(parts.peer, [THIRD.incarnation, serial, 0, "nobody"])
    parts.lifetime.on_peer_lost(PEER)
    assert len(parts.scheduler.tasks) == JOINS_MAX
    await asyncio.sleep(0)
    assert len(parts.contexts.open) == JOINS_MAX  # one of each task in a turn
    await asyncio.gather(*parts.scheduler.tasks)
    assert not parts.contexts.open  # nobody knows them


async def test_context_bytes_are_charged_to_the_worker_that_brings_it() -> None:
    parts = Everything()
    state = parts.contexts.enter(MINE, ME)
    parts.send(MINE, parts.peer)
    parts.crossings.incoming(parts.peer, [*MINE, 3])  # an answer: it was asked
    assert parts.contexts.held_for(PEER.incarnation) == 0
    parts.crossings.incoming(parts.peer, [*THEIRS, 0])
    parts.crossings.incoming(parts.peer, [*THEIRS, 4])
    parts.crossings.incoming(parts.third, [*THEIRS, 0])
    assert parts.contexts.held_for(PEER.incarnation) == 2 * RECORD_BYTES
    assert parts.contexts.held_for(THIRD.incarnation) == 0
    parts.peer.room_bytes = 0
    with pytest.raises(OverloadedError):
        parts.crossings.incoming(parts.peer, [PEER.incarnation, 2, 0])
    assert set(parts.contexts.open) == {MINE, THEIRS}
    parts.contexts.release(THEIRS)
    assert parts.contexts.held_for(PEER.incarnation) == 0
    assert state.kept_for == {}


@pytest.mark.parametrize("is_open", [True, False])
async def test_creator_is_asked_when_a_bearer_is_lost(*, is_open: bool) -> None:
    parts = Everything()
    parts.links.reachable["peer"] = parts.peer
    parts.crossings.incoming(parts.third, [*THEIRS, 0, "peer"])
    parts.lifetime.on_peer_lost(THIRD)
    (task,) = parts.scheduler.tasks
    await let_run()
    ((request, answer),) = parts.peer.asked
    assert request == JoinContext(THEIRS)
    answer.set_result(is_open)
    await task
    assert (THEIRS in parts.contexts.open) is is_open


async def test_end_of_the_worker_aborts_its_own_passes() -> None:
    contexts = Contexts(ME, RecordingLinks().link_of)
    state = contexts.enter(MINE, ME)
    own = state.join_pass(PassId(ME.incarnation, 1), "me", Keeping())
    served = state.join_pass(PassId(PEER.incarnation, 1), "peer", Keeping())
    contexts.close()
    with pytest.raises(AutogradError, match="was shut down"):
        own.check()
    served.check()  # its request is cancelled
    assert contexts.open == {}

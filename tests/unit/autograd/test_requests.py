"""What a pass asks of other workers, and how it ends: no worker, no network."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from asyncrpc.autograd.contexts import Contexts
from asyncrpc.autograd.ends import PassEnds
from asyncrpc.autograd.engine import Keeping
from asyncrpc.autograd.functions import CrossingId, Received
from asyncrpc.autograd.messages import (
    AbortPass,
    Advance,
    AskWaits,
    CommitPass,
    PassId,
    PassIds,
)
from asyncrpc.autograd.requests import PassRequests
from asyncrpc.autograd.waits import PassWaits
from asyncrpc.errors import AutogradError, MalformedError
from asyncrpc.ids import ContextId, Incarnation, MessageId, WorkerId
from tests.unit.recording import (
    LoopScheduler,
    RecordingLink,
    RecordingLinks,
    let_run,
    worker,
)

ME, PEER, FAR = worker("me"), worker("peer"), worker("far")
CONTEXT = ContextId(ME.incarnation, 1)
PASS = PassId(ME.incarnation, 2)


class NoTurns:
    runs_here = False
    is_exclusive = False


class Everything:
    """A pass of this worker, around links that only record."""

    def __init__(self) -> None:
        me = ME.incarnation
        self.scheduler = LoopScheduler()
        self.peer = RecordingLink(PEER)
        self.links = RecordingLinks(self.peer)
        self.contexts = Contexts(ME, self.links)
        self.state = self.contexts.enter(CONTEXT, ME)
        self.one = self.state.join_pass(PASS, "me", Keeping())
        self.requests = PassRequests(
            me, self.contexts, self.links, self.links, self.scheduler
        )
        self.ends = PassEnds(me, self.contexts, self.links, NoTurns())
        self.waits = PassWaits(ME, self.links)

    def ask(self, sender: WorkerId = PEER) -> Received:
        """Ask the sender of a tensor to take part."""
        leaf = received(sender)
        self.requests.send(self.one, [leaf], [], {})
        return leaf


def received(sender: WorkerId, serial: int = 7) -> Received:
    return Received(CrossingId(MessageId(sender.incarnation, serial), 0), sender)


async def test_gradients_and_questions_to_one_worker_go_in_one_request() -> None:
    parts = Everything()
    gradient = torch.ones(1)
    given = received(PEER, 8)
    parts.requests.send(parts.one, [received(PEER)], [given], {given: gradient})
    ((advance, _),) = parts.peer.asked
    assert isinstance(advance, Advance)
    assert (advance.asked, advance.given) == ([7, 0], [8, 0])
    assert advance.gradients[0] is gradient
    assert advance.history is None
    assert parts.one.wave.outstanding == 1


async def test_a_gradient_with_a_history_is_a_tensor_that_is_sent() -> None:
    parts = Everything()
    gradient = torch.ones(1, requires_grad=True) * 2
    given = received(PEER)
    parts.requests.send(parts.one, [], [given], {given: gradient})
    ((advance, _),) = parts.peer.asked
    assert isinstance(advance, Advance)
    ((message, sent),) = parts.state.sent.items()
    assert advance.history == [message.serial, 0]
    assert sent.edges[0].node is gradient.grad_fn


async def test_the_answer_ends_a_part_of_the_pass() -> None:
    parts = Everything()
    parts.ask()
    parts.peer.asked[0][1].set_result([])
    await let_run()
    assert parts.one.failure is None


@pytest.mark.parametrize(
    ("answer", "error"),
    [([["x", 1, 1]], MalformedError), (ValueError("there"), ValueError)],
)
async def test_a_wrong_answer_fails_the_pass(answer: Any, error: type) -> None:
    parts = Everything()
    parts.ask()
    future = parts.peer.asked[0][1]
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)
    await let_run()
    assert isinstance(parts.one.failure, error)


async def test_a_worker_without_a_link_is_dialed() -> None:
    parts = Everything()
    far = parts.links.reachable["far"] = RecordingLink(FAR)
    parts.ask(FAR)
    await parts.scheduler.settle()
    assert [type(request) for request, _ in far.asked] == [Advance]
    assert parts.one.failure is None


async def test_another_life_of_a_worker_fails_the_pass() -> None:
    parts = Everything()
    again = WorkerId("far", Incarnation(1))
    parts.links.reachable["far"] = RecordingLink(again)
    parts.ask(FAR)
    await parts.scheduler.settle()
    assert "has been restarted" in str(parts.one.failure)


@pytest.mark.parametrize("commit", [True, False])
async def test_a_pass_ends_where_it_went(*, commit: bool) -> None:
    parts = Everything()
    parts.ask()
    parameter = torch.ones(1, requires_grad=True)
    parts.one.flow.staged[parameter] = torch.ones(1)
    ids = PassIds(CONTEXT, PASS)
    parts.ends.finish(ids, commit=commit)
    parts.ends.finish(ids, commit=commit)  # which has no more to end
    assert parts.peer.told == [CommitPass(ids) if commit else AbortPass(ids)]
    assert (parameter in parts.state.gradients) is commit
    expected = nullcontext() if commit else pytest.raises(AutogradError)
    with expected:
        parts.one.check()


async def test_what_a_pass_waits_for_is_said_by_all() -> None:
    parts = Everything()
    parts.ask()
    parts.one.wave.is_running = True
    asking = asyncio.create_task(parts.waits.explain(parts.one, []))
    await let_run()
    request, answer = parts.peer.asked[1]
    assert request == AskWaits(parts.one.ids, [int(ME.incarnation)])
    answer.set_result(["worker 'peer' runs its part of the graph"])
    assert await asking == [
        "worker 'me' runs its part of the graph",
        "worker 'peer' runs its part of the graph",
    ]

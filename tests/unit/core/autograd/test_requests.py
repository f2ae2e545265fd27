"""What a pass asks of other workers, how it is written, and how it ends."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from asyncrpc.core.autograd.contexts import Contexts, PassEnds
from asyncrpc.core.autograd.engine import Keeping
from asyncrpc.core.autograd.functions import CrossingId, Received
from asyncrpc.core.autograd.messages import (
    AbortPass,
    Advance,
    AskWaits,
    CommitPass,
    PassAnswer,
    PassId,
    PassIds,
    read_meta,
)
from asyncrpc.core.autograd.state import Pass
from asyncrpc.core.autograd.waits import PassWaits
from asyncrpc.core.autograd.work import PassRequests
from asyncrpc.core.ids import ContextId, Incarnation, MessageId, WorkerId
from asyncrpc.errors import AutogradError, MalformedError
from asyncrpc.trace import FlightRecorder
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


class Everything:
    """A pass of this worker, around links that only record."""

    def __init__(self) -> None:
        me = ME.incarnation
        self.scheduler = LoopScheduler()
        self.peer = RecordingLink(PEER)
        self.links = RecordingLinks(self.peer)
        self.contexts = Contexts(ME, self.links.link_of)
        self.state = self.contexts.enter(CONTEXT, ME)
        self.local_pass = self.state.join_pass(PASS, "me", Keeping())
        self.requests = PassRequests(
            me,
            self.contexts,
            self.links.link_of,
            self.links.link_to,
            self.scheduler,
        )
        self.taken: list[tuple[Pass, WorkerId, PassAnswer]] = []
        self.refusal: Exception | None = None
        self.requests.take_gradients = self._take
        self.ends = PassEnds(
            me, self.contexts, self.links.link_of, FlightRecorder(), is_exclusive=False
        )
        self.waits = PassWaits(ME, self.links.link_of)

    async def _take(self, local_pass: Pass, peer: WorkerId, answer: PassAnswer) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.taken.append((local_pass, peer, answer))

    def engage(self) -> None:
        """Let the peer wait for an answer."""
        self.local_pass.inward[PEER.incarnation] = PEER
        assert self.local_pass.wave.engage(PEER.incarnation)

    def ask(self, sender: WorkerId = PEER) -> Received:
        """Ask the sender of a tensor to take part."""
        leaf = received(sender)
        self.requests.send(self.local_pass, [leaf], [], {})
        return leaf


def answer_of(
    gradients: list[torch.Tensor | None] | None = None,
    *,
    asked: list[int] | None = None,
    crossings: list[int] | None = None,
) -> list[Any]:
    """Return an answer as it travels."""
    return [gradients or [], {"fields": [[], asked or [], crossings or [], None, None]}]


def received(sender: WorkerId, serial: int = 7) -> Received:
    return Received(CrossingId(MessageId(sender.incarnation, serial), 0), sender)


async def test_gradients_and_questions_to_a_worker_share_a_request() -> None:
    parts = Everything()
    gradient = torch.ones(1)
    leaf = received(PEER, 8)
    parts.requests.send(parts.local_pass, [received(PEER)], [leaf], {leaf: gradient})
    ((advance, _),) = parts.peer.asked
    assert isinstance(advance, Advance)
    assert (advance.asked, advance.given) == ([7, 0], [8, 0])
    assert advance.gradients[0] is gradient
    assert advance.history is None
    assert parts.local_pass.wave.outstanding == 1


async def test_gradient_with_a_history_is_sent_as_a_tensor() -> None:
    parts = Everything()
    gradient = torch.ones(1, requires_grad=True) * 2
    leaf = received(PEER)
    parts.requests.send(parts.local_pass, [], [leaf], {leaf: gradient})
    ((advance, _),) = parts.peer.asked
    assert isinstance(advance, Advance)
    ((message, sent),) = parts.state.sent.items()
    assert advance.history == [message.serial, 0]
    assert sent.edges[0].node is gradient.grad_fn


async def test_answer_ends_a_part_of_the_pass() -> None:
    parts = Everything()
    parts.ask()
    parts.peer.asked[0][1].set_result(answer_of())
    await let_run()
    assert parts.local_pass.failure is None
    assert parts.local_pass.wave.is_idle
    assert parts.taken == []


async def test_answer_with_gradients_ends_once_they_are_taken() -> None:
    parts = Everything()
    parts.ask()
    gradients = [torch.ones(1), None]
    crossings = [3, 0, 3, 1]
    parts.peer.asked[0][1].set_result(answer_of(gradients, crossings=crossings))
    await let_run()
    assert not parts.local_pass.wave.is_idle  # who takes them says when
    ((local_pass, peer, answer),) = parts.taken
    assert (local_pass, peer) == (parts.local_pass, PEER)
    assert (answer.gradients, answer.given) == (gradients, crossings)


async def test_gradients_of_an_answer_may_be_refused() -> None:
    parts = Everything()
    parts.ask()
    parts.refusal = MalformedError("of what was not sent")
    parts.peer.asked[0][1].set_result(answer_of(asked=[3, 0]))
    await let_run()
    await parts.scheduler.settle()
    assert parts.local_pass.failure is parts.refusal


class TestGoingBack:
    """What goes with the answer to the worker that waits for it."""

    async def test_returned_gradient_travels_in_the_answer(self) -> None:
        parts = Everything()
        parts.engage()
        gradient = torch.ones(1)
        leaf = received(PEER)
        parts.requests.send(parts.local_pass, [], [leaf], {leaf: gradient})
        assert parts.peer.asked == []
        assert parts.local_pass.wave.is_idle
        answer = parts.local_pass.answer(ME.incarnation)
        assert (answer.gradients, answer.given) == ([gradient], [7, 0])
        assert [report.worker for report in answer.reports] == [ME.incarnation]
        assert parts.local_pass.going_back is None

    async def test_returned_gradient_is_sent_if_another_request_is_under_way(
        self,
    ) -> None:
        parts = Everything()
        parts.engage()
        parts.ask(PEER)
        far = parts.links.reachable["far"] = RecordingLink(FAR)
        parts.links.open[FAR.incarnation] = far
        parts.ask(FAR)
        assert [type(request) for request, _ in far.asked] == [Advance]
        assert [type(request) for request, _ in parts.peer.asked] == [Advance]

    async def test_returned_gradient_is_sent_before_slow_work(self) -> None:
        parts = Everything()
        parts.engage()
        parts.ask(PEER)
        parts.requests.send_ahead(parts.local_pass)
        parts.requests.send_ahead(parts.local_pass)  # which has no more to send
        assert [type(request) for request, _ in parts.peer.asked] == [Advance]
        assert parts.local_pass.wave.outstanding == 1

    async def test_second_request_to_a_peer_is_sent_with_the_first(self) -> None:
        parts = Everything()
        parts.engage()
        parts.ask(PEER)
        parts.ask(PEER)
        assert len(parts.peer.asked) == 2

    async def test_returned_gradient_on_a_device_is_sent(self) -> None:
        parts = Everything()
        parts.engage()
        leaf = received(PEER)
        gradient = torch.ones(1, device="meta")
        parts.requests.send(parts.local_pass, [], [leaf], {leaf: gradient})
        assert len(parts.peer.asked) == 1

    async def test_root_of_the_pass_sends_requests_and_owes_no_answer(self) -> None:
        parts = Everything()
        assert parts.local_pass.wave.engage()
        parts.ask(PEER)
        assert len(parts.peer.asked) == 1


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (
            [[], {"fields": [[["x", 1, True, None]], [], [], None, None]}],
            MalformedError,
        ),
        ([[["x", 1, 1]]], MalformedError),
        ([[], {"fields": [[], [], [3, 0], None, None]}], MalformedError),
        ([[], {"fields": [[], [3], [], None, None]}], MalformedError),
        ([[], {"fields": [[], [], [], None, [1]]}], MalformedError),  # no step was sent
        ([[None], {"fields": [[], [], [3, 0], [5, 0], None]}], MalformedError),
        (ValueError("there"), ValueError),
    ],
)
async def test_wrong_answer_fails_the_pass(answer: Any, error: type) -> None:
    parts = Everything()
    parts.ask()
    future = parts.peer.asked[0][1]
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)
    await let_run()
    assert isinstance(parts.local_pass.failure, error)


async def test_worker_without_a_link_is_dialed() -> None:
    parts = Everything()
    far = parts.links.reachable["far"] = RecordingLink(FAR)
    parts.ask(FAR)
    await parts.scheduler.settle()
    assert [type(request) for request, _ in far.asked] == [Advance]
    assert parts.local_pass.failure is None


async def test_restarted_worker_fails_the_pass() -> None:
    parts = Everything()
    again = WorkerId("far", Incarnation(1))
    parts.links.reachable["far"] = RecordingLink(again)
    parts.ask(FAR)
    await parts.scheduler.settle()
    assert "has been restarted" in str(parts.local_pass.failure)


@pytest.mark.parametrize("commit", [True, False])
async def test_finished_pass_tells_each_peer_once(*, commit: bool) -> None:
    parts = Everything()
    parts.ask()
    parameter = torch.ones(1, requires_grad=True)
    parts.local_pass.flow.staged[parameter] = torch.ones(1)
    ids = PassIds(CONTEXT, PASS)
    parts.ends.finish(ids, commit=commit)
    parts.ends.finish(ids, commit=commit)  # which has no more to end
    assert parts.peer.notices == [CommitPass(ids) if commit else AbortPass(ids)]
    assert (parameter in parts.state.gradients) is commit
    expected = nullcontext() if commit else pytest.raises(AutogradError)
    with expected:
        parts.local_pass.check()


async def test_waits_of_a_pass_are_explained_by_every_worker() -> None:
    parts = Everything()
    parts.ask()
    parts.local_pass.wave.is_running = True
    asking = asyncio.create_task(parts.waits.explain(parts.local_pass, []))
    await let_run()
    request, answer = parts.peer.asked[1]
    assert request == AskWaits(parts.local_pass.ids, [int(ME.incarnation)])
    answer.set_result(["worker 'peer' runs its part of the graph"])
    assert await asking == [
        "worker 'me' runs its part of the graph",
        "worker 'peer' runs its part of the graph",
    ]


OTHER_CONTEXT = ContextId(Incarnation(3), 4)
IDS = PassIds(OTHER_CONTEXT, PassId(Incarnation(5), 6))
FLAGS = list(itertools.product([False, True], repeat=3))
ADVANCE = Advance(
    gradients=[torch.ones(1), None],
    ids=IDS,
    root="root",
    keeping=Keeping(),
    is_fast=False,
    asked=[1, 0],
    given=[2, 0, 2, 1],
    history=[9, 0],
    step=[7, 3, 4, None, False, False, []],
    votes_on=7,
)


@pytest.mark.parametrize(("retain_graph", "create_graph", "is_fast"), FLAGS)
def test_request_is_read_as_it_was_written(
    *, retain_graph: bool, create_graph: bool, is_fast: bool
) -> None:
    keeping = Keeping(retain_graph, create_graph)
    advance = replace(ADVANCE, keeping=keeping, is_fast=is_fast)
    read = Advance.record.read(advance.pack())
    read.check()
    assert read == advance


def test_request_is_packed_as_call_arguments() -> None:
    """For those serde is quick."""
    gradients, others = ADVANCE.pack()
    assert gradients is ADVANCE.gradients
    flags = [False, False, False]
    assert others == {
        "fields": [
            3,
            4,
            5,
            6,
            "root",
            *flags,
            [1, 0],
            [2, 0, 2, 1],
            [9, 0],
            ADVANCE.step,
            7,
        ]
    }


@pytest.mark.parametrize(
    ("crossings", "history", "problem"),
    [
        ([2], None, "has 1 gradients"),
        ([2, 0], [9, 1], "history of gradients has gradient 1"),
        ([2, 0], [], "history of gradients names no message"),
    ],
)
def test_malformed_request_is_refused(
    crossings: list[int], history: list[int] | None, problem: str
) -> None:
    wrong = replace(
        ADVANCE, gradients=[torch.ones(1)], asked=[], given=crossings, history=history
    )
    with pytest.raises(MalformedError, match=problem):
        wrong.check()


@pytest.mark.parametrize(
    ("meta", "name"), [([3, 4, 5], ""), ([3, 4, 5, "a"], "a"), ([3, 4, 5, 6, 7], "")]
)
def test_call_metadata_is_read(meta: list[object], name: str) -> None:
    assert read_meta(meta) == (OTHER_CONTEXT, 5, name)


def test_malformed_call_metadata_is_refused() -> None:
    problem = "message of the metadata of an autograd context must be an unsigned"
    with pytest.raises(MalformedError, match=problem):
        read_meta([3, 4, "5"])

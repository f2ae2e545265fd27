"""Each message finds its handler, as the record that it was declared as."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrpc.core.ids import Incarnation, RRefId
from asyncrpc.core.services.ports import ask
from asyncrpc.core.services.router import HEADS_MAX, Router, answers, takes
from asyncrpc.core.services.schema import Message, Notice, Request, Spread, message
from asyncrpc.core.wire.frames import pack_head
from asyncrpc.errors import MalformedError
from tests.unit.recording import RecordingLink, deliver, worker

PEER = worker("peer")


@message("test", "hear")
class Hear(Notice):
    """A notice."""

    rref_id: Spread[RRefId]


@message("test", "look")
class Look(Request[list[RRefId]]):
    """A request."""

    names: list[str]


RREF = RRefId(Incarnation(1), 2)


class Service:
    """Keeps what it is told; answers what it is asked."""

    def __init__(self) -> None:
        self.messages: list[tuple[Any, Message]] = []
        self.routes = [takes(Hear, self._hear), answers(Look, self._look)]
        self.router = Router()
        self.router.add("test", self.routes)

    def _hear(self, link: RecordingLink, notice: Hear) -> None:
        self.messages.append((link, notice))

    async def _look(self, link: RecordingLink, request: Look) -> list[RRefId]:
        if not request.names:
            raise MalformedError("it names nothing")
        self.messages.append((link, request))
        return [RREF] * len(request.names)


def test_notice_reaches_its_handler() -> None:
    service, link = Service(), RecordingLink(PEER)
    deliver(service.routes, link, Hear(RREF))
    assert service.messages == [(link, Hear(RREF))]


async def test_request_is_answered_in_its_declared_form() -> None:
    service, link = Service(), RecordingLink(PEER)
    answer = await deliver(service.routes, link, Look(["a", "b"]))
    assert answer == [[1, 2], [1, 2]]
    assert Look.read_answer("peer", answer) == [RREF, RREF]


async def test_answer_is_read_or_refused() -> None:
    link = RecordingLink(PEER)
    coroutine = ask(link, Look(["a"])).__await__()
    next(coroutine)
    ((request, answer),) = link.asked
    assert request == Look(["a"])
    answer.set_result([[1, "x"]])
    problem = "serial of element 0 of the answer of worker 'peer' to 'test.look' must"
    with pytest.raises(MalformedError, match=problem):
        coroutine.send(None)


def test_wrong_notice_is_refused_before_its_handler() -> None:
    service = Service()
    route = service.router.notice(Hear.head)
    problem = "worker 'peer' sent an invalid 'test.hear' message: serial must be an "
    with pytest.raises(MalformedError, match=problem):
        route.handle(RecordingLink(PEER), [1, "x"])
    problem = r"the content must be an array of \[creator, serial\], not 5"
    with pytest.raises(MalformedError, match=problem):
        route.handle(RecordingLink(PEER), 5)
    assert not service.messages


async def test_error_of_the_handler_names_the_message() -> None:
    service = Service()
    problem = "worker 'peer' sent an invalid 'test.look' message: it names nothing"
    with pytest.raises(MalformedError, match=problem):
        await deliver(service.routes, RecordingLink(PEER), Look([]))


@pytest.mark.parametrize(
    ("head", "problem"),
    [
        (["test", "see"], "'test.see', which this worker does not know; known: 'hear'"),
        (["test", "look"], "'test.look', which this worker does not know"),
        (["rest", "hear"], "there is no service 'rest'"),
        ([5, None], "there is no service 5"),
        (["test", [1]], "which this worker does not know"),
    ],
)
async def test_message_without_a_handler_is_refused_with_the_known_ones(
    head: list[Any], problem: str
) -> None:
    router = Service().router
    with pytest.raises(MalformedError, match=problem):
        router.notice(pack_head(head)).handle(RecordingLink(PEER), [1, 2])
    if head[1] != "look":
        problem = problem.replace("'hear'", "'look'")
        with pytest.raises(MalformedError, match=problem):
            await router.request(pack_head(head)).handle(RecordingLink(PEER), [1, 2])
    assert not router.notices
    assert not router.requests


def test_heads_are_remembered_up_to_a_limit() -> None:
    router = Service().router
    first = router.notice(Hear.head)
    assert router.notices == {Hear.head: first}
    for number in range(HEADS_MAX + 5):
        assert router.notice(pack_head(["test", "hear", number])) is first
    router.notice(pack_head(["test", "hear", "long" * 100]))
    assert len(router.notices) == HEADS_MAX


@pytest.mark.parametrize("head", [[], ["test"]])
def test_head_without_a_method_is_refused(head: list[Any]) -> None:
    with pytest.raises(MalformedError, match="names no service"):
        Service().router.notice(pack_head(head))


def test_message_shows_its_service_method_and_fields() -> None:
    assert (Hear.service, Hear.method, Hear.name) == ("test", "hear", "test.hear")
    assert Hear(RREF) == Hear(RREF)
    assert repr(Hear(RREF)).endswith("Hear(rref_id=RRefId(creator=1, serial=2))")

"""Connections and lifespans of ASGI, as the middleware of the door sees them."""

from __future__ import annotations

from types import ModuleType
from typing import Final

from asyncrpc.serving.asgi.machine import connection, lifespan
from tests.property.machines.spec import Machine, guards

_HTTP: Final = {"type": "http", "headers": ()}
_WEBSOCKET: Final = {"type": "websocket", "headers": ()}
_GONE: Final = {"type": "http.disconnect"}


def _leaving_client_cancels_an_unanswered_request(build: ModuleType) -> None:
    for answered in range(3):
        machine = build.AsgiConnection(_HTTP)
        if answered:
            machine.sends({"type": "http.response.start", "status": 200})
            assert machine.status == 200
            machine.sends({"type": "http.response.body", "more_body": answered == 1})
        assert machine.received(_GONE) is (answered < 2)
        assert machine.has_left is (answered < 2)


def _waiting_websocket_hears_the_disconnect(build: ModuleType) -> None:
    for is_waiting in (True, False):
        machine = build.AsgiConnection(_WEBSOCKET)
        machine.asks()
        if not is_waiting:
            machine.asks_no_more()
        assert machine.received({"type": "websocket.disconnect"}) is not is_waiting


def _held_messages_are_bounded(build: ModuleType) -> None:
    machine = build.AsgiConnection(_HTTP)
    held = 0
    while machine.may_read:
        machine.received(
            {"type": "http.request", "body": b"x" * 8192, "more_body": True}
        )
        held += 1
    assert held == 8
    machine.take()
    assert machine.may_read


def _last_message_is_held_back(build: ModuleType) -> None:
    for words, held in (
        (("lifespan.startup.complete",), 0),
        (("lifespan.startup.failed",), 1),
        (("lifespan.startup.complete", "lifespan.shutdown.complete"), 1),
        (("lifespan.startup.complete", "lifespan.shutdown.failed"), 1),
    ):
        machine = build.InnerLifespan()
        passed = [machine.sends({"type": word}) for word in words]
        assert passed.count(False) == held
        if held:
            assert machine.last == {"type": words[-1]}
        assert not machine.returned()
    assert build.InnerLifespan().returned()


ASGI_CONNECTION: Final = Machine(
    name="A connection of ASGI",
    about="Whether what an application does is cancelled when its client leaves.",
    source=connection,
    states="AsgiState",
    events="AsgiStep",
    starts=("WAITING",),
    begin=lambda build, _: build.AsgiConnection(_HTTP),
    feed=lambda machine, step: machine.advance(step),
    stories="""
a request is answered: WAITING -BEGIN-> ANSWERING -END-> ANSWERED
its client leaves before: WAITING -LEAVE-> LEFT
its client leaves while the response is sent:
    WAITING -BEGIN-> ANSWERING -LEAVE-> LEFT -END-> LEFT
its client leaves while the application does what comes after the response:
    WAITING -BEGIN-> ANSWERING -END-> ANSWERED -LEAVE-> ANSWERED
a websocket is used and closed: WAITING -ACCEPT-> ACCEPTED -END-> ANSWERED
its client leaves: WAITING -ACCEPT-> ACCEPTED -LEAVE-> LEFT
it is refused without a response: WAITING -END-> ANSWERED
""",
    checks=(
        _leaving_client_cancels_an_unanswered_request,
        _waiting_websocket_hears_the_disconnect,
        _held_messages_are_bounded,
    ),
    guards=guards("""
waiting-reader-is-cancelled:
    return self.has_left and not is_told => return self.has_left
a-request-that-waits-is-not-cancelled:
    is_told = self.is_websocket and self._readers > 0 => is_told = True
part-of-a-body-ends-the-response:
    elif kind in _BODIES and not message.get("more_body", False): =>
    elif kind in _BODIES:
taken-messages-still-count: self._bytes -= _bytes_of(message) => self._bytes -= 0
"""),
)

LIFESPAN: Final = Machine(
    name="The lifespan of an application of ASGI",
    about="Which message of the application goes on to the server, and which waits "
    "until the worker around it has ended.",
    source=lifespan,
    states="LifespanState",
    events="LifespanStep",
    starts=("STARTING",),
    begin=lambda build, _: build.InnerLifespan(),
    feed=lambda machine, step: machine.advance(step),
    stories="""
an application starts and ends: STARTING -START-> STARTED -END-> ENDED -RETURN-> ENDED
it cannot start: STARTING -FAIL-> FAILED -RETURN-> FAILED
it ends without a word: STARTING -START-> STARTED -RETURN-> ENDED
it knows no lifespan: STARTING -RETURN-> UNSUPPORTED
""",
    checks=(_last_message_is_held_back,),
    guards=guards("""
the-server-hears-of-the-end-before-the-worker-has-ended:
    _HELD_BACK: Final = (LifespanState.FAILED, LifespanState.ENDED) =>
    _HELD_BACK: Final = (LifespanState.FAILED,)
a-failure-is-forgotten: self.last = dict(message) => pass
"""),
)

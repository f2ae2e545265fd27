"""The lifespan of an application inside a middleware that starts a worker."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrpc.serving.asgi.machine.lifespan import InnerLifespan, LifespanState

STARTED = {"type": "lifespan.startup.complete"}
FAILED = {"type": "lifespan.startup.failed", "message": "no"}
ENDED = {"type": "lifespan.shutdown.complete"}
END_FAILED = {"type": "lifespan.shutdown.failed", "message": "no"}


@pytest.mark.parametrize("last", [ENDED, END_FAILED])
def test_the_end_is_held_back_until_the_worker_has_ended(last: dict[str, Any]) -> None:
    inner = InnerLifespan()
    assert inner.sends(STARTED) is True
    assert inner.sends(last) is False
    assert (inner.state, inner.last) == (LifespanState.ENDED, last)
    assert not inner.returned()


def test_a_start_that_failed_is_told_after_the_worker_has_ended() -> None:
    inner = InnerLifespan()
    assert inner.sends(FAILED) is False
    assert (inner.state, inner.last) == (LifespanState.FAILED, FAILED)
    assert not inner.returned()


def test_an_application_that_ends_without_a_word() -> None:
    inner = InnerLifespan()
    inner.sends(STARTED)
    assert not inner.returned()
    assert (inner.state, inner.last) == (LifespanState.ENDED, ENDED)


def test_an_application_without_a_lifespan() -> None:
    inner = InnerLifespan()
    assert inner.returned()
    assert inner.returned()  # it is asked again
    assert inner.last == ENDED


@pytest.mark.parametrize("message", [ENDED, {"type": "http.response.start"}])
def test_what_makes_no_sense_is_for_the_server_to_say(message: dict[str, Any]) -> None:
    inner = InnerLifespan()
    assert inner.sends(message) is True
    assert inner.state is LifespanState.STARTING

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
def test_shutdown_is_held_back_until_the_worker_has_ended(last: dict[str, Any]) -> None:
    inner = InnerLifespan()
    assert inner.sends(STARTED) is True
    assert inner.sends(last) is False
    assert (inner.state, inner.last) == (LifespanState.ENDED, last)
    assert not inner.returned()


def test_failed_startup_is_reported_after_the_worker_has_ended() -> None:
    inner = InnerLifespan()
    assert inner.sends(FAILED) is False
    assert (inner.state, inner.last) == (LifespanState.FAILED, FAILED)
    assert not inner.returned()


def test_application_that_returns_after_startup_has_ended() -> None:
    inner = InnerLifespan()
    inner.sends(STARTED)
    assert not inner.returned()
    assert (inner.state, inner.last) == (LifespanState.ENDED, ENDED)


def test_application_without_a_lifespan_is_accepted() -> None:
    inner = InnerLifespan()
    assert inner.returned()
    assert inner.returned()  # it is asked again
    assert inner.last == ENDED


@pytest.mark.parametrize("message", [ENDED, {"type": "http.response.start"}])
def test_unexpected_message_is_left_to_the_server(message: dict[str, Any]) -> None:
    inner = InnerLifespan()
    assert inner.sends(message) is True
    assert inner.state is LifespanState.STARTING

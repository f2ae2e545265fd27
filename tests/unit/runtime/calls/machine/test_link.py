"""The life of a link: every event in every state, and no way back."""

from __future__ import annotations

from itertools import product

import pytest

from asyncrpc.runtime.calls.machine.link import (
    TRANSITIONS,
    LinkEvent,
    LinkState,
    LinkStatus,
)

ORDER = list(LinkState)


def test_every_event_is_foreseen_in_every_state() -> None:
    assert set(TRANSITIONS) == set(product(LinkState, LinkEvent))


@pytest.mark.parametrize(("state", "event"), list(TRANSITIONS))
def test_nothing_leads_back(state: LinkState, event: LinkEvent) -> None:
    status = LinkStatus()
    status.state = state
    if event is LinkEvent.GOODBYE:
        status.on_goodbye()
    else:
        status.on_lost("a cable")
    assert status.state is TRANSITIONS[state, event]
    assert ORDER.index(status.state) >= ORDER.index(state)
    assert status.is_lost == (status.state is LinkState.LOST)


def test_the_first_reason_counts() -> None:
    status = LinkStatus()
    status.on_lost("a cable")
    status.on_lost("something else")
    assert status.lost_because == "a cable"


def test_there_is_always_a_reason() -> None:
    status = LinkStatus()
    assert status.lost_because == ""
    status.on_lost("")
    assert status.lost_because == "the connection was closed"

"""Whether payloads leave over lanes, and how much a turn of the loop may move."""

from __future__ import annotations

import pytest

from asyncrpc.runtime.payloads.machine.lanes import (
    QUIET_TURN_BYTES,
    QUIET_TURNS,
    TRANSITIONS,
    TURN_BYTES,
    LanesEvent,
    LanesState,
    TurnRation,
)


def after(state: LanesState, event: LanesEvent) -> LanesState:
    return TRANSITIONS[state].get(event, state)


class TestStates:
    def test_every_state_is_reached_from_the_first(self) -> None:
        reached = {LanesState.NONE}
        for _ in LanesState:
            reached |= {
                after(state, event) for state in reached for event in LanesEvent
            }
        assert reached == set(LanesState)

    @pytest.mark.parametrize("state", LanesState)
    def test_a_link_that_has_ended_has_no_lanes_ever_again(
        self, state: LanesState
    ) -> None:
        closed = after(state, LanesEvent.CLOSE)
        assert {after(closed, event) for event in LanesEvent} == {LanesState.CLOSED}

    @pytest.mark.parametrize("state", list(LanesState)[:-1])
    def test_a_lane_that_opens_is_used_however_late(self, state: LanesState) -> None:
        assert after(state, LanesEvent.OPENED) is LanesState.UP

    def test_nothing_but_the_loss_of_the_last_takes_lanes_away(self) -> None:
        changes = {
            one for one in LanesEvent if after(LanesState.UP, one) is not LanesState.UP
        }
        assert changes == {LanesEvent.LOST, LanesEvent.CLOSE}

    def test_they_are_opened_once_only(self) -> None:
        for state in set(LanesState) - {LanesState.NONE}:
            assert after(state, LanesEvent.WANT) is state


class TestTurns:
    def test_a_turn_moves_more_once_no_small_message_has_come_for_a_while(self) -> None:
        ration = TurnRation()
        assert ration.next_turn(1) == TURN_BYTES
        for _ in range(QUIET_TURNS - 1):
            assert ration.next_turn(1) == TURN_BYTES
        assert ration.next_turn(1) == QUIET_TURN_BYTES
        assert ration.limit_bytes == QUIET_TURN_BYTES
        assert ration.next_turn(2) == TURN_BYTES
        assert ration.next_turn(2) == TURN_BYTES

"""Whether payloads leave over lanes, and how much a turn of the loop may move."""

from __future__ import annotations

from asyncrpc.core.payloads.machine.lanes import (
    QUIET_TURN_BYTES,
    QUIET_TURNS,
    TURN_BYTES,
    TurnRation,
)


class TestTurns:
    def test_turn_moves_less_while_messages_come_often(self) -> None:
        ration = TurnRation()
        ration.next_turn(1)
        for _ in range(QUIET_TURNS - 1):
            ration.next_turn(1)
        assert ration.next_turn(2) == TURN_BYTES
        for _ in range(QUIET_TURNS - 1):
            assert ration.next_turn(2) == TURN_BYTES
        assert ration.next_turn(2) == QUIET_TURN_BYTES
        assert ration.limit_bytes == QUIET_TURN_BYTES

    def test_messages_that_open_or_answer_a_payload_count_as_rare(self) -> None:
        ration = TurnRation()
        assert ration.limit_bytes == QUIET_TURN_BYTES
        for message in (1, 2, 3):
            for _ in range(QUIET_TURNS + 1):
                assert ration.next_turn(message) == QUIET_TURN_BYTES

    def test_messages_before_a_payload_do_not_matter(self) -> None:
        assert TurnRation().next_turn(1000) == QUIET_TURN_BYTES

    def test_reads_that_bring_acks_do_not_count(self) -> None:
        ration = TurnRation()
        for reads in range(1, QUIET_TURNS):
            ration.on_ack(reads)
            ration.on_ack(reads)  # of another lane, in the same read
            assert ration.next_turn(reads) == QUIET_TURN_BYTES
        assert ration.next_turn(QUIET_TURNS) == QUIET_TURN_BYTES
        assert ration.next_turn(QUIET_TURNS + 1) == TURN_BYTES

"""The books of one connection: no call is answered twice, and none forgotten."""

from __future__ import annotations

import pytest

from asyncrpc.core.calls.machine.calls import PendingCalls, ServedCalls
from asyncrpc.errors import MalformedError


class TestPendingCalls:
    def test_id_is_used_once(self) -> None:
        pending = PendingCalls[str]()
        first = pending.open("a")
        pending.take(first)
        assert pending.open("b") != first

    def test_answer_takes_its_call(self) -> None:
        pending = PendingCalls[str]()
        call_id = pending.open("a")
        assert pending.get(call_id) == "a"
        assert len(pending) == 1
        assert pending.take(call_id) == "a"
        assert pending.get(call_id) is None
        assert len(pending) == 0

    def test_late_answer_is_not_an_error(self) -> None:
        pending = PendingCalls[str]()
        call_id = pending.open("a")
        pending.take(call_id)
        assert pending.take(call_id) is None

    @pytest.mark.parametrize("call_id", [0, 2, 1 << 64])
    def test_answer_to_an_unknown_call_is_the_fault_of_the_peer(
        self, call_id: int
    ) -> None:
        pending = PendingCalls[str]()
        pending.open("a")
        with pytest.raises(MalformedError, match=f"call {call_id}, which was never"):
            pending.take(call_id)

    def test_pending_calls_may_end_during_iteration(self) -> None:
        pending = PendingCalls[int]()
        ids = [pending.open(index) for index in range(3)]
        for record in pending:
            pending.take(ids[record])
        assert len(pending) == 0

    def test_lost_connection_hands_out_every_call_once(self) -> None:
        pending = PendingCalls[str]()
        pending.open("a")
        pending.open("b")
        assert pending.take_all() == ["a", "b"]
        assert pending.take_all() == []


class TestServedCalls:
    def test_served_call_runs_until_it_ends(self) -> None:
        served = ServedCalls[str]()
        served.begin(7, "a")
        assert served.get(7) == "a"
        assert list(served) == ["a"]
        served.end(7)
        assert served.get(7) is None
        assert len(served) == 0

    def test_running_id_cannot_be_reused(self) -> None:
        served = ServedCalls[str]()
        served.begin(7, "a")
        with pytest.raises(MalformedError, match="call 7 was made twice"):
            served.begin(7, "b")
        assert served.get(7) == "a"

    def test_served_calls_may_end_during_iteration(self) -> None:
        served = ServedCalls[int]()
        for call_id in range(3):
            served.begin(call_id, call_id)
        for record in served:
            served.end(record)
        assert len(served) == 0

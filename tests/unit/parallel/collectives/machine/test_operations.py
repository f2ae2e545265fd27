"""Messages meet the collective that they belong to, early, in time or too late."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrpc.errors import MalformedError
from asyncrpc.parallel.collectives.machine import operations
from asyncrpc.parallel.collectives.machine.operations import (
    CollectiveFailure,
    Descriptor,
    MessageKey,
    Mismatch,
    Operations,
)
from asyncrpc.parallel.collectives.messages import (
    CollectiveBegun,
    CollectiveFailed,
    CountBegun,
    read_descriptor,
)

SUM = Descriptor("all_reduce", "sum", "torch.float32", (3,))
MAX = SUM._replace(how="max")
BROKEN = CollectiveFailure("collective", "it broke", ("b",))


@pytest.fixture
def machine() -> Operations[str]:
    return Operations()


class TestMessages:
    def test_early_message_waits_for_its_collective(
        self, machine: Operations[str]
    ) -> None:
        assert machine.arrive(0, MessageKey(1, 0), "x") is None
        operation, mismatch = machine.begin(SUM)
        assert operation.arrived == {MessageKey(1, 0): "x"}
        assert mismatch is None

    def test_message_of_a_running_collective_is_handed_over(
        self, machine: Operations[str]
    ) -> None:
        operation, _ = machine.begin(SUM)
        assert machine.arrive(0, MessageKey(1, 0), "x") is operation
        assert operation.arrived == {MessageKey(1, 0): "x"}

    def test_ended_collective_is_over(self, machine: Operations[str]) -> None:
        operation, _ = machine.begin(SUM)
        assert not machine.is_over(0)
        machine.end(operation)
        assert machine.is_over(0)
        assert not machine.is_over(1)
        assert machine.failure_of(0) is None

    @pytest.mark.parametrize("is_early", [True, False])
    def test_repeated_message_is_refused(
        self,
        machine: Operations[str],
        is_early: bool,  # noqa: FBT001
    ) -> None:
        if not is_early:
            machine.begin(SUM)
        machine.arrive(0, MessageKey(1, 0), "x")
        with pytest.raises(MalformedError, match="came twice"):
            machine.arrive(0, MessageKey(1, 0), "y")

    def test_early_messages_are_limited(
        self, machine: Operations[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(operations, "EARLY_MAX", 3)
        for turn in range(3):
            machine.arrive(0, MessageKey(1, turn), "x")
        with pytest.raises(MalformedError, match="too far ahead"):
            machine.arrive(0, MessageKey(1, 3), "x")
        with pytest.raises(MalformedError, match="too far ahead"):
            machine.receive(3, 1, SUM)
        machine.begin(SUM)  # they belong to it now
        machine.arrive(1, MessageKey(1, 0), "x")
        assert machine.numbers() == {0, 1}


class TestAgreement:
    def test_equal_descriptor_agrees(self, machine: Operations[str]) -> None:
        assert machine.receive(0, 1, SUM) is None
        _, mismatch = machine.begin(SUM)
        assert mismatch is None
        assert machine.receive(0, 2, SUM) is None

    def test_different_descriptor_before_the_start_is_a_mismatch(
        self, machine: Operations[str]
    ) -> None:
        assert machine.receive(0, 1, MAX) is None
        _, mismatch = machine.begin(SUM)
        assert mismatch == Mismatch(1, MAX, SUM)

    def test_different_descriptor_after_the_start_is_a_mismatch(
        self, machine: Operations[str]
    ) -> None:
        machine.begin(SUM)
        assert machine.receive(0, 1, MAX) == Mismatch(1, MAX, SUM)

    def test_descriptor_of_an_ended_collective_is_ignored(
        self, machine: Operations[str]
    ) -> None:
        operation, _ = machine.begin(SUM)
        machine.end(operation)
        assert machine.receive(0, 1, MAX) is None
        assert machine.numbers() == set()

    def test_descriptor_reads_as_a_phrase(self) -> None:
        assert str(SUM) == "all_reduce of float32, shape (3,), by 'sum'"
        assert str(Descriptor("broadcast", "", "torch.int64", (), 1)) == (
            "broadcast of int64, shape (), with root 1"
        )
        assert str(Descriptor("barrier")) == "barrier"


class TestFailures:
    def test_failed_collective_returns_its_waiting_messages(
        self, machine: Operations[str]
    ) -> None:
        operation, _ = machine.begin(SUM)
        machine.arrive(0, MessageKey(1, 0), "x")
        assert machine.fail(0, BROKEN) == ["x"]
        assert (operation.failure, operation.arrived) == (BROKEN, {})
        assert machine.failure_of(0) == BROKEN

    def test_collective_that_failed_early_starts_as_failed(
        self, machine: Operations[str]
    ) -> None:
        machine.arrive(0, MessageKey(1, 0), "x")
        assert machine.fail(0, BROKEN) == ["x"]
        assert machine.failure_of(0) == BROKEN
        operation, _ = machine.begin(SUM)
        assert operation.failure == BROKEN

    def test_first_cause_of_a_failure_counts(self, machine: Operations[str]) -> None:
        operation, _ = machine.begin(SUM)
        machine.fail(0, BROKEN)
        machine.fail(0, CollectiveFailure("collective", "another", ()))
        assert operation.failure == machine.failure_of(0) == BROKEN

    def test_next_collective_is_unaffected_by_a_failure(
        self, machine: Operations[str]
    ) -> None:
        machine.fail(0, BROKEN)
        machine.begin(SUM)
        operation, _ = machine.begin(SUM)
        assert operation.failure is None

    def test_remembered_failures_are_limited(self, machine: Operations[str]) -> None:
        for number in range(operations.FAILURES_KEPT + 1):
            operation, _ = machine.begin(SUM)
            machine.fail(number, BROKEN)
            machine.end(operation)
        assert machine.failure_of(1) == BROKEN
        assert machine.failure_of(0) is None
        assert machine.is_over(0)


@pytest.mark.parametrize(
    "descriptor", [SUM, Descriptor("barrier"), Descriptor("gather", root=2)]
)
def test_descriptor_is_read_as_it_was_written(descriptor: Descriptor) -> None:
    assert (
        read_descriptor(
            [
                *descriptor[:3],
                descriptor.shape and list(descriptor.shape),
                descriptor.root,
            ]
        )
        == descriptor
    )
    begun = CollectiveBegun(1, 2, 3, descriptor)
    assert CollectiveBegun.record.read(begun.pack()) == begun


@pytest.mark.parametrize(
    "wrong", [None, [], ["a"], [1, "", "", None, 0], [*SUM[:3], ["x"], 0], [*SUM[:4]]]
)
def test_malformed_descriptor_is_refused(wrong: Any) -> None:
    with pytest.raises(MalformedError, match="the description of a collective"):
        read_descriptor(wrong)


def test_failure_message_names_the_ranks_to_blame() -> None:
    failed = CollectiveFailed(1, 2, CollectiveFailure("collective", "why", ("a", "b")))
    assert failed.pack() == [1, 2, ["collective", "why", ["a", "b"]]]
    assert CollectiveFailed.record.read(failed.pack()) == failed


def test_answer_of_a_closed_group_has_no_count() -> None:
    assert CountBegun.read_answer("a", None) is None
    assert CountBegun.read_answer("a", 3) == 3
    with pytest.raises(MalformedError, match="the answer of worker 'a'"):
        CountBegun.read_answer("a", -1)

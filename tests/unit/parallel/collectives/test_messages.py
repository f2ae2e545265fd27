"""What a rank writes of a collective is what the others read."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrpc.errors import MalformedError
from asyncrpc.parallel.collectives.machine.operations import (
    CollectiveFailure,
    Descriptor,
)
from asyncrpc.parallel.collectives.messages import (
    CollectiveBegun,
    CollectiveFailed,
    CountBegun,
    read_descriptor,
)

SUM = Descriptor("all_reduce", "sum", "torch.float32", (3,))


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

"""Requests of a backward pass: what is written is what is read."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from asyncrpc.core.autograd.engine import Keeping
from asyncrpc.core.autograd.messages import Advance, PassId, PassIds, read_meta
from asyncrpc.core.ids import ContextId, Incarnation
from asyncrpc.errors import MalformedError

CONTEXT = ContextId(Incarnation(3), 4)
IDS = PassIds(CONTEXT, PassId(Incarnation(5), 6))
FLAGS = list(itertools.product([False, True], repeat=3))
ADVANCE = Advance(
    gradients=[torch.ones(1), None],
    ids=IDS,
    root="root",
    keeping=Keeping(),
    is_fast=False,
    asked=[1, 0],
    given=[2, 0, 2, 1],
    history=[9, 0],
    step=[7, 3, 4, None, False, False, []],
    votes_on=7,
)


@pytest.mark.parametrize(("retain_graph", "create_graph", "is_fast"), FLAGS)
def test_request_is_read_as_it_was_written(
    *, retain_graph: bool, create_graph: bool, is_fast: bool
) -> None:
    keeping = Keeping(retain_graph, create_graph)
    advance = replace(ADVANCE, keeping=keeping, is_fast=is_fast)
    read = Advance.record.read(advance.pack())
    read.check()
    assert read == advance


def test_request_is_packed_as_call_arguments() -> None:
    """For those serde is quick."""
    gradients, others = ADVANCE.pack()
    assert gradients is ADVANCE.gradients
    flags = [False, False, False]
    assert others == {
        "fields": [
            3,
            4,
            5,
            6,
            "root",
            *flags,
            [1, 0],
            [2, 0, 2, 1],
            [9, 0],
            ADVANCE.step,
            7,
        ]
    }


@pytest.mark.parametrize(
    ("crossings", "history", "problem"),
    [
        ([2], None, "has 1 gradients"),
        ([2, 0], [9, 1], "history of gradients has gradient 1"),
        ([2, 0], [], "history of gradients names no message"),
    ],
)
def test_malformed_request_is_refused(
    crossings: list[int], history: list[int] | None, problem: str
) -> None:
    wrong = replace(
        ADVANCE, gradients=[torch.ones(1)], asked=[], given=crossings, history=history
    )
    with pytest.raises(MalformedError, match=problem):
        wrong.check()


@pytest.mark.parametrize(
    ("meta", "name"), [([3, 4, 5], ""), ([3, 4, 5, "a"], "a"), ([3, 4, 5, 6, 7], "")]
)
def test_call_metadata_is_read(meta: list[object], name: str) -> None:
    assert read_meta(meta) == (CONTEXT, 5, name)


def test_malformed_call_metadata_is_refused() -> None:
    problem = "message of the metadata of an autograd context must be an unsigned"
    with pytest.raises(MalformedError, match=problem):
        read_meta([3, 4, "5"])

"""Requests of a backward pass: what is written is what is read."""

from __future__ import annotations

import itertools

import pytest
import torch

from asyncrpc.autograd import messages
from asyncrpc.autograd.engine import Keeping
from asyncrpc.autograd.messages import Advance, read_advance
from asyncrpc.errors import MalformedError
from asyncrpc.ids import ContextId, Incarnation

IDS = ContextId(Incarnation(3), 4), (5, 6)
FLAGS = list(itertools.product([False, True], repeat=3))


@pytest.mark.parametrize(("retain_graph", "create_graph", "is_fast"), FLAGS)
def test_a_request_is_read_as_it_was_written(
    *, retain_graph: bool, create_graph: bool, is_fast: bool
) -> None:
    advance = Advance(
        gradients=[torch.ones(1), None],
        ids=IDS,
        root="root",
        keeping=Keeping(retain_graph, create_graph),
        is_fast=is_fast,
        asked=[1, 0],
        given=[2, 0, 2, 1],
        history=[9, 0],
    )
    value = advance.encode()
    messages.advance("a request", value)
    assert read_advance(value) == advance


@pytest.mark.parametrize(
    ("given", "history", "problem"),
    [
        ([2], None, "brings 1 gradients"),
        ([2, 0], [9, 1], "a history of gradient 1, which is missing"),
        ([2, 0], [], "a history without a message"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(
    given: list[int], history: list[int] | None, problem: str
) -> None:
    keeping = Keeping(retain_graph=False, create_graph=False)
    wrong = Advance([torch.ones(1)], IDS, "r", keeping, False, [], given, history)  # noqa: FBT003
    with pytest.raises(MalformedError, match=problem):
        messages.advance("a request", wrong.encode())

"""A batch is cut into parts that join to it again, whatever containers it is in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrpc.errors import UsageError
from asyncrpc.parallel.pipeline.microbatches import join, rows_of, sizes, split


def value(rows: int) -> Any:
    x = torch.arange(rows * 3).reshape(rows, 3)
    return x, {"half": [x[:, :1], 0.5], "name": None}


@given(st.integers(1, 40), st.data())
def test_parts_join_to_the_batch_and_differ_by_a_row_at_most(
    rows: int, data: st.DataObject
) -> None:
    parts = data.draw(st.integers(1, rows))
    pieces = split(value(rows), parts)
    each = [rows_of(piece, "part") for piece in pieces]
    assert each == sizes(rows, parts)
    assert max(each) - min(each) <= 1
    x, more = join(pieces)
    assert torch.equal(x, value(rows)[0])
    assert torch.equal(more["half"][0], x[:, :1])
    assert (more["half"][1], more["name"]) == (0.5, None)


def test_parts_are_views() -> None:
    x = torch.zeros(4, 2)
    split(x, 2)[1].fill_(1.0)
    assert x.sum() == 4.0


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ([1.0, "text"], "batch must have at least one tensor"),
        ((torch.ones(2), torch.ones(3)), "not 2 and 3"),
        ([torch.ones(2), torch.ones(())], "pass a number instead"),
    ],
)
def test_batch_that_cannot_be_split_is_refused(batch: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        rows_of(batch, "batch")


def test_parts_that_do_not_match_are_refused() -> None:
    with pytest.raises(UsageError, match="different forms"):
        join([torch.ones(2), [torch.ones(2)]])
    with pytest.raises(UsageError, match="at least one row each"):
        join([torch.ones(()), torch.ones(())])

"""Gradients that gather within `no_sync`, here and with torch's module over gloo.

What a rank has gathered counts as used at the next pass that reduces, wherever the
parameter is used there: the oracle is torch's module, in the same processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pytest
import torch
from torch import nn

from asyncrpc import Group, UsageError
from asyncrpc.ddp import DistributedDataParallel
from asyncrpc.errors import CollectiveError
from asyncrpc.multiprocessing import launch
from tests.integration.parallel.ddp.ranks import (
    Grads,
    grads_of,
    groups_of,
    outcomes,
    same,
)
from tests.numerics.ddp.beside import both


class Step(NamedTuple):
    """One backward pass at each rank.

    Attributes:
        uses: the branches that each rank uses; empty: the rank runs no pass.
        is_synced: whether gradients are reduced.
    """

    uses: tuple[str, str]
    is_synced: bool = False


Program: TypeAlias = Sequence[Step | str]  # what happens between steps is in words


def synced(first: str, second: str) -> Step:
    return Step((first, second), is_synced=True)


PROGRAMS: dict[str, Program] = {
    "one rank": [Step(("b", "")), synced("a", "a")],
    "the other rank": [Step(("", "b")), synced("a", "a")],
    "different branches": [Step(("b", "c")), synced("a", "a")],
    "several passes": [
        Step(("b", "")),
        Step(("bc", "a")),
        Step(("", "c")),
        synced("a", "a"),
        synced("ab", "a"),
    ],
    "after a reduced pass": [
        synced("ab", "a"),
        Step(("b", "")),
        synced("a", "a"),
        synced("a", "a"),
    ],
    "gradients dropped after the reduced pass": [
        Step(("b", "c")),
        synced("a", "a"),
        "drop",
        Step(("", "b")),
        synced("a", "a"),
        "drop",
        synced("a", "a"),
    ],
    "frozen between": [Step(("b", "")), "freeze", synced("a", "a"), synced("a", "a")],
}


class Branches(nn.Module):
    """Branches `a`, `b` and `c`, of which a pass uses some; `b` may be sparse."""

    def __init__(self, *, is_sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.a = nn.Linear(3, 2)
        self.b = nn.Embedding(5, 2, sparse=is_sparse)
        self.c = nn.Linear(3, 2)

    def forward(self, row: torch.Tensor, names: str) -> torch.Tensor:
        """Return a scalar, of the branches in `names`."""
        total = torch.zeros(())
        for name in names:
            branch = self.get_submodule(name)
            chosen = row.long() if isinstance(branch, nn.Embedding) else row
            total = total + branch(chosen).square().sum()
        return total


class Case(NamedTuple):
    """How asyncrpc's module is used, which torch's gradients do not depend on."""

    is_sparse: bool
    is_plain: bool


CASES = [Case(*flags) for flags in itertools.product([False, True], repeat=2)]


def row(rank: int, number: int) -> torch.Tensor:
    return torch.tensor([rank + 1.0, number % 5, 2.0])


def prepare(module: nn.Module, words: str) -> None:
    if words == "drop":
        module.zero_grad()
    else:
        assert words == "freeze"
        module.get_submodule("b").requires_grad_(requires_grad=False)


def dense_grads_of(module: nn.Module) -> Grads:
    return [None if grad is None else grad.to_dense() for grad in grads_of(module)]


async def ours(
    group: Group, case: Case, program: Program, **options: Any
) -> list[Grads]:
    module = Branches(is_sparse=case.is_sparse)
    model = await DistributedDataParallel(module, group, **options)
    synced_grads = []
    for number, step in enumerate(program):
        if isinstance(step, str):
            prepare(module, step)
            continue
        with contextlib.nullcontext() if step.is_synced else model.no_sync():
            if uses := step.uses[group.rank]:
                loss = model(row(group.rank, number), uses)
                if case.is_plain:
                    await asyncio.to_thread(loss.backward)
                else:
                    await model.backward(loss)
        if step.is_synced:
            synced_grads.append(dense_grads_of(module))
    model.close()
    return synced_grads


def theirs(rank: int, program: Program, **options: Any) -> list[Grads]:
    """Run a program on torch's module, which can leave no sparse gradient unused."""
    module = Branches()
    model = nn.parallel.DistributedDataParallel(module, **options)
    synced_grads = []
    for number, step in enumerate(program):
        if isinstance(step, str):
            prepare(module, step)
            continue
        with contextlib.nullcontext() if step.is_synced else model.no_sync():
            if uses := step.uses[rank]:
                torch.autograd.backward(model(row(rank, number), uses))
        if step.is_synced:
            synced_grads.append(dense_grads_of(module))
    return synced_grads


async def compare(rank: int, folder: str) -> list[str]:
    """Run all programs by both; return where they differ."""
    different = []
    async with both(rank, folder) as group:
        for (name, program), view in itertools.product(PROGRAMS.items(), (False, True)):
            options = {"find_unused_parameters": True, "gradient_as_bucket_view": view}
            # In a thread: our loop has to answer the other ranks meanwhile.
            run = functools.partial(theirs, rank, program, **options)
            its = await asyncio.to_thread(run)
            for case in CASES:
                mine = await ours(group, case, program, **options)
                if not all(map(same, mine, its)):
                    different.append(f"{name}, {view=}, {case}: {mine}, not {its}")
    return different


@pytest.mark.slow
def test_gathered_gradients_match_torch(tmp_path: Path) -> None:
    differences = launch(
        compare, (str(tmp_path),), 2, method="forkserver", timeout_s=200
    )
    assert differences == [[], []]


@pytest.fixture
async def pair() -> AsyncIterator[list[Group]]:
    async with groups_of(2) as groups:
        yield groups


async def test_gathered_gradients_that_were_dropped_are_unused(
    pair: list[Group],
) -> None:
    """torch raises an internal error here."""
    program: Program = [Step(("b", "")), "drop", synced("a", "a")]
    for case in CASES:
        runs = [
            ours(group, case, program, find_unused_parameters=True) for group in pair
        ]
        for (values,) in await asyncio.gather(*runs):
            assert [value is None for value in values] == [False] * 2 + [True] * 3


@pytest.mark.parametrize("mode", ["static_graph", "find_unused_parameters"])
async def test_gradients_of_one_rank_within_no_sync_are_reduced_for_all(
    pair: list[Group], mode: str
) -> None:
    """In a static graph as well, if it begins within `no_sync`."""
    program: Program = [Step(("b", "")), synced("a", "a"), synced("a", "a")]
    alone = Branches()
    torch.autograd.backward(alone(row(0, 0), "b") / 2)
    for case in CASES:
        runs = [ours(group, case, program, **{mode: True}) for group in pair]
        for rank in await asyncio.gather(*runs):
            for grads in rank:
                assert same(grads[2:], grads_of(alone)[2:])


async def test_a_static_graph_that_changes_within_no_sync_is_refused(
    pair: list[Group],
) -> None:
    program: Program = [synced("a", "a"), Step(("b", "")), synced("a", "a")]
    runs = [ours(group, CASES[0], program, static_graph=True) for group in pair]
    first, second = await outcomes(*runs)
    assert isinstance(first, UsageError)
    assert "'b.weight' took part in this backward pass differently" in str(first)
    assert isinstance(second, CollectiveError)

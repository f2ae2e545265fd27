"""Every schedule, played by 2 to 64 ranks: all end, with the same bits everywhere.

A block is a pair: which ranks are in it, as bits, and a number for how it came about:
two blocks that were added up in another order have other numbers.  A message may be
read at its end at any time until it is taken, so it holds where it is from, not what
is there: a rank that overwrites too soon is found out.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import pytest

from asyncrpc.parallel.collectives.machine import schedules
from asyncrpc.parallel.collectives.machine.schedules import Schedule, StepKind

# Every size where time is no matter; else small ones, and those near a power of two.
EVERY = bool(os.environ.get("ASYNCRPC_EVERY_SIZE"))
SIZES = [
    n for n in range(2, 65) if EVERY or n < 10 or n in (15, 16, 17, 31, 48, 63, 64)
]
Block = tuple[int, int]


class Sent(NamedTuple):
    blocks: tuple[int, ...]
    read: list[Block] | None  # None: when it is taken
    depth: int


def own(rank: int, block: int) -> Block:
    return (1 << rank, hash((rank, block)))


def added(a: Block, b: Block) -> Block:
    assert not a[0] & b[0], "a rank is counted twice"
    return (a[0] | b[0], hash((a[1], b[1])))


class Game:
    """All ranks of one collective, and the messages between them."""

    def __init__(self, plans: Sequence[Schedule], seed: int, *, late: bool) -> None:
        self.late = late
        self.draw = random.Random(seed)
        self.todo = [deque(plan) for plan in plans]
        self.sent: dict[tuple[int, int], deque[Sent]] = defaultdict(deque)
        self.blocks = [0] * len(plans)  # that a rank has sent
        self.depth = [0] * len(plans)  # messages one after the other, up to here

    def play(self, out: list[dict[int, Block]], into: list[dict[int, Block]]) -> None:
        """Let the ranks go on in any order, until all are at their ends."""
        self.go_on(range(len(self.todo)), out, into)
        assert not any(self.todo), f"they wait for each other: {self.todo}"
        assert not any(self.sent.values()), "a message that nobody takes"

    def go_on(
        self,
        ranks: Iterable[int],
        out: list[dict[int, Block]],
        into: list[dict[int, Block]],
    ) -> None:
        """Let these ranks go on until none of them can."""
        able, waiting = list(ranks), set[int]()
        while able:
            at = self.draw.randrange(len(able))
            rank = able[at]
            if not self.todo[rank] or not self.can_go_on(rank):
                able[at] = able[-1]
                able.pop()
                waiting.add(rank)
                continue
            progress = self.step(rank, out, into)
            if progress in waiting:
                waiting.remove(progress)
                able.append(progress)

    def can_go_on(self, rank: int) -> bool:
        step = self.todo[rank][0]
        return step.kind is StepKind.SEND or bool(self.sent[step.peer, rank])

    def step(
        self, rank: int, out: list[dict[int, Block]], into: list[dict[int, Block]]
    ) -> int:
        """Take one step; return the rank that has got a message, -1 if none has."""
        step = self.todo[rank].popleft()
        assert step.peer != rank
        if step.kind is StepKind.SEND:
            read = None if self.late else [out[rank][b] for b in step.blocks]
            self.sent[rank, step.peer].append(
                Sent(step.blocks, read, self.depth[rank] + 1)
            )
            self.blocks[rank] += len(step.blocks)
            return step.peer
        sent = self.sent[step.peer, rank].popleft()
        self.depth[rank] = max(self.depth[rank], sent.depth)
        blocks = sent.read or [out[step.peer][block] for block in sent.blocks]
        for block, value in zip(step.blocks, blocks, strict=True):
            if step.kind is StepKind.REDUCE:
                into[rank][block] = added(into[rank][block], value)
            else:
                into[rank][block] = value
        return -1


class Play:
    """Plays schedules; messages are read when they are sent, or when they are taken."""

    def __init__(self, *, late: bool) -> None:
        self.late = late

    def game(self, plans: Sequence[Schedule], seed: int) -> Game:
        return Game(plans, seed, late=self.late)

    def __call__(
        self, plan: Callable[[int, int], Schedule], size: int, blocks: int
    ) -> tuple[list[dict[int, Block]], Game]:
        game = self.game([plan(rank, size) for rank in range(size)], size)
        held = [
            {block: own(rank, block) for block in range(blocks)} for rank in range(size)
        ]
        game.play(held, held)
        return held, game


def each_root() -> Iterator[tuple[int, int]]:
    """Every size, each with a few roots."""
    for size in SIZES:
        for root in sorted({0, size // 3, size - 1}):
            yield size, root


def everyone(size: int) -> int:
    return (1 << size) - 1


def log2(size: int) -> int:
    return (size - 1).bit_length()


def ring_all_reduce(rank: int, size: int) -> schedules.Schedule:
    scattered = schedules.ring_reduce_scatter(rank, size)
    return scattered + schedules.ring_all_gather(rank, size)


def tree_all_reduce(rank: int, size: int) -> schedules.Schedule:
    reduced = schedules.tree_reduce(rank, size, 0)
    return reduced + schedules.tree_broadcast(rank, size, 0)


@pytest.fixture(params=["read_at_once", "read_late"])
def play(request: pytest.FixtureRequest) -> Play:
    return Play(late=request.param == "read_late")


class TestAllRanks:
    def test_ring_all_reduce_gives_every_rank_the_sum(self, play: Play) -> None:
        for size in SIZES:
            held, game = play(ring_all_reduce, size, size)
            for block in range(size):
                assert {mine[block][0] for mine in held} == {everyone(size)}
                assert len({mine[block] for mine in held}) == 1
            assert set(game.blocks) == {2 * (size - 1)}

    def test_tree_all_reduce_gives_every_rank_the_sum(self, play: Play) -> None:
        for size in SIZES:
            held, game = play(tree_all_reduce, size, 1)
            assert {mine[0][0] for mine in held} == {everyone(size)}
            assert len({mine[0] for mine in held}) == 1
            assert max(game.depth) <= 2 * log2(size)

    def test_ring_reduce_scatter_gives_each_rank_its_block(self, play: Play) -> None:
        for size in SIZES:
            held, game = play(schedules.ring_reduce_scatter, size, size)
            assert all(held[rank][rank][0] == everyone(size) for rank in range(size))
            assert set(game.blocks) == {size - 1}

    def test_tree_reduce_scatter_gives_each_rank_its_block(self, play: Play) -> None:
        for size in SIZES:
            held, game = play(schedules.tree_reduce_scatter, size, size)
            assert all(held[rank][rank][0] == everyone(size) for rank in range(size))
            assert max(game.depth) <= 2 * log2(size)

    @pytest.mark.parametrize("kind", ["ring", "tree"])
    def test_all_gather_gives_every_rank_all_blocks(
        self, play: Play, kind: str
    ) -> None:
        for size in SIZES:
            plan = getattr(schedules, f"{kind}_all_gather")
            held, game = play(plan, size, size)
            for mine in held:
                assert mine == {block: own(block, block) for block in range(size)}
            assert set(game.blocks) == {size - 1}
            assert max(game.depth) == (size - 1 if kind == "ring" else log2(size))

    def test_all_to_all_gives_each_rank_blocks_meant_for_it(self, play: Play) -> None:
        for size in SIZES:
            plans = [schedules.all_to_all(rank, size) for rank in range(size)]
            out = [{block: own(r, block) for block in range(size)} for r in range(size)]
            into: list[dict[int, Block]] = [{} for _ in range(size)]
            # What is sent is for the receiver; it keeps it under the sender's number.
            play.game(plans, size).play(out, into)
            for rank in range(size):
                wanted = {peer: own(peer, rank) for peer in range(size) if peer != rank}
                assert into[rank] == wanted

    def test_no_rank_leaves_a_barrier_before_all_have_come(self) -> None:
        nothing: list[dict[int, Block]]
        for size in SIZES:
            nothing = [{}] * size
            for last in {0, 1, size // 2, size - 1}:
                plans = [schedules.barrier(rank, size) for rank in range(size)]
                game = Game(plans, last, late=False)
                game.go_on(set(range(size)) - {last}, nothing, nothing)
                assert all(game.todo)
                game.play(nothing, nothing)
                assert max(game.depth) <= 2 * log2(size)


class TestRoot:
    """Those with a root, at a few roots."""

    @pytest.mark.parametrize("kind", ["ring", "tree"])
    def test_reduce_gives_the_root_the_sum(self, play: Play, kind: str) -> None:
        plan = getattr(schedules, f"{kind}_reduce")
        for size, root in each_root():
            blocks = size if kind == "ring" else 1
            held, game = play(partial(plan, root=root), size, blocks)
            assert {value[0] for value in held[root].values()} == {everyone(size)}
            if kind == "tree":
                assert max(game.depth) <= log2(size)

    @pytest.mark.parametrize("kind", ["ring", "tree"])
    def test_broadcast_gives_every_rank_the_blocks_of_the_root(
        self, play: Play, kind: str
    ) -> None:
        plan = getattr(schedules, f"{kind}_broadcast")
        for size, root in each_root():
            blocks = size if kind == "ring" else 1
            held, game = play(partial(plan, root=root), size, blocks)
            assert all(mine == held[root] for mine in held)
            assert held[root] == {block: own(root, block) for block in range(blocks)}
            if kind == "tree":
                assert max(game.depth) <= log2(size)
            else:
                assert max(game.blocks) <= 2 * (size - 1)

    def test_gather_gives_the_root_all_blocks(self, play: Play) -> None:
        for size, root in each_root():
            plan = partial(schedules.star_gather, root=root)
            held, game = play(plan, size, size)
            assert held[root] == {block: own(block, block) for block in range(size)}
            assert max(game.depth) == 1

    @pytest.mark.parametrize("kind", ["star", "tree"])
    def test_scatter_gives_each_rank_its_block(self, play: Play, kind: str) -> None:
        plan = getattr(schedules, f"{kind}_scatter")
        for size, root in each_root():
            held, game = play(partial(plan, root=root), size, size)
            assert all(held[rank][rank] == own(root, rank) for rank in range(size))
            assert max(game.depth) <= (log2(size) if kind == "tree" else 1)

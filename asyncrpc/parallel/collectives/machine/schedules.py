"""The messages of a collective across hosts, as data.

A schedule lists the steps of one rank: each step sends blocks to a peer, or takes
blocks from a peer and keeps them or adds them to its own.  A *block* is a part of the
tensor, by number; the schedule does not know its bounds.  Sends do not wait; a step
that takes blocks waits for them.

    rings   every rank sends one block to the next and takes one from the one before,
            n - 1 times: each link carries (n - 1)/n of the tensor, however many ranks
            there are.  For large tensors.
    trees   binomial: log2(n) rounds of the whole.  For small ones.

A reduced block is the result of one chain of additions, made at one rank and copied to
the others: so it has the same bits everywhere.

No step overwrites a sent block before the peer is known to have it; so no block needs
to be copied before it is sent, even over a slow link.

Source: Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations
in MPICH, 2005; Patarasuk, Yuan: Bandwidth Optimal All-reduce Algorithms, 2009.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import NamedTuple

Schedule = tuple["Step", ...]


class StepKind(enum.Enum):
    """The action of a step."""

    SEND = "send"
    KEEP = "keep"  # takes blocks from the peer in place of its own
    REDUCE = "reduce"  # takes blocks from the peer and combines them with its own


class Step(NamedTuple):
    """One step of one rank.

    Attributes:
        peer: the rank of the other end.
        blocks: numbers of the blocks, in the order in which they travel.
    """

    kind: StepKind
    peer: int
    blocks: tuple[int, ...]


# --- rings -------------------------------------------------------------------------


def ring_reduce_scatter(rank: int, size: int) -> Schedule:
    """Leave block `rank`, reduced over all ranks, at each rank.  `size` blocks."""
    steps = []
    for turn in range(1, size):
        steps.append(_send(rank + 1, [rank - turn], size))
        steps.append(_take(StepKind.REDUCE, rank - 1, [rank - turn - 1], size))
    return tuple(steps)


def ring_all_gather(rank: int, size: int) -> Schedule:
    """Bring block `r` of rank r, for every r, to all ranks.  `size` blocks."""
    steps = []
    for turn in range(size - 1):
        steps.append(_send(rank + 1, [rank - turn], size))
        steps.append(_take(StepKind.KEEP, rank - 1, [rank - turn - 1], size))
    return tuple(steps)


def ring_reduce(rank: int, size: int, root: int) -> Schedule:
    """Reduce `size` blocks over all ranks: each at one rank, then gather at `root`."""
    return ring_reduce_scatter(rank, size) + star_gather(rank, size, root)


def ring_broadcast(rank: int, size: int, root: int) -> Schedule:
    """Bring `size` blocks of `root` to all: scatter them, then pass them round."""
    return star_scatter(rank, size, root) + ring_all_gather(rank, size)


# --- trees -------------------------------------------------------------------------


def tree_reduce(rank: int, size: int, root: int) -> Schedule:
    """Reduce block 0 over all ranks, at `root`."""
    steps = [
        Step(StepKind.REDUCE, _real(child, root, size), (0,))
        for child in reversed(list(_children(_virtual(rank, root, size), size)))
    ]
    return tuple(steps) + _to_parent(rank, size, root, (0,))


def tree_broadcast(rank: int, size: int, root: int) -> Schedule:
    """Bring block 0 of `root` to all."""
    me = _virtual(rank, root, size)
    steps = [
        Step(StepKind.SEND, _real(child, root, size), (0,))
        for child in _children(me, size)
    ]
    return _from_parent(rank, size, root, (0,)) + tuple(steps)


def tree_scatter(rank: int, size: int, root: int) -> Schedule:
    """Bring block `r` of `root` to rank r, for every r.  `size` blocks."""
    me = _virtual(rank, root, size)
    steps = [
        Step(
            StepKind.SEND,
            _real(child, root, size),
            _branch(child, root=root, size=size),
        )
        for child in _children(me, size)
    ]
    mine = _branch(me, root=root, size=size)
    return _from_parent(rank, size, root, mine) + tuple(steps)


def tree_all_gather(rank: int, size: int) -> Schedule:
    """Bring block `r` of rank r, for every r, to all ranks.  `size` blocks.

    In round k a rank has 2^k blocks, its own and those after it, and asks the one 2^k
    further on for as many: log2(n) rounds for any n.

    Source: Bruck et al.: Efficient Algorithms for All-to-All Communications in
    Multiport Message-Passing Systems, 1997.
    """
    steps = []
    have = 1
    while have < size:
        count = min(have, size - have)
        steps.append(_send(rank - have, range(rank, rank + count), size))
        theirs = range(rank + have, rank + have + count)
        steps.append(_take(StepKind.KEEP, rank + have, theirs, size))
        have *= 2
    return tuple(steps)


def tree_reduce_scatter(rank: int, size: int) -> Schedule:
    """Leave block `rank`, reduced over all ranks, at each rank.  `size` blocks."""
    everything = tuple(range(size))
    reduce = tuple(
        step._replace(blocks=everything) for step in tree_reduce(rank, size, 0)
    )
    return reduce + tree_scatter(rank, size, 0)


def barrier(rank: int, size: int) -> Schedule:
    """Let no rank end before all have begun: log2(n) rounds without blocks.

    Source: Hensgen, Finkel, Manber: Two Algorithms for Barrier Synchronization, 1988.
    """
    steps = []
    far = 1
    while far < size:
        steps.append(_send(rank + far, (), size))
        steps.append(_take(StepKind.KEEP, rank - far, (), size))
        far *= 2
    return tuple(steps)


# --- each with each ------------------------------------------------------------------


def star_gather(rank: int, size: int, root: int) -> Schedule:
    """Bring block `r` of rank r to `root` directly.  `size` blocks."""
    if rank != root:
        return (Step(StepKind.SEND, root, (rank,)),)
    others = ((root + far) % size for far in range(1, size))
    return tuple(Step(StepKind.KEEP, peer, (peer,)) for peer in others)


def star_scatter(rank: int, size: int, root: int) -> Schedule:
    """Bring block `r` of `root` to rank r directly.  `size` blocks."""
    if rank != root:
        return (Step(StepKind.KEEP, root, (rank,)),)
    others = ((root + far) % size for far in range(1, size))
    return tuple(Step(StepKind.SEND, peer, (peer,)) for peer in others)


def all_to_all(rank: int, size: int) -> Schedule:
    """Bring block `s` of rank r to rank s, which keeps it as block `r`.

    Sent and kept blocks are two separate sets of `size` blocks.
    """
    steps = []
    for far in range(1, size):
        after, before = (rank + far) % size, (rank - far) % size
        steps.append(Step(StepKind.SEND, after, (after,)))
        steps.append(Step(StepKind.KEEP, before, (before,)))
    return tuple(steps)


# --- pure parts ----------------------------------------------------------------------


def _send(peer: int, blocks: list[int] | range | tuple[int, ...], size: int) -> Step:
    return _take(StepKind.SEND, peer, blocks, size)


def _take(
    kind: StepKind, peer: int, blocks: list[int] | range | tuple[int, ...], size: int
) -> Step:
    return Step(kind, peer % size, tuple(block % size for block in blocks))


def _virtual(rank: int, root: int, size: int) -> int:
    """Return the number of a rank in the tree, in which the root is 0."""
    return (rank - root) % size


def _real(virtual: int, root: int, size: int) -> int:
    return (virtual + root) % size


def _children(me: int, size: int) -> Iterator[int]:
    """Yield the children of a node, that of the largest branch first."""
    lowest = me & -me if me else 1 << (size - 1).bit_length()
    step = lowest >> 1
    while step:
        if me + step < size:
            yield me + step
        step >>= 1


def _branch(me: int, *, root: int, size: int) -> tuple[int, ...]:
    """Return the ranks of a node and of all that are below it."""
    width = me & -me if me else size
    return tuple(_real(node, root, size) for node in range(me, min(me + width, size)))


def _to_parent(rank: int, size: int, root: int, blocks: tuple[int, ...]) -> Schedule:
    me = _virtual(rank, root, size)
    if not me:
        return ()
    return (Step(StepKind.SEND, _real(me & (me - 1), root, size), blocks),)


def _from_parent(rank: int, size: int, root: int, blocks: tuple[int, ...]) -> Schedule:
    me = _virtual(rank, root, size)
    if not me:
        return ()
    return (Step(StepKind.KEEP, _real(me & (me - 1), root, size), blocks),)

"""Large tensors, piece by piece, through the windows of the board; in a thread.

    combine    each rank copies pieces of the shares of others into its windows for
               them, combines the pieces of its own share, and gives the results in the
               window for itself, from which the others take them
    exchange   of two ranks: each combines everything
    move       each rank copies pieces into its windows, others take them out

One of two windows is filled while the other is read.  So a rank may be one piece ahead
of another, and no step waits for a later one: in turn k a rank relies on what the
others do in turn k - 1 or before, and gives in its own turn; the last rank never waits.

The windows of one collective are not used by the next one before all ranks have
published that: so the last pieces need not be waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from asyncrpc.parallel.collectives.board import COMBINED, DEPTH, GIVEN, TAKEN, Board
from asyncrpc.parallel.collectives.reductions import Reduction
from asyncrpc.parallel.collectives.tensors import split

Check = Callable[[], None]


class Give(NamedTuple):
    """A tensor that others take.

    Attributes:
        lane: the window that it goes through.
        source: flat.
    """

    lane: int
    source: torch.Tensor
    takers: Sequence[int]


class Take(NamedTuple):
    """A tensor that another rank gives.

    Attributes:
        lane: the window that it comes through.
        target: flat, of the same length.
    """

    rank: int
    lane: int
    target: torch.Tensor


class Windows:
    """The windows of the board, as one rank uses them.

    Attributes:
        others: all but this one.
    """

    def __init__(self, board: Board, rank: int) -> None:
        self._board = board
        self.rank = rank
        self.others = [peer for peer in range(board.size) if peer != rank]
        # By rank, turn and lane.
        self._bytes: list[list[list[Any]]] = self._views(torch.Tensor.numpy)
        self._pieces: dict[torch.dtype, list[list[list[Any]]]] = {}

    def _views(self, view: Callable[[torch.Tensor], Any]) -> list[list[list[Any]]]:
        size = self._board.size
        return [
            [
                [view(self._board.window(rank, turn, lane)) for lane in range(size)]
                for turn in range(DEPTH)
            ]
            for rank in range(size)
        ]

    # --- combining -------------------------------------------------------------------

    def combine(
        self,
        number: int,
        by: Reduction,
        shares: Sequence[torch.Tensor],
        check: Check,
        *,
        result: torch.Tensor,
        takers: Sequence[int],
    ) -> None:
        """Reduce our share over all ranks, and take what others have reduced.

        Args:
            result: where our own reduced share goes; it may be `shares[rank]`.
        """
        board, rank = self._board, self.rank
        job = _Combining(self, by, shares, result)
        takes = rank in takers
        gives = any(taker != rank for taker in takers)
        wait, post = board.wait_for_pieces, board.post_pieces
        pieces = job.pieces
        for turn in range(-1, pieces + 1):
            if 0 <= turn + 1 < pieces:
                wait(COMBINED, number, turn + 2 - DEPTH, self.others, check)
                job.give(turn + 1)
                post(GIVEN, number, turn + 2)
            if 0 <= turn < pieces:
                wait(GIVEN, number, turn + 1, self.others, check)
                job.combine(turn)
                if gives:
                    wait(TAKEN, number, turn + 1 - DEPTH, takers, check)
                    job.give_result(turn)
                post(COMBINED, number, turn + 1)
            if turn >= 1 and takes:
                wait(COMBINED, number, turn, self.others, check)
                job.take_results(turn - 1)
                post(TAKEN, number, turn)

    def exchange(
        self, number: int, by: Reduction, flat: torch.Tensor, check: Check
    ) -> None:
        """Reduce a flat tensor in place over two ranks: each combines all of it.

        So no result needs to be passed on: the other's piece comes from its cache, as a
        share would, and ours is still in our own.
        """
        board, rank, peer = self._board, self.rank, self.others
        step = self.step(flat.dtype)
        windows = self.pieces_of(by, flat.dtype)
        copy = copy_for(by)
        whole = by.piece(flat)
        pieces = -(-len(whole) // step)
        for turn in range(-1, pieces):
            if turn + 1 < pieces:
                piece = whole[(turn + 1) * step : (turn + 2) * step]
                board.wait_for_pieces(COMBINED, number, turn + 2 - DEPTH, peer, check)
                copy(windows[rank][(turn + 1) % DEPTH][0][: len(piece)], piece)
                board.post_pieces(GIVEN, number, turn + 2)
            if turn >= 0:
                piece = whole[turn * step : (turn + 1) * step]
                board.wait_for_pieces(GIVEN, number, turn + 1, peer, check)
                other = windows[peer[0]][turn % DEPTH][0][: len(piece)]
                first, second = (piece, other) if rank == 0 else (other, piece)
                by.combine(first, second, piece)
                board.post_pieces(COMBINED, number, turn + 1)
        by.finish(flat, board.size)

    def combine_in_place(
        self, number: int, by: Reduction, all_: Sequence[torch.Tensor], check: Check
    ) -> None:
        """Reduce flat tensors that every rank sees, in place: each rank its share."""
        board, copy, step = self._board, copy_for(by), self.step(all_[0].dtype)
        share = split(all_[0], board.size)
        before = sum(part.numel() for part in share[: self.rank])
        end = before + share[self.rank].numel()
        pieces = [by.piece(tensor) for tensor in all_]
        for low in range(before, end, step):
            check()
            high = min(low + step, end)
            first, *rest = [piece[low:high] for piece in pieces]
            for piece in rest:
                by.combine(first, piece, first)
            by.finish(all_[0][low:high], board.size)
            for piece in rest:
                copy(piece, first)
        board.post_pieces(COMBINED, number, 1)
        board.wait_for_pieces(COMBINED, number, 1, self.others, check)

    def step(self, dtype: torch.dtype) -> int:
        """Return how many elements a window holds."""
        return self._board.window_bytes // dtype.itemsize

    def pieces_of(self, by: Reduction, dtype: torch.dtype) -> list[list[list[Any]]]:
        """Return all windows as pieces of a dtype."""
        known = self._pieces.get(dtype)
        if known is None:
            known = self._views(lambda window: by.piece(window.view(dtype)))
            self._pieces[dtype] = known
        return known

    # --- moving ----------------------------------------------------------------------

    def move(
        self,
        number: int,
        gives: Sequence[Give],
        takes: Sequence[Take],
        check: Check,
    ) -> None:
        """Give tensors to others, and take theirs."""
        board, step = self._board, self._board.window_bytes
        outgoing = [(give, as_bytes(give.source)) for give in gives]
        incoming = [(take, as_bytes(take.target)) for take in takes]
        longest = max(
            [len(content) for _, content in (*outgoing, *incoming)], default=0
        )
        for turn in range(-(-longest // step)):
            low, window = turn * step, turn % DEPTH
            for give, source in outgoing:
                piece = source[low : low + step]
                if not len(piece):
                    continue
                board.wait_for_pieces(
                    TAKEN, number, turn + 1 - DEPTH, give.takers, check
                )
                np.copyto(
                    self._bytes[self.rank][window][give.lane][: len(piece)], piece
                )
            board.post_pieces(GIVEN, number, turn + 1)
            for take, target in incoming:
                piece = target[low : low + step]
                if not len(piece):
                    continue
                board.wait_for_pieces(GIVEN, number, turn + 1, (take.rank,), check)
                np.copyto(
                    piece, self._bytes[take.rank][window][take.lane][: len(piece)]
                )
            board.post_pieces(TAKEN, number, turn + 1)


class _Combining:
    """The steps of one rank for each piece of one reduction."""

    def __init__(
        self,
        windows: Windows,
        by: Reduction,
        shares: Sequence[torch.Tensor],
        result: torch.Tensor,
    ) -> None:
        self._rank = windows.rank
        self._others = windows.others
        self._size = len(shares)
        self._by = by
        self._copy = copy_for(by)
        self._step = windows.step(shares[0].dtype)
        self._windows = windows.pieces_of(by, shares[0].dtype)
        self._shares = [by.piece(share) for share in shares]
        self._tensor = result
        self._result = by.piece(result)
        self.pieces = -(-max(len(share) for share in self._shares) // self._step)

    def give(self, turn: int) -> None:
        """Put a piece of every other share into a window."""
        windows = self._windows[self._rank][turn % DEPTH]
        for peer in self._others:
            piece = self._piece(self._shares[peer], turn)
            self._copy(windows[peer][: len(piece)], piece)

    def combine(self, turn: int) -> None:
        """Reduce a piece of our share over all ranks, in their order."""
        mine = self._piece(self._shares[self._rank], turn)
        result = self._piece(self._result, turn)
        count = len(mine)
        total: Any = None
        for rank in range(self._size):
            value = (
                mine
                if rank == self._rank
                else self._windows[rank][turn % DEPTH][self._rank][:count]
            )
            if total is None:
                total = value
                continue
            # The result may lie where our own share is, which must be used before;
            # until then the sum is kept in the window of the first rank.
            out = result if rank >= self._rank else total
            self._by.combine(total, value, out)
            total = out
        self._by.finish(self._piece(self._tensor, turn), self._size)

    def give_result(self, turn: int) -> None:
        """Put a piece of our result into the window for all."""
        piece = self._piece(self._result, turn)
        window = self._windows[self._rank][turn % DEPTH][self._rank]
        self._copy(window[: len(piece)], piece)

    def take_results(self, turn: int) -> None:
        """Take a piece of every other share from where its rank has put it."""
        for peer in self._others:
            piece = self._piece(self._shares[peer], turn)
            window = self._windows[peer][turn % DEPTH][peer]
            self._copy(piece, window[: len(piece)])

    def _piece(self, whole: Any, turn: int) -> Any:
        return whole[turn * self._step : (turn + 1) * self._step]


def as_bytes(tensor: torch.Tensor) -> Any:
    """Return a contiguous tensor as an array of bytes, over the same memory."""
    return tensor.view(-1).view(torch.uint8).numpy()


def copy_for(by: Reduction) -> Callable[[Any, Any], Any]:
    """Return the function that copies a piece: `copy(to, from)`."""
    return np.copyto if by.is_array else torch.Tensor.copy_

"""PowerSGD without communication: the computation before, between and after the sums.

A gradient M of n x m is sent as P, n x r, and Q, m x r, for a small rank r:

    first()     P = M Q         Q has orthonormal columns; P is summed over all ranks
    second()    Q = M^T P       P is now orthonormal; Q is summed over all ranks
    finish()    M = P Q^T       with Q's mean; so M is about the mean of all M

Gradients that would hardly get smaller are summed as they are, together with P: a
bucket takes two collectives.  With error feedback, the error of M is kept, and added to
the gradient of the next step.

`Layers` compresses each gradient of a bucket by itself, `Square` all of them as one
square matrix.  Neither knows other ranks, the event loop, or where memory is kept.

Orthonormal columns, for many matrices of one shape at a time.

Source: torch/distributed/algorithms/ddp_comm_hooks/powerSGD_hook.py, `_orthogonalize`,
whose choice of algorithm is kept, so that results are equal.

Source: Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for
Distributed Optimization", NeurIPS 2019; torch/distributed/algorithms/ddp_comm_hooks/
powerSGD_hook.py, whose order of operations is kept, so that results are equal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from asyncrpc.parallel.ddp.flat import cut

_GRAM_SCHMIDT_MAX: Final = 2  # columns; for more a QR decomposition is faster


def orthogonalize(matrices: torch.Tensor, epsilon: float = 0.0) -> int:
    """Make the columns of matrices orthonormal, in place.

    Args:
        epsilon: added to the length of a column before dividing by it; used by the
            Gram-Schmidt process only, that is in half precision or for at most two
            columns.

    Source: torch differs for a column of zeros without an epsilon: there it becomes
    nan, here it stays zero.
    """
    assert matrices.shape[2] <= matrices.shape[1]
    is_half = matrices.dtype in {torch.float16, torch.bfloat16}  # LAPACK has none
    if is_half or matrices.shape[2] <= _GRAM_SCHMIDT_MAX:
        return _gram_schmidt(matrices, epsilon)
    matrices.copy_(torch.linalg.qr(matrices).Q)
    return 0


def _gram_schmidt(matrices: torch.Tensor, epsilon: float) -> int:
    columns, zeros = matrices.shape[2], 0
    for index in range(columns):
        column = matrices[:, :, index : index + 1]
        length = torch.linalg.vector_norm(column, dim=1, keepdim=True)
        if epsilon:
            length += epsilon
        else:
            zeros += length.numel() - int(length.count_nonzero())
            length.masked_fill_(length == 0, 1.0)
        column /= length
        if index + 1 < columns:
            rest = matrices[:, :, index + 1 :]
            rest -= torch.sum(column * rest, dim=1, keepdim=True) * column
    return zeros


_STEP: Final = 1 << 16  # elements of a square that are restored at a time


@dataclass(frozen=True, slots=True)
class Matrix:
    """A gradient that is compressed.

    Attributes:
        rows: its first dimension.
        columns: all others.
        rank: columns of its P and Q.
    """

    place: int
    start: int
    rows: int
    columns: int
    rank: int

    @property
    def end(self) -> int:
        """The end of its elements in the buffer."""
        return self.start + self.rows * self.columns


@dataclass(frozen=True, slots=True)
class LowRankPlan:
    """How the gradients of a bucket are compressed.

    Attributes:
        batches: matrices of one shape that are multiplied together; P and Q of each
            batch follow those of the batch before.
        plain: the stretches of the buffer that are summed uncompressed.
    """

    batches: tuple[tuple[Matrix, ...], ...]
    plain: tuple[tuple[int, int], ...]
    numel: int

    @property
    def matrices(self) -> Iterator[Matrix]:
        """All compressed gradients, in the order of their Ps and Qs."""
        return itertools.chain.from_iterable(self.batches)

    @property
    def plain_numel(self) -> int:
        """Elements that are summed uncompressed."""
        return sum(end - start for start, end in self.plain)

    @property
    def p_numel(self) -> int:
        """Elements of all Ps."""
        return sum(matrix.rows * matrix.rank for matrix in self.matrices)

    @property
    def q_numel(self) -> int:
        """Elements of all Qs."""
        return sum(matrix.columns * matrix.rank for matrix in self.matrices)

    @property
    def sent_numel(self) -> int:
        """Elements that are summed over all ranks."""
        return self.plain_numel + self.p_numel + self.q_numel


def plan_for(
    shapes: Sequence[torch.Size], rank: int, rate_min: float, *, batch: bool
) -> LowRankPlan:
    """Decide which gradients are compressed."""
    by_shape: dict[tuple[int, int], list[Matrix]] = {}
    plain: list[tuple[int, int]] = []
    end = 0
    for place, shape in enumerate(shapes):
        start, end = end, end + shape.numel()
        if start == end:
            continue
        rows = shape[0] if shape else 1
        columns = shape.numel() // rows
        matrix = Matrix(place, start, rows, columns, min(rows, columns, rank))
        if (rows + columns) * matrix.rank * rate_min < rows * columns:
            by_shape.setdefault((rows, columns), []).append(matrix)
        elif plain and plain[-1][1] == start:
            plain[-1] = (plain[-1][0], end)
        else:
            plain.append((start, end))
    alike = [tuple(matrices) for matrices in by_shape.values()]
    if not batch:
        alike = [(matrix,) for matrices in alike for matrix in matrices]
    return LowRankPlan(tuple(alike), tuple(plain), end)


class Layers:
    """One bucket, each gradient of which is compressed by itself.

    Attributes:
        sent: `(elements,)`, summed first: plain gradients, then all Ps.
        qs: `(elements,)`, summed second: all Qs.
        zeros: columns that could not be normalized.
    """

    def __init__(
        self,
        plan: LowRankPlan,
        buffer: torch.Tensor,
        qs: torch.Tensor,
        error: torch.Tensor | None,
        epsilon: float,
    ) -> None:
        """Begin.

        Args:
            error: `(elements,)`, which gets the errors of the means; None: they are
                lost.
        """
        self._plan = plan
        self._buffer = buffer
        self._error = error
        self._epsilon = epsilon
        plain_numel = plan.plain_numel
        self.sent = buffer.new_empty(plain_numel + plan.p_numel)
        self.qs = qs
        self.zeros = 0
        self._ms = [self._matrices(batch) for batch in plan.batches]
        shapes = [(len(batch), batch[0]) for batch in plan.batches]
        p_shapes = [(count, matrix.rows, matrix.rank) for count, matrix in shapes]
        self._ps = cut(self.sent[plain_numel:], p_shapes)
        self._qs = cut(qs, q_shapes(plan))

    def _matrices(self, batch: Sequence[Matrix]) -> torch.Tensor:
        """Return the gradients of a batch, `(count, rows, columns)`."""
        gradients = [
            self._buffer[matrix.start : matrix.end].view(matrix.rows, matrix.columns)
            for matrix in batch
        ]
        # A single matrix stays where it is.
        return (
            torch.stack(gradients) if len(gradients) > 1 else gradients[0].unsqueeze(0)
        )

    def first(self) -> None:
        """Compute `sent`, which is summed first."""
        at = 0
        for start, end in self._plan.plain:
            self.sent[at : at + end - start].copy_(self._buffer[start:end])
            at += end - start
        for m, p, q in zip(self._ms, self._ps, self._qs, strict=True):
            self.zeros += orthogonalize(q, self._epsilon)
            torch.bmm(m, q, out=p)

    def second(self) -> None:
        """Compute `qs`, which are summed second."""
        for m, p, q in zip(self._ms, self._ps, self._qs, strict=True):
            self.zeros += orthogonalize(p, self._epsilon)
            torch.bmm(m.transpose(1, 2), p, out=q)

    def finish(self, size: int) -> None:
        """Put the means over `size` ranks into the buffer."""
        error = self._error
        self.qs.div_(size)
        at = 0
        for start, end in self._plan.plain:
            mean = self.sent[at : at + end - start].div_(size)
            at += end - start
            replace(self._buffer[start:end], mean, error, start)
        for batch, m, p, q in zip(
            self._plan.batches, self._ms, self._ps, self._qs, strict=True
        ):
            if len(batch) > 1:
                means = torch.bmm(p, q.transpose(1, 2), out=m)
                for matrix, mean in zip(batch, means, strict=True):
                    part = self._buffer[matrix.start : matrix.end]
                    replace(part, mean.view(-1), error, matrix.start)
            elif error is None:
                torch.bmm(p, q.transpose(1, 2), out=m)  # which is in the buffer
            else:
                start, end = batch[0].start, batch[0].end
                error[start:end].copy_(self._buffer[start:end])
                torch.bmm(p, q.transpose(1, 2), out=m)
                error[start:end].sub_(self._buffer[start:end])


def q_shapes(plan: LowRankPlan) -> list[tuple[int, int, int]]:
    """Return the shapes of the Qs of each batch, `(count, columns, rank)`."""
    return [(len(batch), batch[0].columns, batch[0].rank) for batch in plan.batches]


def replace(
    part: torch.Tensor, mean: torch.Tensor, error: torch.Tensor | None, start: int
) -> None:
    """Replace a part of a buffer by its mean, and keep the error there."""
    if error is not None:
        torch.sub(part, mean, out=error[start : start + len(part)])
    part.copy_(mean)


class Square:
    """One bucket, all gradients of which are compressed as one square matrix.

    Attributes:
        sent: P, `(side, rank)`, summed first.
        qs: Q, `(side, rank)`, summed second.
        zeros: columns that could not be normalized.
    """

    def __init__(
        self, buffer: torch.Tensor, padded: torch.Tensor, q: torch.Tensor
    ) -> None:
        """Begin.

        Args:
            padded: `(side * side,)`, the gradients; it gets the errors of their means.
                It may be the buffer itself: then the errors are lost.
        """
        self._buffer = buffer
        self._padded = padded
        self._matrix = padded.view(len(q), len(q))
        self.sent = torch.empty_like(q)
        self.qs = q
        self.zeros = 0

    def first(self) -> None:
        """Compute P."""
        self.zeros += orthogonalize(self.qs.unsqueeze(0))
        torch.mm(self._matrix, self.qs, out=self.sent)

    def second(self) -> None:
        """Compute Q."""
        self.zeros += orthogonalize(self.sent.unsqueeze(0))
        torch.mm(self._matrix.t(), self.sent, out=self.qs)

    def finish(self, size: int) -> None:
        """Put the means over `size` ranks into the buffer."""
        self.qs.div_(size)
        side = len(self.qs)
        is_apart = self._padded.data_ptr() != self._buffer.data_ptr()
        rows = max(1, _STEP // side)
        for low in range(0, side, rows):
            means = torch.mm(self.sent[low : low + rows], self.qs.t()).view(-1)
            start = low * side
            if is_apart:
                self._padded[start : start + len(means)].sub_(means)
            part = self._buffer[start : start + len(means)]
            part.copy_(means[: len(part)])


def side_of(numel: int) -> int:
    """Return the side of the smallest square that has room for so many elements."""
    return math.isqrt(numel - 1) + 1 if numel else 0

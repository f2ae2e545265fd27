"""Orthonormal columns, for many matrices of one shape at a time.

Source: torch/distributed/algorithms/ddp_comm_hooks/powerSGD_hook.py, `_orthogonalize`,
whose choice of algorithm is kept, so that results are equal.
"""

from __future__ import annotations

from typing import Final

import torch

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

"""Columns are made orthonormal, as torch's hook does it."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from asyncrpc.parallel.ddp.hooks.orthogonal import orthogonalize

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def drawn(count: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    draw = torch.Generator().manual_seed(rows)
    return torch.randn(count, rows, columns, generator=draw).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 2, 3, 8])
def test_columns_become_orthonormal(columns: int, dtype: torch.dtype) -> None:
    matrices = drawn(3, 40, columns, dtype)
    assert orthogonalize(matrices) == 0
    products = (matrices.transpose(1, 2).double() @ matrices.double()).abs()
    wanted = torch.eye(columns, dtype=torch.float64).expand(3, -1, -1)
    # A half has rounded each of forty products, and each column as often as it is put
    # right for another.
    allowed = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(products, wanted, rtol=0.0, atol=allowed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 2, 3, 8])
@pytest.mark.parametrize("epsilon", [0.0, 1e-3])
def test_orthogonal_columns_equal_those_of_torch_bit_by_bit(
    columns: int, epsilon: float, dtype: torch.dtype
) -> None:
    ours = drawn(2, 17, columns, dtype)
    theirs = ours.clone()
    orthogonalize(ours, epsilon)
    powerSGD_hook._orthogonalize(theirs, epsilon)  # type: ignore[no-untyped-call]  # noqa: SLF001  torch's
    assert torch.equal(ours, theirs)


def test_orthogonalize_writes_to_views() -> None:
    memory = drawn(1, 30, 1, torch.float32).view(-1)
    orthogonalize(memory[10:].view(1, 10, 2))
    assert memory[10::2].norm() == pytest.approx(1.0)


@pytest.mark.parametrize("columns", [1, 2])
def test_zero_columns_stay_zero_and_are_counted(columns: int) -> None:
    matrices = drawn(3, 10, columns, torch.float32)
    matrices[1] = 0
    assert orthogonalize(matrices) == columns
    assert (matrices[1] == 0).all()
    assert torch.isfinite(matrices).all()


def test_epsilon_keeps_zero_columns_from_being_counted() -> None:
    matrices = torch.zeros(2, 10, 1)
    assert orthogonalize(matrices, 1e-8) == 0
    assert (matrices == 0).all()

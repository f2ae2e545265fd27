"""PowerSGD gives what torch's gives, step by step, for the same gradients.

So do its errors, its Qs, its counts and what it draws next; and every rank has the same
bits.  Over two ranks, where there is one order of additions, all of it is the same bits
as torch's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrpc.multiprocessing import launch
from tests.numerics.ddp.hooks_beside_torch import BUCKETS, LARGE, Case, play

SIZES = [2, 3, 4]
FEW: dict[str, Any] = {"start_powerSGD_iter": 2, "min_compression_rate": 1.2}
# Halves are added in another order than gloo's, twice, between two normalizations.
HALF = {"fp16(powerSGD)": 0.05, "bf16(powerSGD)": 0.25}


def check(size: int, tmp_path: Path, *cases: Case) -> list[float]:
    """Return the largest difference of each case, over all ranks."""
    arguments = (str(tmp_path), "power", cases)
    by_rank = launch(play, arguments, size, method="forkserver")
    largest = [max(each) for each in zip(*by_rank, strict=True)]
    if size == 2:
        assert largest == [0.0] * len(cases)
    return largest


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_powersgd_matches_torch_with_feedback_and_warm_start(
    size: int, tmp_path: Path
) -> None:
    cases = [
        Case(
            hook,
            {
                **FEW,
                "use_error_feedback": feedback,
                "warm_start": warm,
                "matrix_approximation_rank": rank,
                "random_seed": 7,
            },
            # Two columns nearly depend on each other at times, and enlarge what
            # another order of additions makes: 3e-5, and 7e-15 in doubles.
            tolerance=1e-4,
        )
        for hook in ("powerSGD", "batched")
        for feedback in (True, False)
        for warm in (True, False)
        for rank in (1, 2)
    ]
    check(size, tmp_path, *cases)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_powersgd_matches_torch_with_other_options(size: int, tmp_path: Path) -> None:
    options: list[dict[str, Any]] = [
        {**FEW, "matrix_approximation_rank": 4},  # by QR decomposition
        {**FEW, "matrix_approximation_rank": 64},  # more than a matrix has
        {**FEW, "orthogonalization_epsilon": 1e-3},
        {**FEW, "batch_tensors_with_same_shape": True},
        {
            **FEW,
            "batch_tensors_with_same_shape": True,
            "matrix_approximation_rank": 3,
            "use_error_feedback": False,
        },
        {**FEW, "start_powerSGD_iter": 4, "compression_stats_logging_frequency": 2},
        {
            "start_powerSGD_iter": 0,
            "use_error_feedback": False,
            "warm_start": False,
            "min_compression_rate": 0.4,  # vectors, too
        },
        {**FEW, "min_compression_rate": 100},  # nothing is compressed
        {},  # nothing yet
    ]
    check(size, tmp_path, *(Case("powerSGD", chosen) for chosen in options))


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_powersgd_matches_torch_in_other_dtypes(size: int, tmp_path: Path) -> None:
    eps = torch.finfo(torch.float64).eps
    doubles = [
        Case(
            hook,
            {**FEW, "matrix_approximation_rank": 2},
            dtype=torch.float64,
            tolerance=1e5 * eps,
        )
        for hook in ("powerSGD", "batched")
    ]
    halves = [
        Case(hook, {**FEW, "matrix_approximation_rank": rank}, steps=4, tolerance=most)
        for hook, most in HALF.items()
        for rank in (1, 2)
    ]
    check(size, tmp_path, *doubles, *halves)


@pytest.mark.slow
def test_powersgd_matches_torch_over_many_steps(tmp_path: Path) -> None:
    many = Case("powerSGD", {**FEW, "matrix_approximation_rank": 2}, steps=60)
    large = Case("powerSGD", FEW, buckets=LARGE, steps=4)
    square = Case("batched", FEW, buckets=(*LARGE, *BUCKETS), steps=4)
    check(2, tmp_path, many, large, square)

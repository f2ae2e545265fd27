"""Norms and scales of gradients, of every kind that torch has."""

from __future__ import annotations

import math
import threading

import pytest
import torch

from asyncrpc.optim.local import LocalOptimizer, scale_for, squared_norm


def by_parameter(*gradients: torch.Tensor) -> dict[torch.Tensor, torch.Tensor]:
    return {torch.empty(()): gradient for gradient in gradients}


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64]
)
def test_the_norm_is_taken_in_double_precision(dtype: torch.dtype) -> None:
    """In half precision this norm, 2 ** 16, would be infinite."""
    gradients = by_parameter(torch.full((4,), 2.0**15, dtype=dtype))
    assert squared_norm(gradients) == 2.0**32


def test_complex_and_sparse_gradients_count_by_their_parts() -> None:
    imaginary = torch.tensor([3 + 4j], dtype=torch.complex64)
    assert squared_norm(by_parameter(imaginary, imaginary.conj())) == 50.0
    # An index that comes twice: its values add up before they are squared.
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0]), (5,), check_invariants=True
    )
    assert squared_norm(by_parameter(sparse)) == pytest.approx(9.0)


def test_no_gradients_have_no_norm() -> None:
    assert squared_norm({}) == 0.0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_bad_element_makes_the_norm_bad(bad: float) -> None:
    gradients = by_parameter(torch.ones(100), torch.tensor([1.0, bad]))
    assert not math.isfinite(squared_norm(gradients))


@pytest.mark.parametrize(
    ("norm", "clip", "wanted"),
    [
        (None, None, 1.0),
        (2.0, None, 1.0),
        (2.0, 3.0, 1.0),
        (2.0, 1.0, 1.0 / (2.0 + 1e-6)),
        (0.0, 1.0, 1.0),
        (math.inf, 1.0, 0.0),
    ],
)
def test_gradients_are_scaled_down_and_never_up(
    norm: float | None, clip: float | None, wanted: float
) -> None:
    assert scale_for(norm, clip, skip_nonfinite=False) == wanted


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_what_is_not_finite_is_skipped_only_if_asked(norm: float) -> None:
    assert scale_for(norm, None, skip_nonfinite=True) is None
    assert scale_for(norm, 1.0, skip_nonfinite=True) is None
    assert scale_for(norm, None, skip_nonfinite=False) == 1.0
    assert scale_for(1.0, None, skip_nonfinite=True) == 1.0


def test_a_norm_that_is_nan_clips_to_nan_as_torch_does() -> None:
    scale = scale_for(math.nan, 1.0, skip_nonfinite=False)
    assert scale is not None
    assert math.isnan(scale)


def test_a_step_that_raises_puts_grad_back() -> None:
    parameter = torch.ones(2, requires_grad=True)
    parameter.grad = kept = torch.full((2,), 7.0)
    local = LocalOptimizer(torch.optim.LBFGS([parameter]), threading.Lock())
    for _ in range(2):  # and frees the lock
        with pytest.raises(TypeError, match="closure"):
            local.step({parameter: torch.ones(2)}, 1.0, allow_stale=False)
        assert parameter.grad is kept


def test_a_learning_rate_in_a_tensor_stays_in_it() -> None:
    rate = torch.tensor(0.5)
    optimizer = torch.optim.Adam([torch.ones(1, requires_grad=True)], lr=rate)
    local = LocalOptimizer(optimizer, threading.Lock())
    local.set_learning_rate(0.25, None)
    assert rate.item() == 0.25
    assert local.learning_rates() == [0.25]

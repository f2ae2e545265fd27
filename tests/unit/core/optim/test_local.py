"""Norms of gradients of every kind that torch has; steps that fail leave no trace."""

from __future__ import annotations

import math
import threading
from fractions import Fraction
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from asyncrpc.core.autograd.gradient_lock import GradientLock
from asyncrpc.core.optim.local import (
    LocalOptimizer,
    exact_sum,
    norm_of,
    scale_for,
    squares,
)
from asyncrpc.core.optim.options import GroupChange
from asyncrpc.errors import OptimizerError


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64]
)
def test_norm_is_computed_in_double_precision(dtype: torch.dtype) -> None:
    """In half precision this norm, 2 ** 16, would be infinite."""
    gradients = [torch.full((4,), 2.0**15, dtype=dtype), None]
    assert norm_of(squares(gradients)) == 2.0**16


def test_complex_and_sparse_gradients_count_by_their_parts() -> None:
    imaginary = torch.tensor([3 + 4j], dtype=torch.complex64)
    assert sum(squares([imaginary, imaginary.conj()])) == 50.0
    # An index that comes twice: its values add up before they are squared.
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0]), (5,), check_invariants=True
    )
    assert sum(squares([sparse])) == pytest.approx(9.0)


def test_empty_gradients_have_norm_zero() -> None:
    assert squares([]) == squares([None]) == []
    assert norm_of([]) == 0.0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_nonfinite_element_makes_the_norm_nonfinite(bad: float) -> None:
    gradients = [torch.ones(100), torch.tensor([1.0, bad])]
    assert not math.isfinite(norm_of(squares(gradients)))


@hypothesis.given(st.lists(st.floats(-1e300, 1e300), max_size=20), st.integers(0, 20))
def test_exact_sum_is_independent_of_its_partition(
    values: list[float], at: int
) -> None:
    wanted = math.fsum(values)
    assert math.fsum([*exact_sum(values[:at]), *exact_sum(values[at:])]) == wanted
    assert sum(map(Fraction, exact_sum(values))) == sum(map(Fraction, values))


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
def test_nonfinite_step_is_skipped_on_request_only(norm: float) -> None:
    assert scale_for(norm, None, skip_nonfinite=True) is None
    assert scale_for(norm, 1.0, skip_nonfinite=True) is None
    assert scale_for(norm, None, skip_nonfinite=False) == 1.0
    assert scale_for(1.0, None, skip_nonfinite=True) == 1.0


def test_nan_norm_clips_to_nan_as_in_torch() -> None:
    scale = scale_for(math.nan, 1.0, skip_nonfinite=False)
    assert scale is not None
    assert math.isnan(scale)


def numbered(count: int = 2) -> list[torch.Tensor]:
    return [torch.full((2,), float(n), requires_grad=True) for n in range(count)]


class Failing(torch.optim.SGD):
    """Changes what it has before it raises, once it has taken `well` steps."""

    def __init__(self, params: Any, well: int = 0) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.well = well

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.well -= 1
        if self.well < 0:
            self.param_groups[0]["lr"] = 7.0
            raise ArithmeticError("after all was changed")


def local_of(optimizer: torch.optim.Optimizer) -> LocalOptimizer:
    return LocalOptimizer(optimizer, GradientLock())


def step(local: LocalOptimizer, *gradients: torch.Tensor | None) -> None:
    local.step(gradients, 1.0, [], allow_stale=False)


def test_failed_step_restores_everything() -> None:
    parameters = numbered()
    parameters[0].grad = kept = torch.full((2,), 7.0)
    local = local_of(Failing(parameters, well=1))
    gradients = [torch.ones(2), torch.ones(2)]
    step(local, *gradients)
    before = [parameter.detach().clone() for parameter in parameters], local.state()
    for _ in range(2):  # and frees the lock
        with pytest.raises(ArithmeticError, match="all was changed"):
            local.step(gradients, 1.0, [GroupChange(0, {"lr": 0.5})], allow_stale=False)
        assert parameters[0].grad is kept
        assert parameters[1].grad is None
        after = [parameter.detach() for parameter in parameters], local.state()
        assert str(after) == str(before)


def test_graph_of_undone_values_cannot_go_backward() -> None:
    (parameter,) = numbered(1)
    local = local_of(torch.optim.SGD([parameter], lr=0.1))
    snapshot = local.step_kept([torch.ones(2)], 1.0, [], allow_stale=False)
    squared = parameter.square()  # of what is put back in the next line
    local.locked(snapshot.restore)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            squared.sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
        step(local, torch.ones(2))


def is_held(lock: GradientLock) -> bool:
    """Say whether another thread could not take a lock."""
    states = []

    def look() -> None:
        if lock.acquire(blocking=False):
            lock.release()
            states.append(False)
        else:
            states.append(True)

    looking = threading.Thread(target=look)
    looking.start()
    looking.join()
    return states[0]


class Watching(torch.optim.SGD):
    """Looks whether the lock over `.grad` is held while it steps."""

    def __init__(self, params: Any, lock: GradientLock) -> None:
        super().__init__(params, lr=0.1)
        self.lock = lock

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert is_held(self.lock)
        super().step(closure)


def test_running_step_holds_off_backward_passes() -> None:
    lock = GradientLock()
    local = LocalOptimizer(Watching(numbered(1), lock), lock)
    step(local, torch.ones(2))
    local.step_kept([torch.ones(2)], 1.0, [], allow_stale=False)
    assert not is_held(lock)


def test_snapshot_undoes_a_step() -> None:
    parameters = numbered()
    local = local_of(torch.optim.Adam(parameters, lr=0.1))
    snapshot = local.step_kept([torch.ones(2), None], 1.0, [], allow_stale=False)
    assert parameters[0].tolist() != [0.0, 0.0]
    local.locked(snapshot.restore)
    assert [parameter.tolist() for parameter in parameters] == [[0.0, 0.0], [1.0, 1.0]]
    assert local.state()["state"] == {}


def test_step_is_sure_after_a_like_step_of_each_parameter() -> None:
    local = local_of(torch.optim.SGD(numbered(), lr=0.1))
    dense, sparse = torch.ones(2), torch.ones(2).to_sparse()
    assert not local.is_sure([dense, None])
    step(local, dense, None)
    assert local.is_sure([dense, None])
    assert not local.is_sure([dense, dense])
    assert not local.is_sure([sparse, None])
    assert not local.is_sure([dense])  # as a group was being added
    step(local, sparse, dense)
    assert local.is_sure([sparse, dense])
    local.load_state(local.state())  # torch checks no shape of it
    assert not local.is_sure([sparse, dense])
    step(local, sparse, dense)
    local.set_options([GroupChange(0, {"maximize": True})])
    assert not local.is_sure([sparse, dense])
    step(local, sparse, dense)
    local.add_group({"params": numbered(1)})
    assert not local.is_sure([sparse, dense, dense])
    assert local.is_sure([sparse, dense, None])


def test_optimizer_of_a_user_is_never_sure() -> None:
    local = local_of(Failing(numbered(1), well=2))
    step(local, torch.ones(2))
    assert not local.is_sure([torch.ones(2)])
    hooked = torch.optim.SGD(numbered(1), lr=0.1)
    hooked.register_step_post_hook(lambda *_: None)
    local = local_of(hooked)
    step(local, torch.ones(2))
    assert not local.is_sure([torch.ones(2)])


def test_failed_step_believed_sure_reports_partial_application() -> None:
    (parameter,) = numbered(1)
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    local = local_of(optimizer)
    step(local, torch.ones(2))
    optimizer.state[parameter]["exp_avg"] = torch.zeros(3)  # behind our back
    with pytest.raises(OptimizerError, match=r"RuntimeError: .*may be applied in part"):
        step(local, torch.ones(2))

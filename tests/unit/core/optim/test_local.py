"""Steps of optimizers: norms, options, states, and whose turn it is."""

from __future__ import annotations

import math
import random
import threading
from fractions import Fraction
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from asyncrpc import UsageError
from asyncrpc.core.autograd.inline import GradientLock
from asyncrpc.core.ids import Incarnation, WorkerId
from asyncrpc.core.optim import states
from asyncrpc.core.optim.local import (
    LocalOptimizer,
    exact_sum,
    norm_of,
    scale_for,
    squares,
)
from asyncrpc.core.optim.options import (
    GroupChange,
    GroupOptions,
    changes,
    is_harmless,
    options_of,
    set_options,
)
from asyncrpc.core.optim.turns import Turns
from asyncrpc.errors import LocalProtocolError, OptimizerError


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64]
)
def test_norm_is_computed_in_double_precision(dtype: torch.dtype) -> None:
    """In half precision this norm, 2 ** 16, would be infinite."""
    assert norm_of(squares([torch.full((4,), 2.0**15, dtype=dtype), None])) == 2.0**16


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


def test_option_changes_contain_differences_only() -> None:
    known: list[dict[str, Any]] = [{"lr": 0.1, "betas": (0.9, 0.99)}, {"lr": 0.1}]
    now: list[dict[str, Any]] = [
        {"lr": 0.1, "betas": (0.8, 0.99)},
        {"lr": 0.2, "initial_lr": 0.1},
    ]
    assert changes(known, known) == []
    assert changes(now, known) == [
        GroupChange(0, {"betas": (0.8, 0.99)}),
        GroupChange(1, {"lr": 0.2, "initial_lr": 0.1}),
    ]


def test_tensor_rate_is_compared_by_value() -> None:
    known = [{"lr": torch.tensor(0.1)}]
    assert changes([{"lr": torch.tensor(0.1)}], known) == []
    assert len(changes([{"lr": torch.tensor(0.2)}], known)) == 1
    assert len(changes([{"lr": 0.1}], known)) == 1


def test_tensor_rate_is_changed_in_place() -> None:
    rate = torch.tensor(0.5)
    optimizer = torch.optim.Adam([torch.ones(1, requires_grad=True)], lr=rate)
    set_options(optimizer, [GroupChange(0, {"lr": torch.tensor(0.25), "eps": 0.1})])
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.25
    set_options(optimizer, [GroupChange(0, {"lr": 0.125})])
    assert rate.item() == 0.125
    (copied,) = options_of(optimizer)
    rate.fill_(1.0)
    assert copied["lr"].item() == 0.125
    assert copied["eps"] == 0.1
    assert "params" not in copied


def test_options_without_a_portable_value_are_left_out() -> None:
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    optimizer.param_groups[0]["hook"] = lambda: None
    optimizer.param_groups[0]["pair"] = (1, object())
    (options,) = options_of(optimizer)
    assert "hook" not in options
    assert "pair" not in options
    assert options["lr"] == 0.1


@pytest.mark.parametrize(
    "value", [0.1, 3, (0.9, 0.99), torch.tensor(0.1), (0.9, torch.tensor(0.1))]
)
def test_numeric_option_changes_are_harmless(value: Any) -> None:
    assert is_harmless([GroupChange(0, {"lr": 0.1, "option": value})])


@pytest.mark.parametrize("value", [True, None, "strong_wolfe", (True, 1)])
def test_other_option_changes_may_be_harmful(value: Any) -> None:
    assert not is_harmless([GroupChange(0, {"lr": 0.1, "option": value})])


def test_schedulers_accept_group_options_which_cannot_step() -> None:
    options = GroupOptions([{"lr": 0.4}, {"lr": 0.2}], {"lr": 0.4})
    schedule = torch.optim.lr_scheduler.StepLR(options, step_size=1, gamma=0.5)
    options.note_step()
    schedule.step()  # without a warning, which would be an error here
    assert [group["lr"] for group in options.param_groups] == [0.2, 0.1]
    with pytest.raises(UsageError, match=r"await optimizer\.step"):
        options.step()
    fresh = GroupOptions([{"lr": 0.4}], {"lr": 0.4})
    early = torch.optim.lr_scheduler.StepLR(fresh, step_size=1)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        early.step()


A, B = (WorkerId(name, Incarnation(1)) for name in "ab")


class Reference:
    def __init__(self, owner: WorkerId) -> None:
        self.owner_id = owner


def groups_on(*owners: str) -> list[dict[str, Any]]:
    known = {"a": A, "b": B}
    return [{"params": [Reference(known[name]) for name in group]} for group in owners]


def owner_state(*names: str, groups: list[list[int]]) -> dict[str, Any]:
    """Return a state whose parameters have these names."""
    return {
        "state": {number: {"name": name} for number, name in enumerate(names) if name},
        "param_groups": [{"lr": 0.1, "params": group} for group in groups],
    }


GROUPS = groups_on("aba", "bb")
TOGETHER = {
    "state": {
        0: {"name": "a0"},
        1: {"name": "b0"},
        2: {"name": "a1"},
        4: {"name": "b2"},
    },
    "param_groups": [
        {"lr": 0.5, "params": [0, 1, 2]},
        {"lr": 0.25, "params": [3, 4]},
    ],
}


def test_states_are_joined_by_parameter_positions() -> None:
    parts = {
        A: owner_state("a0", "a1", groups=[[0, 1], []]),
        B: owner_state("b0", "", "b2", groups=[[0], [1, 2]]),
    }
    joined = states.joined(GROUPS, parts, [{"lr": 0.5}, {"lr": 0.25}])
    assert joined == TOGETHER
    assert list(joined["state"]) == [0, 1, 2, 4]


def test_joined_state_is_split_by_owner() -> None:
    a = states.part_for(GROUPS, TOGETHER, A)
    assert a["state"] == {0: {"name": "a0"}, 1: {"name": "a1"}}
    assert [group["params"] for group in a["param_groups"]] == [[0, 1], []]
    b = states.part_for(GROUPS, TOGETHER, B)
    assert b["state"] == {0: {"name": "b0"}, 2: {"name": "b2"}}
    assert b["param_groups"] == [
        {"lr": 0.5, "params": [0]},
        {"lr": 0.25, "params": [1, 2]},
    ]


def test_state_entry_of_no_parameter_cannot_be_joined() -> None:
    state = owner_state("a0", groups=[[0]])
    state["state"]["round"] = 3
    with pytest.raises(UsageError, match=r"'round'.*per_owner=True"):
        states.joined(groups_on("a"), {A: state}, [{}])


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({"state": {}}, "it has no 'param_groups'"),
        ({"param_groups": []}, "it has no 'state'"),
        ({"state": {}, "param_groups": [{"params": [0]}]}, r"\[1\] parameters"),
        ({**TOGETHER, "state": {5: {}}}, r"has\s+groups of \[3, 2\]"),
    ],
)
def test_state_of_another_optimizer_is_refused(state: Any, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        states.check_fits(GROUPS, state)
    states.check_fits(GROUPS, TOGETHER)


def test_steps_that_share_a_parameter_wait_for_each_other() -> None:
    turns = Turns()
    assert turns.ask(1, {10, 11})
    assert not turns.ask(2, {11, 12})
    assert turns.ask(3, {13})
    assert turns.end(3) == []
    assert turns.end(1) == [2]
    assert turns.end(2) == []
    assert len(turns) == 0


def test_later_step_does_not_overtake_a_waiting_one() -> None:
    """The third could go now, but the second, which came before, shares with it."""
    turns = Turns()
    assert turns.ask(1, {10})
    assert not turns.ask(2, {10, 11})
    assert not turns.ask(3, {11})
    assert turns.end(1) == [2]
    assert turns.end(2) == [3]


def test_abandoned_turn_lets_the_next_step_begin() -> None:
    turns = Turns()
    turns.ask(1, {10})
    turns.ask(2, {10, 11})
    turns.ask(3, {11})
    assert turns.end(2) == [3]
    assert turns.end(1) == []


def test_several_steps_may_begin_at_once() -> None:
    turns = Turns()
    turns.ask(1, {10, 11})
    turns.ask(2, {10})
    turns.ask(3, {11})
    turns.ask(4, {10, 11})
    assert turns.end(1) == [2, 3]
    assert turns.end(2) == []
    assert turns.end(3) == [4]


def test_ended_turn_is_forgotten() -> None:
    turns = Turns()
    assert turns.ask(1, {10})
    with pytest.raises(LocalProtocolError, match="asked for a turn before"):
        turns.ask(1, {11})
    turns.end(1)
    assert turns.end(1) == []
    assert turns.ask(1, {10})


@pytest.mark.parametrize("seed", range(20))
def test_turns_never_overlap_and_all_are_granted(seed: int) -> None:
    rng = random.Random(seed)
    turns, keys = Turns(), {}
    active: set[int] = set()
    waiting: list[int] = []
    for holder in range(60):
        keys[holder] = frozenset(rng.sample(range(6), rng.randint(1, 3)))
        if turns.ask(holder, keys[holder]):
            active.add(holder)
        else:
            waiting.append(holder)
        if rng.random() < 0.6:
            ended = rng.choice(sorted(active | set(waiting)))
            active.discard(ended)
            begun = turns.end(ended)
            active.update(begun)
            waiting = [
                holder for holder in waiting if holder != ended and holder not in begun
            ]
        held = [key for holder in active for key in keys[holder]]
        assert len(held) == len(set(held))
        assert bool(active) or not waiting
    while active:
        ended = active.pop()
        active.update(turns.end(ended))
    assert len(turns) == 0

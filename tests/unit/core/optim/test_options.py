"""Options of groups: what differs, what may travel, what a step may refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncrpc import UsageError
from asyncrpc.core.optim.options import (
    GroupChange,
    GroupOptions,
    changes,
    is_harmless,
    options_of,
    set_options,
)


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

"""What looks at a step of an optimizer is not left out."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import profiler
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from asyncrpc.core.optim.local import plain_step_of

OPTIMIZERS = [
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
]


def parameter() -> torch.nn.Parameter:
    new_parameter = torch.nn.Parameter(torch.ones(3))
    new_parameter.grad = torch.arange(3.0)
    return new_parameter


class Halving(torch.optim.Optimizer):
    """A user's optimizer, which counts its steps."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            for tensor in group["params"]:
                tensor.mul_(0.5)


@pytest.mark.parametrize("kind", [*OPTIMIZERS, Halving])
def test_plain_step_equals_step(kind: Any) -> None:
    mine, its = parameter(), parameter()
    optimizer, other = kind([mine]), kind([its])
    step = plain_step_of(optimizer)
    for _ in range(3):
        step()
        other.step()
    assert torch.equal(mine, its)
    assert mine.grad is not None
    assert not torch.equal(mine, torch.ones(3))


def test_plain_step_leaves_the_wrapper_of_torch_out() -> None:
    optimizer = torch.optim.SGD([parameter()], lr=1.0)
    with mock.patch.object(torch.autograd.profiler, "record_function") as ranges:
        plain_step_of(optimizer)()
        assert not ranges.called
        optimizer.step()
        assert ranges.called


def test_plain_step_calls_own_and_global_hooks() -> None:
    optimizer = torch.optim.SGD([parameter()], lr=1.0)
    step, calls = plain_step_of(optimizer), []

    def note(*_: Any) -> None:
        calls.append(1)

    for register in (
        optimizer.register_step_pre_hook,
        optimizer.register_step_post_hook,
        register_optimizer_step_pre_hook,
        register_optimizer_step_post_hook,
    ):
        handle = register(note)
        calls.clear()
        step()
        assert calls == [1]
        handle.remove()
        step()
        assert calls == [1]


def test_learning_rate_scheduler_sees_plain_steps() -> None:
    optimizer = torch.optim.SGD([parameter()], lr=1.0)
    step = plain_step_of(optimizer)
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    step()
    scheduler.step()  # warns, which is an error here, if it has seen no step


def test_profiler_sees_a_range_for_a_plain_step() -> None:
    step = plain_step_of(torch.optim.SGD([parameter()], lr=1.0))
    with profiler.profile(activities=[profiler.ProfilerActivity.CPU]) as profile:
        step()
    assert "Optimizer.step#SGD.step" in {event.name for event in profile.events()}


def test_plain_step_calls_a_wrapper_of_the_class() -> None:
    class Mine(torch.optim.SGD):
        pass

    optimizer = Mine([parameter()], lr=1.0)
    step, calls = plain_step_of(optimizer), []
    original: Any = Mine.step

    @functools.wraps(original)
    def wrapper(*args: Any) -> Any:
        calls.append(1)
        return original(*args)

    Mine.step = wrapper  # type: ignore[method-assign, assignment]
    step()
    plain_step_of(optimizer)()
    assert calls == [1, 1]

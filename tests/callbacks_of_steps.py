"""Every way in which torch calls back into Python while an optimizer takes a step.

A way is a context manager: inside, a step of the optimizer calls `call`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, TypeAlias, cast

import torch
from torch.optim import lr_scheduler as lrs
from torch.optim import optimizer as of_all_optimizers

from tests.callbacks_of_torch import (
    Call,
    Reading,
    Register,
    doing,
    profile_twice,
    removing,
)

Step: TypeAlias = Callable[[Call, torch.optim.Optimizer], AbstractContextManager[None]]

STEPS: Final[dict[str, Step]] = {}


def step(make: Callable[[Call, torch.optim.Optimizer], Iterator[None]]) -> Step:
    manager = contextmanager(make)
    STEPS[make.__name__] = manager
    return manager


def add_steps(make: Callable[..., Iterator[None]], **first: Any) -> None:
    STEPS.update(
        (name, partial(contextmanager(make), value)) for name, value in first.items()
    )


def with_hook(
    register: Register, call: Call, optimizer: torch.optim.Optimizer
) -> Iterator[None]:
    of, name = register
    with removing(getattr(of or optimizer, name)(doing(call))):
        yield


add_steps(
    with_hook,
    pre_hook=(None, "register_step_pre_hook"),
    post_hook=(None, "register_step_post_hook"),
    pre_hook_of_all=(of_all_optimizers, "register_optimizer_step_pre_hook"),
    post_hook_of_all=(of_all_optimizers, "register_optimizer_step_post_hook"),
)


@step
def wrapped_step(call: Call, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """As a scheduler of learning rates wraps it, and GradScaler and profilers do."""
    mine: Any = optimizer
    plain: Any = optimizer.step

    def wrapped(*args: Any) -> Any:
        call()
        return plain(*args)

    mine.step = wrapped
    yield
    del mine.step


@step
def replaced_step(call: Call, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    kind: Any = type(optimizer)
    plain = kind.step

    def replaced(self: Any, closure: Any = None) -> Any:
        call()
        return plain(self, closure)

    kind.step = replaced
    try:
        yield
    finally:
        kind.step = plain


@step
def step_of_a_scaler(call: Call, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    mine: Any = optimizer

    class Scaler(torch.amp.GradScaler):
        def unscale_(self, optimizer: Any) -> None:
            call()
            super().unscale_(optimizer)

        def update(self, new_scale: Any = None) -> None:
            call()
            super().update(new_scale)

    scaler = Scaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))  # makes its tensors
    inner = SimpleNamespace(step=optimizer.step, param_groups=optimizer.param_groups)

    def scaled() -> None:
        scaler.step(cast("torch.optim.Optimizer", inner))
        scaler.update()

    mine.step = scaled
    yield
    del mine.step


@step
def scale_that_was_set(call: Call, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """As a scaler sets it for optimizers that unscale by themselves."""
    mine: Any = optimizer

    class Scale(Reading):
        pass

    mine.grad_scale = torch.ones(()).as_subclass(Scale)
    mine.found_inf = torch.zeros(()).as_subclass(Scale)
    group = optimizer.param_groups[0]
    group.update(fused=True, foreach=False)
    Scale.call = staticmethod(call)
    yield
    group.update(fused=None, foreach=None)
    del mine.grad_scale, mine.found_inf


@step
def profiled_step(call: Call, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    with removing(optimizer.register_step_post_hook(lambda *_: profile_twice(call))):
        yield


# --- schedulers of learning rates ----------------------------------------------------

Factor: TypeAlias = Callable[[int], float]


def sequence_of(optimizer: torch.optim.Optimizer, factor: Factor) -> Any:
    parts: list[Any] = [lrs.LambdaLR(optimizer, factor) for _ in range(2)]
    return lrs.SequentialLR(optimizer, parts, milestones=[2])


class Schedule(lrs.LRScheduler):
    """A scheduler of the user's own."""

    def __init__(self, optimizer: torch.optim.Optimizer, factor: Factor) -> None:
        self.factor = factor
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        return [rate * self.factor(self.last_epoch) for rate in self.base_lrs]


def scheduled(
    make: Callable[[torch.optim.Optimizer, Factor], Any],
    call: Call,
    optimizer: torch.optim.Optimizer,
) -> Iterator[None]:
    """Let a scheduler go on after each step, and call; the rate stays."""
    mine: Any = optimizer
    is_made = False

    def factor(_: int) -> float:
        if is_made:  # it is asked at once, too
            call()
        return 1.0

    schedule = make(optimizer, factor)
    is_made = True
    with removing(optimizer.register_step_post_hook(lambda *_: schedule.step())):
        yield
    del mine.step  # which schedulers wrap


add_steps(
    scheduled,
    scheduled_by_a_function=lrs.LambdaLR,
    scheduled_by_a_product=lrs.MultiplicativeLR,
    scheduled_in_sequence=sequence_of,
    scheduled_in_a_chain=lambda optimizer, factor: lrs.ChainedScheduler(
        [lrs.LambdaLR(optimizer, factor), lrs.MultiplicativeLR(optimizer, factor)]
    ),
    scheduled_by_the_user=Schedule,
)


# --- what a step reads ---------------------------------------------------------------


class Options(list[Any]):
    """Groups of parameters whose reading calls."""

    call: Call

    def __iter__(self) -> Iterator[Any]:
        self.call()
        return super().__iter__()


class Name(str):
    """The name of an option; comparing it calls."""

    __slots__ = ("call",)

    call: Call

    def __hash__(self) -> int:
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        self.call()
        return super().__eq__(other)


@step
def names_of_the_user(call: Call, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    (group,) = optimizer.param_groups
    mine = Name("momentum")
    mine.call = doing(call)
    before = group.pop("momentum")
    group[mine] = before
    yield
    optimizer.param_groups[0] = {**{str(name): group[name] for name in group}}


class Defaults(dict[str, Any]):
    """Options whose reading calls."""

    call: Call

    def __getitem__(self, name: str) -> Any:
        self.call()
        return super().__getitem__(name)


def replaced(
    name: str, kind: Callable[[Any], Any], call: Call, optimizer: torch.optim.Optimizer
) -> Iterator[None]:
    plain = getattr(optimizer, name)
    mine = kind(plain)
    mine.call = call
    setattr(optimizer, name, mine)
    yield
    setattr(optimizer, name, plain)


add_steps(partial(replaced, "param_groups"), options_of_the_user=Options)
add_steps(partial(replaced, "defaults"), defaults_of_the_user=Defaults)

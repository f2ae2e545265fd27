"""Every way in which torch calls back into Python while it computes gradients.

A way is a context manager: inside, the function that it gives computes a loss whose
backward pass calls `call`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Final, Self, TypeAlias

import torch
from torch import nn
from torch.autograd import graph
from torch.nn.modules import module as of_all_modules
from torch.profiler import (
    ExecutionTraceObserver,
    ProfilerAction,
    ProfilerActivity,
    profile,
    record_function,
)
from torch.utils.checkpoint import checkpoint

Call: TypeAlias = Callable[[], None]
Forward: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
Way: TypeAlias = Callable[[Call], AbstractContextManager[Forward]]

_LIBRARY: Any = torch.library.Library

WAYS: Final[dict[str, Way]] = {}


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))


def way(make: Callable[[Call], Iterator[Forward]]) -> Way:
    manager = contextmanager(make)
    WAYS[make.__name__] = manager
    return manager


def add_ways(make: Callable[..., Iterator[Forward]], **first: Any) -> None:
    WAYS.update(
        (name, partial(contextmanager(make), value)) for name, value in first.items()
    )


def total(y: Any) -> torch.Tensor:
    loss: torch.Tensor = y.sum()
    return loss


def doing(call: Call) -> Callable[..., None]:
    """Return a hook that calls, and leaves gradients as they are."""

    def hook(*_: Any) -> None:
        call()

    return hook


def passing(call: Call) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what calls, and gives a saved tensor as it is."""

    def unpack(saved: torch.Tensor) -> torch.Tensor:
        call()
        return saved

    return unpack


@contextmanager
def removing(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


# --- hooks of tensors and nodes ------------------------------------------------------


def on_result(hook: Callable[[Any, Call], object], call: Call) -> Iterator[Forward]:
    """Give a forward pass that hooks the tensor that it computes."""
    w = parameter()

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = (x * w).exp()
        hook(y, call)
        return total(y)

    yield forward


add_ways(
    on_result,
    tensor_hook=lambda y, call: y.register_hook(doing(call)),
    node_hook=lambda y, call: y.grad_fn.register_hook(doing(call)),
    node_prehook=lambda y, call: y.grad_fn.register_prehook(doing(call)),
    hook_of_one_saved_tensor=lambda y, call: y.grad_fn._raw_saved_result.register_hooks(  # noqa: SLF001
        torch.Tensor.detach, passing(call)
    ),
)
_ENGINE: Any = torch.autograd.Variable._execution_engine  # noqa: SLF001


def on_parameter(hook: Callable[[Any, Call], object], call: Call) -> Iterator[Forward]:
    w = parameter()
    kept = hook(w, call)
    yield lambda x: (x * w).sum()
    del kept  # a node keeps its hook as long as it lives


def hooked_node(w: torch.Tensor, call: Call) -> object:
    node = graph.get_gradient_edge(w).node
    node.register_hook(doing(call))
    return node


add_ways(
    on_parameter,
    parameter_hook=lambda w, call: w.register_hook(doing(call)),
    post_accumulate_hook=lambda w, call: w.register_post_accumulate_grad_hook(
        doing(call)
    ),
    accumulating_node_hook=hooked_node,
    callback_at_the_end=lambda w, call: w.register_hook(
        lambda _: _ENGINE.queue_callback(call)
    ),
    profiler_in_a_hook=lambda w, call: w.register_hook(lambda _: profile_twice(call)),
)


@way
def hook_of_several_tensors(call: Call) -> Iterator[Forward]:
    w = parameter()

    def forward(x: torch.Tensor) -> torch.Tensor:
        y, z = x * w, x + w
        graph.register_multi_grad_hook((y, z), doing(call), mode="any")
        return (y * z).sum()

    yield forward


@way
def hook_on_a_received_tensor(call: Call) -> Iterator[Forward]:
    w = parameter().detach()

    def forward(x: Any) -> torch.Tensor:
        x.register_hook(doing(call))
        return total(x * w)

    yield forward


# --- hooks of modules ----------------------------------------------------------------


Register: TypeAlias = tuple[Any, str]  # of all modules, or of one; and its method


def with_module(register: Register, call: Call) -> Iterator[Forward]:
    of, name = register
    module = nn.Linear(3, 3)
    state = vars(of_all_modules)
    before = state["_global_is_full_backward_hook"]  # torch takes one kind at a time
    state["_global_is_full_backward_hook"] = None
    handle = getattr(of or module, name)(doing(call))
    try:
        yield lambda x: module(x * 1).sin().sum()
    finally:
        handle.remove()
        state["_global_is_full_backward_hook"] = before


add_ways(
    with_module,
    module_backward_hook=(None, "register_full_backward_hook"),
    module_backward_pre_hook=(None, "register_full_backward_pre_hook"),
    old_module_backward_hook=(None, "register_backward_hook"),
    hook_of_all_modules=(of_all_modules, "register_module_full_backward_hook"),
    pre_hook_of_all_modules=(of_all_modules, "register_module_full_backward_pre_hook"),
    old_hook_of_all_modules=(of_all_modules, "register_module_backward_hook"),
)


def in_forward(register: Register, call: Call) -> Iterator[Forward]:
    """Give a forward pass whose hook on a module hooks the tensors that it sees."""
    of, name = register
    module = nn.Linear(3, 3)

    def hook(_: nn.Module, inputs: Any, outputs: Any = None) -> None:
        (inputs[0] if outputs is None else outputs).register_hook(doing(call))

    with removing(getattr(of or module, name)(hook)):
        yield lambda x: module(x * torch.ones(3, requires_grad=True)).sum()


add_ways(
    in_forward,
    module_forward_hook=(None, "register_forward_hook"),
    module_forward_pre_hook=(None, "register_forward_pre_hook"),
    forward_hook_of_all_modules=(of_all_modules, "register_module_forward_hook"),
    forward_pre_hook_of_all_modules=(
        of_all_modules,
        "register_module_forward_pre_hook",
    ),
)


# --- saved tensors -------------------------------------------------------------------


@way
def saved_tensors_hooks(call: Call) -> Iterator[Forward]:
    w = parameter()

    def forward(x: torch.Tensor) -> torch.Tensor:
        with graph.saved_tensors_hooks(lambda saved: saved, passing(call)):
            return (x * w).sum()

    yield forward


@way
def checkpoint_that_reenters(call: Call) -> Iterator[Forward]:
    w = parameter()

    def part(y: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():  # the second time: in the backward pass
            call()
        return y.sin()

    yield lambda x: checkpoint(part, x * w, use_reentrant=True).sum()


@way
def checkpoint_by_saved_tensors(call: Call) -> Iterator[Forward]:
    w = parameter()

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen: list[int] = []

        def part(y: torch.Tensor) -> torch.Tensor:
            if seen:
                call()
            seen.append(1)
            return y.sin()

        return total(checkpoint(part, x * w, use_reentrant=False))

    yield forward


# --- functions, operators, subclasses ------------------------------------------------


@way
def function(call: Call) -> Iterator[Forward]:
    w = parameter()

    class Calling(torch.autograd.Function):
        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            _ = ctx
            call()
            return gradient

    yield lambda x: Calling.apply(x * w).sum()  # type: ignore[no-untyped-call]


@way
def custom_operator(call: Call) -> Iterator[Forward]:
    w = parameter()

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        _ = ctx
        call()
        return gradient * 2

    operator = torch.library.custom_op(
        "tests_callbacks::double",
        double,
        mutates_args=(),
        schema="(Tensor x) -> Tensor",
    )
    operator.register_autograd(backward)
    yield lambda x: operator(x * w).sum()


@way
def kernel_of_an_operator(call: Call) -> Iterator[Forward]:
    w = parameter()
    library: Any = _LIBRARY("aten", "IMPL")

    def kernel(x: torch.Tensor) -> torch.Tensor:
        call()
        return torch.full_like(x, 0.5)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own kernel is replaced
        library.impl("cos", kernel, "CPU")
    try:
        yield lambda x: (x * w).sin().sum()  # its backward pass has a cosine
    finally:
        library._destroy()  # noqa: SLF001


class Dispatching(torch.Tensor):
    """A wrapper whose operators call, and return plain tensors."""

    within: torch.Tensor
    call: Call

    @staticmethod
    def __new__(cls, within: torch.Tensor, call: Call) -> Self:
        wrapper: Self = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls, within.shape, dtype=within.dtype
        )
        wrapper.within, wrapper.call = within, call
        return wrapper

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, _: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for arg in args:
            if isinstance(arg, cls) and torch._C._current_graph_task_id() != -1:  # noqa: SLF001
                arg.call()
        plain = [arg.within if isinstance(arg, cls) else arg for arg in args]
        return operator(*plain, **(kwargs or {}))


@way
def subclass_that_was_saved(call: Call) -> Iterator[Forward]:
    w = parameter()
    other = Dispatching(torch.ones(3), call)
    yield lambda x: (x * w * other).sum()


_GRAD: Any = torch.Tensor.grad
_SET_GRAD: Final = _GRAD.__set__


class Watching(nn.Parameter):
    """A parameter whose attributes call while a pass runs."""

    @classmethod
    def __torch_function__(
        cls, name: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        call = getattr(args[0], "call", None) if args else None
        if call is not None and name == _SET_GRAD:
            call()
        parent: Any = super()
        return parent.__torch_function__(name, types, args, kwargs or {})


@way
def subclass_of_parameters(call: Call) -> Iterator[Forward]:
    w: Any = Watching(torch.tensor([1.0, 2.0, 3.0]))
    w.call = call
    yield lambda x: (x * w).sum().as_subclass(torch.Tensor)


class Reading(torch.Tensor):
    """A gradient whose attributes and operations call."""

    call: Call | None = None

    @classmethod
    def __torch_function__(
        cls, name: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if cls.call is not None:
            cls.call()
        parent: Any = super()
        return parent.__torch_function__(name, types, args, kwargs or {})


# --- profilers and scalers -----------------------------------------------------------


def profile_twice(call: Call) -> None:
    """Let a profiler call its schedule and its handler of traces."""

    def schedule(_: int) -> ProfilerAction:
        call()
        return ProfilerAction.RECORD_AND_SAVE

    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule,
        on_trace_ready=doing(call),
        acc_events=True,
    ) as profiler:
        profiler.step()


def under_profiler(make: Callable[[], Any], call: Call) -> Iterator[Forward]:
    """Give a pass that a profiler of the whole process watches."""
    w: Any = parameter()
    w.register_hook(doing(call))

    def forward(x: torch.Tensor) -> torch.Tensor:
        with record_function("of a test"):
            return total(x * w)

    with make():
        yield forward


def observer() -> AbstractContextManager[Any]:
    return profile(
        activities=[ProfilerActivity.CPU],
        execution_trace_observer=ExecutionTraceObserver().register_callback(os.devnull),
        acc_events=True,
    )


add_ways(
    under_profiler,
    profiler_with_stacks=lambda: profile(
        activities=[ProfilerActivity.CPU], with_stack=True, acc_events=True
    ),
    profiler_of_autograd=torch.autograd.profiler.profile,
    execution_trace=observer,
)


@way
def scaled_loss(call: Call) -> Iterator[Forward]:
    """As `torch.amp` has it: a scaler that looks at gradients within the pass."""
    w: Any = parameter()

    class Scaler(torch.amp.GradScaler):
        def unscale_(self, optimizer: Any) -> None:
            call()
            super().unscale_(optimizer)

    scaler = Scaler("cpu", init_scale=2.0)
    inner = torch.optim.SGD([w], lr=0.0)

    def unscale(_: torch.Tensor) -> None:
        scaler.unscale_(inner)
        scaler.update()

    w.register_post_accumulate_grad_hook(unscale)
    yield lambda x: scaler.scale((x * w).sum())

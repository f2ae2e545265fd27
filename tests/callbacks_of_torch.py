"""Every way in which torch calls back into Python while it computes gradients or steps.

A way is a context manager: inside, the function that it gives computes a loss whose
backward pass calls `call`, or, inside, an optimizer's step does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, Self, TypeAlias

import torch
from torch import nn
from torch.autograd import graph
from torch.nn.modules import module as of_all_modules
from torch.optim import optimizer as of_all_optimizers
from torch.utils.checkpoint import checkpoint

Call: TypeAlias = Callable[[], None]
Forward: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
Way: TypeAlias = Callable[[Call], AbstractContextManager[Forward]]
Step: TypeAlias = Callable[[Call, torch.optim.Optimizer], AbstractContextManager[None]]

_LIBRARY: Any = torch.library.Library

WAYS: Final[dict[str, Way]] = {}
STEPS: Final[dict[str, Step]] = {}


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))


def way(make: Callable[[Call], Iterator[Forward]]) -> Way:
    manager = contextmanager(make)
    WAYS[make.__name__] = manager
    return manager


def step(make: Callable[[Call, torch.optim.Optimizer], Iterator[None]]) -> Step:
    manager = contextmanager(make)
    STEPS[make.__name__] = manager
    return manager


def total(y: Any) -> torch.Tensor:
    loss: torch.Tensor = y.sum()
    return loss


def doing(call: Call) -> Callable[..., None]:
    """Return a hook that calls, and leaves gradients as they are."""

    def hook(*_: Any) -> None:
        call()

    return hook


# --- hooks of tensors and nodes ------------------------------------------------------


@way
def tensor_hook(call: Call) -> Iterator[Forward]:
    w = parameter()

    def forward(x: torch.Tensor) -> torch.Tensor:
        y: Any = x * w
        y.register_hook(doing(call))
        return total(y)

    yield forward


@way
def parameter_hook(call: Call) -> Iterator[Forward]:
    w: Any = parameter()
    w.register_hook(doing(call))
    yield lambda x: (x * w).sum()


@way
def post_accumulate_hook(call: Call) -> Iterator[Forward]:
    w: Any = parameter()
    w.register_post_accumulate_grad_hook(doing(call))
    yield lambda x: (x * w).sum()


@way
def node_hook(call: Call) -> Iterator[Forward]:
    w = parameter()

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = (x * w).sin()
        assert y.grad_fn is not None
        y.grad_fn.register_hook(doing(call))
        return y.sum()

    yield forward


@way
def node_prehook(call: Call) -> Iterator[Forward]:
    w = parameter()

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = (x * w).sin()
        assert y.grad_fn is not None
        y.grad_fn.register_prehook(doing(call))
        return y.sum()

    yield forward


@way
def accumulating_node_hook(call: Call) -> Iterator[Forward]:
    w = parameter()
    node = graph.get_gradient_edge(w).node
    node.register_hook(doing(call))
    yield lambda x: (x * w).sum()
    del node  # it keeps the hook as long as it lives


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


@way
def callback_at_the_end(call: Call) -> Iterator[Forward]:
    w: Any = parameter()
    engine: Any = torch.autograd.Variable._execution_engine  # noqa: SLF001
    w.register_hook(lambda _: engine.queue_callback(call))
    yield lambda x: (x * w).sum()


# --- hooks of modules ----------------------------------------------------------------


def with_module(register: str, call: Call, *, of: Any = None) -> Iterator[Forward]:
    module = nn.Linear(3, 3)
    handle = getattr(of or module, register)(doing(call))
    try:
        yield lambda x: module(x * 1).sin().sum()
    finally:
        handle.remove()


@way
def module_backward_hook(call: Call) -> Iterator[Forward]:
    yield from with_module("register_full_backward_hook", call)


@way
def module_backward_pre_hook(call: Call) -> Iterator[Forward]:
    yield from with_module("register_full_backward_pre_hook", call)


@way
def old_module_backward_hook(call: Call) -> Iterator[Forward]:
    yield from with_module("register_backward_hook", call)


@way
def hook_of_all_modules(call: Call) -> Iterator[Forward]:
    register = "register_module_full_backward_hook"
    yield from with_module(register, call, of=of_all_modules)


@way
def pre_hook_of_all_modules(call: Call) -> Iterator[Forward]:
    register = "register_module_full_backward_pre_hook"
    yield from with_module(register, call, of=of_all_modules)


@way
def old_hook_of_all_modules(call: Call) -> Iterator[Forward]:
    register = "register_module_backward_hook"
    state = vars(of_all_modules)
    before = state["_global_is_full_backward_hook"]  # torch takes one kind at a time
    state["_global_is_full_backward_hook"] = None
    try:
        yield from with_module(register, call, of=of_all_modules)
    finally:
        state["_global_is_full_backward_hook"] = before


def in_forward(register: str, call: Call, *, of: Any = None) -> Iterator[Forward]:
    """Give a forward pass whose hook on a module hooks the tensors that it sees."""
    module = nn.Linear(3, 3)

    def hook(_: nn.Module, inputs: Any, outputs: Any = None) -> None:
        (inputs[0] if outputs is None else outputs).register_hook(doing(call))

    handle = getattr(of or module, register)(hook)
    try:
        yield lambda x: module(x * torch.ones(3, requires_grad=True)).sum()
    finally:
        handle.remove()


@way
def module_forward_hook(call: Call) -> Iterator[Forward]:
    yield from in_forward("register_forward_hook", call)


@way
def module_forward_pre_hook(call: Call) -> Iterator[Forward]:
    yield from in_forward("register_forward_pre_hook", call)


@way
def forward_hook_of_all_modules(call: Call) -> Iterator[Forward]:
    register = "register_module_forward_hook"
    yield from in_forward(register, call, of=of_all_modules)


@way
def forward_pre_hook_of_all_modules(call: Call) -> Iterator[Forward]:
    register = "register_module_forward_pre_hook"
    yield from in_forward(register, call, of=of_all_modules)


# --- saved tensors -------------------------------------------------------------------


@way
def saved_tensors_hooks(call: Call) -> Iterator[Forward]:
    w = parameter()

    def unpack(saved: torch.Tensor) -> torch.Tensor:
        call()
        return saved

    def forward(x: torch.Tensor) -> torch.Tensor:
        with graph.saved_tensors_hooks(lambda saved: saved, unpack):
            return (x * w).sum()

    yield forward


@way
def hook_of_one_saved_tensor(call: Call) -> Iterator[Forward]:
    w = parameter()

    def unpack(saved: torch.Tensor) -> torch.Tensor:
        call()
        return saved

    def forward(x: torch.Tensor) -> torch.Tensor:
        y: Any = (x * w).exp()
        y.grad_fn._raw_saved_result.register_hooks(  # noqa: SLF001
            torch.Tensor.detach, unpack
        )
        return total(y)

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
        made: Self = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls, within.shape, dtype=within.dtype
        )
        made.within, made.call = within, call
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, _: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for one in args:
            if isinstance(one, cls) and torch._C._current_graph_task_id() != -1:  # noqa: SLF001
                one.call()
        plain = [one.within if isinstance(one, cls) else one for one in args]
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


# --- steps ---------------------------------------------------------------------------


@step
def pre_hook(call: Call, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    with _removing(optimizer.register_step_pre_hook(doing(call))):
        yield


@step
def post_hook(call: Call, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    with _removing(optimizer.register_step_post_hook(doing(call))):
        yield


@step
def pre_hook_of_all(call: Call, _: torch.optim.Optimizer) -> Iterator[None]:
    register = of_all_optimizers.register_optimizer_step_pre_hook
    with _removing(register(doing(call))):
        yield


@step
def post_hook_of_all(call: Call, _: torch.optim.Optimizer) -> Iterator[None]:
    register = of_all_optimizers.register_optimizer_step_post_hook
    with _removing(register(doing(call))):
        yield


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


class Options(list[Any]):
    """Groups of parameters whose reading calls."""

    call: Call

    def __iter__(self) -> Iterator[Any]:
        self.call()
        return super().__iter__()


@step
def options_of_the_user(call: Call, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    plain = optimizer.param_groups
    mine = Options(plain)
    mine.call = call
    optimizer.param_groups = mine
    yield
    optimizer.param_groups = plain


@contextmanager
def _removing(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()

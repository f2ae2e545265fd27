"""What torch calls back while it computes gradients or steps runs in a thread.

It may wait for anything: it sees its worker and its autograd context, and neither the
loop nor another pass waits for it.  In all tests the loop runs, from the first time on,
whatever it is allowed to run.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Self

import pytest
import torch
from torch import nn
from torch.autograd import graph
from torch.nn.modules import module as of_all_modules
from torch.optim import optimizer as of_all_optimizers
from torch.utils import checkpoint

import asyncrpc
from asyncrpc import RRef, autograd
from asyncrpc.core.autograd import inline
from asyncrpc.core.autograd.inline import InlinePolicy, Runner
from asyncrpc.errors import BackwardFailedError, OptimizerError
from asyncrpc.optim import DistributedOptimizer
from asyncrpc.testing import Cluster, acting_as
from tests.callbacks_of_steps import STEPS, Step
from tests.callbacks_of_torch import WAYS, Forward, Reading, Watching, Way

LIMIT_S = 60.0  # what waits waits for events; only a hang reaches it
ACTS = ("block", "call", "sleep", "pass", "raise")


class Callback:
    """The code that torch calls: it notes where it is, and acts once in each round."""

    def __init__(self) -> None:
        self.act = ""
        self.seen: list[tuple[bool, str, str, Any]] = []
        self.has_begun, self.may_go = threading.Event(), threading.Event()
        self._acts = False

    def begin(self, act: str) -> None:
        self.act, self.seen = act, []
        self.has_begun.clear()
        self.may_go.clear()

    def __call__(self) -> None:
        if self._acts:  # called back by what it does itself
            return
        self._acts = True
        try:
            self._run()
        finally:
            self._acts = False

    def _run(self) -> None:
        try:
            asyncio.get_running_loop()
            is_on_loop = True
        except RuntimeError:
            is_on_loop = False
        thread = threading.current_thread().name
        name, ctx = asyncrpc.current_worker().name, autograd.current_context().id
        self.seen.append((is_on_loop, thread, name, ctx))
        if is_on_loop or len(self.seen) > 1:
            return
        self.has_begun.set()
        if self.act == "block":
            assert self.may_go.wait(LIMIT_S)
        elif self.act == "call":
            assert asyncrpc.rpc_sync("a", max, args=(1, 2)) == 2
        elif self.act == "sleep":
            time.sleep(0.001)
        elif self.act == "pass":
            with torch.enable_grad():  # a backward pass has turned it off
                assert asyncrpc.rpc_sync("a", another_pass) > 0
        elif self.act == "raise":
            raise ValueError("said by a callback")


callback = Callback()
forward: Forward = torch.sum


def served(x: torch.Tensor) -> torch.Tensor:
    return forward(x)


async def ping() -> str:
    return "alive"


async def another_pass() -> int:
    """Run a pass over the same parameters, in a context of its own."""
    async with autograd.context() as ctx:
        x = torch.ones(3, requires_grad=True)
        await autograd.backward(ctx, await asyncrpc.rpc_async("b", served, args=(x,)))
        return len(autograd.get_gradients(ctx))


@pytest.fixture(autouse=True)
def _eager_loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the loop run all that it may, as in a process that never had a hook."""
    global callback  # noqa: PLW0603
    callback = Callback()
    monkeypatch.setattr(InlinePolicy, "is_short", lambda *_: True)
    handles = torch.utils.hooks.RemovableHandle.next_id
    monkeypatch.setattr(inline._hooks, "own_handles", handles)  # noqa: SLF001
    yield
    callback.may_go.set()


@contextmanager
def serving(make: Way) -> Iterator[None]:
    global forward
    with make(callback) as forward:
        yield


async def beside(work: Any) -> None:
    """Wait for work whose callback may block, once another call has been answered."""
    task = asyncio.ensure_future(work)
    if callback.act == "block":
        assert await asyncio.to_thread(callback.has_begun.wait, LIMIT_S)
        assert await asyncrpc.rpc_async("b", ping) == "alive"
        callback.may_go.set()
    await task


def check(context_id: Any) -> None:
    assert callback.seen, "torch has not called it"
    for is_on_loop, thread, worker, seen_in in callback.seen:
        assert not is_on_loop
        assert thread.startswith("asyncrpc-b-")
        assert (worker, seen_in) == ("b", context_id)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("make", WAYS.values(), ids=WAYS)
async def test_callbacks_of_a_pass_may_wait(make: Way) -> None:
    async with Cluster(2) as (a, _):
        with acting_as(a), serving(make):
            for act in ACTS:
                callback.begin(act)
                x = torch.ones(3, requires_grad=True)
                async with autograd.context() as ctx:
                    loss = await asyncrpc.rpc_async("b", served, args=(x,))
                    if act == "raise":
                        with pytest.raises(BackwardFailedError, match="a callback"):
                            await autograd.backward(ctx, loss)
                    else:
                        await beside(autograd.backward(ctx, loss))
                        assert x in autograd.get_gradients(ctx)
                    check(ctx.id)


weight = nn.Parameter(torch.ones(3))
optimizers: list[torch.optim.Optimizer] = []


def make_sgd(parameters: Any) -> torch.optim.Optimizer:
    optimizers.append(torch.optim.SGD(parameters, lr=0.1))
    return optimizers[-1]


def weight_reference() -> Any:
    return RRef(weight)


def weighed(x: torch.Tensor) -> torch.Tensor:
    return (x * weight).sum()


async def one_step(optimizer: DistributedOptimizer) -> Any:
    """Take a step of ones; return the id of its context."""
    async with autograd.context() as ctx:
        loss = await asyncrpc.rpc_async("b", weighed, args=(torch.ones(3),))
        await autograd.backward(ctx, loss)
        if callback.act == "raise":
            with pytest.raises(OptimizerError, match=r"(?!.*in part).*a callback"):
                await optimizer.step(ctx)
        else:
            await beside(optimizer.step(ctx))
        return ctx.id


@pytest.mark.parametrize("make", STEPS.values(), ids=STEPS)
async def test_callbacks_of_a_step_may_wait(make: Step) -> None:
    """They are added after steps that the loop has taken, and removed again."""
    with torch.no_grad():
        weight.fill_(1.0)
    async with Cluster(2) as (a, _):
        with acting_as(a), serving(WAYS["parameter_hook"]):
            reference = await asyncrpc.rpc_async("b", weight_reference)
            optimizer = await DistributedOptimizer(make_sgd, [reference])
            for _ in range(2):
                await one_step(optimizer)
            with make(callback, optimizers[-1]):
                for act in ACTS:
                    callback.begin(act)
                    check(await one_step(optimizer))
            callback.begin("")
            await one_step(optimizer)
            assert not callback.seen
            assert weight.tolist() == pytest.approx([0.3] * 3)  # 7 of 8 were applied


async def test_loop_runs_torch_code_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the other tests: a pass and a step run there."""
    ran: list[str] = []
    plain = Runner.run_here

    def run_here(self: Runner, kind: Any, job: Any) -> Any:
        ran.append(type(kind[0]).__name__)
        return plain(self, kind, job)

    monkeypatch.setattr(Runner, "run_here", run_here)
    async with Cluster(2) as (a, _):
        with acting_as(a):
            reference = await asyncrpc.rpc_async("b", weight_reference)
            optimizer = await DistributedOptimizer(make_sgd, [reference])
            for _ in range(2):  # the first step is one that may raise
                await one_step(optimizer)
    # Of each step: the part of the pass on "b", where a received tensor is summed up.
    assert ran == ["type", "type", "int"]


# --- what asyncrpc asks tensors of the users' classes --------------------------------


class Wrapping(torch.Tensor):
    """As `Reading`, of a tensor within, for torch's operators."""

    within: torch.Tensor

    @staticmethod
    def __new__(cls, within: torch.Tensor) -> Self:
        wrapper: Self = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls, within.shape, dtype=within.dtype
        )
        wrapper.within = within
        return wrapper

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, _: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        note_loop()
        plain = [getattr(arg, "within", arg) for arg in args]
        result = operator(*plain, **(kwargs or {}))
        return cls(result) if isinstance(result, torch.Tensor) else result


asked_on_loop: list[str] = []


def note_loop() -> None:
    with contextlib.suppress(RuntimeError):  # not on the loop
        asyncio.get_running_loop()
        asked_on_loop.append("".join(traceback.format_stack(limit=8)))


def of_class(kind: Any, tensor: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = (
        Wrapping(tensor) if kind is Wrapping else tensor.as_subclass(kind)
    )
    return result


class Giving(torch.autograd.Function):
    """Its gradient is of a class of the user's."""

    kind: Any = Reading

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        _ = ctx
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        _ = ctx
        (gradient,) = gradients
        return of_class(Giving.kind, gradient.clone())


watched: Any = Watching(torch.ones(3))


def apply_giving(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = Giving.apply(x)  # type: ignore[no-untyped-call]
    return result


def given_weight(x: torch.Tensor) -> torch.Tensor:
    return apply_giving(weight).sum() + (x * 0).sum()


def times_watched(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = (x * watched).as_subclass(torch.Tensor)
    return result


def times_weight(x: torch.Tensor) -> torch.Tensor:
    return x * weight


def same(x: Any) -> Any:
    return x


def make_reading() -> torch.Tensor:
    return torch.ones(3).as_subclass(Reading)


def watched_reference() -> Any:
    return RRef(watched)


Asks = Callable[[Any], Awaitable[object]]


async def is_sent(peer: Any) -> None:
    await peer.call(same, [make_reading(), {"x": make_reading()}, watched])
    await peer.call(make_reading)
    await peer.remote(make_reading).to_here()


async def is_sent_in_a_context(peer: Any) -> None:
    x = torch.ones(3, requires_grad=True)
    async with autograd.context() as ctx:
        there = await peer.call(same, (x * 1).as_subclass(Reading))
        await autograd.backward(ctx, there.as_subclass(torch.Tensor).sum())


async def is_the_gradient_at_a_root(peer: Any) -> None:
    async with autograd.context() as ctx:
        y = await peer.call(times_weight, torch.ones(3, requires_grad=True))
        await autograd.backward(ctx, [y], gradients=[make_reading()])


async def is_a_gradient(peer: Any) -> None:
    """Sent on, passed on as it is, and added to others of the same tensor."""
    x = torch.ones(3, requires_grad=True)
    async with autograd.context() as ctx:
        y = await peer.call(same, x)
        z = await peer.call(apply_giving, y) + await peer.call(apply_giving, y)
        await autograd.backward(ctx, z.sum())


async def is_a_gradient_of_an_earlier_pass(peer: Any) -> None:
    async with autograd.context() as ctx:
        for function in (given_weight, weighed):
            x = torch.ones(3, requires_grad=True)
            await autograd.backward(ctx, await peer.call(function, x))


async def is_a_parameter_of_an_earlier_segment(peer: Any) -> None:
    async with autograd.context() as ctx:
        y = await peer.call(times_weight, torch.ones(3, requires_grad=True))
        z = await peer.call(times_watched, y * 1)
        await autograd.backward(ctx, z.sum())


async def is_a_parameter(peer: Any) -> None:
    optimizer = await DistributedOptimizer(
        torch.optim.SGD, [await peer.call(watched_reference)], lr=0.1
    )
    options: list[dict[str, Any]] = [{}, {"clip_grad_norm": 1.0}, {"allow_stale": True}]
    for how in options:
        async with autograd.context() as ctx:
            y = await peer.call(times_watched, torch.ones(3, requires_grad=True))
            await autograd.backward(ctx, y.sum())
            await optimizer.step(ctx, **how)
    await optimizer.state_dict()


ASKS: Final[list[tuple[Asks, Any]]] = [
    (is_sent, Reading),
    (is_sent_in_a_context, Reading),
    (is_the_gradient_at_a_root, Reading),
    (is_a_parameter, Reading),
    (is_a_gradient, Reading),
    (is_a_gradient_of_an_earlier_pass, Wrapping),
    (is_a_parameter_of_an_earlier_segment, Reading),
]


@pytest.mark.parametrize(("what", "kind"), ASKS, ids=[ask.__name__ for ask, _ in ASKS])
async def test_tensor_subclass_code_does_not_run_on_the_loop(
    what: Asks, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Giving, "kind", kind)
    monkeypatch.setattr(Reading, "call", note_loop)
    monkeypatch.setattr(watched, "call", note_loop, raising=False)
    asked_on_loop.clear()
    async with Cluster(2) as (a, _):
        with acting_as(a):
            await what(a.peer("b"))
    assert not asked_on_loop, asked_on_loop[0]


# --- all of torch's names ------------------------------------------------------------

_SETS_NONE: Final = "is called where a state is saved or loaded, in a thread"
_REGISTERS: Final = "is called where a module is built, by the program"
_LOGS: Final = "is called where the program logs an event"
_INNER: Final = "is what torch itself keeps or uses for the others"

# By the end of a name: the way, or why it calls nothing in a pass or a step.
NAMES: Final[dict[str, Way | Step | str]] = {
    "Tensor.register_hook": WAYS["tensor_hook"],
    "Tensor.register_post_accumulate_grad_hook": WAYS["post_accumulate_hook"],
    "Tensor._backward_hooks": WAYS["parameter_hook"],
    "Tensor._post_accumulate_grad_hooks": WAYS["post_accumulate_hook"],
    "graph._register_logging_hooks_on_whole_graph": WAYS["node_prehook"],
    "graph.register_multi_grad_hook": WAYS["hook_of_several_tensors"],
    "graph.disable_saved_tensors_hooks": "forbids hooks",
    "graph.saved_tensors_hooks": WAYS["saved_tensors_hooks"],
    "autograd._pop_saved_tensors_default_hooks": _INNER,
    "autograd._push_saved_tensors_default_hooks": WAYS["saved_tensors_hooks"],
    "_autograd._pop_saved_tensors_default_hooks": _INNER,
    "_autograd._push_saved_tensors_default_hooks": WAYS["saved_tensors_hooks"],
    "_autograd._top_saved_tensors_default_hooks": _INNER,
    "_autograd._saved_tensors_hooks_disable": _INNER,
    "_autograd._saved_tensors_hooks_enable": _INNER,
    "_autograd._saved_tensors_hooks_is_enabled": _INNER,
    "_autograd._saved_tensors_hooks_set_tracing": _INNER,
    "_autograd._saved_tensors_hooks_get_disabled_error_message": _INNER,
    "_autograd._set_empty_test_observer": _INNER,
    "autograd._set_empty_test_observer": _INNER,
    "_autograd._clear_callbacks": "removes torch's own observers",
    "function._HookMixin": _INNER,
    "function.hooks": _INNER,
    "Function._register_hook": _INNER,
    "Function._register_hook_dict": WAYS["tensor_hook"],
    "Function.register_hook": WAYS["hook_on_a_received_tensor"],
    "Function.register_prehook": WAYS["hook_on_a_received_tensor"],
    "SinBackward0._register_hook_dict": WAYS["tensor_hook"],
    "SinBackward0.register_hook": WAYS["node_hook"],
    "SinBackward0.register_prehook": WAYS["node_prehook"],
    "AccumulateGrad._register_hook_dict": WAYS["tensor_hook"],
    "AccumulateGrad.register_hook": WAYS["accumulating_node_hook"],
    "AccumulateGrad.register_prehook": WAYS["accumulating_node_hook"],
    "SavedTensor.register_hooks": WAYS["hook_of_one_saved_tensor"],
    "SavedTensor.unpack_hook": WAYS["hook_of_one_saved_tensor"],
    "_EngineBase.queue_callback": WAYS["callback_at_the_end"],
    "checkpoint._checkpoint_hook": WAYS["checkpoint_by_saved_tensors"],
    "checkpoint._recomputation_hook": WAYS["checkpoint_by_saved_tensors"],
    "Module._get_backward_hooks": _INNER,
    "Module._get_backward_pre_hooks": _INNER,
    "Module._maybe_warn_non_full_backward_hook": _INNER,
    "Module._register_load_state_dict_pre_hook": _SETS_NONE,
    "Module._register_state_dict_hook": _SETS_NONE,
    "Module.register_load_state_dict_post_hook": _SETS_NONE,
    "Module.register_load_state_dict_pre_hook": _SETS_NONE,
    "Module.register_state_dict_post_hook": _SETS_NONE,
    "Module.register_state_dict_pre_hook": _SETS_NONE,
    "Module.register_backward_hook": WAYS["old_module_backward_hook"],
    "Module.register_forward_hook": WAYS["module_forward_hook"],
    "Module.register_forward_pre_hook": WAYS["module_forward_pre_hook"],
    "Module.register_full_backward_hook": WAYS["module_backward_hook"],
    "Module.register_full_backward_pre_hook": WAYS["module_backward_pre_hook"],
    "module.BackwardHook": _INNER,
    "module._WrappedHook": _INNER,
    "module._global_backward_hooks": _INNER,
    "module._global_backward_pre_hooks": _INNER,
    "module._global_buffer_registration_hooks": _INNER,
    "module._global_forward_hooks": _INNER,
    "module._global_forward_hooks_always_called": _INNER,
    "module._global_forward_hooks_with_kwargs": _INNER,
    "module._global_forward_pre_hooks": _INNER,
    "module._global_is_full_backward_hook": _INNER,
    "module._global_module_registration_hooks": _INNER,
    "module._global_parameter_registration_hooks": _INNER,
    "module._has_any_global_hook": _INNER,
    "module.register_module_backward_hook": WAYS["old_hook_of_all_modules"],
    "module.register_module_buffer_registration_hook": _REGISTERS,
    "module.register_module_forward_hook": WAYS["forward_hook_of_all_modules"],
    "module.register_module_forward_pre_hook": WAYS["forward_pre_hook_of_all_modules"],
    "module.register_module_full_backward_hook": WAYS["hook_of_all_modules"],
    "module.register_module_full_backward_pre_hook": WAYS["pre_hook_of_all_modules"],
    "module.register_module_module_registration_hook": _REGISTERS,
    "module.register_module_parameter_registration_hook": _REGISTERS,
    "Optimizer.OptimizerPostHook": _INNER,
    "Optimizer.OptimizerPreHook": _INNER,
    "Optimizer.profile_hook_step": _INNER,
    "Optimizer.register_load_state_dict_post_hook": _SETS_NONE,
    "Optimizer.register_load_state_dict_pre_hook": _SETS_NONE,
    "Optimizer.register_state_dict_post_hook": _SETS_NONE,
    "Optimizer.register_state_dict_pre_hook": _SETS_NONE,
    "Optimizer.register_step_post_hook": STEPS["post_hook"],
    "Optimizer.register_step_pre_hook": STEPS["pre_hook"],
    "optimizer.GlobalOptimizerPostHook": _INNER,
    "optimizer.GlobalOptimizerPreHook": _INNER,
    "optimizer._global_optimizer_post_hooks": _INNER,
    "optimizer._global_optimizer_pre_hooks": _INNER,
    "optimizer.hooks": _INNER,
    "optimizer.register_optimizer_step_post_hook": STEPS["post_hook_of_all"],
    "optimizer.register_optimizer_step_pre_hook": STEPS["pre_hook_of_all"],
    "profile.set_custom_trace_id_callback": "is called where a trace begins",
    "profile._trace_ready": _INNER,
    "profiler.ExecutionTraceObserver": WAYS["execution_trace"],
    "profiler._optimizer_post_hook": "counts steps for a profiler of another process",
    "profiler.register_optimizer_step_post_hook": STEPS["post_hook_of_all"],
    "profiler.schedule": WAYS["profiler_in_a_hook"],
    "profiler.tensorboard_trace_handler": WAYS["profiler_in_a_hook"],
    "ExecutionTraceObserver.register_callback": WAYS["execution_trace"],
    "ExecutionTraceObserver.unregister_callback": _INNER,
    "record_function._call_end_callbacks_on_future": _INNER,
    "monitor.EventHandlerHandle": _INNER,
    "monitor.TensorboardEventHandler": _LOGS,
    "monitor.register_event_handler": _LOGS,
    "monitor.unregister_event_handler": _INNER,
    "Library.fallback": "serves operators without a kernel, which torch's have",
}


_CALLS_BACK: Final = re.compile(
    "hook|callback|handler|observer|trace_ready|schedule$|fallback", re.IGNORECASE
)


def names_of_torch() -> Iterator[str]:
    sine: Any = torch.ones(1, requires_grad=True).sin().grad_fn
    places: list[Any] = [
        torch.Tensor,
        torch.autograd,
        graph,
        torch.autograd.function,
        torch.autograd.Function,
        type(sine),
        type(sine.next_functions[0][0]),
        type(sine._raw_saved_self),  # noqa: SLF001
        type(torch.autograd.Variable._execution_engine),  # noqa: SLF001
        torch._C._autograd,  # noqa: SLF001
        checkpoint,
        nn.Module,
        of_all_modules,
        torch.optim.Optimizer,
        of_all_optimizers,
        torch.optim.lr_scheduler.LRScheduler,
        torch.amp.GradScaler,
        torch.profiler.profile,
        torch.autograd.profiler.profile,
        torch.autograd.profiler.record_function,
        torch.profiler,
        torch.profiler.ExecutionTraceObserver,
        torch.monitor,
        torch.library.Library,
    ]
    for place in places:
        for name in dir(place):
            if _CALLS_BACK.search(name) and "subclass" not in name:
                yield f"{place.__name__.rpartition('.')[2]}.{name}"


def test_hooks_of_torch_are_all_listed() -> None:
    """A new one of a later torch needs a way, or a reason why it has none."""
    assert sorted(set(names_of_torch()) - set(NAMES)) == []


def test_ways_are_all_named() -> None:
    named = [value for value in NAMES.values() if not isinstance(value, str)]
    unnamed = {name for name, make in {**WAYS, **STEPS}.items() if make not in named}
    assert unnamed == {
        "function",
        "custom_operator",
        "kernel_of_an_operator",
        "subclass_that_was_saved",
        "subclass_of_parameters",
        "checkpoint_that_reenters",
        "profiler_with_stacks",
        "profiler_of_autograd",
        "scaled_loss",
        "wrapped_step",
        "replaced_step",
        "step_of_a_scaler",
        "scale_that_was_set",
        "profiled_step",
        "scheduled_by_a_function",
        "scheduled_by_a_product",
        "scheduled_in_sequence",
        "scheduled_in_a_chain",
        "scheduled_by_the_user",
        "options_of_the_user",
        "names_of_the_user",
        "defaults_of_the_user",
    }  # not hooks

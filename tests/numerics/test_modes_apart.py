"""What torch keeps per thread and a coroutine holds over an `await` reaches no other.

Neither other calls, nor plain tasks' calls, nor what asyncrpc does itself on the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import pytest_asyncio
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.autograd.graph import (
    allow_mutation_on_saved_tensors,
    disable_saved_tensors_hooks,
)
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import asyncrpc
from asyncrpc import Worker, autograd
from asyncrpc.core.torch_modes import FunctionModes
from asyncrpc.serving import Batcher
from asyncrpc.testing import Cluster, acting_as
from asyncrpc.tools.inspection import awaits

_C: Any = torch._C  # noqa: SLF001
_TORCH: Any = torch  # some of its functions have no types


class Dispatching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes every operation; one of another call is not its business."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{func} came to a mode of another call")


class Functions(TorchFunctionMode):
    """As `Dispatching`, for torch's functions."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{func} came to a mode of another call")


def refused(tensor: torch.Tensor) -> torch.Tensor:
    raise AssertionError(f"a tensor of {tensor.shape} came to hooks of another call")


Mode = Callable[[], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def grad_in_inference() -> Any:
    with torch.inference_mode(), torch.enable_grad():
        yield


@contextlib.contextmanager
def default_device() -> Any:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


MODES: dict[str, Mode] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "enable_grad in inference_mode": grad_in_inference,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast without a cache": lambda: torch.autocast("cpu", cache_enabled=False),
    "torch.device": lambda: torch.device("meta"),
    "set_default_device": default_device,
    "a function mode": Functions,
    "a dispatch mode": Dispatching,
    "FakeTensorMode": FakeTensorMode,
    "saved-tensor hooks": lambda: torch.autograd.graph.saved_tensors_hooks(
        refused, refused
    ),
}
each_mode = pytest.mark.parametrize("name", MODES)
# These are looked for only where a step of a call waits, and so may hold them.
SWITCHES: dict[str, Mode] = {
    "DisableTorchFunctionSubclass": torch._C.DisableTorchFunctionSubclass,  # noqa: SLF001
    "DisableTorchFunction": torch._C.DisableTorchFunction,  # noqa: SLF001
    "disable_saved_tensors_hooks": lambda: disable_saved_tensors_hooks("not here"),
    "allow_mutation_on_saved_tensors": allow_mutation_on_saved_tensors,
    "FlopCounterMode": lambda: FlopCounterMode(display=False),
}
HELD: dict[str, Mode] = {**MODES, **SWITCHES}
each_held = pytest.mark.parametrize("name", HELD)


def state() -> tuple[Any, ...]:
    """Return all that a mode can change in this thread."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch._C._len_torch_function_stack(),  # noqa: SLF001
        torch._C._len_torch_dispatch_stack(),  # noqa: SLF001
        str(torch._C._dispatch_tls_local_include_set()),  # noqa: SLF001
        str(torch._C._dispatch_tls_local_exclude_set()),  # noqa: SLF001
        _C._autograd._top_saved_tensors_default_hooks(False),  # noqa: FBT003, SLF001
        _C._autograd._saved_tensors_hooks_get_disabled_error_message(),  # noqa: SLF001
        _C._get_torch_function_state(),  # noqa: SLF001
    )


DEFAULT = state()


class Gate:
    """Where a coroutine waits under a mode, found by its name."""

    all: dict[str, Gate] = {}  # noqa: RUF012

    def __init__(self, name: str) -> None:
        self.all[name] = self
        self.entered = asyncio.Event()
        self.go_on = asyncio.Event()


async def hold_mode(name: str) -> bool:
    """Hold a mode over awaits; return whether it was there again after each."""
    gate = Gate.all[name]
    with HELD[name]():
        before = state()
        gate.entered.set()
        await gate.go_on.wait()
        within = state() == before
        await asyncio.sleep(0)
        within &= state() == before
    return within and state() == DEFAULT


async def items_held(name: str) -> AsyncIterator[bool]:
    with HELD[name]():
        before = state()
        for _ in range(3):
            yield state() == before


def items_held_in_thread(name: str) -> Any:
    with HELD[name]():
        before = state()
        for _ in range(3):
            yield state() == before


def in_thread() -> bool:
    return state() == DEFAULT


async def at_once() -> bool:
    return state() == DEFAULT


async def in_steps() -> bool:
    is_default = state() == DEFAULT
    await asyncio.sleep(0)
    return is_default and state() == DEFAULT


@asyncrpc.on_loop
def on_loop() -> bool:
    return state() == DEFAULT


async def later_items() -> AsyncIterator[bool]:
    for _ in range(2):
        await asyncio.sleep(0)
        yield state() == DEFAULT


class Box:
    """Goes by pickle."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def identity(x: Any) -> Any:
    return x


async def kept_here(x: Any) -> Any:
    return x


KEPT: tuple[Callable[[Any], Any], ...] = (identity, kept_here)


def weighed(x: torch.Tensor) -> torch.Tensor:
    return (x * x).sum()


VALUES: dict[str, Callable[[], torch.Tensor]] = {
    "small": lambda: torch.arange(6.0),
    "large": lambda: torch.arange(100_000.0),
    "strided": lambda: torch.arange(12.0).view(3, 4).T,
    "empty": lambda: torch.ones(0, 3),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "a leaf": lambda: torch.ones(3, requires_grad=True),
}


def is_plain(value: Any, like: torch.Tensor) -> bool:
    tensor = value.tensor if type(value) is Box else value
    same = tensor.to_dense() if tensor.layout is torch.sparse_coo else tensor
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and not tensor.is_inference()
        and torch.equal(same.detach(), like.detach().to_dense())
    )


async def check_calls(a: Worker) -> None:
    """Make calls of all kinds, and find no trace of a mode."""
    peer = a.peer("b")
    for function in (in_thread, at_once, in_steps, on_loop):
        assert await peer.call(function), function.__name__
    assert all([item async for item in peer.stream(later_items)])
    assert await peer.remote(torch.ones, 2).to_here() is not None
    for name, make in VALUES.items():
        value = make()
        for sends in KEPT:
            assert is_plain(await peer.call(sends, value), value), name
            assert is_plain(await peer.call(sends, Box(value)), value), name
        (listed,) = await peer.call(identity, [value])
        assert is_plain(listed, value), name
    total = await peer.call(torch.add, torch.ones(2), torch.ones(2))  # on the loop
    assert is_plain(total, torch.full((2,), 2.0))
    assert total.dtype == torch.float32


async def check_backward(a: Worker) -> None:
    x = torch.arange(1.0, 4.0, requires_grad=True)
    async with autograd.context() as context:
        loss = await a.peer("b").call(weighed, await a.peer("b").call(kept_here, x * 1))
        await autograd.backward(context, [loss])
        gradient = autograd.get_gradients(context)[x]
    assert is_plain(gradient, 2 * x)


@pytest_asyncio.fixture
async def a() -> AsyncIterator[Worker]:
    async with Cluster(2) as (first, _):
        with acting_as(first):
            await first.peer("b").call(in_thread)
            yield first
    assert state() == DEFAULT


@contextlib.asynccontextmanager
async def waiting(name: str, start: Callable[[], Awaitable[Any]]) -> AsyncIterator[Any]:
    """Let a coroutine wait under a mode while the body runs."""
    gate = Gate(name)
    running = asyncio.ensure_future(start())
    await gate.entered.wait()
    yield running
    gate.go_on.set()
    assert await running


@each_held
async def test_a_served_coroutine_holds_its_modes_alone(name: str, a: Worker) -> None:
    async with waiting(name, lambda: a.peer("b").call(hold_mode, name)):
        assert state() == DEFAULT
        await check_calls(a)
        await check_backward(a)
        assert state() == DEFAULT


@pytest.mark.parametrize(
    "name", [name for name in MODES if name != "set_default_device"]
)
async def test_modes_of_a_task_of_the_program_reach_no_call(
    name: str, a: Worker
) -> None:
    """Torch itself gives them to other tasks of the loop; not so asyncrpc to calls."""
    gate = Gate(name)

    async def checks() -> None:
        await gate.entered.wait()
        under = state()
        try:
            assert under != DEFAULT
            assert await asyncio.to_thread(called_in_thread)
            assert state() == under
        finally:
            gate.go_on.set()

    async def holds() -> None:
        with MODES[name]():
            gate.entered.set()
            await gate.go_on.wait()

    await asyncio.gather(holds(), checks())


def called_in_thread() -> bool:
    """Call from a thread, which has the defaults, over the loop that has a mode."""
    for function in (in_thread, at_once, in_steps, on_loop):
        assert asyncrpc.rpc_sync("b", function), function.__name__
    for label, make in VALUES.items():
        value = make()
        for sends in KEPT:
            assert is_plain(asyncrpc.rpc_sync("b", sends, (value,)), value), label
            back = asyncrpc.rpc_sync("b", sends, (Box(value),))
            assert is_plain(back, value), label
    total = asyncrpc.rpc_sync("b", torch.add, (torch.ones(2), torch.ones(2)))
    assert is_plain(total, torch.full((2,), 2.0))
    return bool(total.dtype == torch.float32)


@each_mode
async def test_a_call_made_under_a_mode_carries_plain_tensors(
    name: str, a: Worker
) -> None:
    """Whatever the caller has, what it sends and what comes back are not touched."""
    values = {label: make() for label, make in VALUES.items()}
    echoed = {}
    with MODES[name]():
        for label, value in values.items():
            echoed[label] = await a.peer("b").call(identity, value)
            echoed[label + " in a box"] = await a.peer("b").call(identity, Box(value))
    for label, value in values.items():
        assert is_plain(echoed[label], value), label
        assert is_plain(echoed[label + " in a box"], value), label


@pytest.mark.parametrize("function", [items_held, items_held_in_thread])
@each_held
async def test_a_stream_keeps_its_modes_between_items(
    function: Any, name: str, a: Worker
) -> None:
    answers = []
    async for was_there in a.peer("b").stream(function, name):
        answers.append(was_there)
        assert state() == DEFAULT
        assert await a.peer("b").call(in_thread)
    assert answers == [True] * 3


@each_held
async def test_a_batch_holds_its_modes_alone(name: str, a: Worker) -> None:
    async def forward(items: list[str]) -> list[bool]:
        return [await hold_mode(item) for item in items]

    async with (
        Batcher(forward, 4, 0.0) as batcher,
        waiting(name, lambda: batcher(name)),
    ):
        assert state() == DEFAULT
        await check_calls(a)


async def leaves(name: str) -> None:
    Left.open_ones.append(MODES[name]())
    Left.open_ones[-1].__enter__()


def leaves_in_thread(name: str) -> None:
    Left.open_ones.append(MODES[name]())
    Left.open_ones[-1].__enter__()


class Left:
    open_ones: list[Any] = []  # noqa: RUF012  (they would end when collected)


@pytest.mark.parametrize("function", [leaves, leaves_in_thread])
@each_mode
async def test_modes_left_open_end_with_their_function(
    function: Any, name: str, a: Worker
) -> None:
    await a.peer("b").call(function, name)
    assert state() == DEFAULT
    await check_calls(a)


async def waits(name: str) -> None:
    gate = Gate.all[name]
    gate.entered.set()
    await gate.go_on.wait()


@pytest.mark.parametrize("name", ["no_grad", "inference_mode", "autocast"])
async def test_calls_of_subtasks_have_the_mode_of_the_task_that_awaits_them(
    name: str, a: Worker
) -> None:
    async def two_calls() -> list[tuple[Any, ...]]:
        return [await a.peer("b").call(state) for _ in range(2)]

    with MODES[name]():
        under = state()
        seen = list(await asyncio.gather(two_calls(), two_calls()))
        assert seen == [[under] * 2] * 2


async def test_modes_are_restored_despite_other_tasks() -> None:
    """Every pair of modes: one is held by one step, the other by another's."""
    both = HELD.copy()
    del both["allow_mutation_on_saved_tensors"]  # one at a time in a process
    for mine, other in itertools.product(both.values(), both.values()):
        place, elsewhere = FunctionModes(), FunctionModes()
        entered, others = contextlib.ExitStack(), contextlib.ExitStack()
        with place:
            entered.enter_context(mine())
            under = state()
        assert state() == DEFAULT, (mine, other)
        with elsewhere:
            others.enter_context(other())
        with place:
            assert state() == under, (mine, other)
            entered.close()
            assert state() == DEFAULT
        with elsewhere:
            others.close()
        assert state() == DEFAULT, (mine, other)


async def test_the_default_device_of_the_program_stays_for_coroutines(
    a: Worker,
) -> None:
    """It is set for the thread; plain functions run in others, as in torch."""
    torch.set_default_device("meta")
    try:
        assert await a.peer("b").call(device_here) == "meta"
        assert await a.peer("b").call(device_in_thread) == "cpu"
        await a.peer("b").call(torch.set_default_device, "cpu")
        async with waiting("torch.device", lambda: holds_device(a)):
            assert await a.peer("b").call(device_here) == "meta"
            value = torch.ones(2, device="cpu")
            back = await a.peer("b").call(identity, Box(value))
            assert back.tensor.device.type == "cpu"
    finally:
        torch.set_default_device(None)


async def holds_device(a: Worker) -> bool:
    await a.peer("b").call(device_held)
    return True


async def device_held() -> None:
    gate = Gate.all["torch.device"]
    with torch.device("cpu"):
        gate.entered.set()
        await gate.go_on.wait()


async def device_here() -> str:
    await asyncio.sleep(0)
    return torch.empty(0).device.type


def device_in_thread() -> str:
    return torch.empty(0).device.type


# --- states of the process ------------------------------------------------------------


class Kept:
    """A context that one function enters and another leaves."""

    def __init__(self, make: Mode) -> None:
        self._make, self._entered = make, contextlib.ExitStack()

    def enter(self) -> None:
        self._entered.enter_context(self._make())

    def leave(self) -> None:
        self._entered.close()


dual_level = Kept(forward_ad.dual_level)
cached_parametrizations = Kept(parametrize.cached)

PROCESS_WIDE: dict[str, tuple[Callable[[], Any], Callable[[], Any], Any]] = {
    "default dtype": (
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_default_dtype(torch.float32),
        torch.get_default_dtype,
    ),
    "deterministic algorithms": (
        lambda: torch.use_deterministic_algorithms(mode=True),
        lambda: torch.use_deterministic_algorithms(mode=False),
        torch.are_deterministic_algorithms_enabled,
    ),
    "anomaly detection": (
        lambda: torch.autograd.set_detect_anomaly(mode=True, check_nan=False),
        lambda: torch.autograd.set_detect_anomaly(mode=False),
        torch.is_anomaly_enabled,
    ),
    "invariants of sparse tensors": (
        torch.sparse.check_sparse_tensor_invariants.enable,
        torch.sparse.check_sparse_tensor_invariants.disable,
        torch.sparse.check_sparse_tensor_invariants.is_enabled,
    ),
    "the generator": (lambda: torch.manual_seed(7), torch.seed, torch.initial_seed),
    "precision of products": (
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: torch.set_float32_matmul_precision("highest"),
        torch.get_float32_matmul_precision,
    ),
    "kernels of attention": (
        lambda: torch.backends.cuda.enable_flash_sdp(enabled=False),
        lambda: torch.backends.cuda.enable_flash_sdp(enabled=True),
        torch.backends.cuda.flash_sdp_enabled,
    ),
    "flags of a backend": (
        partial(_TORCH.backends.mkldnn.set_flags, _enabled=False),
        partial(_TORCH.backends.mkldnn.set_flags, _enabled=True),
        lambda: torch.backends.mkldnn.enabled,
    ),
    "the level of forward AD": (
        dual_level.enter,
        dual_level.leave,
        lambda: forward_ad._current_level,  # noqa: SLF001
    ),
    "cached parametrizations": (
        cached_parametrizations.enter,
        cached_parametrizations.leave,
        lambda: parametrize._cache_enabled,  # noqa: SLF001
    ),
    "options of printing": (
        partial(_TORCH.set_printoptions, precision=2),
        partial(_TORCH.set_printoptions, profile="default"),
        lambda: torch._tensor_str.PRINT_OPTS.precision,  # noqa: SLF001
    ),
}


def set_state(name: str) -> str:
    PROCESS_WIDE[name][0]()
    return str(PROCESS_WIDE[name][2]())


async def state_of(name: str) -> str:
    return str(PROCESS_WIDE[name][2]())


@pytest.mark.filterwarnings("ignore:Anomaly")
@pytest.mark.parametrize("name", PROCESS_WIDE)
async def test_a_state_of_the_process_is_shared_by_all_calls(
    name: str, a: Worker
) -> None:
    """So it is in torch; it changes nothing of what is sent."""
    try:
        shown = await a.peer("b").call(set_state, name)
        assert await a.peer("b").call(state_of, name) == shown
        value = torch.arange(6, dtype=torch.float32)
        back = await a.peer("b").call(identity, Box(value))
        assert is_plain(back, value)
        assert back.tensor.dtype == torch.float32
        await check_backward(a)
    finally:
        PROCESS_WIDE[name][1]()


# --- the dashboard -------------------------------------------------------------------


async def test_the_awaits_of_a_served_coroutine_are_shown(a: Worker) -> None:
    gate = Gate("shown")
    call = asyncio.ensure_future(a.peer("b").call(waits, "shown"))
    await gate.entered.wait()
    seen = [
        step.code.co_name
        for task in asyncio.all_tasks()
        for step in awaits.chain_of(task).steps
    ]
    assert "waits" in seen
    gate.go_on.set()
    await call

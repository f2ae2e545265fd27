"""A RemoteModule that TorchScript has compiled: its calls, and what is refused.

Each test is a scenario that worker0 plays; the others serve it.
"""

from __future__ import annotations

import gc
import io
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asyncrpc.compat import autograd, rpc
from asyncrpc.compat.nn import RemoteModule, _RemoteModule
from tests.integration.compat.playing import play


@torch.jit.interface
class Scales:
    def forward(  # type: ignore[empty-body]
        self, x: Tensor, by: float, where: str
    ) -> tuple[Tensor, str]:
        pass


@torch.jit.interface
class ScalesLater:
    def forward_async(  # type: ignore[empty-body]
        self, x: Tensor, by: float, where: str
    ) -> torch.jit.Future[tuple[Tensor, str]]:
        pass


class Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, by: float, where: str) -> tuple[Tensor, str]:
        if by == 0.0:
            raise ValueError("by nothing")
        return x * self.factor * by, where + "!"


def compiled() -> Any:
    return torch.jit.script(Scaling())


class Outer(nn.Module):
    """Has a part elsewhere."""

    def __init__(self, remote: nn.Module) -> None:
        super().__init__()
        self.remote = remote

    def forward(self, x: Tensor) -> Tensor:
        first, _ = self.remote(x, 2.0, "a")
        result: Tensor = first + 1
        return result


def remote(make: Callable[[], Any] = Scaling) -> _RemoteModule:
    return _RemoteModule("worker1/cpu", make, _module_interface_cls=Scales)


# --- calls ---------------------------------------------------------------------------


def run_from_python_and_from_compiled_code() -> None:
    @torch.jit.script
    def run(module: Scales, x: Tensor) -> tuple[Tensor, str]:
        return module.forward(x, 2.0, "a")

    @torch.jit.script
    def run_later(module: ScalesLater, x: Tensor) -> tuple[Tensor, str]:
        future, other = (
            module.forward_async(x, 1.0, "b"),
            module.forward_async(x, 2.0, ""),
        )
        return future.wait()[0] + other.wait()[0], future.wait()[1]

    x = torch.ones(2)
    for make in (Scaling, compiled):
        module = remote(make)
        assert module.is_scriptable
        assert module.forward(x, 3.0, where="p")[0].tolist() == [3.0, 3.0]
        script = torch.jit.script(module)
        results = [
            script.forward(x, 2.0, "a"),
            script.forward_async(x, 2.0, "a").wait(),
            run(script, x),
        ]
        assert [(tensor.tolist(), word) for tensor, word in results] == [
            ([2.0, 2.0], "a!")
        ] * 3
        later, word = run_later(script, x)
        assert (later.tolist(), word) == ([3.0, 3.0], "b!")


def run_as_a_part() -> None:
    outer = torch.jit.script(Outer(remote()))
    assert outer(torch.ones(2)).tolist() == [3.0, 3.0]
    known = remote().module_rref
    again = RemoteModule.init_from_module_rref("worker1", known, Scales)
    assert torch.jit.script(again).forward(torch.ones(2), 2.0, "")[1] == "!"


def gradients() -> None:
    x = torch.ones(2, requires_grad=True)
    module = remote()
    script, factor = torch.jit.script(module), module.remote_parameters()[0]
    with autograd.context() as context_id:
        first = script.forward(x, 2.0, "")[0]
        second = script.forward_async(first, 3.0, "").wait()[0]
        autograd.backward(context_id, [second.sum()])
        assert autograd.get_gradients(context_id)[x].tolist() == [6.0, 6.0]
        there = rpc.rpc_sync("worker1", gradient_of, (context_id, factor))
        assert there.tolist() == [12.0, 12.0]


def gradient_of(context_id: int, parameter: rpc.RRef[Any]) -> Tensor:
    return autograd.get_gradients(context_id)[parameter.local_value()]


def failures() -> None:
    script = torch.jit.script(remote())
    with pytest.raises(RuntimeError, match="by nothing"):
        script.forward(torch.ones(2), 0.0, "")
    with pytest.raises(RuntimeError, match="by nothing"):
        script.forward_async(torch.ones(2), 0.0, "").wait()
    assert script.forward(torch.ones(2), 1.0, "c")[1] == "c!"


# --- travel --------------------------------------------------------------------------


def compiled_there(module: _RemoteModule) -> str:
    script = torch.jit.script(module)
    return str(script.forward(torch.ones(2), 1.0, "there")[1])


def travel() -> None:
    module = remote()
    assert rpc.rpc_sync("worker2", compiled_there, (module,)) == "there!"
    script = torch.jit.script(module)
    with pytest.raises(RuntimeError, match="Passing a script RemoteModule over RPC"):
        rpc.rpc_sync("worker2", compiled_there, (script,))
    with pytest.raises(torch.jit.Error, match="can only be pickled when using RPC"):
        torch.save(script, io.BytesIO())
    with pytest.raises(torch.jit.Error, match="can only be pickled when using RPC"):
        rpc.rpc_sync("worker2", compiled_there, (torch.jit.script(Outer(remote())),))


def let_go() -> None:
    module = remote()
    gone = weakref.ref(module.module_rref)
    script = torch.jit.script(module)
    del module
    gc.collect()
    assert gone() is not None
    script.forward(torch.ones(2), 1.0, "")
    del script
    gc.collect()
    assert gone() is None


def refuse() -> None:
    with pytest.raises(RuntimeError, match="without `_module_interface_cls`"):
        torch.jit.script(RemoteModule("worker1", Scaling))


@pytest.mark.parametrize(
    "scenario",
    [
        run_from_python_and_from_compiled_code,
        run_as_a_part,
        gradients,
        failures,
        let_go,
        refuse,
    ],
)
def test_compiled_module_passes_the_scenario(scenario: Callable[[], None]) -> None:
    play(scenario)


def test_source_module_travels_and_compiled_module_does_not() -> None:
    play(travel, nprocs=3)


ROUNDS = 2_000_000  # more than a second of TorchScript's interpreter


@torch.jit.script
def turn(rounds: int) -> int:
    total = 0
    for number in range(rounds):
        total = (total + number) % 7
    return total


@torch.jit.script
def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2.0, 3.0]))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * self.scale


def nothing() -> None:
    pass


def apply(layer: torch.jit.ScriptModule, rows: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = layer(rows)
    return result


def calls_pass_while_it_runs() -> None:
    rpc.rpc_sync("worker1", nothing)
    call = rpc.rpc_async("worker1", turn, (ROUNDS,))
    waits_s = []
    while not call.done():
        begun_s = time.perf_counter()
        rpc.rpc_sync("worker1", nothing)
        waits_s.append(time.perf_counter() - begun_s)
    assert call.wait() == ROUNDS * (ROUNDS - 1) // 2 % 7
    # With the GIL held there would be one, as long as the function.
    assert len(waits_s) > 100


def test_a_compiled_function_runs_without_the_interpreter_s_lock() -> None:
    play(calls_pass_while_it_runs)


def functions_and_modules() -> None:
    x = torch.ones(2)
    assert rpc.rpc_sync("worker1", scaled, (x, 3.0)).tolist() == [3.0, 3.0]
    rref = rpc.remote("worker1", scaled, (x, 0.5))
    assert rref.to_here().tolist() == [0.5, 0.5]
    layer = torch.jit.script(Layer())
    assert rpc.rpc_sync("worker1", apply, (layer, x)).tolist() == [2.0, 3.0]
    assert rpc.rpc_sync("worker1", layer, (x,)).tolist() == [2.0, 3.0]


def test_compiled_functions_are_called_and_modules_travel() -> None:
    play(functions_and_modules)

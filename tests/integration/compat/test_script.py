"""What TorchScript has compiled, as what is called and as what travels."""

from __future__ import annotations

import time

import torch
from torch import nn

from asyncrpc.compat import rpc
from tests.integration.compat.playing import play

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
    made = rpc.remote("worker1", scaled, (x, 0.5))
    assert made.to_here().tolist() == [0.5, 0.5]
    layer = torch.jit.script(Layer())
    assert rpc.rpc_sync("worker1", apply, (layer, x)).tolist() == [2.0, 3.0]
    assert rpc.rpc_sync("worker1", layer, (x,)).tolist() == [2.0, 3.0]


def test_compiled_functions_are_called_and_modules_travel() -> None:
    play(functions_and_modules)

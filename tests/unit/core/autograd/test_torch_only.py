"""Which graphs call torch's own code only; `tests/numerics` looks at what is not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrpc.core.autograd import inline
from asyncrpc.core.autograd.functions import Region, edge_of
from asyncrpc.core.autograd.inline import note_own_handle, runs_torch_only


@pytest.fixture(autouse=True)
def _without_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    handles = torch.utils.hooks.RemovableHandle.next_id
    monkeypatch.setattr(inline._hooks, "own_handles", handles)  # noqa: SLF001


def graph_of(loss: torch.Tensor) -> Region:
    region = Region()
    region.extend([edge_of(loss)])
    return region


def is_torchs(loss: torch.Tensor | Region) -> bool:
    region = loss if isinstance(loss, Region) else graph_of(loss)
    return runs_torch_only(region.nodes, region.parameters, [])


def loss_of(module: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = module(torch.ones(2, 3)).relu().sum()
    return loss


LIBRARY: Any = torch.library.Library
MODULES = [
    nn.Linear(3, 3),
    nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 1)),
    nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Softmax(-1)),
    nn.LSTMCell(3, 3),
]


@pytest.mark.parametrize("module", MODULES, ids=lambda layer: type(layer).__name__)
def test_modules_of_torch_count_as_torch_only(module: nn.Module) -> None:
    output = module(torch.ones(2, 3))
    first = output[0] if isinstance(output, tuple) else output
    assert is_torchs(first.sum())


def test_lists_of_saved_tensors_are_searched() -> None:
    x, where = torch.ones(3, requires_grad=True), torch.tensor([0, 1])
    assert is_torchs(x[where].sum())
    y: Any = x[where]
    y.grad_fn._raw_saved_indices[0].register_hooks(torch.clone, torch.clone)  # noqa: SLF001
    assert not is_torchs(y.sum())


class Functions(TorchFunctionMode):
    pass


class Dispatches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    pass


def compiled() -> AbstractContextManager[Any]:
    from torch._dynamo import compiled_autograd  # noqa: PLC0415  (it takes seconds)

    enabled: AbstractContextManager[Any] = compiled_autograd._enable(  # noqa: SLF001
        lambda compiler: compiler
    )
    return enabled


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
@pytest.mark.parametrize(
    "enter", [Functions, Dispatches, compiled, torch.autograd.detect_anomaly]
)
def test_thread_or_process_modes_may_call_user_code(
    enter: Callable[[], AbstractContextManager[Any]],
) -> None:
    region = graph_of(loss_of(MODULES[0]))
    with enter():
        assert not is_torchs(region)
    assert is_torchs(region)


def test_changed_view_may_hide_user_code() -> None:
    x = torch.ones(3, requires_grad=True) * 1
    x[:2].mul_(2)
    assert type(x.grad_fn).__name__ == "CopySlices"
    assert not is_torchs(x.sum())


def test_foreign_hook_on_any_module_may_be_on_a_node() -> None:
    loss = loss_of(MODULES[0])
    handle = nn.Linear(1, 1).register_forward_hook(lambda *_: None)
    assert not is_torchs(loss)
    handle.remove()
    assert not is_torchs(loss)  # it may have been registered with a node as well
    note_own_handle()
    assert is_torchs(loss)


def test_replaced_torch_operator_may_call_user_code() -> None:
    loss = loss_of(MODULES[0])
    library = LIBRARY("tests_torch_only", "DEF")
    library.define("mine(Tensor x) -> Tensor")
    library.impl("mine", torch.clone, "CPU")
    assert is_torchs(loss)
    library._destroy()  # noqa: SLF001
    assert is_torchs(loss)
    replaced = LIBRARY("aten", "IMPL")
    replaced.impl("erfinv", torch.clone, "AutogradCPU")
    assert not is_torchs(loss)
    replaced._destroy()  # noqa: SLF001
    assert is_torchs(loss)

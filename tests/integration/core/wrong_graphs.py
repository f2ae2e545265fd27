"""Functions whose results have a graph that misbehaves when gradients come to it.

Each takes a tensor and the name of what is to happen (`misbehaving.give`); it returns a
tensor that is differentiable.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

import asyncrpc
from tests.integration.core.misbehaving import give

Function = Callable[[torch.Tensor, str], torch.Tensor]


class _Misbehaving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kind: str) -> torch.Tensor:
        ctx.kind = kind
        return x * 2

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return give(ctx.kind), None


def by_function(x: torch.Tensor, kind: str) -> torch.Tensor:
    result: torch.Tensor = _Misbehaving.apply(x, kind)  # type: ignore[no-untyped-call]
    return result


inner_refs: Final[list[weakref.ref[torch.Tensor]]] = []  # inside of a graph here


def by_tensor_hook(x: torch.Tensor, kind: str) -> torch.Tensor:
    inside = x * 2
    inner_refs[:] = [*inner_refs[-9:], weakref.ref(inside)]
    inside.register_hook(lambda _: give(kind))  # type: ignore[no-untyped-call]
    return inside * 3


def by_hook_of_what_came(x: torch.Tensor, kind: str) -> torch.Tensor:
    x.register_hook(lambda _: give(kind))  # type: ignore[no-untyped-call]
    return x * 2


def by_hook_of_what_goes(x: torch.Tensor, kind: str) -> torch.Tensor:
    result = x * 2
    result.register_hook(lambda _: give(kind))  # type: ignore[no-untyped-call]
    return result


def by_node_hook(x: torch.Tensor, kind: str) -> torch.Tensor:
    inside = x * 2
    assert inside.grad_fn is not None
    inside.grad_fn.register_hook(lambda *_: give(kind))
    return inside * 3


def by_node_prehook(x: torch.Tensor, kind: str) -> torch.Tensor:
    inside = x * 2
    assert inside.grad_fn is not None
    inside.grad_fn.register_prehook(lambda *_: give(kind))
    return inside * 3


def by_module_hook(x: torch.Tensor, kind: str) -> torch.Tensor:
    module = nn.Linear(x.shape[-1], 2)
    module.register_full_backward_hook(lambda *_: give(kind))
    result: torch.Tensor = module(x)
    return result


def by_module_prehook(x: torch.Tensor, kind: str) -> torch.Tensor:
    module = nn.Linear(x.shape[-1], 2)
    module.register_full_backward_pre_hook(lambda *_: give(kind))
    result: torch.Tensor = module(x)
    return result


def by_parameter_hook(x: torch.Tensor, kind: str) -> torch.Tensor:
    parameter = nn.Parameter(torch.ones(x.shape[-1]))
    parameter.register_hook(lambda _: give(kind))  # type: ignore[no-untyped-call]
    return x * parameter


def by_accumulating_hook(x: torch.Tensor, kind: str) -> torch.Tensor:
    parameter = nn.Parameter(torch.ones(x.shape[-1]))
    parameter.register_post_accumulate_grad_hook(lambda _: give(kind))  # type: ignore[no-untyped-call]
    return x * parameter


def by_saved_tensor(x: torch.Tensor, kind: str) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: tensor, lambda _: give(kind)
    ):
        return x.exp()


RAISING: Final[dict[str, Function]] = {
    "function": by_function,
    "tensor hook": by_tensor_hook,
    "hook of what came": by_hook_of_what_came,
    "hook of what goes": by_hook_of_what_goes,
    "node hook": by_node_hook,
    "node prehook": by_node_prehook,
    "module hook": by_module_hook,
    "module prehook": by_module_prehook,
    "parameter hook": by_parameter_hook,
    "accumulating hook": by_accumulating_hook,
    "saved tensor": by_saved_tensor,
}


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


async def through(to: str, name: str, x: torch.Tensor, kind: str) -> torch.Tensor:
    """Have another worker misbehave in this one's graph."""
    peer = asyncrpc.current_worker().peer(to)
    result: torch.Tensor = await peer.call(RAISING[name], x * 2, kind)
    return result * 2


def well(x: torch.Tensor) -> torch.Tensor:
    """Return what has a graph that does as it should."""
    parameter = nn.Parameter(torch.ones(x.shape[-1]))
    return double(x) * parameter

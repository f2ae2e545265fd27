"""The names that a training program of torch's needs: torch's own, or the facade's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch.distributed import rpc

from tests.bench.sides import training_torch


def torch_names() -> Any:
    """Torch's; its optimizer's steps run compiled, where a mark has no place."""
    return SimpleNamespace(
        rpc=rpc,
        context=training_torch.context,
        backward=training_torch.backward,
        optimizer=training_torch.make_optimizer,
        parameter_rrefs=training_torch.parameter_rrefs,
        marks_steps=False,
    )


def facade_names() -> Any:
    from asyncrpc.compat import autograd, optim, rpc  # noqa: PLC0415  (of this side)

    return SimpleNamespace(
        rpc=rpc,
        context=autograd.context,
        backward=autograd.backward,
        optimizer=optim.DistributedOptimizer,
        parameter_rrefs=facade_parameter_rrefs,
        marks_steps=True,
    )


def facade_parameter_rrefs(rref: Any) -> Any:
    from asyncrpc.compat import rpc  # noqa: PLC0415  (of this side)

    return [rpc.RRef(one) for one in rref.local_value().parameters()]

"""The tensors of a module that all ranks have alike: which ones it has now.

A forward pass may assign a buffer anew, and `module.double()` does so with all of them,
so they are looked up whenever they are sent.

This module also knows how buffers of another rank are put in place beside graphs that
are still needed: a batch norm keeps its running statistics in the graph, though its
backward pass does not read them while it trains.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from asyncrpc.core.arguments import shown
from asyncrpc.core.torch_modes import with_defaults
from asyncrpc.errors import UsageError
from asyncrpc.parallel.ddp.flat import cut_packed, one_of_each, pack


def tensors_of(
    module: nn.Module, ignored: Collection[str] = ()
) -> tuple[dict[str, nn.Parameter], dict[str, torch.Tensor]]:
    """Return the parameters and buffers of a module that are not ignored."""
    parameters = dict(module.named_parameters())
    buffers = buffers_of(module, ())
    for name in ignored:
        if type(name) is not str or name not in {*parameters, *buffers}:
            raise UsageError(
                "ignored must list names of the module's parameters or buffers, not "
                f"{shown(name)}"
            )
        parameters.pop(name, None)
        buffers.pop(name, None)
    for name, tensor in {**parameters, **buffers}.items():
        _check(name, tensor)
    return parameters, buffers


def buffers_of(module: nn.Module, ignored: Collection[str]) -> dict[str, torch.Tensor]:
    """Return the buffers that a module has now, but for the ignored ones."""
    buffers = module.named_buffers()
    return {name: buffer for name, buffer in buffers if name not in ignored}


def _check(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose values cannot be sent as plain bytes."""
    if nn.parameter.is_lazy(tensor):
        raise UsageError(
            f"{name!r} has no shape yet: run the module once on an input before you "
            "wrap it"
        )
    if tensor.is_nested:
        kind = "a nested tensor"
    elif tensor.is_quantized:
        kind = "a quantized tensor"
    elif tensor.layout is not torch.strided:
        kind = f"a tensor of layout {tensor.layout}"
    elif type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        kind = f"a {type(tensor).__name__}, which wraps other tensors"
    elif tensor.is_meta:
        raise UsageError(
            f"module must have values, but its {name!r} is on {tensor.device}, where "
            "tensors have no values"
        )
    else:
        return
    raise UsageError(
        f"module must have dense tensors, but its {name!r} is {kind}: leave it alone "
        f"by ignored=[{name!r}]"
    )


class Buffers:
    """The buffers of a module, which all ranks take from one."""

    def __init__(self, module: nn.Module, ignored: Collection[str]) -> None:
        self._module = module
        self._ignored = ignored
        self._late: torch.Tensor | None = None

    def now(self) -> Sequence[torch.Tensor]:
        """Return the buffers that the module has now."""
        buffers = buffers_of(self._module, self._ignored)
        for name, buffer in buffers.items():
            _check(name, buffer)
        return list(buffers.values())

    def packed(self) -> torch.Tensor:
        """Return their bytes."""
        return pack(self.now())

    def put(self, packed: torch.Tensor, *, keeps_graph: bool) -> None:
        """Put the buffers of another rank in place."""
        statistics = {
            id(buffer)
            for module in self._module.modules()
            if isinstance(module, _NormBase) and module.training
            for buffer in module.buffers(recurse=False)
        }
        self._late = packed if keeps_graph else None
        mine = self.now()
        for buffer, values in zip(mine, cut_packed(packed, mine), strict=True):
            target = one_of_each(buffer.detach())
            if id(buffer) in statistics:
                target.data.copy_(values)  # autograd does not notice
            elif not keeps_graph and not torch.equal(target.cpu(), values):
                target.copy_(values)

    @with_defaults
    def put_late(self) -> None:
        """Put in place what `put` has left; no graph of a former pass is needed now."""
        if self._late is not None:
            self.put(self._late, keeps_graph=False)

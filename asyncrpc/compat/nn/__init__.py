"""torch.distributed.nn's names: remote modules, and differentiable collectives.

    import asyncrpc.compat.nn as nn

    module = nn.RemoteModule("worker1/cpu", torch.nn.Linear, args=(20, 30))
    y = module.forward(torch.randn(8, 20))

The collectives are torch's own: they run in its process groups, without RPC.

Source: torch.distributed.nn, version 2.13.
"""

from __future__ import annotations

from torch.distributed.nn import functional
from torch.distributed.nn.functional import (
    all_gather,
    all_reduce,
    all_to_all,
    all_to_all_single,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)

from asyncrpc.compat.nn.api.remote_module import (
    _REMOTE_MODULE_PICKLED_ATTRIBUTES,
    RemoteModule,
    _RemoteModule,
)

__all__ = [
    "_REMOTE_MODULE_PICKLED_ATTRIBUTES",
    "RemoteModule",
    "_RemoteModule",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "functional",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]

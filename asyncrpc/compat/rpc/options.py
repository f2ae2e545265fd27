"""Options of the backends: torch's own classes, which hold values and do nothing.

So a program that builds its options with torch's names may go on to do so.
"""

from __future__ import annotations

from torch.distributed.rpc import (
    RpcBackendOptions,
    TensorPipeRpcBackendOptions,
    WorkerInfo,
)

__all__ = ["RpcBackendOptions", "TensorPipeRpcBackendOptions", "WorkerInfo"]

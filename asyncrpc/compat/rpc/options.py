"""Options of the backends: torch's own classes, which only hold values.

So a program can keep building its options with torch's names.
"""

from __future__ import annotations

from torch._C._distributed_rpc import RpcBackendOptions, WorkerInfo
from torch.distributed.rpc.options import TensorPipeRpcBackendOptions

__all__ = ["RpcBackendOptions", "TensorPipeRpcBackendOptions", "WorkerInfo"]

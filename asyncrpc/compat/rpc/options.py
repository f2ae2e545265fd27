"""Options of the backends: torch's own classes, which hold values and do nothing.

So a program that builds its options with torch's names may go on to do so.
"""

from __future__ import annotations

from torch._C._distributed_rpc import RpcBackendOptions, WorkerInfo
from torch.distributed.rpc.options import TensorPipeRpcBackendOptions

__all__ = ["RpcBackendOptions", "TensorPipeRpcBackendOptions", "WorkerInfo"]

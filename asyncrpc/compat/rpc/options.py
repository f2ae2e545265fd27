"""Options of the backends: torch's own classes and functions, which only hold values.

So a program can keep building its options with torch's names.
"""

from __future__ import annotations

from torch._C._distributed_rpc import RpcBackendOptions, WorkerInfo
from torch.distributed.rpc.options import (
    DeviceType,
    TensorPipeRpcBackendOptions,
    _to_device,
    _to_device_list,
    _to_device_map,
)

__all__ = [
    "DeviceType",
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "_to_device",
    "_to_device_list",
    "_to_device_map",
]

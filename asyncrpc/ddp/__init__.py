"""Data parallel training: every rank of a group keeps the same module."""

from asyncrpc.ddp.bucket import GradBucket
from asyncrpc.ddp.distributed import DDPStatistics, DistributedDataParallel
from asyncrpc.ddp.elastic import broadcast_state
from asyncrpc.ddp.hooks.compression import CompressionStats, PowerSGDState
from asyncrpc.ddp.hooks.local_sgd import PostLocalSGDState, post_localSGD_hook
from asyncrpc.ddp.hooks.plain import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
    noop_hook,
)
from asyncrpc.ddp.hooks.powersgd import batched_powerSGD_hook, powerSGD_hook
from asyncrpc.ddp.hooks.states import HookState
from asyncrpc.ddp.joining import Join
from asyncrpc.ddp.optimizers.averaging import (
    HierarchicalModelAverager,
    ModelAverager,
    PeriodicModelAverager,
)
from asyncrpc.ddp.optimizers.post_local import PostLocalSGDOptimizer
from asyncrpc.ddp.optimizers.zero import ZeroRedundancyOptimizer

__all__ = [
    "CompressionStats",
    "DDPStatistics",
    "DistributedDataParallel",
    "GradBucket",
    "HierarchicalModelAverager",
    "HookState",
    "Join",
    "ModelAverager",
    "PeriodicModelAverager",
    "PostLocalSGDOptimizer",
    "PostLocalSGDState",
    "PowerSGDState",
    "ZeroRedundancyOptimizer",
    "allreduce_hook",
    "batched_powerSGD_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "broadcast_state",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "noop_hook",
    "post_localSGD_hook",
    "powerSGD_hook",
]

"""Data parallel training: every rank of a group keeps the same module."""

from asyncrpc.parallel.ddp.bucket import GradBucket
from asyncrpc.parallel.ddp.distributed import DDPStatistics, DistributedDataParallel
from asyncrpc.parallel.ddp.elastic import broadcast_state
from asyncrpc.parallel.ddp.hooks.compression import CompressionStats, PowerSGDState
from asyncrpc.parallel.ddp.hooks.local_sgd import PostLocalSGDState, post_localSGD_hook
from asyncrpc.parallel.ddp.hooks.plain import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
    noop_hook,
)
from asyncrpc.parallel.ddp.hooks.powersgd import batched_powerSGD_hook, powerSGD_hook
from asyncrpc.parallel.ddp.hooks.states import HookState
from asyncrpc.parallel.ddp.joining import Join
from asyncrpc.parallel.ddp.optimizers.averaging import (
    HierarchicalModelAverager,
    ModelAverager,
    PeriodicModelAverager,
)
from asyncrpc.parallel.ddp.optimizers.post_local import PostLocalSGDOptimizer
from asyncrpc.parallel.ddp.optimizers.zero import ZeroRedundancyOptimizer

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

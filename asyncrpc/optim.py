"""Optimizers of parameters that live on many workers.

Source: torch.distributed.optim.
"""

from asyncrpc.core.optim.distributed import DistributedOptimizer
from asyncrpc.core.optim.options import StepResult

__all__ = ["DistributedOptimizer", "StepResult"]

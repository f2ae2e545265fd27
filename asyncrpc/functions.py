"""Decorators that say how a function runs when it is called from another worker.

Source: torch.distributed.rpc.functions.
"""

from asyncrpc.runtime.inbound import async_execution, on_loop
from asyncrpc.runtime.repeating import idempotent

__all__ = ["async_execution", "idempotent", "on_loop"]

"""Decorators that say how a function runs when it is called from another worker.

Source: torch.distributed.rpc.functions.
"""

from asyncrpc.runtime.calls.repeating import idempotent
from asyncrpc.runtime.calls.targets import async_execution, on_loop

__all__ = ["async_execution", "idempotent", "on_loop"]

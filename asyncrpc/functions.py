"""Decorators that say how a function runs when it is called from another worker.

Source: torch.distributed.rpc.functions.
"""

from asyncrpc.runtime.calls.modes import async_execution, on_loop
from asyncrpc.runtime.calls.repeating import idempotent

__all__ = ["async_execution", "idempotent", "on_loop"]

"""Decorators that set how a function runs when another worker calls it.

Source: torch.distributed.rpc.functions.
"""

from asyncrpc.core.calls.modes import async_execution, on_loop
from asyncrpc.core.calls.repeating import idempotent

__all__ = ["async_execution", "idempotent", "on_loop"]

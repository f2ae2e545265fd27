"""How a function is to run on the callee."""

from __future__ import annotations

from asyncrpc.runtime.calls.inbound import async_execution

__all__ = ["async_execution"]

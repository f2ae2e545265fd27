"""Distributed autograd: contexts, backward passes, gradients.

    async with asyncrpc.autograd.context() as ctx:
        loss = (await peer.call(forward, x)).sum()
        await asyncrpc.autograd.backward(ctx, [loss])
        gradients = asyncrpc.autograd.get_gradients(ctx)

Source: torch.distributed.autograd.
"""

from asyncrpc.core.autograd.contexts import Context
from asyncrpc.core.autograd.public import (
    backward,
    context,
    current_context,
    get_gradients,
)

__all__ = ["Context", "backward", "context", "current_context", "get_gradients"]

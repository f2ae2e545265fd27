"""torch.distributed.optim's DistributedOptimizer, blocking.

Source: torch.distributed.optim.DistributedOptimizer, version 2.13.
"""

from __future__ import annotations

from typing import Any

from asyncrpc.compat.autograd import _context
from asyncrpc.compat.rpc import agent as agents
from asyncrpc.core.calls.context import current_worker_var, forget_deadline
from asyncrpc.core.optim.distributed import DistributedOptimizer as Optimizer
from asyncrpc.errors import AsyncRpcError

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer:
    """Optimizes parameters on the workers that own them.

    Unlike torch's, a step is applied on all owners or on none, and parameters without
    a gradient in the context are left alone.

    Args:
        optimizer_class: of the optimizers on the owners.
        params_rref: references to the parameters.
        *args: of the class, after the parameters.
        **kwargs: likewise.

    Raises:
        RuntimeError: an owner could not make its optimizer; the text says why.
    """

    def __init__(
        self, optimizer_class: Any, params_rref: Any, *args: Any, **kwargs: Any
    ) -> None:
        agent = agents.current()

        async def make() -> Optimizer:
            forget_deadline()
            current_worker_var.set(agent.worker)
            optimizer = Optimizer(optimizer_class, list(params_rref), *args, **kwargs)
            return await optimizer

        try:
            self._optimizer = agent.host.run(make())
        except AsyncRpcError as error:
            raise RuntimeError(str(error)) from error

    def step(self, context_id: int) -> None:
        """Apply the gradients of a context.

        Raises:
            RuntimeError: it failed on some owner; the text says where and why.
        """
        agent = agents.current()

        async def run() -> None:
            forget_deadline()
            await self._optimizer.step(_context(agent, context_id))

        try:
            agent.host.run(run())
        except AsyncRpcError as error:
            raise RuntimeError(str(error)) from error

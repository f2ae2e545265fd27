"""Autograd that remembers, in each context, the nodes of what has come from others.

Programs written for torch look at them: `_recv_functions` of a context.
"""

from __future__ import annotations

from typing import Any

import torch

from asyncrpc.autograd.service import AutogradService
from asyncrpc.ids import ContextId, Incarnation
from asyncrpc.runtime.extensions import OnGradient
from asyncrpc.runtime.links.link import Link
from asyncrpc.runtime.worker import Worker


class RememberingAutograd(AutogradService):
    """Autograd of the facade's worker.

    Attributes:
        received: by context, the node of the first tensor of each message.
    """

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self.received: dict[ContextId, dict[int, Any]] = {}

    def incoming(self, link: Link, meta: Any) -> OnGradient | None:
        """Join the context of a message; note what its tensors go through."""
        receive = super().incoming(link, meta)
        if receive is None:
            return None
        context_id = ContextId(Incarnation(int(meta[0])), int(meta[1]))
        nodes = self.received.setdefault(context_id, {})

        def receive_noted(tensor: torch.Tensor) -> torch.Tensor:
            result = receive(tensor)
            nodes.setdefault(int(meta[2]), result.grad_fn)
            return result

        return receive_noted

    def release(self, context_id: ContextId, told_by: int = 0) -> None:
        """End a context; forget its nodes."""
        self.received.pop(context_id, None)
        super().release(context_id, told_by)

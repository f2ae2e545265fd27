"""Where a local graph ends and another worker's begins.

On the sending side nothing is added to the graph: the edge at which its gradient will
enter is noted (`GradientEdge`), as it is when the tensor is sent, so that a later
in-place change of the tensor does not matter.  On the receiving side one node is made,
which catches the gradient and keeps it for the service to send.

Source: torch.distributed.autograd's SendRpcBackward and RecvRpcBackward; there the
second sends by itself, and expects every gradient to come.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from asyncrpc.ids import MessageId, WorkerId


class CrossingId(NamedTuple):
    """One tensor in one message."""

    message: MessageId
    position: int

    @property
    def key(self) -> list[int]:
        """What names it between the two workers."""
        return [self.message.serial, self.position]


def total(have: torch.Tensor | None, more: torch.Tensor) -> torch.Tensor:
    """Add a gradient to what there is, if there is any; each may be sparse."""
    if have is None:
        return more
    # Torch adds a sparse tensor to a dense one, and not the other way round.
    return more + have if have.is_sparse else have + more


@dataclass(slots=True, eq=False)
class Received:
    """A tensor that came from another worker, as a place where a pass leaves.

    Attributes:
        crossing: which one.
        sender: who waits for its gradient.
        gradient: what the engine has brought here and nobody has taken; or None.
    """

    crossing: CrossingId
    sender: WorkerId
    gradient: torch.Tensor | None = None

    def add(self, gradient: torch.Tensor | None) -> None:
        """Add a gradient to what is there."""
        if gradient is None:
            return
        self.gradient = total(self.gradient, gradient)

    def take(self) -> torch.Tensor | None:
        """Return what is there, and forget it."""
        gradient, self.gradient = self.gradient, None
        return gradient


class Recv(torch.autograd.Function):
    """Gives a received tensor a history: the node that catches its gradient.

    Its output is no leaf and no view, so it may be changed in place, as in one process.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,  # noqa: ARG004  (there to require a gradient)
        tensor: torch.Tensor,
        received: Received,
    ) -> torch.Tensor:
        """Return the tensor; `anchor` requires a gradient, so the output does."""
        ctx.received = received
        ctx.set_materialize_grads(value=False)
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None, None]:
        """Keep the gradient; nothing flows on from here."""
        ctx.received.add(gradients[0])
        return None, None, None


_RECV_NODE: type = Recv._backward_cls  # noqa: SLF001


def edge_of(tensor: torch.Tensor) -> GradientEdge:
    """Return where a gradient of `tensor` enters its graph."""
    if tensor.layout is not torch.strided:
        # torch looks for it behind a view, which sparse tensors do not have.
        with torch.enable_grad():
            behind: Any = tensor.clone().grad_fn
        node, number = behind.next_functions[0]
        return GradientEdge(node, number, ownership_token=behind)
    return get_gradient_edge(tensor)


def following(node: Node) -> tuple[tuple[Node | None, int], ...]:
    """Return where a node passes gradients to, here."""
    if type(node) is _RECV_NODE:
        return ()  # behind it is only the anchor
    return node.next_functions


def leaves_of(nodes: Iterable[Node]) -> tuple[list[torch.Tensor], list[Received]]:
    """Return the parameters and the received tensors that some nodes stand for."""
    parameters, received = [], []
    for node in nodes:
        if type(node) is _RECV_NODE:
            received.append(node.received)  # type: ignore[attr-defined]
        elif not node.next_functions:
            variable = getattr(node, "variable", None)
            if variable is not None:
                parameters.append(variable)
    return parameters, received


@dataclass(slots=True)
class Region:
    """The part of a local graph that a pass can reach.

    Attributes:
        nodes: seen so far.
        received: the received tensors among them.
        parameters: the leaf tensors among them that gather a gradient here.
    """

    nodes: set[Node] = field(default_factory=set)
    received: list[Received] = field(default_factory=list)
    parameters: list[torch.Tensor] = field(default_factory=list)

    def extend(self, edges: Iterable[GradientEdge]) -> list[Received]:
        """Add all that `edges` reach; return the received tensors that are new."""
        known, nodes = len(self.received), self.nodes
        todo = list(
            dict.fromkeys(edge.node for edge in edges if edge.node not in nodes)
        )
        nodes.update(todo)
        while todo:
            node = todo.pop()
            if type(node) is _RECV_NODE:
                self.received.append(node.received)  # type: ignore[attr-defined]
                continue  # behind it is only the anchor
            after = node.next_functions
            for child, _ in after:
                # Looked up before it is kept: a graph is a chain more often than not.
                if child is not None and child not in nodes:
                    nodes.add(child)
                    todo.append(child)
            if not after and (variable := getattr(node, "variable", None)) is not None:
                self.parameters.append(variable)
        return self.received[known:]

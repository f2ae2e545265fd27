"""Where a local graph ends and another worker's begins.

On the sending side nothing is added to the graph.  The edge at which the gradient will
enter (`GradientEdge`) is noted when the tensor is sent, so that a later in-place change
of the tensor does not matter.  On the receiving side one node is made, which catches
the gradient and keeps it for the service to send.

Source: torch.distributed.autograd's SendRpcBackward and RecvRpcBackward; there the
second sends by itself, and expects every gradient to come.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from asyncrpc.core.autograd.inline import is_plain, own_node, without_functions
from asyncrpc.core.ids import MessageId, WorkerId
from asyncrpc.core.torch_modes import with_defaults
from asyncrpc.errors import AutogradError


class CrossingId(NamedTuple):
    """One tensor in one message."""

    message: MessageId
    position: int

    @property
    def key(self) -> list[int]:
        """Return its key between the two workers."""
        return [self.message.serial, self.position]


def total(sum_so_far: torch.Tensor | None, more: torch.Tensor) -> torch.Tensor:
    """Return a gradient plus an earlier one, if any; each may be sparse."""
    return more if sum_so_far is None else _sum(sum_so_far, more)


@with_defaults
def _sum(sum_so_far: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    # Torch adds a sparse tensor to a dense one, but not the other way round.
    return more + sum_so_far if sum_so_far.is_sparse else sum_so_far + more


@dataclass(slots=True, eq=False)
class Received:
    """A tensor from another worker, where a pass leaves this one.

    Attributes:
        sender: the worker that waits for its gradient.
        gradient: a gradient from the engine that was not taken yet; or None.
        like: the shape, data type and device of its gradients.
        tensor: the tensor itself, as long as the program has it.
        has_hooks: whether hooks have been registered on its node.
        is_awaited: whether a pass that takes its gradient runs.
    """

    crossing: CrossingId
    sender: WorkerId
    gradient: torch.Tensor | None = None
    like: tuple[torch.Size, torch.dtype, torch.device] | None = None
    tensor: weakref.ref[torch.Tensor] | None = None
    has_hooks: bool = False
    is_awaited: bool = False

    def passes(self, gradient: torch.Tensor) -> bool:
        """Return whether the engine would bring this gradient here as it is."""
        if self.has_hooks or self.tensor is None or not is_plain(gradient):
            return False
        tensor = self.tensor()
        with without_functions():
            retains_grad = tensor is not None and tensor.retains_grad
            like = gradient.shape, gradient.dtype, gradient.device
        return self.like == like and not retains_grad

    def begin(self, gradient: torch.Tensor | None = None) -> None:
        """Wait for the gradient of a run, of which this much was there before."""
        self.gradient, self.is_awaited = gradient, True

    def add(self, gradient: torch.Tensor | None) -> None:
        """Add a gradient to the kept one."""
        if gradient is None:
            return
        if not self.is_awaited:
            raise AutogradError(
                f"torch's own backward has reached a tensor from worker "
                f"{self.sender.name!r}, and computes nothing on other workers: call "
                "`await asyncrpc.autograd.backward(context, [loss])` "
                "(torch.distributed.autograd.backward(context_id, [loss]) in a program "
                "of torch's), or detach the tensor"
            )
        self.gradient = total(self.gradient, gradient)

    def end(self) -> torch.Tensor | None:
        """Return the gradient of a run, and forget it."""
        gradient, self.gradient, self.is_awaited = self.gradient, None, False
        return gradient


class Recv(torch.autograd.Function):
    """Gives a received tensor a history: the node that catches its gradient.

    Its output is neither a leaf nor a view, so it may be changed in place, as in one
    process.
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
        # `data` asks nothing of the tensor's device, which another thread may use now.
        return tensor.detach() if tensor.is_cpu else tensor.data

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None, None]:
        """Keep the gradient; nothing flows on from here."""
        ctx.received.add(gradients[0])
        return None, None, None


def received_as(
    anchor: torch.Tensor, tensor: torch.Tensor, received: Received
) -> torch.Tensor:
    """Give a received tensor a history: a node that catches its gradient."""
    with torch.enable_grad():
        result: torch.Tensor = Recv.apply(anchor, tensor, received)  # type: ignore[no-untyped-call]
    received.like = result.shape, result.dtype, result.device
    received.tensor = weakref.ref(result)
    return result


_RECV_NODE: type = Recv._backward_cls  # noqa: SLF001
own_node(_RECV_NODE)


def _note_hooks(method: str) -> None:
    """Let a received tensor know when a hook is registered on its node."""
    register = getattr(_RECV_NODE, method)

    def noting(node: Any, *args: Any, **kwargs: Any) -> Any:
        node.received.has_hooks = True
        return register(node, *args, **kwargs)

    setattr(_RECV_NODE, method, noting)


# A hook on the tensor calls the first of these.
for _method in ("_register_hook_dict", "register_hook", "register_prehook"):
    _note_hooks(_method)


class _GradientProbe(torch.autograd.Function):
    """Leads to the node of a tensor without an operation on its device."""

    @staticmethod
    def forward(ctx: Any, _tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor that depends on the input."""
        _ = ctx
        return torch.empty(0, dtype=torch.float32, device="cpu")

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> None:
        """Never run."""


def edge_of(tensor: torch.Tensor) -> GradientEdge:
    """Return where a gradient of `tensor` enters its graph."""
    if not is_plain(tensor) or not tensor.is_cpu:  # a subclass may be user code
        with torch.enable_grad():
            probe: torch.Tensor = _GradientProbe.apply(tensor)  # type: ignore[no-untyped-call]
        assert probe.grad_fn is not None  # the tensor requires a gradient
        node, number = probe.grad_fn.next_functions[0]
        assert node is not None
        return GradientEdge(node, number, ownership_token=probe.grad_fn)
    if tensor.layout is not torch.strided:
        # torch looks for the edge behind a view, and sparse tensors have no views.
        with torch.enable_grad():
            behind: Any = tensor.clone().grad_fn
        node, number = behind.next_functions[0]
        return GradientEdge(node, number, ownership_token=behind)
    return get_gradient_edge(tensor)


def following(node: Node) -> tuple[tuple[Node | None, int], ...]:
    """Return the local nodes that a node passes gradients to."""
    if type(node) is _RECV_NODE:
        return ()  # behind it is only the anchor
    return node.next_functions


def leaves_of(nodes: Iterable[Node]) -> tuple[list[torch.Tensor], list[Received]]:
    """Return the parameters and the received tensors that nodes stand for."""
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
        parameters: the leaf tensors among them that gather a gradient here.
    """

    nodes: set[Node] = field(default_factory=set)
    received: list[Received] = field(default_factory=list)
    parameters: list[torch.Tensor] = field(default_factory=list)
    _todo: list[Node] = field(default_factory=list)

    def extend(self, edges: Iterable[GradientEdge]) -> list[Received]:
        """Add all that `edges` reach; return the received tensors that are new."""
        known = len(self.received)
        self.begin(edges)
        self.go_on(sys.maxsize)
        return self.received[known:]

    def begin(self, edges: Iterable[GradientEdge]) -> None:
        """Begin to add the nodes that `edges` reach; `go_on` finds the rest."""
        todo = dict.fromkeys(edge.node for edge in edges if edge.node not in self.nodes)
        self._todo.extend(todo)
        self.nodes.update(todo)

    def go_on(self, count: int) -> bool:
        """Look at no more than `count` nodes; return whether some are left."""
        todo, nodes = self._todo, self.nodes
        while todo and count:
            count -= 1
            node = todo.pop()
            if type(node) is _RECV_NODE:
                self.received.append(node.received)  # type: ignore[attr-defined]
                continue  # behind it is only the anchor
            after = node.next_functions
            for child, _ in after:
                # Looked up before it is kept, since most graphs are chains.
                if child is not None and child not in nodes:
                    nodes.add(child)
                    todo.append(child)
            if not after and (variable := getattr(node, "variable", None)) is not None:
                self.parameters.append(variable)
        return bool(todo)

    def adopt(self, other: Region) -> list[Received]:
        """Copy the nodes of `other`, ending its walk; return the received tensors."""
        other.go_on(sys.maxsize)
        self.nodes.update(other.nodes)
        self.received += other.received
        self.parameters += other.parameters
        return self.received

"""The ends of a worker's graph as torch shows them: one node for each message.

Natively every tensor that arrives has its own node, and a tensor that leaves has no
node.  Programs written for torch look for one node per message, by its name.  So one
node joins the tensors of a message once it is decoded, and the node of a message that
was sent is made on first use.

Source: torch.distributed.autograd's SendRpcBackward and RecvRpcBackward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, NoReturn

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import GradientEdge, Node

from asyncrpc.core.autograd.functions import Region, following, leaves_of
from asyncrpc.core.autograd.inline import own_node
from asyncrpc.core.autograd.service import AutogradService
from asyncrpc.core.autograd.state import ContextState, Sent
from asyncrpc.core.ids import ContextId, Incarnation, MessageId
from asyncrpc.core.parts import Parts
from asyncrpc.core.services.extensions import OnGradient
from asyncrpc.core.services.ports import PeerLink

RECEIVED: Final = "torch::distributed::autograd::RecvRpcBackward"
SENT: Final = "torch::distributed::autograd::SendRpcBackward"

_NO_HOOKS: Final = (
    f"{SENT} is a view of what was sent, and nothing runs in it: register the hook on "
    "the tensor, or on one of next_functions"
)


# --- received ------------------------------------------------------------------------


class RecvRpc(torch.autograd.Function):
    """Joins the tensors of a message; its inputs are the nodes that catch gradients.

    It works in place: the tensors stay the same, as the message's value has them.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the tensors."""
        ctx.mark_dirty(*tensors)
        ctx.set_materialize_grads(value=False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:  # noqa: ARG004
        """Return the gradients; None for a tensor that was not used."""
        return gradients


_JOINING: Final[type] = RecvRpc._backward_cls  # noqa: SLF001
_JOINING.__name__ = RECEIVED  # the name that the node shows
own_node(_JOINING)


def join(tensors: Sequence[torch.Tensor]) -> Node:
    """Give received tensors one node, and return it.

    Args:
        tensors: each with a history; any shapes and layouts.
    """
    with torch.enable_grad(), contextlib.ExitStack() as stack:
        # Their memory does not change: results computed from one while the message was
        # rebuilt stay valid.
        for tensor in tensors:
            stack.enter_context(_unsafe_preserve_version_counter(tensor))
        RecvRpc.apply(*tensors)  # type: ignore[no-untyped-call]
    node = tensors[0].grad_fn
    assert node is not None
    return node


@dataclass(slots=True)
class JoinedRegion(Region):
    """A region that passes a joining node only for the tensors that were used.

    The others take no part, as if each had its own node.
    """

    _ahead: list[tuple[Node, int]] = field(default_factory=list)

    def begin(self, edges: Iterable[GradientEdge]) -> None:
        """Add the nodes that `edges` reach; `go_on` finds the rest."""
        self._ahead += ((edge.node, edge.output_nr) for edge in edges)

    def go_on(self, count: int) -> bool:
        """Visit at most `count` nodes; return whether some are left."""
        todo = self._ahead
        while todo and count:
            count -= 1
            node, number = todo.pop()
            after: Iterable[tuple[Node | None, int]] = ()
            if type(node) is _JOINING:
                self.nodes.add(node)
                after = (node.next_functions[number],)
            elif node not in self.nodes:
                self.nodes.add(node)
                after = following(node)
                if not after:
                    parameters, received = leaves_of((node,))
                    self.parameters += parameters
                    self.received += received
            todo += ((child, to) for child, to in after if child is not None)
        return bool(todo)


class JoinedState(ContextState):
    """A context's state whose passes know joining nodes."""

    region_class: ClassVar[type[Region]] = JoinedRegion

    __slots__ = ()


class ReceivedMessage:
    """Collects the tensors of a message until all have arrived, and joins them."""

    __slots__ = ("_receive", "_tensors", "joined")

    def __init__(self, receive: OnGradient, joined: Callable[[Node], None]) -> None:
        self._receive = receive
        self._tensors: list[torch.Tensor] = []
        self.joined = joined

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give a tensor its history."""
        result = self._receive(tensor)
        self._tensors.append(result)
        return result

    def finish(self) -> None:
        """Join the tensors: the message has been decoded."""
        if self._tensors:
            self.joined(join(self._tensors))


# --- sent ----------------------------------------------------------------------------


class SendRpcBackward(Node):
    """The node that torch has for each sent message; a view, which never runs.

    Source: torch.distributed.autograd's SendRpcBackward, where gradients enter a graph.
    """

    requires_grad = True

    def __init__(self, sent: Sent) -> None:
        self._sent = sent

    def __repr__(self) -> str:
        return f"<SendRpcBackward object at {id(self):#x}>"

    def name(self) -> str:
        """Return the name of torch's node."""
        return SENT

    @property
    def next_functions(self) -> tuple[tuple[Node | None, int], ...]:
        """The edges at which each tensor's gradient enters this worker's graph."""
        return tuple((edge.node, edge.output_nr) for edge in self._sent.edges)

    @property
    def metadata(self) -> dict[Any, Any]:  # type: ignore[override]  # torch's is wrong
        """Return no metadata."""
        return {}

    @property
    def _input_metadata(self) -> list[Any]:
        return [edge.node._input_metadata[edge.output_nr] for edge in self._sent.edges]  # noqa: SLF001

    def _sequence_nr(self) -> int:
        return 0

    def _register_hook_dict(self, tensor: torch.Tensor) -> NoReturn:
        _ = tensor
        raise RuntimeError(_NO_HOOKS)

    def register_hook(self, fn: Callable[..., Any]) -> NoReturn:
        """Refuse a hook."""
        _ = fn
        raise RuntimeError(_NO_HOOKS)

    def register_prehook(self, fn: Callable[..., Any]) -> NoReturn:
        """Refuse a hook."""
        _ = fn
        raise RuntimeError(_NO_HOOKS)


# --- both, by context ----------------------------------------------------------------


class RememberingAutograd(AutogradService):
    """Autograd of the facade's worker, which knows the node of each message."""

    state_class: ClassVar[type[ContextState]] = JoinedState

    def __init__(self, worker: Parts) -> None:
        super().__init__(worker)
        self.contexts.on_released = self._forget
        # A message is named by its sender and its number there.
        self._received: dict[ContextId, dict[tuple[str, int], Node]] = {}
        self._sent: dict[ContextId, dict[MessageId, SendRpcBackward]] = {}

    def incoming(self, link: PeerLink, meta: Any) -> OnGradient | None:
        """Join the context of a message; note the node of its tensors."""
        receive = super().incoming(link, meta)
        if receive is None:
            return None
        context_id = ContextId(Incarnation(int(meta[0])), int(meta[1]))
        message = link.peer.name, int(meta[2])

        def joined(node: Node) -> None:
            self._received.setdefault(context_id, {})[message] = node

        return ReceivedMessage(receive, joined)

    def decoded(self, on_gradient: OnGradient) -> None:
        """Join the tensors of a message."""
        if isinstance(on_gradient, ReceivedMessage):
            on_gradient.finish()

    def received(self, context_id: ContextId) -> dict[tuple[str, int], Node]:
        """Return the nodes of received messages; on the loop."""
        return dict(self._received.get(context_id, {}))

    def sent(self, state: ContextState) -> dict[MessageId, SendRpcBackward]:
        """Return the nodes of sent messages, the same each time; on the loop."""
        if (
            state.id not in self.contexts.open
        ):  # it has ended: nothing would remove them
            return {key: SendRpcBackward(sent) for key, sent in state.sent.items()}
        nodes = self._sent.setdefault(state.id, {})
        for message, sent in state.sent.items():
            if message not in nodes:
                nodes[message] = SendRpcBackward(sent)
        return dict(nodes)

    def _forget(self, context_id: ContextId) -> None:
        """Remove the nodes of a context that has ended."""
        self._received.pop(context_id, None)
        self._sent.pop(context_id, None)

    async def close(self) -> None:
        """Release every graph."""
        self._received.clear()
        self._sent.clear()
        await super().close()

"""Nodes as torch shows them: one for each message, and gradients as without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from asyncrpc.compat.nodes import (
    RECEIVED,
    SENT,
    JoinedRegion,
    ReceivedMessage,
    SendRpcBackward,
    join,
)
from asyncrpc.core.autograd.functions import CrossingId, Received, Recv
from asyncrpc.core.autograd.state import Sent
from asyncrpc.core.ids import Incarnation, MessageId, WorkerId
from asyncrpc.core.serde import Codec, FunctionTable, Policy

PEER = WorkerId("a", Incarnation(1))
MESSAGE = MessageId(PEER.incarnation, 1)


class Squared:
    """Computes while a message is rebuilt, from a tensor that it brings."""

    def __init__(self, root: torch.Tensor) -> None:
        self.root = root

    def __getstate__(self) -> dict[str, Any]:
        return {"root": self.root}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.root = state["root"]
        self.square = self.root * self.root


class Catcher:
    """What gives tensors that come a history; keeps where their gradients will be."""

    def __init__(self) -> None:
        self.caught: list[Received] = []
        self.anchor = torch.zeros((), requires_grad=True)

    def receive(self, tensor: torch.Tensor) -> torch.Tensor:
        self.caught.append(Received(CrossingId(MESSAGE, len(self.caught)), PEER))
        self.caught[-1].begin()
        received: torch.Tensor = Recv.apply(  # type: ignore[no-untyped-call]
            self.anchor, tensor, self.caught[-1]
        )
        return received

    def gradients(self) -> list[torch.Tensor | None]:
        return [crossing.gradient for crossing in self.caught]


def sparse() -> torch.Tensor:
    where, what = torch.tensor([[0, 1, 1], [2, 0, 2]]), torch.tensor([3.0, 4.0, 5.0])
    return torch.sparse_coo_tensor(where, what, (2, 3), check_invariants=True)


def through_codec(value: Any) -> tuple[Any, Catcher, list[Node]]:
    """Return a value as it arrives, what catches its gradients, and its nodes."""
    functions = FunctionTable(Policy.TRUSTED)
    encoded = Codec(functions).encode(value)
    buffers = [memoryview(bytearray(buffer)) for buffer in encoded.buffers]
    catcher, nodes = Catcher(), list[Node]()
    arriving = ReceivedMessage(catcher.receive, nodes.append)
    codec = Codec(functions)
    decoded = codec.decode(encoded.control, buffers, on_gradient=arriving)
    arriving.finish()
    return decoded, catcher, nodes


@pytest.mark.parametrize("make", [lambda: torch.ones(2, 3), sparse])
def test_tensors_of_a_message_share_one_node(make: Any) -> None:
    catcher = Catcher()
    tensors = [catcher.receive(make()) for _ in range(3)]
    versions = [tensor._version for tensor in tensors]  # noqa: SLF001
    node = join(tensors)
    assert node.name() == RECEIVED
    assert isinstance(node, Node)
    assert all(tensor.grad_fn is node for tensor in tensors)
    assert [tensor._version for tensor in tensors] == versions  # noqa: SLF001
    assert not any(tensor.is_leaf or tensor._is_view() for tensor in tensors)  # noqa: SLF001
    (tensors[0] * 2 + tensors[2]).sum().backward()  # type: ignore[no-untyped-call]
    first, unused, last = catcher.gradients()
    assert first is not None
    assert last is not None
    assert unused is None
    assert torch.equal(first.to_dense(), 2 * last.to_dense())


def test_region_contains_used_tensors_only() -> None:
    catcher = Catcher()
    x, y, z = (catcher.receive(torch.ones(2)) for _ in range(3))
    node = join([x, y, z])
    leaf = torch.ones(2, requires_grad=True)
    region = JoinedRegion()
    used = region.extend([get_gradient_edge(x * x + leaf), get_gradient_edge(x)])
    assert used == region.received == [catcher.caught[0]]
    assert region.parameters == [leaf]
    assert node in region.nodes
    assert region.extend([get_gradient_edge(z), get_gradient_edge(x * 2)]) == [
        catcher.caught[2]
    ]


def test_adopting_region_goes_on_where_the_adopted_one_stopped() -> None:
    catcher = Catcher()
    x, y, z = (catcher.receive(torch.ones(2)) for _ in range(3))
    node = join([x, y, z])
    leaf = torch.ones(2, requires_grad=True)
    prefetched, region = JoinedRegion(), JoinedRegion()
    prefetched.begin([get_gradient_edge(x * leaf), get_gradient_edge(x)])
    assert prefetched.go_on(1)
    assert region.adopt(prefetched) == [catcher.caught[0]]
    assert (region.parameters, region.nodes) == ([leaf], prefetched.nodes)
    assert node in region.nodes
    assert region.extend([get_gradient_edge(y), get_gradient_edge(x)]) == [
        catcher.caught[1]
    ]
    assert prefetched.received == [catcher.caught[0]]


def test_joined_tensors_may_be_changed_in_place() -> None:
    catcher = Catcher()
    x, y = catcher.receive(torch.ones(2)), catcher.receive(torch.ones(2))
    join([x, y])
    x.mul_(y)
    (x * x).sum().backward()  # type: ignore[no-untyped-call]
    assert [
        gradient.tolist() for gradient in catcher.gradients() if gradient is not None
    ] == [
        [2.0, 2.0],
        [2.0, 2.0],
    ]


def test_tensors_computed_while_decoding_stay_valid() -> None:
    roots = torch.tensor([3.0], requires_grad=True) * 1, torch.ones(1) * 2
    value = [Squared(roots[0]), roots[1].requires_grad_() * 1]
    (squared, other), catcher, nodes = through_codec(value)
    assert squared.root.grad_fn is other.grad_fn is nodes[0]
    (squared.square + squared.root + other).sum().backward()
    assert [
        gradient.tolist() for gradient in catcher.gradients() if gradient is not None
    ] == [
        [7.0],
        [1.0],
    ]


def test_message_without_crossings_has_no_node() -> None:
    value, _, nodes = through_codec([torch.ones(2), [1, 2]])
    assert value[0].grad_fn is None
    assert not nodes


def test_send_node_shows_where_gradients_enter() -> None:
    leaf = torch.ones(2, requires_grad=True)
    edges = [get_gradient_edge(leaf), GradientEdge(*get_gradient_edge(leaf * 2)[:2])]
    node = SendRpcBackward(Sent(edges, PEER))
    assert isinstance(node, Node)
    assert node.name() == SENT
    assert [
        (next_node and next_node.name(), number)
        for next_node, number in node.next_functions
    ] == [
        ("torch::autograd::AccumulateGrad", 0),
        ("MulBackward0", 0),
    ]
    assert len(node._input_metadata) == 2  # noqa: SLF001
    assert (node.metadata, node._sequence_nr(), node.requires_grad) == ({}, 0, True)  # noqa: SLF001
    assert repr(node).startswith("<SendRpcBackward object at 0x")


@pytest.mark.parametrize(
    "register", ["register_hook", "register_prehook", "_register_hook_dict"]
)
def test_send_node_refuses_hooks_that_would_never_run(register: str) -> None:
    node = SendRpcBackward(Sent([], PEER))
    with pytest.raises(RuntimeError, match="register the hook on the tensor"):
        getattr(node, register)(print)

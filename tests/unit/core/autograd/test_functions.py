"""Where a graph ends, and the part of it that a pass can reach."""

from __future__ import annotations

import pytest
import torch

from asyncrpc.core.autograd.engine import Flow, Keeping, SegmentRun, prepare
from asyncrpc.core.autograd.functions import (
    CrossingId,
    Received,
    Region,
    edge_of,
    received_as,
)
from asyncrpc.core.autograd.machine import Segment
from asyncrpc.core.ids import Incarnation, MessageId, WorkerId

SENDER = WorkerId("b", Incarnation(7))
ANCHOR = torch.zeros((), requires_grad=True)


def receive(serial: int = 1) -> tuple[torch.Tensor, Received]:
    received = Received(CrossingId(MessageId(SENDER.incarnation, serial), 0), SENDER)
    return received_as(ANCHOR, torch.ones(3), received), received


def run_of(tensor: torch.Tensor, *gradients: torch.Tensor | None) -> SegmentRun:
    """Return the run of a whole graph with these gradients for one tensor."""
    region, edge = Region(), edge_of(tensor)
    region.extend([edge])
    starts = [(edge, gradient) for gradient in gradients]
    return prepare(Segment([0]), starts, region, Flow(), Keeping())


# --- straight through ----------------------------------------------------------------


def test_forwarded_gradients_bypass_the_engine() -> None:
    tensor, received = receive()
    first, other = torch.full((3,), 2.0), torch.full((3,), 3.0)
    assert run_of(tensor, first).straight_through() == {received: first}
    leaving = run_of(tensor, first, None, other).straight_through()
    assert leaving is not None
    assert torch.equal(leaving[received], first + other)
    assert run_of(tensor, None).straight_through() == {}


def test_forwarded_gradients_bypass_the_engine_without_the_tensor() -> None:
    tensor, received = receive()
    run = run_of(tensor, torch.ones(3))
    del tensor
    assert run.straight_through() == {received: run.entering.popitem()[1]}


@pytest.mark.parametrize("how", ["hook", "retained", "changed", "used"])
def test_hooked_or_used_tensor_goes_through_the_engine(how: str) -> None:
    tensor, _ = receive()
    match how:
        case "hook":
            tensor.register_hook(lambda _: None)  # type: ignore[no-untyped-call]
        case "retained":
            tensor.retain_grad()
        case "changed":
            tensor.mul_(2)
        case "used":
            tensor = tensor * 2
    assert run_of(tensor, torch.ones(3)).straight_through() is None


@pytest.mark.parametrize(
    "gradient", [torch.ones(2), torch.ones(3, dtype=torch.float64), torch.ones(1, 3)]
)
def test_gradient_of_another_shape_or_dtype_goes_to_the_engine(
    gradient: torch.Tensor,
) -> None:
    tensor, _ = receive()
    assert run_of(tensor, gradient).straight_through() is None


# --- regions -------------------------------------------------------------------------


def long_graph(length: int) -> tuple[torch.Tensor, torch.Tensor, Received]:
    tensor, received = receive()
    weight = torch.ones(3, requires_grad=True)
    for _ in range(length):
        tensor = tensor * weight
    return tensor, weight, received


def test_region_is_searched_a_few_nodes_at_a_time() -> None:
    end, weight, received = long_graph(10)
    region = Region()
    region.begin([edge_of(end)])
    looks = 1
    while region.go_on(4):
        looks += 1
    assert looks == 3  # of ten products, a parameter and a received tensor
    assert len(region.nodes) == 12
    assert (region.parameters, region.received) == ([weight], [received])
    region.begin([edge_of(end)])
    assert not region.go_on(1)


def test_region_begun_earlier_is_adopted_whole() -> None:
    end, weight, received = long_graph(10)
    begun, region = Region(), Region()
    begun.begin([edge_of(end)])
    assert begun.go_on(2)
    assert region.adopt(begun) == [received]
    assert region.parameters == [weight]
    assert len(region.nodes) == 12

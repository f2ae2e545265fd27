"""The part of a graph that one stage has: where gradients enter, leave and gather.

A pipeline runs each stage's backward pass by itself, once for each micro-batch, so that
the schedule decides when.  A received tensor begins a graph of its own; a node there
catches the gradient that goes back.

Parameters gather their gradients over the micro-batches of a step in a dictionary.  It
is lent to `.grad` while a backward pass runs, so that the engine adds in place and
hooks run as usual; at any other time `.grad` is the program's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.autograd.graph import Node, get_gradient_edge

from asyncrpc.core.autograd.functions import Recv
from asyncrpc.errors import UsageError

Gradients = dict[torch.Tensor, torch.Tensor]

_CROSSING: type = Recv._backward_cls  # noqa: SLF001  (the node that a call leaves)


class Caught:
    """The gradient that a backward pass brought to a tensor from another stage.

    Attributes:
        gradient: of its shape; None if the output does not depend on it.
    """

    __slots__ = ("gradient",)

    def __init__(self) -> None:
        self.gradient: torch.Tensor | None = None

    def add(self, gradient: torch.Tensor | None) -> None:
        """Set the gradient, which comes once: there is one backward pass."""
        self.gradient = gradient


class Entrance(Recv):
    """A `Recv` for tensors from another stage, which no pass over calls crosses."""


def enter(tensor: torch.Tensor) -> tuple[torch.Tensor, Caught]:
    """Begin a graph at a received tensor; return it, and where its gradient will be."""
    caught = Caught()
    anchor = torch.zeros((), requires_grad=True, dtype=torch.float32, device="cpu")
    entered: torch.Tensor = Entrance.apply(  # type: ignore[no-untyped-call]
        anchor, tensor, caught
    )
    return entered, caught


def backward(
    roots: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    sums: Gradients,
) -> None:
    """Run a backward pass, adding the gradients of leaf tensors to `sums`.

    The caller holds the lock over `.grad` of this worker's parameters.

    Args:
        gradients: of their shapes; a root without a gradient takes no part.
    """
    pairs = [
        (root, gradient)
        for root, gradient in zip(roots, gradients, strict=True)
        if gradient is not None
    ]
    if not pairs:
        return
    starts = [root for root, _ in pairs]
    with _lent(_leaves(starts), sums):
        torch.autograd.backward(starts, [gradient for _, gradient in pairs])


def _leaves(roots: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the leaf tensors that a backward pass from these roots can reach."""
    todo = [get_gradient_edge(root).node for root in roots]
    seen: set[Node] = set()
    leaves: list[torch.Tensor] = []
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if type(node) is _CROSSING:
            raise UsageError(
                "the module of this stage made a call whose result the loss depends "
                "on, and a pipeline does not send gradients there: make the called "
                "module a stage, or use plain calls and asyncrpc.autograd.backward"
            )
        following = node.next_functions
        if following:
            todo += [child for child, _ in following if child is not None]
        elif (variable := getattr(node, "variable", None)) is not None:
            leaves.append(variable)
    return leaves


@contextmanager
def _lent(leaves: Sequence[torch.Tensor], sums: Gradients) -> Iterator[None]:
    """Return a context in which `.grad` of the leaves is our sums."""
    before = [leaf.grad for leaf in leaves]
    try:
        for leaf in leaves:
            leaf.grad = sums.get(leaf)
        yield
        for leaf in leaves:
            if leaf.grad is not None:
                sums[leaf] = leaf.grad
    finally:
        for leaf, gradient in zip(leaves, before, strict=True):
            leaf.grad = gradient

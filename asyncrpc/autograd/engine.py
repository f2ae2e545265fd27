"""Runs the local part of a pass on torch's own engine, in a thread.

`.grad` of the user's parameters must look untouched, while AccumulateGrad nodes must
run, since hooks on them are how torch's DistributedDataParallel learns of gradients.
So `.grad` is set aside, the engine writes there, what it wrote is taken, and the old
value put back; all under a lock that optimizer steps take too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.autograd.graph import GradientEdge

from asyncrpc.autograd.functions import CrossingId, Received, Region

K = TypeVar("K")
Gradients = dict[torch.Tensor, torch.Tensor]
Leaving = dict[Received, torch.Tensor]


class Engine:
    """Runs passes one at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # over `.grad` of every parameter here

    def run_whole(
        self,
        starts: Sequence[tuple[GradientEdge, torch.Tensor]],
        region: Region,
        *,
        retain_graph: bool,
    ) -> tuple[Gradients, Leaving]:
        """Run every start in one engine call.

        Returns:
            The gradients of the parameters and of the received tensors that were
            reached.
        """
        if not starts:
            return {}, {}
        edges = [edge for edge, _ in starts]
        gradients = [gradient for _, gradient in starts]
        with self.lock, gradients_set_aside(region.parameters) as gathered:
            for one in region.received:
                one.take()  # a pass that failed, or was not ours, may have left some
            torch.autograd.backward(edges, gradients, retain_graph=retain_graph)
            # Here and not later: other passes go through the same nodes.
            caught = [(one, one.take()) for one in region.received]
        return gathered, {one: found for one, found in caught if found is not None}

    def run_partial(
        self,
        starts: Sequence[tuple[GradientEdge, torch.Tensor]],
        region: Region,
        sums: tuple[Gradients, Leaving],
        *,
        retain_graph: bool,
    ) -> None:
        """Run some starts, adding what parameters and received tensors get to `sums`.

        Hooks of parameters do not run: `finish_partial` runs them on the whole sum.
        """
        if not starts:
            return
        received = list(region.recv_nodes)
        nodes = [GradientEdge(region.recv_nodes[one], 0) for one in received]
        parameters = region.parameters
        with self.lock, _hooks_off(parameters):
            found = torch.autograd.grad(
                [edge for edge, _ in starts],
                [*parameters, *nodes],  # type: ignore[arg-type]
                [gradient for _, gradient in starts],
                retain_graph=retain_graph,
                allow_unused=True,
            )
            # Under the lock too: another run of this pass may be adding.
            _add(sums[0], zip(parameters, found, strict=False))
            _add(sums[1], zip(received, found[len(parameters) :], strict=True))

    def finish_partial(self, sums: Gradients) -> Gradients:
        """Hand each parameter its whole gradient, so that its hooks run, once."""
        if not sums:
            return {}
        parameters = list(sums)
        with self.lock, gradients_set_aside(parameters) as gathered:
            torch.autograd.backward(parameters, [sums[one] for one in parameters])
        return gathered


def _add(
    sums: dict[K, torch.Tensor], parts: Iterable[tuple[K, torch.Tensor | None]]
) -> None:
    for key, part in parts:
        if part is not None:
            have = sums.get(key)
            sums[key] = part if have is None else have + part


@contextmanager
def gradients_set_aside(parameters: Sequence[torch.Tensor]) -> Iterator[Gradients]:
    """Collect what the block leaves in `.grad`; afterwards `.grad` is as it was."""
    before = [parameter.grad for parameter in parameters]
    gathered: Gradients = {}
    try:
        for parameter in parameters:
            parameter.grad = None
        yield gathered
        for parameter in parameters:
            if parameter.grad is not None:
                gathered[parameter] = parameter.grad
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


@contextmanager
def _hooks_off(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Keep the hooks of leaf tensors from running on parts of their gradients."""
    kept: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for parameter in parameters:
        hooks = parameter._backward_hooks  # noqa: SLF001  (torch has no public way)
        if hooks:
            kept.append((hooks, dict(hooks)))
            hooks.clear()
    try:
        yield
    finally:
        for hooks, were in kept:
            hooks.update(were)


def reach_of(
    starts: Mapping[CrossingId, GradientEdge],
) -> dict[CrossingId, list[Received]]:
    """Return which received tensors each start reaches."""
    return {key: Region().extend([edge]) for key, edge in starts.items()}

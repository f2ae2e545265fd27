"""Runs parts of a local graph on torch's own engine, in a thread.

`.grad` of the user's parameters must look untouched, while AccumulateGrad nodes must
run, since hooks on them are how torch's DistributedDataParallel learns of gradients.
So `.grad` is set aside, the engine writes there, its result is taken, and the old value
is put back; all under a lock that optimizer steps also take.

A segment is a part of a graph whose other nodes run before or later.  The engine is
told of the segment's last nodes as its `inputs`, so it runs them and the nodes that
lead to them, and no others; gradients that cross the border enter with the later
segment.  So each node's hooks run once, on the whole of its gradient.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import (
    Callable,
    Collection,
    Container,
    Hashable,
    Iterable,
    Sequence,
)
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Self

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward

from asyncrpc.core.arguments import wrong
from asyncrpc.core.autograd.functions import (
    Received,
    Region,
    following,
    leaves_of,
    total,
)
from asyncrpc.core.autograd.inline import (
    SMALL,
    SMALL_NUMEL,
    GradientLock,
    GradientsSetAside,
    note_own_handle,
    runs_torch_only,
)
from asyncrpc.core.autograd.machine import Segment
from asyncrpc.core.calls.context import PassPart, part_of_pass_var
from asyncrpc.core.serde import words_of
from asyncrpc.core.torch_modes import with_defaults
from asyncrpc.errors import MalformedError, NoGradientPathError, UsageError

Gradients = dict[torch.Tensor, torch.Tensor]
Leaving = dict[Received, torch.Tensor]
Entering = dict[tuple[Node, int], torch.Tensor]
Gradient = Sequence[torch.Tensor | None]

_C: Any = torch._C  # noqa: SLF001
_CHANGED: Final = "modified by an inplace operation"  # torch's words
_STALE: Final = (
    "If another trainer's step of asyncrpc.optim.DistributedOptimizer has changed a "
    "parameter since: take turns, or call step(context, allow_stale=True) there to let "
    "passes run with the new values."
)
NODES_MAX: Final = 64  # of a run on the loop: looking at more takes as long as a thread


@dataclass(frozen=True, slots=True)
class Keeping:
    """Whether a graph that has run is kept.

    Attributes:
        create_graph: record the history of its gradients, to be differentiated in turn.
    """

    retain_graph: bool = False
    create_graph: bool = False


@dataclass(slots=True)
class Flow(PassPart):
    """Gradients of one pass on one worker, between and after its segments.

    Attributes:
        entering: gradients of nodes that will run, by node and number of its input.
    """

    entering: Entering = field(default_factory=dict)
    staged: Gradients = field(default_factory=dict)

    def enter(self, edge: GradientEdge, gradient: torch.Tensor) -> None:
        """Add a gradient to those that enter a node."""
        key = edge.node, edge.output_nr
        self.entering[key] = total(self.entering.get(key), gradient)


@dataclass(frozen=True, slots=True)
class SegmentRun:
    """A segment that will run, with all its inputs.

    Attributes:
        entering: gradients, by where they enter.
        received: the received tensors among its nodes; their gradients are complete
            afterwards.
        flow: where gradients of parameters go, and gradients that wait.
        keeping: whether the graph is kept.
    """

    segment: Segment[Any, Node]
    nodes: Collection[Node]
    entering: Entering
    parameters: Sequence[torch.Tensor]
    received: Sequence[Received]
    flow: Flow
    keeping: Keeping

    def straight_through(self) -> Leaving | None:
        """Return the outputs if no node must run, else None.

        No node must run where received tensors were sent on as they are.
        """
        if not self.entering:
            return {}
        if len(self.received) < len(self.nodes):
            return None
        leaving = {}
        for (node, _), gradient in self.entering.items():
            received: Received = node.received  # type: ignore[attr-defined]
            if not received.passes(gradient):
                return None
            leaving[received] = gradient
        return leaving

    @property
    def kind(self) -> Hashable:
        """Return a key shared by runs that take about as long, or None.

        It is None also for a run that may call user code.
        """
        parameters = self.parameters
        if len(parameters) > SMALL or len(self.nodes) > NODES_MAX:
            return None
        if self.keeping.create_graph or torch.distributed.is_initialized():
            return None  # torch's DistributedDataParallel waits for other processes
        # First of all: what is asked of the tensors below may be user code.
        flow = self.flow
        gradients = [*self.entering.values(), *flow.entering.values()]
        if flow.staged:  # `.grad` of these is used, too
            parameters = [*parameters, *flow.staged]
            gradients += flow.staged.values()
        if not runs_torch_only(self.nodes, parameters, gradients):
            return None
        if any(parameter.numel() > SMALL_NUMEL for parameter in parameters):
            return None
        (node, _), gradient = next(iter(self.entering.items()))
        if gradient.numel() > SMALL_NUMEL or not gradient.is_cpu:
            return None
        return (
            type(node),
            gradient.shape,
            len(self.entering),
            len(self.segment.nodes),
            len(self.received),
            *map(id, self.parameters),
        )


@with_defaults
def root_gradients(
    roots: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None] | None
) -> list[torch.Tensor]:
    """Return the gradient that each root of a pass starts with."""
    if not roots:
        raise UsageError("roots must have at least one root")
    if gradients is not None and len(gradients) != len(roots):
        raise UsageError(
            f"gradients must have one tensor for each of the {len(roots)} roots, not "
            f"{len(gradients)}"
        )
    start_gradients: list[torch.Tensor] = []
    for index, root in enumerate(roots):
        if not isinstance(root, torch.Tensor):
            raise wrong(f"roots[{index}]", "a tensor", root)
        if not root.requires_grad:
            raise NoGradientPathError(
                f"roots[{index}] of shape {tuple(root.shape)} does not require a "
                "gradient"
            )
        gradient = None if gradients is None else gradients[index]
        if not isinstance(gradient, torch.Tensor | None):
            raise wrong(f"gradients[{index}]", "a tensor", gradient)
        if gradient is None and (root.numel() != 1 or root.is_complex()):
            raise UsageError(
                f"roots[{index}] of shape {tuple(root.shape)} is not a real scalar: "
                "pass its gradient (gradients=[...])"
            )
        if gradient is not None and gradient.shape != root.shape:
            raise UsageError(
                f"gradients[{index}] must have the shape of roots[{index}], "
                f"{tuple(root.shape)}, not {tuple(gradient.shape)}"
            )
        start_gradients.append(torch.ones_like(root) if gradient is None else gradient)
    return start_gradients


def prepare(
    segment: Segment[Any, Node],
    starts: Iterable[tuple[GradientEdge, torch.Tensor | None]],
    region: Region,
    flow: Flow,
    keeping: Keeping,
) -> SegmentRun:
    """Gather the inputs of a segment.

    Args:
        starts: where its gradients enter; None for a missing gradient.
    """
    for edge, gradient in starts:
        if gradient is not None:
            flow.enter(edge, gradient)
    if segment.is_whole:
        entering, flow.entering = flow.entering, {}
        whole = region.parameters, region.received
        return SegmentRun(segment, region.nodes, entering, *whole, flow, keeping)
    here = set(segment.nodes)
    keys = [key for key in flow.entering if key[0] in here]
    entering = {key: flow.entering.pop(key) for key in keys}
    return SegmentRun(
        segment, segment.nodes, entering, *leaves_of(segment.nodes), flow, keeping
    )


class Engine:
    """Runs segments one at a time.

    Attributes:
        lock: over `.grad` of every parameter here.
    """

    def __init__(self) -> None:
        # The loop may take it around a job that takes it again.
        self.lock = GradientLock()

    def run(self, run: SegmentRun) -> Leaving:
        """Run a segment; return the gradients of received tensors that have one."""
        try:
            with self.lock:
                leaving = self._run(run)
                if run.flow.endings and run.segment.is_rest:
                    self.end(run.flow)
                return leaving
        except MalformedError as error:
            raise RuntimeError(words_of(error)) from error
        except RuntimeError as error:
            if type(error) is RuntimeError and _CHANGED in words_of(error):
                raise RuntimeError(f"{words_of(error)} {_STALE}") from error
            raise

    def end(self, flow: Flow) -> None:
        """Let hooks end what they have begun: no further gradient of the pass comes."""
        ending = [
            parameter for ending in flow.endings for parameter in ending.parameters
        ]
        parameters = list(dict.fromkeys((*flow.staged, *ending)))
        gradients = [flow.staged.get(parameter) for parameter in parameters]
        with self.lock, GradientsSetAside(self.lock, parameters, gradients):
            while flow.endings:
                flow.endings[0].end()
                flow.endings = flow.endings[1:]
            flow.staged.update(
                (parameter, parameter.grad)
                for parameter in parameters
                if parameter.grad is not None
            )

    def _run(self, run: SegmentRun) -> Leaving:
        # Also of an earlier segment: torch's DistributedDataParallel reduces gradients
        # when it has all of a bucket, and then changes them in place.
        staged = run.flow.staged
        parameters = list(dict.fromkeys((*run.parameters, *staged)))
        gradients = [staged.get(parameter) for parameter in parameters]
        # All in this thread, also what is on devices: hooks see its context variables.
        before = _C._is_multithreading_enabled()  # noqa: SLF001
        _C._set_multithreading_enabled(False)  # noqa: FBT003, SLF001
        try:
            with (
                GradientsSetAside(self.lock, parameters, gradients),
                _Catching(self.lock, run.received) as caught,
            ):
                _run(run)
                for parameter in parameters:
                    if parameter.grad is not None:
                        staged[parameter] = parameter.grad
        finally:
            _C._set_multithreading_enabled(before)  # noqa: SLF001
        return caught


class _Catching:
    """Lets received tensors catch the gradients of one run, and takes these."""

    __slots__ = ("_caught", "_lock", "_meanwhile", "_received")

    def __init__(self, lock: GradientLock, received: Sequence[Received]) -> None:
        self._lock = lock
        self._received = received
        self._meanwhile: Sequence[torch.Tensor | None] = ()
        self._caught: Leaving = {}

    def __enter__(self) -> Leaving:
        for leaf in self._received:
            leaf.begin()
        self._lock.changes.append(self)
        return self._caught

    def __exit__(self, *_: object) -> None:
        self._lock.changes.pop()
        # Here and not later: other passes go through the same nodes.
        for leaf in self._received:
            if (gradient := leaf.end()) is not None:
                self._caught[leaf] = gradient

    def suspend(self) -> None:
        """Take what was caught so far, while other passes may run."""
        self._meanwhile = [leaf.end() for leaf in self._received]

    def resume(self) -> None:
        """Go on from there."""
        for leaf, gradient in zip(self._received, self._meanwhile, strict=True):
            leaf.begin(gradient)


def _run(run: SegmentRun) -> None:
    segment, keeping = run.segment, run.keeping
    edges = [GradientEdge(node, number) for node, number in run.entering]
    ends = () if segment.is_rest else segment.ends  # all of the graph, or up to these
    inputs = tuple(GradientEdge(end, 0) for end in ends)
    create_graph = keeping.create_graph
    # Gradients that cross the border are computed after the run, from the kept graph.
    retain_graph = keeping.retain_graph or create_graph or bool(segment.cuts)
    # As torch.autograd.backward, but without its checks of arguments, which take as
    # long as a short run; `root_gradients` has checked them.
    compute = partial(
        _engine_run_backward,
        tuple(edges),
        tuple(run.entering.values()),
        retain_graph,
        create_graph,
        inputs,
        allow_unreachable=True,
        accumulate_grad=True,
    )
    flow = run.flow
    flow.parameters = run.parameters
    flow.keeps_graph = keeping.retain_graph or create_graph
    token = part_of_pass_var.set(flow) if run.parameters else None
    try:
        _compute(run, compute)
    finally:
        if token is not None:
            part_of_pass_var.reset(token)


def _compute(run: SegmentRun, compute: Callable[[], object]) -> None:
    segment, create_graph = run.segment, run.keeping.create_graph
    if not create_graph and not segment.cuts:  # most runs
        compute()
        return
    with contextlib.ExitStack() as stack:
        if create_graph:  # torch warns of a cycle through `.grad`, which is not here
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="Using backward.. with create_gr")
        borders = [stack.enter_context(_Border(node)) for node in segment.cuts]
        compute()
    with torch.set_grad_enabled(create_graph):
        for border in borders:
            border.pass_on(set(segment.nodes), run.flow)


def is_apart(node: Node) -> bool:
    """Return whether a node must not be one of several whose followers run later.

    It is the node of a view that was changed in place: it checks whether two other
    nodes will run, and raises if only one of them will.
    """
    return type(node).__name__ == "CopySlices"


class _Border:
    """A node whose gradients flow on to nodes that run later."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._incoming: Gradient | None = None  # its input, after all hooks
        self._outgoing: Gradient = ()

    def __enter__(self) -> Self:
        self._handle = self._node.register_hook(self._catch)
        note_own_handle()
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _catch(self, outgoing: Gradient, incoming: Gradient) -> None:
        self._incoming, self._outgoing = incoming, outgoing

    def pass_on(self, here: Container[Node], flow: Flow) -> None:
        """Add the outgoing gradients to those that enter the nodes that run later."""
        if self._incoming is None:
            return  # no gradient came so far
        after, outgoing = following(self._node), self._outgoing
        if not isinstance(self._node, BackwardCFunction):
            # A node of torch's own has computed only the gradients that the engine
            # needed.  It is called again outside of the engine, which runs no hooks.
            computed = self._node(*self._incoming)  # type: ignore[operator]
            outgoing = computed if len(after) > 1 else (computed,)
        for (child, number), gradient in zip(after, outgoing, strict=True):
            if child is not None and child not in here and gradient is not None:
                edge = GradientEdge(child, number)
                flow.enter(edge, _as_the_engine_passes_on(gradient, edge))


def _as_the_engine_passes_on(
    gradient: torch.Tensor, edge: GradientEdge
) -> torch.Tensor:
    """Return a gradient as torch's engine makes it fit before it adds it to others.

    A node gives it in the shape and dtype of the result: that of a tensor which was
    broadcast is summed up, that of a real one loses its imaginary part.
    """
    wanted: Any = edge.node._input_metadata[edge.output_nr]  # noqa: SLF001
    if gradient.is_complex() and not wanted.dtype.is_complex:
        gradient = gradient.real
    if gradient.dtype != wanted.dtype:
        gradient = gradient.to(wanted.dtype)
    if gradient.layout == torch.strided and gradient.shape != wanted.shape:
        gradient = gradient.sum_to_size(wanted.shape)
    return gradient

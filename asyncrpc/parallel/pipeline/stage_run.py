"""One step at one stage: its inputs, its computations, and its outputs.

It runs the actions that `schedules.StageMachine` has due, in threads, one at a time.
Graphs are here from a micro-batch's forward pass to its backward pass; gradients of
parameters gather until the step is committed.

A pipeline runs each stage's backward pass by itself, once for each micro-batch, so that
the schedule decides when.  A received tensor begins a graph of its own; a node there
catches the gradient that goes back.

Parameters gather their gradients over the micro-batches of a step in a dictionary.  It
is lent to `.grad` while a backward pass runs, so that the engine adds in place and
hooks run as usual; at any other time `.grad` is the program's own.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils import _pytree as pytree

from asyncrpc.autograd import current_context
from asyncrpc.core.autograd.functions import Recv
from asyncrpc.core.autograd.modes import modes_here
from asyncrpc.core.loop.clock import now_s
from asyncrpc.core.rref.handle import RRef
from asyncrpc.core.rref.shared import copy_of
from asyncrpc.core.torch_modes import FunctionModes
from asyncrpc.core.worker import current_worker
from asyncrpc.errors import LocalProtocolError, UsageError
from asyncrpc.parallel.pipeline.schedules import (
    INFERENCE,
    OUTPUTS_AHEAD,
    ActionKind,
    StageAction,
    StageMachine,
    StagePosition,
)
from asyncrpc.trace import StageSpan, StageStep

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


T = TypeVar("T")


class StageAnswer(NamedTuple):
    """A stage's report of a step; travels as a plain tuple.

    Attributes:
        spans: for each action its kind, micro-batch, start and end, the latter in
            seconds from when the step came here.
        held_most: the largest number of micro-batches whose graphs were here at once.
        result: of the last stage: the loss, or the outputs of an inference.
    """

    spans: list[tuple[str, int, float, float]]
    held_most: int
    result: Any


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The plan of a step.

    Attributes:
        chunks: the number of micro-batches.
        with_graph: whether operations are recorded.
        loss_fn: at the last stage of a training: of output and target.
        weights: at the last stage of a training: of the loss of each micro-batch.
    """

    number: int
    schedule: str
    chunks: int
    with_graph: bool
    loss_fn: Callable[..., Any] | None = None
    weights: Sequence[float] = ()

    @property
    def is_training(self) -> bool:
        """Return whether there are backward passes."""
        return self.schedule != INFERENCE


@dataclass(slots=True)
class _Held:
    """The graph of one micro-batch, from its forward pass to its backward pass.

    Attributes:
        caught: the gradients that go back, once they are here.
        roots: the outputs that require a gradient.
        gradients: of the roots, once they are here.
    """

    caught: list[Caught] = field(default_factory=list)
    roots: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor | None] = field(default_factory=list)


class StageRun:
    """One step at one stage.

    Attributes:
        machine: decides which action is due.
    """

    def __init__(
        self,
        plan: StepPlan,
        place: StagePosition,
        module: nn.Module,
        device: torch.device,
        following: RRef[Any] | None,
    ) -> None:
        self._worker = current_worker().parts
        if plan.loss_fn is not None:
            self._worker.functions.check(plan.loss_fn)
        self._context = current_context() if plan.is_training else None
        self._modes = modes_here()  # of the driver's thread, as far as they travel
        self._place = place
        self._module = module
        self._device = device
        self._following = following
        self._plan = plan
        self._start_s = now_s()
        self.machine = StageMachine(plan.schedule, place, plan.chunks)
        self._computed = asyncio.Event()
        self._committed = asyncio.Event()
        self._came = asyncio.Event()
        self._is_over = False
        self._failure: BaseException | None = None  # of the next stage
        self._reason: BaseException | None = None  # why this step is over
        self._inputs: dict[int, tuple[Any, Sequence[bool]]] = {}
        self._targets: dict[int, Any] = {}
        # The futures that the stage before waits for.
        self._inputs_used: dict[int, asyncio.Future[None]] = {}
        self._gradients: dict[int, asyncio.Future[Any]] = {}
        # For the next stage: outputs that it does not need yet, and calls under way.
        self._outbox: deque[tuple[int, Any, list[bool]]] = deque()
        self._taking: set[asyncio.Future[Any]] = set()
        self._asking: set[asyncio.Future[Any]] = set()
        self._held: dict[int, _Held] = {}
        self._sums: Gradients = {}
        self._losses: list[torch.Tensor] = []
        self._outputs: list[Any] = []
        self._spans: list[tuple[str, int, float, float]] = []

    # --- inputs and answers ----------------------------------------------------------

    def take(self, chunk: int, value: Any, needs: Sequence[bool]) -> None:
        """Take an input."""
        self._inputs[chunk] = (value, needs)
        self._inputs_used[chunk] = self._worker.loop.create_future()
        self.machine.arrive(chunk)
        self._came.set()

    def input_used(self, chunk: int) -> asyncio.Future[None]:
        """Return a future that is done when an input is in use."""
        return self._inputs_used[chunk]

    async def gradients(self, chunk: int) -> list[torch.Tensor | None]:
        """Return the gradients of an input, and let go of them."""
        try:
            gradients: list[torch.Tensor | None] = await self._gradients_of(chunk)
            return gradients
        finally:
            self._gradients.pop(chunk, None)

    def _gradients_of(self, chunk: int) -> asyncio.Future[Any]:
        """Return the future of the gradients of an input, made if it is new."""
        future = self._gradients.get(chunk)
        if future is None:
            future = self._gradients[chunk] = self._worker.loop.create_future()
        return future

    def take_target(self, chunk: int, value: Any) -> None:
        """Take a target."""
        self._targets[chunk] = value

    def _on_taken(self, chunk: int, call: asyncio.Future[Any]) -> None:
        """Note that the next stage uses an output, or that the call has failed."""
        self._taking.discard(call)
        if self._has_failed(call):
            return
        if not self._plan.is_training:
            self.machine.answer(chunk)
            self._came.set()
        try:
            self._send()
        except Exception as error:  # noqa: BLE001  (a step that waits for it raises it)
            self._fail(error)

    def _on_gradients(self, chunk: int, call: asyncio.Future[Any]) -> None:
        """Take the gradients of an output, unless the call has failed."""
        self._asking.discard(call)
        if self._has_failed(call):
            return
        self._held[chunk].gradients = call.result()
        self.machine.answer(chunk)
        self._came.set()

    def _has_failed(self, call: asyncio.Future[Any]) -> bool:
        """Return whether a call to the next stage has failed, or was cancelled."""
        if call.cancelled():
            return True
        error = call.exception()
        if error is not None:
            self._fail(error)
        return error is not None or self._is_over

    def _fail(self, error: BaseException) -> None:
        """Fail the step by a failure of the next stage."""
        if not self._is_over:
            self._failure = self._failure or error
            self._came.set()

    # --- actions ---------------------------------------------------------------------

    async def complete(self) -> StageAnswer:
        """Run all actions in order; in a training, wait for the commit."""
        while not self.machine.is_done:
            if self._failure is not None:
                raise self._failure
            action = self.machine.due
            if action is None:
                self._came.clear()
                await self._came.wait()  # calls of other stages end, well or not
                continue
            self.machine.begin(action)
            await self._do(action)
        self._computed.set()
        if self._plan.is_training:
            await self._committed.wait()  # the driver commits, or cancels this call
        self._note_step()
        return StageAnswer(self._spans, self.machine.held_most, self._result())

    def _note_step(self) -> None:
        """Record the stage's actions for observers of this worker."""
        self._worker.recorder.stage_steps.append(
            StageStep(
                now_s(),
                self._start_s,
                None if self._context is None else self._context.id,
                self._plan.number,
                self._plan.schedule,
                self._place.index,
                self._place.stages,
                tuple(StageSpan(*span) for span in self._spans),
            )
        )

    def commit(self) -> None:
        """Add the gradients to the autograd context of this moment."""
        context = self._context
        if context is None or not self.machine.is_done:
            raise LocalProtocolError(f"{self._place} has no gradients to commit yet")
        context.service.state(context).commit(self._sums)
        self._committed.set()

    async def computed(self) -> None:
        """Return when all actions have run."""
        await self._computed.wait()  # `let_go` sets it, however the step ends
        if self._reason is not None:
            raise self._reason

    def let_go(self, reason: BaseException) -> None:
        """Let go of every graph, and of calls to the next stage."""
        if not self.machine.is_done:
            self._reason = reason
        self._computed.set()
        self._is_over = True
        waiting = (self._inputs_used, self._gradients)
        for answer in [answer for kept in waiting for answer in kept.values()]:
            if not answer.done():
                answer.set_exception(copy_of(reason))
        for call in (*self._taking, *self._asking):
            call.cancel()
        self._outbox.clear()
        for kept in (*waiting, self._inputs, self._targets, self._held):
            kept.clear()
        self._failure = None

    def _result(self) -> Any:
        if not self._place.is_last:
            return None
        if not self._plan.is_training:
            return self._outputs
        return torch.stack(self._losses).sum()

    async def _do(self, action: StageAction) -> None:
        """Run one action."""
        kind, chunk = action
        try:
            if kind is ActionKind.FORWARD:
                _settle(self._inputs_used.pop(chunk), None)
                sent = await self._in_thread(self._forward, action)
                self.machine.end(action)
                self._hand_on(chunk, sent)
            else:
                if kind is ActionKind.BACKWARD:
                    await self._in_thread(self._backward, action)
                self._end(action)
        except Exception as error:
            error.add_note(
                f"in the {kind.value} pass of micro-batch {chunk} at "
                f"{self._place} of a pipeline, on worker {self._worker.name!r}"
            )
            raise

    def _hand_on(self, chunk: int, sent: tuple[Any, list[bool]] | None) -> None:
        """Send an output to the next stage; the last stage answers itself."""
        if self._following is None:
            self.machine.answer(chunk)
            return
        assert sent is not None, "only the last stage sends nothing"
        self._outbox.append((chunk, *sent))
        self._send()

    def _send(self) -> None:
        """Send outputs, as many as the next stage needs soon."""
        assert self._following is not None, "the last stage sends nothing"
        step, following = self._plan.number, self._following.rpc_async()
        while self._outbox and len(self._taking) < OUTPUTS_AHEAD:
            chunk, value, needs = self._outbox.popleft()
            taking = following.take(step, chunk, value, needs)
            self._taking.add(taking)
            taking.add_done_callback(partial(self._on_taken, chunk))
            if self._plan.is_training:
                asking = following.gradients(step, chunk)
                self._asking.add(asking)
                asking.add_done_callback(partial(self._on_gradients, chunk))

    def _end(self, action: StageAction) -> None:
        """Let go of a micro-batch, and send its gradients back."""
        held = self._held.pop(action.chunk)
        self.machine.end(action)
        if self._plan.is_training and self._place.index:
            gradients = [place.gradient for place in held.caught]
            _settle(self._gradients_of(action.chunk), gradients)

    # --- in threads ------------------------------------------------------------------

    async def _in_thread(self, job: Callable[[int], T], action: StageAction) -> T:
        """Run a job in a thread, in this call's worker and context; note the time."""
        context = contextvars.copy_context()

        def run() -> T:
            start_s = now_s()
            try:
                result = context.run(job, action.chunk)
            except StopIteration as error:  # no future can hold it
                raise RuntimeError("a module raised StopIteration") from error
            end_s = now_s()
            self._spans.append(
                (
                    action.kind.value,
                    action.chunk,
                    start_s - self._start_s,
                    end_s - self._start_s,
                )
            )
            return result

        ran: T = await self._worker.run_in_thread(run)
        return ran

    def _forward(self, chunk: int) -> tuple[Any, list[bool]] | None:
        """Compute an output; return it to travel, and which tensors need gradients."""
        value, needs = self._inputs.pop(chunk)
        held = self._held[chunk] = _Held()
        with FunctionModes(self._modes), torch.set_grad_enabled(self._plan.with_graph):
            if self._plan.is_training:
                value = _entered(value, needs, held.caught)
            output = self._call(value)
            if self._plan.loss_fn is not None:
                held.roots.append(self._loss_of(output, chunk))
                return None
        if self._following is None:
            self._outputs.append(output)
            return None
        if not self._plan.is_training:
            return output, []
        return _detached(output, held.roots)

    def _call(self, value: Any) -> Any:
        """Apply the module: a tuple is its arguments, any other value its only one."""
        device = self._device
        if device.type != "cpu":
            value = pytree.tree_map_only(
                torch.Tensor, lambda tensor: tensor.to(device), value
            )
        output = self._module(*value) if type(value) is tuple else self._module(value)
        if device.type == "cpu" or self._plan.loss_fn is not None:
            return output
        return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), output)

    def _loss_of(self, output: Any, chunk: int) -> torch.Tensor:
        """Return the loss of a micro-batch, by its weight."""
        assert self._plan.loss_fn is not None, "this is the last stage of a training"
        device = self._device
        target = pytree.tree_map_only(
            torch.Tensor, lambda tensor: tensor.to(device), self._targets.pop(chunk)
        )
        loss = self._plan.loss_fn(output, target)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            kind = type(loss).__name__
            shape = f" of shape {tuple(loss.shape)}" if kind == "Tensor" else ""
            raise UsageError(
                f"the loss function returned a {kind}{shape}; it must return a tensor "
                "of one element"
            )
        if not loss.requires_grad:
            raise UsageError(
                "the loss does not require a gradient: no parameter of the last stage, "
                "nor of the stages before it, takes part in it"
            )
        weighted: torch.Tensor = loss.reshape(()) * self._plan.weights[chunk]
        self._losses.append(weighted.detach().cpu())
        return weighted

    def _backward(self, chunk: int) -> None:
        """Run the backward pass of a micro-batch."""
        held = self._held[chunk]
        roots, gradients = held.roots, held.gradients
        if self._plan.loss_fn is not None:
            gradients = [torch.ones_like(root) for root in roots]
        assert self._context is not None, "only trainings have backward passes"
        with self._context.service.engine.lock:
            backward(roots, gradients, self._sums)


def _settle(waiting: asyncio.Future[Any], result: Any) -> None:
    if not waiting.done():  # the waiting task may have been cancelled
        waiting.set_result(result)


def _entered(value: Any, needs: Sequence[bool], caught: list[Caught]) -> Any:
    """Begin a graph at each tensor of an input whose gradient is wanted."""
    wanted = iter(needs)

    def enter_tensor(tensor: torch.Tensor) -> torch.Tensor:
        if not next(wanted, False):
            return tensor
        entered, place = enter(tensor)
        caught.append(place)
        return entered

    return pytree.tree_map_only(torch.Tensor, enter_tensor, value)


def _detached(output: Any, roots: list[torch.Tensor]) -> tuple[Any, list[bool]]:
    """Return an output without its history, and which tensors of it had one."""
    needs: list[bool] = []

    def detach(tensor: torch.Tensor) -> torch.Tensor:
        needs.append(tensor.requires_grad)
        if tensor.requires_grad:
            roots.append(tensor)
        return tensor.detach()

    return pytree.tree_map_only(torch.Tensor, detach, output), needs

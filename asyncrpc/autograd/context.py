"""Autograd contexts: one distributed pass's worth of crossings and gradients.

Which context is current is a context variable: every task has its own, and a function
that runs for a call joins its caller's.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from torch.autograd.graph import GradientEdge

from asyncrpc.autograd.functions import CrossingId, Received, Region
from asyncrpc.autograd.machine import PassMachine
from asyncrpc.errors import AutogradError
from asyncrpc.ids import ContextId, Incarnation, MessageId, WorkerId

if TYPE_CHECKING:
    from asyncrpc.autograd.service import AutogradService

current_context_var: Final[ContextVar[Context | None]] = ContextVar(
    "asyncrpc_autograd_context", default=None
)


class Context:
    """A handle of an autograd context; from `asyncrpc.autograd.context()`.

    Attributes:
        id: the same on every worker that takes part.
    """

    __slots__ = ("_service", "_token", "id")

    def __init__(self, service: AutogradService, context_id: ContextId) -> None:
        self._service = service
        self._token: Any = None
        self.id = context_id

    @property
    def service(self) -> AutogradService:
        """The worker's part that keeps this context's state."""
        return self._service

    async def __aenter__(self) -> Self:
        """Make this the current context of the task."""
        self._service.open(self.id)
        self._token = current_context_var.set(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the context on every worker that it reached; they are not waited for."""
        current_context_var.reset(self._token)
        self._service.release(self.id)

    def __repr__(self) -> str:
        return f"<autograd context {self.id}>"


class ContextState:
    """What one worker knows of one context.

    Attributes:
        sent: where gradients for what was sent enter, by message.
        received: what came, by message.
        peers: workers that messages of this context went to or came from.
        gradients: gathered and committed, by leaf tensor.
        passes: backward passes under way.
    """

    __slots__ = (
        "_ended",
        "_pass_ended",
        "anchor",
        "gradients",
        "passes",
        "peers",
        "received",
        "sent",
    )

    def __init__(self) -> None:
        self.sent: dict[MessageId, list[GradientEdge]] = {}
        self.received: dict[MessageId, list[Received]] = {}
        self.peers: set[WorkerId] = set()
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        self.passes: dict[tuple[int, int], Pass] = {}
        self._ended: set[tuple[int, int]] = set()  # two numbers for each pass
        self.anchor = torch.zeros((), requires_grad=True)
        self._pass_ended = asyncio.Event()

    def join_pass(self, pass_id: tuple[int, int]) -> Pass:
        """Return a backward pass, made if it is new here.

        Raises:
            AutogradError: it has ended: word of that may overtake a request, which
                runs as a task.
        """
        if pass_id in self._ended:
            raise AutogradError("the pass has been aborted")
        return self.passes.setdefault(pass_id, Pass())

    def end_pass(self, pass_id: tuple[int, int]) -> Pass | None:
        """Forget a backward pass, and return it if it was known."""
        self._ended.add(pass_id)
        self._pass_ended.set()
        return self.passes.pop(pass_id, None)

    async def settled(self) -> None:
        """Wait until no backward pass runs here."""
        while self.passes:
            self._pass_ended.clear()
            await self._pass_ended.wait()

    def commit(self, gradients: dict[torch.Tensor, torch.Tensor]) -> None:
        """Add the gradients of a pass that has succeeded everywhere."""
        for parameter, gradient in gradients.items():
            have = self.gradients.get(parameter)
            total = gradient if have is None else have + gradient
            self.gradients[parameter] = total


class Pass:
    """One backward pass on one worker.

    Attributes:
        machine: what may run.
        region: the local graph that takes part.
        onward: the workers that this one asked to take part; it tells them the end.
        starts: where gradients enter, by crossing; roots have negative indices.
        arrived: gradients that have come and have not run.
        ran: by start, done when it has run and all that follows from it.
        sums: gradients of parameters so far, in partial runs.
        leaving: gradients of received tensors so far, until they are sent.
        staged: gradients to be committed when the whole pass succeeds.
        tasks: what runs for it here.
    """

    __slots__ = (
        "arrived",
        "leaving",
        "machine",
        "onward",
        "ran",
        "reach_is_set",
        "region",
        "staged",
        "starts",
        "sums",
        "tasks",
    )

    def __init__(self) -> None:
        self.machine: PassMachine[CrossingId, CrossingId] = PassMachine()
        self.region = Region()
        self.onward: set[Incarnation] = set()
        self.starts: dict[CrossingId, GradientEdge] = {}
        self.arrived: dict[CrossingId, torch.Tensor | None] = {}
        self.ran: dict[CrossingId, asyncio.Future[None]] = {}
        self.reach_is_set = False
        self.sums: dict[torch.Tensor, torch.Tensor] = {}
        self.leaving: dict[Received, torch.Tensor] = {}
        self.staged: dict[torch.Tensor, torch.Tensor] = {}
        self.tasks: set[asyncio.Task[None]] = set()

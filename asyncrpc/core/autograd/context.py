"""Autograd contexts: the crossings and gradients of one distributed pass.

Which context is current is a context variable: every task has its own, and a function
that runs for a call joins its caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, Final, Protocol, Self

import torch

from asyncrpc.core.autograd.engine import Engine, Keeping
from asyncrpc.core.autograd.state import ContextState, StepAfterPass, VotesWithPass
from asyncrpc.core.ids import ContextId, WorkerId
from asyncrpc.core.loop.clock import Deadline
from asyncrpc.errors import NotStartedError, UsageError

current_context_var: Final[ContextVar[Context | None]] = ContextVar(
    "asyncrpc_autograd_context", default=None
)


class ContextService(Protocol):
    """Keeps the state of contexts on one worker.

    Attributes:
        engine: runs local graphs.
    """

    engine: Engine

    @property
    def me(self) -> WorkerId:
        """The worker."""

    def check_on_loop(self, used: str, /) -> None:
        """Raise unless this is the loop of the worker, and it runs."""

    def open(self, context_id: ContextId, creator: WorkerId) -> ContextState:
        """Return a context's state, made if it is new."""

    def state(self, context: Context | ContextId) -> ContextState:
        """Return the state of a context that is open."""

    def release(self, context_id: ContextId) -> None:
        """End a context."""

    async def gathered(self, context_id: ContextId) -> dict[torch.Tensor, torch.Tensor]:
        """Return the gradients here of a context."""

    def deadline_of(self, timeout_s: Any) -> Deadline | None:
        """Return the deadline of a pass that is given a timeout."""

    async def backward(
        self,
        context: Context,
        roots: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None] | None,
        keeping: Keeping,
        deadline: Deadline | None,
        *,
        is_fast: bool = False,
        step: StepAfterPass | VotesWithPass | None = None,
    ) -> None:
        """Run a pass from local roots."""


class Context:
    """A handle of an autograd context; from `asyncrpc.autograd.context()`.

    Attributes:
        id: the same on every worker that takes part.
    """

    __slots__ = ("_service", "_token", "id", "is_of_pass")

    def __init__(
        self,
        service: ContextService,
        context_id: ContextId,
        *,
        is_of_pass: bool = False,
    ) -> None:
        self._service = service
        self._token: Any = None
        self.id = context_id
        # Current in user code of a pass or a step, whose calls take no part in it.
        self.is_of_pass = is_of_pass

    @property
    def service(self) -> ContextService:
        """Internal: the worker's service that keeps this context's state."""
        return self._service

    async def __aenter__(self) -> Self:
        """Make this the current context of the task.

        Raises:
            InvalidContextError: the context has ended.
            NotStartedError: the context's worker has been shut down.
            UsageError: the context has been entered before; or this is not the worker's
                loop.
        """
        self._service.check_on_loop("autograd.context")
        if self._token is not None:
            raise UsageError(
                "this autograd context has been entered before: make a new one, "
                "`async with asyncrpc.autograd.context() as ctx:`"
            )
        self._service.open(self.id, self._service.me)
        self._token = current_context_var.set(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the context on every worker that it reached; they are not waited for.

        Raises:
            UsageError: this is not the worker's loop; the context has not ended.
        """
        with suppress(NotStartedError):  # the end of the worker has ended it
            self._service.check_on_loop("autograd.context")
        with suppress(ValueError):  # a task with variables of its own ends it
            current_context_var.reset(self._token)
        self._service.release(self.id)

    def __repr__(self) -> str:
        return f"<autograd context {self.id}>"
